from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.diagnose.hang import find_hang
from multinode.records.run import Connection, LastStep, NodeDiagnosis, ProcessDiagnosis, Sockets, Stall
from multinode.stats.unknown import Unknown
from tests.diagnose.test_nccl_ras import MISMATCH

SITE = "/env/lib/python3.11/site-packages"


def stack(*calls: str) -> str:
    """faulthandler's text; a call is `name`, of torch.distributed, or `name file:line`, the user's."""
    lines = ["Current thread 0x00007f627d35fb80 (most recent call first):"]
    for call in calls:
        name, _, place = call.partition(" ")
        path, _, line = place.partition(":")
        path = f"/home/a/{path}" if path else f"{SITE}/torch/distributed/distributed_c10d.py"
        lines.append(f'  File "{path}", line {line or 1} in {name}')
    return "\n".join(lines)


WAITING = stack("all_reduce", "main train.py:12")


def nodes(changes: dict[int, dict[str, Any] | None], *, steps: dict[int, int] | None = None) -> list[NodeDiagnosis]:
    """Two nodes with two ranks each that wait in all_reduce, but for these changes; None has no process."""
    found = []
    for node_rank in (0, 1):
        ranks = (2 * node_rank, 2 * node_rank + 1)
        processes = [ProcessDiagnosis(role="launcher", pid=100, command="torchrun", state="S")]
        for rank in ranks:
            change = changes.get(rank, {})
            process = ProcessDiagnosis(role="worker", pid=200 + rank, rank=rank, state="S", stack=WAITING, looked_s=0.3)
            if change is not None:
                processes.append(msgspec.structs.replace(process, **change))
        last = tuple(LastStep(rank=rank, step=(steps or {}).get(rank, 7), time_s=1.0) for rank in ranks)
        found.append(
            NodeDiagnosis(
                node=f"node{node_rank}", node_rank=node_rank, ranks=ranks, processes=tuple(processes), last_steps=last
            )
        )
    return found


def explain_nodes(said: list[NodeDiagnosis]) -> Stall:
    return find_hang(said, 0.0, 300.0)


def explain(changes: dict[int, dict[str, Any] | None], *, steps: dict[int, int] | None = None) -> Stall:
    return explain_nodes(nodes(changes, steps=steps))


def test_a_stopped_rank_is_named_with_the_command_that_lets_it_go_on() -> None:
    found = explain({3: {"state": "T", "stack": Unknown("stopped")}})
    assert found.message == ("rank 3 on node1 is stopped (state T) by SIGSTOP; the other 3 ranks wait in all_reduce")
    assert found.hint == "resume it, on node1: kill -CONT 203"
    assert (found.code, found.node, found.node_rank, found.rank) == ("stopped", "node1", 1, 3)


def test_several_stopped_ranks_are_named_together() -> None:
    found = explain({2: {"state": "T"}, 3: {"state": "T"}})
    assert found.message.startswith("ranks 2, 3 on node1 are stopped (state T) by SIGSTOP; the other 2")
    assert found.hint == "resume it, on node1: kill -CONT 202 203"


def test_a_rank_that_a_debugger_holds_is_not_told_to_be_stopped() -> None:
    assert "held by a debugger" in explain({0: {"state": "t"}}).message


def test_a_rank_without_a_process_is_named_with_its_last_step() -> None:
    found = explain({1: None}, steps={1: 5})
    assert found.message == (
        "rank 1 on node0 has no process left: it ended after step 5; the other 3 ranks wait in all_reduce"
    )


def test_workers_that_nowhere_started_blame_no_node() -> None:
    empty = [
        msgspec.structs.replace(node, processes=node.processes[:1], last_steps=())
        for node in nodes(dict.fromkeys(range(4)))
    ]
    found = explain_nodes(empty)
    assert found.message == "no worker has started on any node: the launchers are waiting for each other"
    assert (found.node, found.rank) == (None, None)


def test_a_rank_that_the_kernel_holds_is_named_and_one_that_it_held_for_a_moment_is_not() -> None:
    held = {"state": "D", "state_before": "D", "wchan": "nfs_wait_bit_killable"}
    found = explain({2: held})
    assert found.message.startswith("rank 2 on node1 is in uninterruptible sleep (state D, in nfs_wait_bit_killable)")
    assert found.rank == 2
    assert explain({2: held | {"state_before": "R"}}).rank is None


def test_a_node_that_does_not_answer_is_named() -> None:
    pair = nodes({})
    pair[1] = NodeDiagnosis(node="node1", node_rank=1, ranks=(2, 3), error="no answer within 20 s")
    found = explain_nodes(pair)
    assert found.message == "node1 did not report what its ranks are doing: no answer within 20 s"
    assert found.node == "node1"


def test_a_stopped_rank_matters_more_than_a_node_that_does_not_answer() -> None:
    pair = nodes({0: {"state": "T"}})
    pair[1] = NodeDiagnosis(node="node1", node_rank=1, ranks=(2, 3), error="no answer within 20 s")
    assert explain_nodes(pair).rank == 0


def test_the_rank_outside_of_the_collective_is_named_with_its_place() -> None:
    found = explain({1: {"stack": stack("load data.py:8", "main train.py:11"), "cpu_s": 0.0}}, steps={1: 6})
    assert found.message == (
        "rank 1 on node0 is in load (data.py:8), idle, at step 6 while the others finished 7; "
        "the other 3 ranks wait in all_reduce"
    )
    assert found.stack == "/home/a/data.py:8 in load\n/home/a/train.py:11 in main"


def test_a_rank_that_computes_is_told_to() -> None:
    assert "(data.py:8), using CPU;" in explain({1: {"stack": stack("load data.py:8"), "cpu_s": 0.29}}).message


def test_ranks_in_different_collectives_are_told_apart() -> None:
    found = explain({2: {"stack": stack("broadcast", "main train.py:15")}})
    assert found.message == "rank 2 on node1 waits in broadcast; the other 3 ranks wait in all_reduce"
    assert "same order" in (found.hint or "")


def test_the_rank_with_fewer_steps_is_named_where_stacks_say_nothing() -> None:
    unknown: dict[int, dict[str, Any] | None] = {rank: {"stack": Unknown("no py-spy")} for rank in range(4)}
    assert explain(unknown, steps={2: 6}).message == "rank 2 on node1 is behind at step 6 of 7"
    found = explain(unknown)
    assert found.rank is None
    assert "no py-spy" in found.message


def test_a_connection_that_carries_nothing_is_named_where_all_are_equally_far() -> None:
    full = Connection(state="established", peer="10.0.0.2:5000", send_queue_bytes=4096, receive_queue_bytes=0)
    found = explain({0: {"sockets": Sockets(established=1, connecting=0, listed=(full,))}})
    assert found.message == (
        "rank 0 on node0 cannot deliver 4096 bytes to 10.0.0.2:5000; all 4 ranks wait in all_reduce"
    )
    trying = msgspec.structs.replace(full, state="connecting", send_queue_bytes=1)
    found = explain({3: {"sockets": Sockets(established=0, connecting=1, listed=(trying,))}})
    assert found.message.startswith("rank 3 on node1 cannot connect to 10.0.0.2:5000")


def test_ranks_that_all_wait_for_the_same_blame_nobody() -> None:
    found = explain({})
    assert found.message == "all 4 ranks wait in all_reduce, and none is behind"
    assert found.node is None


def test_ranks_that_are_all_at_the_users_same_line_blame_nobody() -> None:
    found = explain({rank: {"stack": stack("load data.py:8")} for rank in range(4)})
    assert found.message == "all 4 ranks are in load (data.py:8)"
    assert found.rank is None


def test_a_stopped_launcher_is_named_where_no_worker_is() -> None:
    first, second = nodes({})
    launcher = msgspec.structs.replace(second.processes[0], state="T")
    second = msgspec.structs.replace(second, processes=(launcher, *second.processes[1:]))
    found = explain_nodes([first, second])
    assert found.message.startswith("the launcher on node1 (torchrun, pid 100) is stopped")
    assert found.hint == "resume it, on node1: kill -CONT 100"


# What two ranks on GPUs show when one of them sleeps: the other has launched its collective and reads the loss.
READING = stack("step train.py:30")
ASLEEP = stack("load data.py:7", "main train.py:12")


def on_gpus(**changes: Any) -> dict[str, Any]:
    return {"gpu": True, **changes}


@pytest.mark.parametrize("late", [0, 3])
def test_on_gpus_the_rank_that_launched_fewer_collectives_is_behind(late: int) -> None:
    stacks: dict[int, dict[str, Any] | None] = {
        rank: on_gpus(stack=READING, collectives=42, cpu_s=0.3) for rank in range(4)
    }
    found = explain(stacks | {late: on_gpus(stack=ASLEEP, collectives=41)})
    assert found.rank == late
    assert found.message == (
        f"rank {late} on node{late // 2} has launched 41 collectives while others launched 42, and is in load "
        "(data.py:7)"
    )


def test_on_gpus_nobody_is_blamed_for_being_outside_of_a_collective() -> None:
    # Rank 1 blocks in a copy, which has no frame of its own, while the others are in calls that wait on the host.
    found = explain({rank: on_gpus(stack=READING if rank == 1 else WAITING) for rank in range(4)})
    assert (found.rank, found.node) == (None, None)
    assert explain({1: {"stack": READING}}).rank == 1


@pytest.mark.parametrize("missing", [1, 2])
def test_counts_of_some_ranks_alone_blame_nobody(missing: int) -> None:
    changes: dict[int, dict[str, Any] | None] = {rank: on_gpus(collectives=40 + rank) for rank in range(4)}
    assert explain(changes | {missing: on_gpus(collectives=None)}).rank is None


def test_nccls_own_counts_name_the_rank_by_its_process() -> None:
    told = nodes({rank: on_gpus(stack=READING) for rank in range(4)})
    # Ranks of this communicator are not those of the job.
    ras = MISMATCH.replace("Rank 7 has", "Rank 0 has").replace("1650386", "203")
    found = explain_nodes([told[0], msgspec.structs.replace(told[1], ras=ras)])
    assert (found.rank, found.node) == (3, "node1")
    assert "launched 60 AllReduce operations while another launched 64 (NCCL RAS)" in found.message
