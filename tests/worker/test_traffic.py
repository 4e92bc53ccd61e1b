"""Each collective of torch.distributed, called by two real processes on gloo, and what of it was counted."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from .traffic_workers import MEET, Recorded, train

pytestmark = pytest.mark.torch

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
    "all_gather_single": "new('all_gather_single')(both, x)",
    "_all_gather_base": "dist._all_gather_base(both, x)",
    "all_gather_coalesced": "dist.all_gather_coalesced([[torch.empty(10)], [torch.empty(10)]], [x])",
    "reduce_scatter": "dist.reduce_scatter(x, [torch.ones(10), torch.ones(10)])",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x, both)",
    "reduce_scatter_single": "new('reduce_scatter_single')(x, both)",
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
    "functional all_gather of a mesh": "gather(x, 0, mesh).wait()",
    "functional reduce_scatter by name": "scatter(both, 'sum', 0, dist.group.WORLD.group_name).wait()",
    "functional all_to_all": "functional.all_to_all_single(x, None, None, (mesh, 0)).wait()",
    "a late peer": "time.sleep(0.3 * rank); dist.all_reduce(x)",
    "a late peer, asynchronous": "time.sleep(0.3 * rank); dist.all_reduce(x, async_op=True).wait()",
    "from another thread": "in_a_thread(lambda: dist.all_reduce(x))",
    "the sizes of a long list": "[dist.all_reduce(torch.ones(size)) for size in range(1, 101)]",
    "what was called before": "dist.all_reduce(x)",
}
CALL_ALL = """
import threading, time
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
alone = [dist.new_group([0]), dist.new_group([1])][rank]
others = [dist.new_group([1]), dist.new_group([0])]
others = [group for group in others if group == dist.GroupMember.NON_GROUP_MEMBER][0]
mesh = init_device_mesh("cpu", (2,))
self_, peer = rank, 1 - rank
# Before they were given these names.
gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

def new(name):
    return getattr(dist, name, lambda *tensors: None)

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
for statement in STATEMENTS:
    x, both = torch.arange(10.0) + rank, torch.arange(20.0) * (rank + 1)
    try:
        exec(statement)
    except RuntimeError as error:
        assert "does not support" in str(error), error
    results.append([x.tolist(), both.tolist()])
    steps.step("optimizer")
tell(results)
"""
SCRIPT = f"STATEMENTS = {list(STATEMENTS.values())!r}\n{CALL_ALL}"
S, BOTH = 40, 80
TORCH = tuple(map(int, version("torch").split(".")[:2]))
# Before, torch has no such function, or its gloo refuses the call (tried: 2.4, 2.11, 2.13): nothing is counted.
SINCE = {
    "all_gather_single": (2, 12),
    "reduce_scatter_single": (2, 12),
    "reduce_scatter": (2, 5),
}
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
    expected = EXPECTED[name] if SINCE.get(name, (0, 0)) <= TORCH else []
    for worker in called:
        assert _calls(worker, name, "op", "size_bytes", "count") == expected


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


def test_time_blocked_inside_a_node_and_between_nodes_are_two_figures(tmp_path: Path, archive: Path) -> None:
    script = """
import time
# Two of four workers, on a node of their own.
os.environ["WORLD_SIZE"] = "4"
inside = dist.new_group([0, 1])
x = torch.ones(4)
for call in (
    lambda: dist.all_reduce(x),
    lambda: dist.all_reduce(x, group=inside),
    lambda: dist.all_reduce(x, group=inside, async_op=True).wait(),
):
    dist.barrier()
    steps.restart()
    time.sleep(0.3 * rank)
    call()
    steps.step("optimizer")
"""
    waited, _ = train(tmp_path, archive, MEET + script)
    between, *local = (step["phases_us"] for step in waited.of("step"))
    assert between["comm"] > 200_000
    assert "comm_local" not in between
    assert all(phases["comm_local"] > 200_000 and "comm" not in phases for phases in local)


def test_a_thread_that_does_not_train_is_counted_and_not_timed(called: list[Recorded]) -> None:
    assert "comm" not in _step(called[0], "from another thread")["phases_us"]


def test_what_the_collectives_compute_is_the_same_without_hooks(
    called: list[Recorded], tmp_path: Path, archive: Path
) -> None:
    bare = train(tmp_path, archive, MEET + SCRIPT, watched=False, warm=True)
    assert [worker.said for worker in called] == [worker.said for worker in bare]
    assert bare[0].of("traffic") == []
