"""Micro-steps, samples and tokens, counted in real trainings of torch and transformers on one worker."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

from .instrumented import Worker

pytestmark = pytest.mark.torch

NAMES = ("micro_steps", "samples", "tokens", "effective_tokens", "squared_lengths")
# Each is what a model is called with, and the samples, tokens, effective tokens and squares of lengths that this is.
INPUTS = {
    "input_ids and a mask": ("input_ids=ids, attention_mask=mask", (2, 6, 4, 9 + 1)),
    "padding on the left": ("input_ids=ids, attention_mask=mask.flip(1)", (2, 6, 4, 9 + 1)),
    "input_ids alone": ("input_ids=ids", (2, 6, None, 9 + 9)),
    "a mapping": ("{'input_ids': ids, 'attention_mask': mask}", (2, 6, 4, 10)),
    "a mapping that is no dict": ("Mapped(input_ids=ids, attention_mask=mask)", (2, 6, 4, 10)),
    "rows packed by position": ("input_ids=ids, position_ids=torch.tensor([[0, 1, 0]] * 2)", (2, 6, None, 5 + 5)),
    "rows packed by segment": ("input_ids=ids, attention_mask=torch.tensor([[1, 1, 2], [1, 2, 0]])", (2, 6, 5, 5 + 2)),
    "all in one line": ("input_ids=ids.flatten()", (None, 6, None, None)),
    "all in one line by position": (
        "input_ids=ids.flatten(), position_ids=torch.tensor([0, 1, 2, 3, 0, 1])",
        (None, 6, None, 16 + 4),
    ),
    "a mask of all pairs": ("input_ids=ids, attention_mask=torch.ones(2, 1, 3, 3)", (2, 6, None, None)),
    "a mask of all pairs, and positions": (
        "input_ids=ids, attention_mask=torch.ones(2, 1, 3, 3), position_ids=torch.tensor([[0, 1, 0]] * 2)",
        (2, 6, None, 10),
    ),
    "a mask that is a subclass": ("input_ids=ids, attention_mask=mask.as_subclass(Sub)", (2, 6, None, None)),
    "a decoder besides": (
        "input_ids=ids, attention_mask=mask, decoder_input_ids=torch.ones(2, 9).long()",
        (2, 6, 4, 10),
    ),
    "ids by position": ("ids, ids", (2, 6, None, 18)),
    "images": ("torch.ones(5, 3, 8, 8)", (5, None, None, None)),
    "a table": ("torch.ones(5, 3)", (5, None, None, None)),
    "images in a list": ("[torch.ones(5, 3, 8, 8), torch.ones(5)]", (5, None, None, None)),
    "a number": ("torch.tensor(3.0)", (None, None, None, None)),
    "nothing": ("", (None, None, None, None)),
    "text": ("['some', 'text']", (None, None, None, None)),
}
CALLS = """
import collections
class Mapped(collections.UserDict):
    def __init__(self, **fields): super().__init__(fields)
class Sub(torch.Tensor): pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def forward(self, *args, **kwargs): return self.weight.sum()
ids = torch.tensor([[5, 6, 7], [5, 0, 0]])
mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
"""


@pytest.fixture
def worker(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive, warm=True)


def counted(records: list[dict[str, Any]]) -> list[tuple[int | None, ...]]:
    return [tuple(record.get(name) for name in NAMES) for record in records]


def test_each_kind_of_input_is_counted_for_what_it_is(worker: Worker) -> None:
    calls = "".join(f"model({arguments})\nstep()\n" for arguments, _ in INPUTS.values())
    records = worker.run_wired(f"{CALLS}meet()\nmodel = torch.nn.parallel.DistributedDataParallel(Net())\n{calls}")
    assert dict(zip(INPUTS, counted(records), strict=True)) == {
        name: (1, *expected) for name, (_, expected) in INPUTS.items()
    }


@pytest.mark.parametrize(
    "wrapping",
    [
        "model = torch.nn.parallel.DistributedDataParallel(Net())",
        "import torch.distributed.fsdp as f\nmodel = f.FullyShardedDataParallel(Deep(), **units)",
        "from torch.distributed.fsdp import fully_shard\nmodel = Deep()\nfully_shard(model.inner)\nfully_shard(model)",
        "from deepspeed.runtime.engine import DeepSpeedEngine\nmodel = DeepSpeedEngine(Net())",
        "model = torch.compile(torch.nn.parallel.DistributedDataParallel(Net()), backend='eager')",
    ],
    ids=["ddp", "fsdp", "fully_shard", "deepspeed", "compiled"],
)
def test_a_step_counts_the_batches_that_were_trained_on_once_each(worker: Worker, wrapping: str) -> None:
    worker.module(
        "deepspeed.runtime.engine",
        "import torch\nclass DeepSpeedEngine(torch.nn.Module):\n"
        "    def __init__(self, module): super().__init__(); self.module = module\n"
        "    def forward(self, *args, **kwargs): return self.module(*args, **kwargs)\n",
    )
    records = worker.run_wired(f"""{CALLS}
from torch.utils.checkpoint import checkpoint
units = dict(device_id=torch.device('cpu'), auto_wrap_policy=lambda **_: True)
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.outer = torch.nn.Linear(3, 3)
    def forward(self, input_ids, attention_mask):
        hidden = checkpoint(self.inner, input_ids.float(), use_reentrant=False)
        return self.outer(hidden).sum()
meet()
{wrapping}
for _ in range(3):
    for _ in range(2):
        model(input_ids=ids, attention_mask=mask).backward()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    model.eval()
    model(input_ids=ids, attention_mask=mask)
    model.train()
    step()
""")
    assert counted(records) == [(2, 4, 12, 8, 20)] * 3


def test_a_forward_pass_that_is_computed_again_is_no_other_batch(worker: Worker) -> None:
    records = worker.run_wired(f"""{CALLS}
from torch.utils.checkpoint import checkpoint
class Saving(Net):
    def forward(self, input_ids): return (self.weight * input_ids * self.weight).sum()
meet()
model = torch.nn.parallel.DistributedDataParallel(Saving())
checkpoint(model, ids, use_reentrant=False).backward()
step()
""")
    assert counted(records) == [(1, 2, 6, None, 18)]


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (12, [(3, 6, 18, 12, 24)] * 2),
        # An epoch's last step has what is left, not the samples of a whole one.
        (15, [(3, 6, 18, 12, 24), (3, 6, 18, 12, 24), (2, 3, 9, 6, 12)]),
    ],
)
def test_the_trainer_counts_each_batch_once(worker: Worker, rows: int, counts: list[tuple[int, ...]]) -> None:
    script = """
# A worker of none: the Trainer would want to meet the others.
os.environ["LOCAL_RANK"] = "-1"
del os.environ["RANK"], os.environ["WORLD_SIZE"]
import transformers.trainer
worker.hooks._hook_trainer(steps, guard, transformers.trainer)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"loss": self.embed(input_ids).pow(2).mean()}
rows = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": [1, 2, 3]}] * int(os.environ["ROWS"])
from transformers import Trainer, TrainingArguments
import tempfile
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=3, use_cpu=True,
    num_train_epochs=1, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
)
Trainer(model=Net(), args=arguments, train_dataset=rows).train()
"""
    records = worker.run_wired(f'os.environ["ROWS"] = "{rows}"{script}')
    stepped = [record for record in records if "mono_ns" in record]
    assert counted(stepped) == counts
    for record in stepped:
        assert set(record["phases_us"]) == {"data", "forward", "backward", "optimizer"}


def test_a_sample_of_several_rows_is_one_sample_as_its_framework_has_it(worker: Worker) -> None:
    records = worker.run_wired("""
rows = iter([16, 16, 8, None])
steps.meters.append(lambda _: {"samples": next(rows)})
for _ in range(4): steps.step("trainer", samples=8)
""")
    # Where rows are not those of samples, or one step had more, the others are whole ones.
    odd = worker.run_wired("""
rows = iter([8, 8, 16, 8, 512, 300, 410, 1])
steps.meters.append(lambda _: {"samples": next(rows)})
for whole in (8, 8, 8, 8, 9, 9, 9, 8): steps.step("trainer", samples=whole)
""")
    assert [record["samples"] for record in odd if "mono_ns" in record] == [8, 8, 8, 8, 9, 9, 9, 1]
    # Of pairs (DPO) a batch has two rows a sample; where rows are unknown, a step is a whole one.
    assert [record["samples"] for record in records if "mono_ns" in record] == [8, 8, 4, 8]


def test_of_two_models_one_is_counted_and_the_other_once_it_is_the_only_one(worker: Worker) -> None:
    records = worker.run_wired(f"""{CALLS}
meet()
one, other = (torch.nn.parallel.DistributedDataParallel(Net()) for _ in range(2))
for _ in range(2):
    one(input_ids=ids); other(torch.ones(7, 3)); other(torch.ones(7, 3)); step()
for _ in range(3):
    other(torch.ones(7, 3)); step()
del one
other(torch.ones(7, 3)); step()
""")
    seen = counted(records)
    assert seen[:2] == [(1, 2, 6, None, 18)] * 2
    # In the step in which the first rests, nobody knows yet that it is over.
    assert seen[2] == (None,) * 5
    assert seen[3:] == [(1, 7, None, None, None)] * 3


def test_a_bare_model_in_a_loop_of_ones_own_is_not_guessed_at(worker: Worker) -> None:
    assert counted(worker.run_wired(f"{CALLS}Net()(ids).backward()\nstep()\n")) == [(None,) * 5]


def test_a_batch_that_cannot_be_looked_at_trains_on_and_the_next_one_is_counted(worker: Worker) -> None:
    records = worker.run_wired(f"""{CALLS}
class Odd(dict):
    def __contains__(self, name): raise RuntimeError("odd")
meet()
model = torch.nn.parallel.DistributedDataParallel(Net())
sys.stderr = open(os.devnull, "w")
assert model(Odd()).item() == 1.0
step()
model(input_ids=ids, attention_mask=mask)
step()
""")
    assert "odd" in records[0]["message"]
    assert counted(records[1:]) == [(None,) * 5, (1, 2, 6, 4, 10)]


def test_counts_of_a_device_are_reported_when_they_are_known_and_sum_up(worker: Worker) -> None:
    records = worker.run_wired(f"""{CALLS}
asked = []
class Later:
    def __init__(self, count): self.count, self.known = count, False
    def __call__(self): return self.count if self.known else None
def start(torch, tensor, count):
    asked.append(Later(int(count(torch, tensor))))
    return asked[-1]
batches = worker.batches.Batches(steps.phases, start)
model = Net()
for number in range(5):
    batches.begin(model, input_ids=ids, attention_mask=mask); batches.end()
    # The device is two steps behind.
    if number >= 2:
        for late in asked[2 * (number - 2) : 2 * (number - 1)]:
            late.known = True
    say(batches(number))
""")
    assert [record["effective_tokens"] for record in records] == [0, 0, 4, 4, 4]
    assert [record["squared_lengths"] for record in records] == [0, 0, 10, 10, 10]


def test_of_many_masks_every_eighth_steps_are_counted_and_the_others_taken_to_be_alike(worker: Worker) -> None:
    records = worker.run_wired(f"""{CALLS}
counts = 0
def start(torch, tensor, count):
    global counts
    counts += 1
    counted = int(count(torch, tensor))
    return lambda: counted
batches = worker.batches.Batches(steps.phases, start)
model = Net()
for number in range(200):
    before = counts
    # Two micro-batches per step; later rows are fuller.
    batches.begin(model, input_ids=ids, attention_mask=mask); batches.end()
    batches.begin(model, input_ids=ids, attention_mask=mask if number < 100 else mask | 1); batches.end()
    say({{**batches(number), "counts": counts - before}})
""")
    assert [record["counts"] for record in records] == [4] * 5 + [0 if step % 8 else 4 for step in range(5, 200)]
    # Of these the record says so.
    assert [record.get("estimated_tokens", 0) for record in records] == [
        0 if record["counts"] else 12 for record in records
    ]
    assert {record["tokens"] for record in records} == {12}
    assert [record["effective_tokens"] for record in records[:100]] == [8] * 100
    assert [record["squared_lengths"] for record in records[:100]] == [20] * 100
    # 4 and 6 tokens; the change is learnt from the masks that are counted.
    late = records[100:]
    assert sum(record["effective_tokens"] for record in late) == pytest.approx(100 * 10, rel=0.03)
    assert sum(record["squared_lengths"] for record in late) == pytest.approx(100 * (10 + 18), rel=0.05)
    assert [record["effective_tokens"] for record in late[-20:]] == [10] * 20


def test_memory_of_a_gpu_is_what_is_allocated_and_what_is_reserved(worker: Worker) -> None:
    records = worker.run_wired("""
from types import SimpleNamespace
def cuda(initialized):
    sys.modules["torch.cuda"] = SimpleNamespace(
        is_initialized=lambda: initialized, max_memory_allocated=lambda: 3 << 30, max_memory_reserved=lambda: 5 << 30)
    say(worker.steps.memory_meter()(1))
cuda(True)
cuda(False)
""")
    assert records[0] == {"peak_memory_bytes": 3 << 30, "peak_reserved_bytes": 5 << 30}
    assert list(records[1]) == ["peak_memory_bytes"]


def test_the_wait_for_a_core_is_the_kernels_count_by_phase(worker: Worker, tmp_path: Path) -> None:
    counts = tmp_path / "schedstat"
    records = worker.run_wired(f"""
from types import SimpleNamespace
path = {str(counts)!r}
def told(text):
    open(path, "w").write(text)
def clock():
    return worker.phases.PhaseClock(SimpleNamespace(), worker.phases.CoreWait(path))
told("900 5000 7")
phases = clock()
told("900 6000 7"); phases.enter("forward"); told("950 9000 9"); phases.leave(); phases.enter("comm"); phases.leave()
told("950 9500 9"); phases.take_us(); say(phases.take_core_wait_us())
phases.take_us(); say(phases.take_core_wait_us())
told("no numbers"); phases.take_us(); say([phases.take_core_wait_us()])
told("0 0 0"); phases = clock(); phases.take_us(); say([phases.take_core_wait_us()])
path += ".missing"; phases = worker.phases.PhaseClock(SimpleNamespace(), worker.phases.CoreWait(path))
phases.take_us(); say([phases.take_core_wait_us()])
""")
    assert records == [{"host": 1.5, "forward": 3.0}, {}, [None], [None], [None]]


def test_who_shares_its_core_waits_for_it(worker: Worker) -> None:
    (record,) = worker.run_wired("""
import os, subprocess, time
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
wait = worker.phases.CoreWait()
begun_ns = wait.read_ns()
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
ran = time.thread_time()
try:
    # Both want the core all the time; how soon they have taken turns is the kernel's business.
    while wait.read_ns() < begun_ns + 1_000_000 and time.thread_time() < ran + 30:
        pass
finally:
    other.kill()
    other.wait()
say({"waited_ns": wait.read_ns() - begun_ns})
""")
    assert record["waited_ns"] >= 1_000_000


def test_a_count_on_a_gpu_is_copied_to_pinned_memory_and_nothing_waits_for_it(worker: Worker) -> None:
    (record,) = worker.run_wired("""
from types import SimpleNamespace
calls = []
class Number:
    value = 0
    def copy_(self, source, non_blocking): calls.append(["copy", source, non_blocking]); self.value = source
    def __int__(self): return self.value
class Mask:
    device = SimpleNamespace(type="cuda")
    def ne(self, _): return self
    def sum(self): return 42
class Event:
    done = False
    def record(self, stream): calls.append(["record", stream])
    def query(self): return Event.done
def empty(shape, dtype, pin_memory):
    calls.append(["empty", pin_memory])
    return Number()
capturing = False
stand_in = SimpleNamespace(Tensor=Mask, int64=0, empty=empty, cuda=SimpleNamespace(
    Event=Event, current_stream=lambda device: device.type, is_current_stream_capturing=lambda: capturing))
begin = lambda: worker.batches.start_count(stand_in, Mask(), worker.batches.count_tokens)
poll = begin()
before = poll()
Event.done = True
after = poll()
capturing = True
say({"before": before, "after": after, "calls": calls, "captured": begin()})
""")
    assert operator.itemgetter("before", "after", "captured")(record) == (None, 42, None)
    assert record["calls"] == [["empty", True], ["copy", 42, True], ["record", "cuda"]]
