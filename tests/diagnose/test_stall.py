from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from multinode.diagnose.hang import find_hang
from multinode.records.run import Connection, LastStep, NodeDiagnosis, ProcessDiagnosis, Sockets, Stall
from multinode.stats.unknown import Unknown
from tests.diagnose.test_nccl_ras import MISMATCH
from tests.golden import Golden

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


def nodes(changes: Mapping[int, dict[str, Any] | None], *, steps: dict[int, int] | None = None) -> list[NodeDiagnosis]:
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


def explain(changes: Mapping[int, dict[str, Any] | None], *, steps: dict[int, int] | None = None) -> Stall:
    return explain_nodes(nodes(changes, steps=steps))


FULL = Connection(state="established", peer="10.0.0.2:5000", send_queue_bytes=4096, receive_queue_bytes=0)
TRYING = msgspec.structs.replace(FULL, state="connecting", send_queue_bytes=1)
HELD = {"state": "D", "state_before": "D", "wchan": "nfs_wait_bit_killable"}
LOADING = stack("load data.py:8", "main train.py:11")
UNREAD: dict[int, dict[str, Any] | None] = {rank: {"stack": Unknown("no py-spy")} for rank in range(4)}


def without_answer(changes: dict[int, dict[str, Any] | None]) -> list[NodeDiagnosis]:
    silent = NodeDiagnosis(node="node1", node_rank=1, ranks=(2, 3), error="no answer within 20 s")
    return [nodes(changes)[0], silent]


def without_workers() -> list[NodeDiagnosis]:
    return [
        msgspec.structs.replace(node, processes=node.processes[:1], last_steps=())
        for node in nodes(dict.fromkeys(range(4)))
    ]


def with_stopped_launcher() -> list[NodeDiagnosis]:
    first, second = nodes({})
    launcher = msgspec.structs.replace(second.processes[0], state="T")
    return [first, msgspec.structs.replace(second, processes=(launcher, *second.processes[1:]))]


def test_the_rank_or_node_that_the_others_wait_for_is_named(golden: Golden) -> None:
    golden.check_findings(
        "hang",
        {
            "rank 3 is stopped": explain({3: {"state": "T", "stack": Unknown("stopped")}}),
            "ranks 2 and 3 are stopped": explain({2: {"state": "T"}, 3: {"state": "T"}}),
            "a debugger holds rank 0": explain({0: {"state": "t"}}),
            "rank 1 has ended": explain({1: None}, steps={1: 5}),
            "no worker on any node": explain_nodes(without_workers()),
            "the kernel holds rank 2": explain({2: HELD}),
            "the kernel held rank 2 for a moment": explain({2: HELD | {"state_before": "R"}}),
            "node1 does not answer": explain_nodes(without_answer({})),
            "node1 does not answer, rank 0 is stopped": explain_nodes(without_answer({0: {"state": "T"}})),
            "rank 1 is outside of the collective": explain({1: {"stack": LOADING, "cpu_s": 0.0}}, steps={1: 6}),
            "rank 1 computes": explain({1: {"stack": stack("load data.py:8"), "cpu_s": 0.29}}),
            "rank 2 is in another collective": explain({2: {"stack": stack("broadcast", "main train.py:15")}}),
            "no stacks, rank 2 has fewer steps": explain(UNREAD, steps={2: 6}),
            "no stacks": explain(UNREAD),
            "rank 0 cannot deliver": explain({0: {"sockets": Sockets(established=1, connecting=0, listed=(FULL,))}}),
            "rank 3 cannot connect": explain({3: {"sockets": Sockets(established=0, connecting=1, listed=(TRYING,))}}),
            "all wait in one collective": explain({}),
            "all are at one line": explain({rank: {"stack": stack("load data.py:8")} for rank in range(4)}),
            "the launcher of node1 is stopped": explain_nodes(with_stopped_launcher()),
        },
    )


def test_the_stack_of_the_rank_to_blame_has_the_users_own_frames() -> None:
    assert explain({1: {"stack": LOADING}}).stack == "/home/a/data.py:8 in load\n/home/a/train.py:11 in main"


# What two ranks on GPUs show when one of them sleeps: the other has launched its collective and reads the loss.
READING = stack("step train.py:30")
ASLEEP = stack("load data.py:7", "main train.py:12")


def on_gpus(**changes: Any) -> dict[str, Any]:
    return {"gpu": True, **changes}


def launching(late: int) -> Stall:
    """All have launched 42 collectives, but for this rank."""
    stacks: dict[int, dict[str, Any] | None] = {
        rank: on_gpus(stack=READING, collectives=42, cpu_s=0.3) for rank in range(4)
    }
    return explain(stacks | {late: on_gpus(stack=ASLEEP, collectives=41)})


def counted_by_nccl() -> Stall:
    """NCCL's RAS names the process; its ranks of this communicator are not those of the job."""
    first, second = nodes({rank: on_gpus(stack=READING) for rank in range(4)})
    ras = MISMATCH.replace("Rank 7 has", "Rank 0 has").replace("1650386", "203")
    return explain_nodes([first, msgspec.structs.replace(second, ras=ras)])


def test_on_gpus_the_rank_that_launched_fewer_collectives_is_behind(golden: Golden) -> None:
    # A rank blocks in a copy, which has no frame of its own, while the others are in calls that wait on the host.
    copying = {rank: on_gpus(stack=READING if rank == 1 else WAITING) for rank in range(4)}
    golden.check_findings(
        "hang_on_gpus",
        {
            "rank 0 launched fewer": launching(0),
            "rank 3 launched fewer": launching(3),
            "rank 3 launched fewer, by NCCL's count": counted_by_nccl(),
            "rank 1 is outside of the collective": explain(copying),
            "rank 1 is outside of the collective, on CPUs": explain({1: {"stack": READING}}),
        },
    )


@pytest.mark.parametrize("missing", [1, 2])
def test_counts_of_some_ranks_alone_blame_nobody(missing: int) -> None:
    changes: dict[int, dict[str, Any] | None] = {rank: on_gpus(collectives=40 + rank) for rank in range(4)}
    assert explain(changes | {missing: on_gpus(collectives=None)}).rank is None
