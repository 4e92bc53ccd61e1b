"""What is recorded of DDP's reducer, beside what gloo was seen to carry and what torch's own counters say."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

from multinode.records.samples import DdpSample

from .gloo_pair import Told, run_pair

STEPS = 5
# After these all buckets are as they stay, and torch has told their sizes.
SETTLING = 3
TRAIN = """
import contextlib, copy
WATCHED = os.environ["WATCHED"] == "yes"
added = []
class Traffic:
    def add(self, op, group, size_bytes, count=1, source="call"):
        import torch.distributed
        assert group is torch.distributed.group.WORLD
        added.extend([op, size_bytes, source] for _ in range(count))
if WATCHED:
    watch(worker.ddp.hooks(steps, guard, Traffic()))
torch = begin()
from torch.autograd.profiler import profile
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
fp16, as_it_is = (getattr(torch.distributed.BuiltinCommHookType, name) for name in ("FP16_COMPRESS", "ALLREDUCE"))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.spare = torch.nn.Linear(3, 3)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

def make(unused=False, **settings):
    torch.manual_seed(7)
    net = Net()
    net.spare.requires_grad_(unused)
    return DDP(net, bucket_cap_mb=0.008, **settings)

def counters(model):
    data = model._get_ddp_logging_data()
    names = "forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time"
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [data["iteration"], sizes, [data.get(name, 0) / 1000 for name in names]]

def seen(recorded):
    # Element counts; gloo runs in threads of its own.
    return [[e.name, e.input_shapes[0][0]] for e in recorded.function_events if e.name.startswith("gloo:")]

def train(models, micro_steps=1, no_sync=True, forwards=1, steps_to_do=5):
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    for model in models:
        yield_counters(model)
    records = []
    for number in range(steps_to_do):
        del added[:]
        said, losses = [], []
        with profile(record_shapes=True) as recorded:
            for model in models:
                for micro in range(micro_steps):
                    last = micro == micro_steps - 1
                    with contextlib.nullcontext() if last or not no_sync else model.no_sync():
                        x = torch.randn(4, 32)
                        loss = sum((model(x + i).square().mean() for i in range(forwards)), torch.zeros(()))
                        said.append(counters(model))
                        loss.backward()
                        losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        steps.step("optimizer")
        records.append({"step": steps.count, "gloo": seen(recorded), "added": list(added), "said": said,
                        "losses": losses})
    return {"steps": records, "weights": [each.sum().item() for model in models for each in model.parameters()],
            "exact": [each.double().square().sum().item() for model in models for each in model.parameters()]}

def yield_counters(model):
    assert model._get_ddp_logging_data()["iteration"] == 0

def hooked(register):
    model = make()
    register(model)
    return model

told = {
    "plain": train([make()]),
    "accumulated": train([make()], micro_steps=4),
    "synchronised each time": train([make()], micro_steps=2, no_sync=False),
    "unused": train([make(unused=True, find_unused_parameters=True)]),
    "static": train([make(unused=True, static_graph=True)]),
    "two forward passes": train([make()], forwards=2),
    "two models": train([make(), make()]),
    "python hook": train([hooked(lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook))]),
    "built-in hook": train([hooked(lambda model: model._register_builtin_comm_hook(as_it_is))]),
    "fp16 hook": train([hooked(lambda model: model._register_builtin_comm_hook(fp16))]),
    "long": train([make()], steps_to_do=14),
}
# Neither evaluation nor a model that is thrown away belongs to any step; a copy is a model like any other.
model = make()
with torch.no_grad():
    model(torch.ones(1, 32))
copied = copy.deepcopy(model.module)
torch.save(model, FOLDER + "/model-%d.pt" % RANK)
told["saved"] = b"multinode" in open(FOLDER + "/model-%d.pt" % RANK, "rb").read()
told["loaded"] = train([torch.load(FOLDER + "/model-%d.pt" % RANK, weights_only=False)])
tell(told)
"""
BYTES = {"fp16 hook": 2}
WITHOUT_OURS = {"python hook"}
SCENARIOS = [
    "plain",
    "accumulated",
    "synchronised each time",
    "unused",
    "static",
    "two forward passes",
    "two models",
    "python hook",
    "built-in hook",
    "fp16 hook",
    "long",
    "loaded",
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("ddp") / "watched", TRAIN, WATCHED="yes")


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("ddp") / "unwatched", TRAIN, WATCHED="no")


def samples_of(told: Told, scenario: str) -> list[DdpSample]:
    numbers = {step["step"] for step in told.said[scenario]["steps"]}
    return [sample for sample in told.samples if isinstance(sample, DdpSample) and sample.step in numbers]


def carried(step: dict[str, Any], item_bytes: int) -> collections.Counter[tuple[str, float]]:
    return collections.Counter((name.removeprefix("gloo:"), float(count * item_bytes)) for name, count in step["gloo"])


def added(step: dict[str, Any]) -> collections.Counter[tuple[str, float]]:
    return collections.Counter((op, float(size)) for op, size, source in step["added"] if source == "ddp")


@pytest.mark.torch
@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - WITHOUT_OURS))
def test_what_is_added_to_a_steps_traffic_is_what_gloo_carried(watched: list[Told], scenario: str) -> None:
    for told in watched:
        for step in told.said[scenario]["steps"][SETTLING:]:
            assert added(step) == carried(step, BYTES.get(scenario, 4)) != collections.Counter()


@pytest.mark.torch
@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - WITHOUT_OURS - {"fp16 hook"}))
def test_while_buckets_settle_the_bytes_are_right_and_the_agreement_on_them_is_counted(
    watched: list[Told], scenario: str
) -> None:
    for step in watched[0].said[scenario]["steps"][:SETTLING]:
        ours, theirs = added(step), carried(step, 4)
        total = {op: sum(size * count for (each, size), count in theirs.items() if each == op) for op, _ in theirs}
        assert sum(size * count for (op, size), count in ours.items() if op == "all_reduce") == total["all_reduce"]
        # The order of the parameters, exactly; how many buckets there are now torch has not told yet.
        orders = [max((size for op, size in counts if op == "broadcast"), default=None) for counts in (ours, theirs)]
        calls = [sum(count for (op, _), count in each.items() if op == "broadcast") for each in (ours, theirs)]
        assert (orders[0], calls[0]) == (orders[1], calls[1])


@pytest.mark.torch
def test_buckets_that_a_python_hook_sends_are_not_added_a_second_time(watched: list[Told]) -> None:
    for step in watched[0].said["python hook"]["steps"]:
        assert collections.Counter(op for op, _ in added(step).elements())["all_reduce"] == 0
        assert carried(step, 4)


@pytest.mark.torch
@pytest.mark.parametrize("scenario", ["plain", "accumulated", "unused", "static", "python hook", "fp16 hook", "long"])
def test_each_step_has_the_counters_that_torch_shows_in_the_next(watched: list[Told], scenario: str) -> None:
    for told in watched:
        steps = told.said[scenario]["steps"]
        samples = samples_of(told, scenario)
        assert [sample.step for sample in samples] == [step["step"] for step in steps[:-1]]
        assert [sample.iteration for sample in samples] == list(range(1, len(steps)))
        for sample, following in zip(samples, steps[1:], strict=True):
            # The last forward pass of a step is the one that is synchronised.
            iteration, sizes, times_us = following["said"][-1]
            assert (sample.iteration, sample.bucket_sizes_bytes) == (iteration, tuple(map(int, sizes.split(", "))))
            assert [sample.forward_us, sample.backward_us, sample.comm_us, sample.overlap_us] == times_us
            assert sample.comm_us > 0


@pytest.mark.torch
def test_of_a_step_that_reduces_twice_both_are_recorded(watched: list[Told]) -> None:
    told = watched[0]
    first = told.said["synchronised each time"]["steps"][0]["step"]
    samples = samples_of(told, "synchronised each time")
    expected = [(first + (iteration - 1) // 2, iteration) for iteration in range(1, 2 * STEPS)]
    assert [(sample.step, sample.iteration) for sample in samples] == expected


@pytest.mark.torch
def test_a_forward_pass_that_no_backward_pass_follows_leaves_no_counters(watched: list[Told]) -> None:
    samples = samples_of(watched[0], "two forward passes")
    assert [sample.iteration for sample in samples] == [2, 4, 6, 8]


@pytest.mark.torch
def test_two_models_are_told_apart_from_one(watched: list[Told]) -> None:
    told = watched[0]
    numbers = [step["step"] for step in told.said["two models"]["steps"]]
    assert sorted(sample.step for sample in samples_of(told, "two models")) == sorted(numbers[:-1] * 2)


@pytest.mark.torch
def test_a_model_that_is_saved_holds_nothing_of_ours(watched: list[Told]) -> None:
    assert not watched[0].said["saved"]


@pytest.mark.torch
def test_nothing_failed_on_the_way(watched: list[Told]) -> None:
    assert "multinode:" not in watched[0].stderr + watched[1].stderr


@pytest.mark.torch
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_training_is_the_same_bit_for_bit(watched: list[Told], unwatched: list[Told], scenario: str) -> None:
    for ours, theirs in zip(watched, unwatched, strict=True):
        assert ours.said[scenario]["exact"] == theirs.said[scenario]["exact"]
        losses = [[step["losses"] for step in told.said[scenario]["steps"]] for told in (ours, theirs)]
        assert losses[0] == losses[1]


COMPILED = """
added = []
class Traffic:
    def add(self, op, group, size_bytes, count=1, source="call"):
        added.append([op, size_bytes, count])
if os.environ["WATCHED"] == "yes":
    watch(worker.ddp.hooks(steps, guard, Traffic()))
torch = begin()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x).tanh()
model = torch.nn.parallel.DistributedDataParallel(Net())
run = torch.compile(model, backend="eager")
for _ in range(12):
    run(torch.ones(2, 8)).sum().backward()
    steps.step("optimizer")
counters = torch._dynamo.utils.counters
tell({"added": added, "graphs": counters["stats"]["unique_graphs"], "again": counters["recompile_limit"]})
"""


@pytest.mark.torch
def test_a_compiled_model_is_counted_and_not_compiled_again(tmp_path: Path) -> None:
    ours, theirs = (run_pair(tmp_path / watched, COMPILED, WATCHED=watched)[0] for watched in ("yes", "no"))
    assert [each for each in ours.said["added"] if each[0] == "all_reduce"] == [["all_reduce", 288, 1]] * 12
    for told in (ours, theirs):
        assert (told.said["graphs"], told.said["again"]) == (1, {})


# A stand-in for torch on a GPU, that does what reducer.cpp, logger.cpp and reducer_cuda.cpp do with the sample rate.
CUDA_TORCH = """
class Event:
    def record(self, stream): self.at = cuda.issued
    def query(self): return self.at <= cuda.finished
class cuda:
    Event = Event
    issued = finished = 0
    capturing = False
    @staticmethod
    def is_current_stream_capturing(): return cuda.capturing
    @staticmethod
    def current_stream(device): return "stream"
def is_grad_enabled(): return True
def _disable_dynamo(function): return function
from . import nn, optim
"""
CUDA_DDP = """
import torch
class DistributedDataParallel:
    require_backward_grad_sync, find_unused_parameters, static_graph = True, False, False
    _use_python_reducer = _delay_all_reduce_all_params = _has_rebuilt_buckets = False
    device_type, device, process_group = "cuda", "cuda:0", "group"
    def __init__(self):
        self.iterations, self.rate, self.timed, self.waited = 0, 100, [], []
        self.data = {"bucket_sizes": "8", "iteration": 0, "comm_hook": "", "num_parameter_tensors": 1}
    def _set_ddp_runtime_logging_sample_rate(self, rate): self.rate = rate
    def _get_ddp_logging_data(self): return dict(self.data)
    def collects(self): return 0 < self.iterations <= 10 or self.iterations and self.iterations % self.rate == 0
    def _pre_forward(self):
        if self.collects():
            assert self.iterations <= 10 or self.timed[-1] == self.iterations, "read what was not timed"
            if torch.cuda.finished < torch.cuda.issued:
                self.waited.append(self.iterations)
            started = 1000 * self.timed[-1]
            self.data.update(iteration=self.iterations, forward_compute_time_start=started,
                             backward_comm_time_start=started + 1, forward_compute_time=1000,
                             backward_compute_time=2000, backward_comm_time=3000,
                             backward_compute_comm_overlap_time=1000)
        self.iterations += 1
        if self.collects():
            self.timed.append(self.iterations)
"""
CUDA_LOOP = """
class Traffic:
    def add(self, *args, **fields): pass
watch(worker.ddp.hooks(steps, guard, Traffic()))
import torch.nn.parallel.distributed as distributed
import torch.optim.optimizer as optimizer
model = distributed.DistributedDataParallel()
for number in range(1, 41):
    torch = sys.modules["torch"]
    torch.cuda.capturing = %(capturing)s
    model._pre_forward()
    torch.cuda.issued += 1
    for hook in optimizer.hooks: hook("optimizer", (), {})
    if %(done)s:
        torch.cuda.finished = torch.cuda.issued
    steps.step("optimizer")
tell({"waited": model.waited, "timed": model.timed})
"""


def run_on_a_gpu(folder: Path, *, done: str, capturing: str = "False") -> Told:
    modules = {
        "torch/__init__.py": CUDA_TORCH,
        "torch/nn/__init__.py": "from .parallel import distributed\n",
        "torch/nn/parallel/__init__.py": "",
        "torch/nn/parallel/distributed.py": CUDA_DDP,
        "torch/optim/__init__.py": "from . import optimizer\n",
        "torch/optim/optimizer.py": "hooks = []\nregister_optimizer_step_pre_hook = hooks.append\n",
    }
    for name, text in modules.items():
        path = folder / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (told,) = run_pair(folder / "run", CUDA_LOOP % {"done": done, "capturing": capturing}, workers=1)
    assert told.stderr == ""
    return told


def iterations_of(told: Told) -> list[int]:
    return [sample.iteration for sample in told.samples if isinstance(sample, DdpSample)]


def test_on_a_gpu_every_iteration_is_read_whose_device_is_done(tmp_path: Path) -> None:
    told = run_on_a_gpu(tmp_path, done="True")
    assert iterations_of(told) == list(range(1, 40))
    assert told.said["waited"] == []


def test_on_a_gpu_that_is_behind_nothing_is_read_after_what_torch_reads_itself(tmp_path: Path) -> None:
    told = run_on_a_gpu(tmp_path, done="False")
    assert iterations_of(told) == told.said["waited"] == list(range(1, 11))


def test_on_a_gpu_that_is_behind_now_and_then_the_other_iterations_are_read(tmp_path: Path) -> None:
    told = run_on_a_gpu(tmp_path, done="number % 3")
    assert iterations_of(told) == [number for number in range(1, 40) if number <= 10 or number % 3]
    assert [number for number in told.said["waited"] if number > 10] == []


def test_what_is_captured_in_a_graph_is_neither_timed_nor_read(tmp_path: Path) -> None:
    told = run_on_a_gpu(tmp_path, done="True", capturing="20 <= number < 25")
    assert [number for number in told.said["timed"] if 20 <= number < 25] == []
    assert iterations_of(told) == [number for number in range(1, 40) if not 19 <= number < 25]
