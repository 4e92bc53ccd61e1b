"""Trainings whose collectives are counted: FSDP2, DeepSpeed, compiled functions; and a GPU's waits, with a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from .traffic_workers import MEET, train

pytestmark = pytest.mark.torch

FSDP2 = """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
mesh = dist.init_device_mesh("cpu", (2,))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8) * (rank + 1)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    steps.step("optimizer")
tell([p.to_local().tolist() for p in model.parameters()])
"""
ZERO2 = """
import logging
logging.disable(logging.CRITICAL)
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 8) * (rank + 1)).sum())
    engine.step()
    steps.step("deepspeed")
"""
# Graphs as the compiler cuts them, and how many calls were counted, of functions that a compiler knows, or breaks at.
COMPILED = """
import torch.distributed._functional_collectives as functional
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def rewritten(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

def gathered(x):
    y = torch.empty_like(x)
    dist.all_gather_into_tensor(y, x * 2)
    return y + 1

def broken(x):
    y = x * 2
    dist.broadcast(y, 0)
    return y + 1

def asynchronous(x):
    y = x * 2
    dist.all_reduce(y, async_op=True).wait()
    return y + 1

def inlined(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

graphs = []

def backend(graph, _inputs):
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    graphs.append([getattr(target, "__name__", str(target)) for target in targets])
    return graph

for function in (rewritten, gathered, broken, asynchronous, inlined):
    torch._dynamo.reset()
    graphs.append(function.__name__)
    compiled = torch.compile(function, backend=backend, fullgraph=function in (rewritten, gathered, inlined))
    for size in (3, 3, 4, 5):
        assert compiled(torch.ones(size)).tolist() == [3.0] * size
    steps.step("optimizer")
tell(graphs)
"""
# A stream whose events come to pass three steps later, 0.5 ms after each other; and a tensor that says it is on a GPU.
FAKE_STREAM = """
class Event:
    made = []
    def __init__(self):
        self.made.append(self)
    def record(self):
        stream.now += 1
        self.at, self.over = stream.now, steps.count + 3
    def record_on(self, _where):
        # Of a call on another stream: it begins at once and lasts longer than anything waits for it.
        self.at, self.over = stream.now + (1000 if stream.calls % 2 else 0), steps.count + 3
        stream.calls += 1
    def query(self):
        return steps.count >= self.over
    def elapsed_time(self, end):
        assert self.query() and end.query()
        return (end.at - self.at) * 0.5

class Stream:
    now, handle, calls = 0, 0, 0
    def here(self, _device): return self.handle
    def in_use(self): return True
    def current(self): return self.handle
    def event(self): return Event()

stream = Stream()
"""
ON_GPU = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class OnGpu(torch.Tensor):
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

x = torch.ones(10).as_subclass(OnGpu)

def step(*calls):
    for call in calls:
        call()
    steps.step("optimizer")

step(lambda: dist.all_reduce(x), lambda: dist.all_reduce(x))
step(lambda: dist.all_reduce(x, async_op=True).wait())
stream.handle = 7
step(lambda: dist.all_reduce(x))
stream.handle = 0
step(*[lambda: dist.all_reduce(x)] * 600)
for _ in range(4):
    step()
tell(len(Event.made))
"""


def test_fsdp2_gathers_twice_and_reduces_once_and_its_clipping_is_seen(tmp_path: Path, archive: Path) -> None:
    watched = train(tmp_path, archive, MEET + FSDP2, warm=True)
    bare = train(tmp_path, archive, MEET + FSDP2, watched=False, warm=True)
    assert [worker.said for worker in watched] == [worker.said for worker in bare]
    first, second = 4 * 8 * 16, 4 * 16 * 4
    assert watched[0].calls("op", "size_bytes", "count")[1:] == 2 * [
        [
            ("all_gather", second, 2),
            ("all_gather", first, 2),
            ("all_reduce", 8, 1),
            ("reduce_scatter", second, 1),
            ("reduce_scatter", first, 1),
        ]
    ]


def test_deepspeed_takes_the_functions_that_count(tmp_path: Path, archive: Path) -> None:
    (worker, _) = train(tmp_path, archive, MEET + ZERO2)
    gradients = 4 * (8 * 16 + 16 * 4)
    flags = ("all_reduce", 4, 1)
    assert worker.calls("op", "size_bytes", "count")[1:] == 2 * [
        [("all_gather", gradients, 1), flags, ("all_reduce", gradients, 1)]
    ]


def test_what_is_compiled_is_compiled_as_ever_and_what_is_not_is_counted(tmp_path: Path, archive: Path) -> None:
    (watched,) = train(tmp_path, archive, COMPILED, workers=1)
    (bare,) = train(tmp_path, archive, COMPILED, watched=False, workers=1, warm=True)
    assert watched.said == bare.said
    rewritten, gathered, broken, asynchronous, inlined = watched.calls("op", "count")
    assert (rewritten, gathered, inlined) == ([], [], [])
    assert sum(count for _op, count in broken) == sum(count for _op, count in asynchronous) == 4


def test_waits_of_the_computing_stream_are_recorded_when_they_are_over(tmp_path: Path, archive: Path) -> None:
    (worker,) = train(tmp_path, archive, ON_GPU, workers=1, stream=FAKE_STREAM, warm=True)
    waits = [
        tuple(record[field] for field in ("step", "wait_us", "calls", "of_calls"))
        for record in worker.of("device_wait")
    ]
    # The third step was on another stream, and is told untimed; of the fourth, none is over before it ends.
    assert waits == [(1, 1000.0, 2, 2), (2, 500.0, 1, 1), (3, 0, 0, 1), (4, 300_000.0, 600, 600)]
    assert all("comm" not in step["phases_us"] for step in worker.of("step")[:1])
    # What the first step waited for is over when the third one ends.
    recorded = [sample["kind"] for sample in worker.samples if sample["kind"] in {"step", "device_wait"}]
    assert recorded.index("device_wait") == 2
    # Of 604 pairs of events, the first step's two are used again in the fourth.
    assert worker.said == 2 * 602


# As FSDP2 and DeepSpeed have it: collectives on streams of their own, and events that the computing stream waits for.
# torch's own need a GPU; these do what its Python does (torch/cuda/streams.py).
OTHER_STREAMS = (
    FAKE_STREAM
    + """
import sys, types
class CudaEvent:
    def record(self, stream=None): pass
    def wait(self, stream=None): stream.waited += 1
class CudaStream:
    waited = 0
    def __init__(self, handle): self.cuda_stream = handle
    def wait_event(self, event): event.wait(self)
    def wait_stream(self, other): self.wait_event(other.record_event())
    def record_event(self):
        event = CudaEvent()
        event.record(self)
        return event
cuda = types.ModuleType("torch.cuda.streams")
cuda.Event = CudaEvent
"""
)
ON_OTHER_STREAMS = (
    ON_GPU[: ON_GPU.index("step(lambda")]
    + """
dict(traffic.hooks())["torch.cuda.streams"](cuda)
computing, gathering, reducing, copying = (CudaStream(handle) for handle in (0, 7, 8, 9))

def on(where, *calls):
    def run():
        stream.handle = where.cuda_stream
        for _ in range(calls[0] if calls else 1):
            dist.all_reduce(x)
        stream.handle = 0
    return run

# A gather that computing waits for by an event, and one beside it that is called after the event.
events = []
record = lambda: events.append(gathering.record_event())
step(on(gathering, 2), record, on(gathering), lambda: computing.wait_event(events[0]))
# The third of them, and one that is waited for twice.
step(on(gathering), lambda: computing.wait_stream(gathering), lambda: computing.wait_stream(gathering))
# Through a stream between: it waits for one of them, and computing for it.
step(on(reducing, 3), lambda: copying.wait_stream(reducing), lambda: computing.wait_stream(copying))
# What nothing was sent on delays nothing.
step(lambda: computing.wait_stream(CudaStream(5)), lambda: gathering.wait_stream(computing))
# Never waited for in this step, and then in the next one.
step(on(reducing))
step(lambda: computing.wait_stream(reducing))
for _ in range(4):
    step()
tell([one.waited for one in (computing, gathering, copying)])
"""
)


def test_what_the_computing_stream_waits_for_on_other_streams_is_timed_once(tmp_path: Path, archive: Path) -> None:
    (worker,) = train(tmp_path, archive, ON_OTHER_STREAMS, workers=1, stream=OTHER_STREAMS, warm=True)
    waits = [
        tuple(one[field] for field in ("step", "wait_us", "calls", "of_calls")) for one in worker.of("device_wait")
    ]
    # Who waits for a call of an earlier step may have waited for it before, unseen: it is not among the timed ones.
    assert waits == [(1, 500.0, 2, 3), (2, 500.0, 1, 1), (3, 500.0, 3, 3), (5, 0, 0, 1), (6, 500.0, 0, 0)]
    # The training's own waits are as they were.
    assert worker.said == [6, 1, 1]
