"""What workers call on torch.distributed, counted in two real processes on gloo; waits on a GPU with a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.torch

DEADLINE_S = 100.0
# Each worker installs the hooks by hand, as multinode_hooks does, and ends a step where the script says so.
PRELUDE = """
import os, sys
hooks, samples, meeting, rank, watched = sys.argv[1:]
rank, watched = int(rank), watched == "watched"
sys.path.insert(0, hooks)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import multinode_device_waits, multinode_guard, multinode_imports, multinode_recorder, multinode_steps, multinode_traffic
recorder = multinode_recorder.Recorder(samples, rank)
guard = multinode_guard.Guard(recorder)
steps = multinode_steps.Steps(recorder, guard)
"""
INSTALL = """
if watched:
    device = multinode_device_waits.DeviceWaits(steps, stream)
    traffic = multinode_traffic.Traffic(steps, guard, device)
    actions = [(name, guard.quietly(action)) for name, action in traffic.hooks()]
    sys.meta_path.insert(0, multinode_imports.AfterImport(actions))
import torch
import torch.distributed as dist
torch.manual_seed(0)
"""
CUDA_STREAM = """
stream = multinode_device_waits.CudaStream()
"""
MEET = """
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
"""
LEAVE = """
dist.destroy_process_group()
"""
# Every statement is one step. `x` is 10 float32: 40 bytes; `both` twice as much; `self_` and `peer` are the ranks.
STATEMENTS = {
    "nothing": "",
    "all_reduce": "dist.all_reduce(x)",
    "all_reduce, by name": "dist.all_reduce(op=dist.ReduceOp.MAX, tensor=x)",
    "all_reduce, asynchronous": "dist.all_reduce(x, async_op=True).wait()",
    "all_reduce, twice and another": "dist.all_reduce(x); dist.all_reduce(x); dist.all_reduce(both)",
    "all_reduce_coalesced": "dist.all_reduce_coalesced([x, both])",
    "all_gather": "dist.all_gather([torch.empty(10), torch.empty(10)], x)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(both, x)",
    "all_gather_single": "dist.all_gather_single(both, x)",
    "_all_gather_base": "dist._all_gather_base(both, x)",
    "all_gather_coalesced": "dist.all_gather_coalesced([[torch.empty(10)], [torch.empty(10)]], [x])",
    "reduce_scatter": "dist.reduce_scatter(x, [torch.ones(10), torch.ones(10)])",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x, both)",
    "reduce_scatter_single": "dist.reduce_scatter_single(x, both)",
    "broadcast": "dist.broadcast(x, 0)",
    "_broadcast_coalesced": "dist._broadcast_coalesced(dist.group.WORLD, [x, both], 1 << 20, 0)",
    "all_to_all_single": "dist.all_to_all_single(torch.empty(10), x)",
    "reduce": "dist.reduce(x, 1)",
    "gather": "dist.gather(x, [torch.empty(10), torch.empty(10)] if rank == 0 else None, 0)",
    "scatter": "dist.scatter(x, [torch.ones(10), torch.ones(10)] if rank == 0 else None, 0)",
    "send and recv": "dist.send(x, peer) if rank == 0 else dist.recv(x, peer)",
    "isend and irecv": "[work.wait() for work in (dist.isend(both, peer), dist.irecv(x.new_empty(20), peer))]",
    "batch_isend_irecv": "[work.wait() for work in dist.batch_isend_irecv("
    "[dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(10), peer)])]",
    "barrier": "dist.barrier()",
    "all_gather_object": "dist.all_gather_object([None, None], 'one')",
    "a group of one": "dist.all_reduce(x, group=alone)",
    "a group of others": "dist.all_reduce(x, group=others)",
    "a call that fails": "fails(lambda: dist.all_reduce('no tensor'))",
    "a call after it": "dist.all_reduce(x)",
    "coalescing manager": "coalesced()",
    "functional all_reduce": "functional.all_reduce(x, 'sum', dist.group.WORLD).wait()",
    "functional all_gather of a mesh": "functional.all_gather_single(x, 0, mesh).wait()",
    "functional reduce_scatter by name": "functional.reduce_scatter_single("
    "both, 'sum', 0, dist.group.WORLD.group_name).wait()",
    "functional all_to_all": "functional.all_to_all_single(x, None, None, (mesh, 0)).wait()",
    "a late peer": "time.sleep(0.3 * rank); dist.all_reduce(x)",
    "a late peer, asynchronous": "time.sleep(0.3 * rank); dist.all_reduce(x, async_op=True).wait()",
    "from another thread": "in_a_thread(lambda: dist.all_reduce(x))",
    "the sizes of a long list": "[dist.all_reduce(torch.ones(size)) for size in range(1, 101)]",
    "what was called before": "dist.all_reduce(x)",
}
SCRIPT = """
import hashlib, json, threading, time, warnings
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
warnings.simplefilter("ignore")
alone = [dist.new_group([0]), dist.new_group([1])][rank]
others = [dist.new_group([1]), dist.new_group([0])]
others = [group for group in others if group == dist.GroupMember.NON_GROUP_MEMBER][0]
mesh = init_device_mesh("cpu", (2,))
self_, peer = rank, 1 - rank

def fails(call):
    try:
        call()
    except TypeError as error:
        assert "Invalid function argument" in str(error), error
    else:
        raise AssertionError

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def coalesced():
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(both, async_op=True)
    manager.wait()

results = []
for number, statement in enumerate(json.loads(os.environ["STATEMENTS"]), 1):
    x, both = torch.arange(10.0) + rank, torch.arange(20.0) * (rank + 1)
    exec(statement)
    results.append([x.tolist(), both.tolist()])
    steps.step("optimizer")
print(hashlib.sha256(json.dumps(results).encode()).hexdigest())
"""
S, BOTH = 40, 80
WORLD = "0"
EXPECTED: dict[str, list[tuple[str, float, int]]] = {
    "nothing": [],
    "all_reduce": [("all_reduce", S, 1)],
    "all_reduce, by name": [("all_reduce", S, 1)],
    "all_reduce, asynchronous": [("all_reduce", S, 1)],
    "all_reduce, twice and another": [("all_reduce", S, 2), ("all_reduce", BOTH, 1)],
    "all_reduce_coalesced": [("all_reduce", S + BOTH, 1)],
    "all_gather": [("all_gather", BOTH, 1)],
    "all_gather_into_tensor": [("all_gather", BOTH, 1)],
    "all_gather_single": [("all_gather", BOTH, 1)],
    "_all_gather_base": [("all_gather", BOTH, 1)],
    "all_gather_coalesced": [("all_gather", BOTH, 1)],
    "reduce_scatter": [("reduce_scatter", BOTH, 1)],
    "reduce_scatter_tensor": [("reduce_scatter", BOTH, 1)],
    "reduce_scatter_single": [("reduce_scatter", BOTH, 1)],
    "broadcast": [("broadcast", S, 1)],
    "_broadcast_coalesced": [("broadcast", S + BOTH, 1)],
    "all_to_all_single": [("all_to_all", S, 1)],
    "reduce": [("reduce", S, 1)],
    "gather": [("gather", BOTH, 1)],
    "scatter": [("scatter", BOTH, 1)],
    "isend and irecv": [("recv", BOTH, 1), ("send", BOTH, 1)],
    "batch_isend_irecv": [("recv", S, 1), ("send", S, 1)],
    "barrier": [("barrier", 0, 1)],
    "a group of one": [("all_reduce", S, 1)],
    "a group of others": [],
    "a call that fails": [],
    "a call after it": [("all_reduce", S, 1)],
    "coalescing manager": [("all_reduce", S, 1), ("all_reduce", BOTH, 1)],
    "functional all_reduce": [("all_reduce", S, 1)],
    "functional all_gather of a mesh": [("all_gather", BOTH, 1)],
    "functional reduce_scatter by name": [("reduce_scatter", BOTH, 1)],
    "functional all_to_all": [("all_to_all", S, 1)],
    "a late peer": [("all_reduce", S, 1)],
    "a late peer, asynchronous": [("all_reduce", S, 1)],
    "from another thread": [("all_reduce", S, 1)],
    "the sizes of a long list": [("all_reduce", 202.0, 100)],
    "what was called before": [("all_reduce", S, 1)],
}

FSDP2 = """
import hashlib
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
print(hashlib.sha256(repr([p.to_local().tolist() for p in model.parameters()]).encode()).hexdigest())
"""
ZERO2 = """
import hashlib, logging
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
print(hashlib.sha256(repr([p.tolist() for p in model.parameters()]).encode()).hexdigest())
"""
# Graphs as the compiler cuts them, and how many calls were counted, of functions that a compiler knows, or breaks at.
COMPILED = """
import json
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
    graphs.append([getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes if node.op == "call_function"])
    return graph

for function in (rewritten, gathered, broken, asynchronous, inlined):
    torch._dynamo.reset()
    graphs.append(function.__name__)
    compiled = torch.compile(function, backend=backend, fullgraph=function in (rewritten, gathered, inlined))
    for size in (3, 3, 4, 5):
        assert compiled(torch.ones(size)).tolist() == [3.0] * size
    steps.step("optimizer")
print(json.dumps(graphs))
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
    def query(self):
        return steps.count >= self.over
    def elapsed_time(self, end):
        assert self.query() and end.query()
        return (end.at - self.at) * 0.5

class Stream:
    now, current = 0, True
    def in_use(self): return True
    def is_current(self): return self.current
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
stream.current = False
step(lambda: dist.all_reduce(x))
stream.current = True
step(*[lambda: dist.all_reduce(x)] * 600)
for _ in range(4):
    step()
print(len(Event.made))
"""


class Recorded(NamedTuple):
    """What one worker printed and recorded."""

    stdout: str
    samples: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["kind"] == kind]

    def calls(self, *fields: str) -> list[list[tuple[Any, ...]]]:
        """Of each step, those fields of what it called."""
        records = {record["traffic"]: record["calls"] for record in self.of("traffic")}
        assert sorted(records) == list(range(len(records)))
        return [
            [tuple(call[field] for field in fields) for call in records[step["traffic"]]] for step in self.of("step")
        ]


def train(
    folder: Path, archive: Path, script: str, *, watched: bool = True, workers: int = 2, stream: str = CUDA_STREAM
) -> list[Recorded]:
    """Run the script in so many workers; none may fail, and none may say a word of trouble."""
    samples = folder / ("watched" if watched else "bare")
    samples.mkdir()
    hooks = archive / "multinode_agent" / "instrument"
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "STATEMENTS": json.dumps(list(STATEMENTS.values())),
    }
    begin = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PRELUDE + stream + INSTALL + script + LEAVE,
        str(hooks),
        str(samples),
    ]
    running = [
        subprocess.Popen(
            [*begin, str(samples / "meeting"), str(rank), "watched" if watched else "bare"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    try:
        done = [process.communicate(timeout=DEADLINE_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_stdout, stderr) in zip(running, done, strict=True):
        assert process.returncode == 0, stderr
        assert "multinode:" not in stderr
    return [Recorded(stdout, _read(samples / f"rank-{rank}.jsonl")) for rank, (stdout, _) in enumerate(done)]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> list[Recorded]:
    """Two workers that have called all of STATEMENTS."""
    return train(tmp_path_factory.mktemp("called"), archive, MEET + SCRIPT)


def _step(recorded: Recorded, name: str) -> dict[str, Any]:
    return recorded.of("step")[list(STATEMENTS).index(name)]


def _calls(recorded: Recorded, name: str, *fields: str) -> list[tuple[Any, ...]]:
    return recorded.calls(*fields)[list(STATEMENTS).index(name)]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_call_is_counted_once_with_its_size(called: list[Recorded], name: str) -> None:
    for worker in called:
        assert _calls(worker, name, "op", "size_bytes", "count") == EXPECTED[name]


def test_send_and_receive_are_told_apart(called: list[Recorded]) -> None:
    assert [_calls(worker, "send and recv", "op", "size_bytes") for worker in called] == [[("send", S)], [("recv", S)]]


def test_objects_are_gathered_by_their_size_and_their_bytes(called: list[Recorded]) -> None:
    gathered = _calls(called[0], "all_gather_object", "op", "count")
    assert gathered == [("all_gather", 1), ("all_gather", 1)]


def test_equal_steps_have_the_number_of_one_record(called: list[Recorded]) -> None:
    (worker, _) = called
    assert _step(worker, "what was called before")["traffic"] == _step(worker, "all_reduce")["traffic"]
    calls = [json.dumps(record["calls"]) for record in worker.of("traffic")]
    assert len(set(calls)) == len(calls) < len(STATEMENTS)


def test_groups_are_told_once_by_their_members(called: list[Recorded]) -> None:
    for rank, worker in enumerate(called):
        groups = {record["group"]: (record["ranks"], record["backend"]) for record in worker.of("group")}
        assert len(groups) == len(worker.of("group")) == 2
        ((whole,),) = _calls(worker, "all_reduce", "group")
        ((alone,),) = _calls(worker, "a group of one", "group")
        assert (groups[whole], groups[alone]) == (([0, 1], "gloo"), ([rank], "gloo"))


@pytest.mark.parametrize("name", ["a late peer", "a late peer, asynchronous"])
def test_time_blocked_in_a_collective_is_the_phase_comm(called: list[Recorded], name: str) -> None:
    assert _step(called[0], name)["phases_us"]["comm"] > 200_000
    assert "comm" not in _step(called[0], "nothing")["phases_us"]


def test_a_thread_that_does_not_train_is_counted_and_not_timed(called: list[Recorded]) -> None:
    assert "comm" not in _step(called[0], "from another thread")["phases_us"]


def test_what_the_collectives_compute_is_the_same_without_hooks(
    called: list[Recorded], tmp_path: Path, archive: Path
) -> None:
    bare = train(tmp_path, archive, MEET + SCRIPT, watched=False)
    assert [worker.stdout for worker in called] == [worker.stdout for worker in bare]
    assert bare[0].of("traffic") == []


def test_fsdp2_gathers_twice_and_reduces_once_and_its_clipping_is_seen(tmp_path: Path, archive: Path) -> None:
    watched = train(tmp_path, archive, MEET + FSDP2)
    bare = train(tmp_path, archive, MEET + FSDP2, watched=False)
    assert [worker.stdout for worker in watched] == [worker.stdout for worker in bare]
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
    (bare,) = train(tmp_path, archive, COMPILED, watched=False, workers=1)
    assert json.loads(watched.stdout) == json.loads(bare.stdout)
    rewritten, gathered, broken, asynchronous, inlined = watched.calls("op", "count")
    assert (rewritten, gathered, inlined) == ([], [], [])
    assert sum(count for _op, count in broken) == sum(count for _op, count in asynchronous) == 4


def test_waits_of_the_computing_stream_are_recorded_when_they_are_over(tmp_path: Path, archive: Path) -> None:
    (worker,) = train(tmp_path, archive, ON_GPU, workers=1, stream=FAKE_STREAM)
    waits = [
        tuple(record[field] for field in ("step", "wait_us", "calls", "of_calls"))
        for record in worker.of("device_wait")
    ]
    # The third step's call was on another stream; of the fourth one, as many were timed as are kept.
    assert waits == [(1, 1000.0, 2, 2), (2, 500.0, 1, 1), (4, 256_000.0, 512, 600)]
    assert all("comm" not in step["phases_us"] for step in worker.of("step")[:1])
    recorded_at = [sample["kind"] for sample in worker.samples if sample["kind"] in {"step", "device_wait"}]
    assert recorded_at.index("device_wait") > 3
    assert int(worker.stdout) == 2 * 512
