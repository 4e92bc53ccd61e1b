"""Ranks that do not meet in a collective, by dumps in the form of torch's flight recorder."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from multinode.diagnose.desync import Desync, RankPlace, find_desync
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import first_failure
from multinode.records.flight import FlightDump, decode_flight, read_flight
from multinode.records.samples import FlightSample
from tests.diagnose.test_failure import GLOO, ended
from tests.diagnose.test_stall import explain, stack

WORLD = {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3]}
NOW_NS = 1_795_911_600_000_000_000


def call(
    number: int, op: str, *, size: int = 8, group: Mapping[str, Any] = WORLD, ended: bool = False
) -> dict[str, Any]:
    return {
        "profiling_name": f"gloo:{op}",
        "process_group": [group["name"], group["desc"]],
        "collective_seq_id": number,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": ended,
        "is_p2p": False,
        "time_created_ns": NOW_NS - 41_000_000_000 + number,
    }


def dump(rank: int, calls: Iterable[Mapping[str, Any]], *groups: Mapping[str, Any]) -> dict[str, Any]:
    config = {group["name"]: group for group in (WORLD, *groups)}
    return {"rank": rank, "time_ns": NOW_NS, "version": "2.10", "pg_config": config, "entries": [*calls]}


def find(calls: Mapping[int, Iterable[Mapping[str, Any]]], *groups: Mapping[str, Any], **places: RankPlace) -> Desync:
    dumps = {rank: decode_flight(json.dumps(dump(rank, made, *groups))) for rank, made in calls.items()}
    found = find_desync(
        {rank: told for rank, told in dumps.items() if told is not None},
        {int(name[1:]): place for name, place in places.items()},
    )
    assert found is not None
    return found


DONE = call(6, "all_reduce", ended=True)


def test_a_rank_that_has_not_entered_a_collective_is_named_with_it_and_its_line() -> None:
    waits = RankPlace(collective="train.py:88")
    found = find(
        {rank: [DONE, *([call(7, "all_gather")] if rank < 3 else [])] for rank in range(4)},
        r0=waits,
        r1=waits,
        r2=waits,
        r3=RankPlace(elsewhere="load_batch (train.py:70)"),
    )
    assert found.message == (
        "rank 3 has not entered all_gather #7 (train.py:88), and is in load_batch (train.py:70); ranks 0-2 wait in "
        "this collective for 41 s"
    )
    assert (found.code, found.ranks, found.others) == ("missing_rank", (3,), (0, 1, 2))


@pytest.mark.parametrize("later_ns", [0, 1_000_000], ids=["first", "later"])
def test_a_group_of_two_is_named_and_others_are_not_blamed_for_waiting_for_its_ranks(later_ns: int) -> None:
    tensor = {"name": "2", "desc": "tp", "ranks": [2, 3]}
    world, gathered = call(7, "all_reduce"), call(1, "all_gather", group=tensor)
    gathered["time_created_ns"] += later_ns
    calls = {0: [DONE, world], 1: [DONE, world], 2: [DONE, gathered], 3: [DONE]}
    found = find(calls, tensor)
    assert found.message == "rank 3 has not entered all_gather #1 of group tp; rank 2 waits in this collective for 41 s"


def test_a_group_without_a_description_is_named_by_its_ranks() -> None:
    pair = {"name": "2", "desc": "undefined", "ranks": [2, 3]}
    found = find({2: [call(1, "broadcast", group=pair)], 3: [DONE]}, pair)
    assert "broadcast #1 of group 2 (ranks 2, 3);" in found.message


def test_another_operation_is_told_beside_what_the_others_called() -> None:
    found = find(
        {rank: [DONE, call(7, "broadcast" if rank == 1 else "all_reduce")] for rank in range(4)},
        r0=RankPlace(collective="train.py:88"),
        r1=RankPlace(collective="train.py:90"),
    )
    assert found.message == (
        "rank 1 called broadcast (train.py:90), but ranks 0, 2, 3 wait in all_reduce #7 (train.py:88) for 41 s"
    )
    assert (found.code, found.ranks) == ("other_operation", (1,))


def test_another_size_is_told_with_both() -> None:
    found = find({rank: [DONE, call(7, "all_reduce", size=9 if rank == 2 else 8)] for rank in range(4)})
    assert found.code == "other_size"
    assert found.message.startswith(
        "rank 2 called all_reduce of 9 elements (Float), but ranks 0, 1, 3 wait in all_reduce of 8 elements (Float) #7"
    )


@pytest.mark.parametrize("op", ["all_to_all", "alltoall_base", "gather", "scatter"])
def test_sizes_that_may_differ_between_ranks_are_no_finding(op: str) -> None:
    calls = {rank: [call(7, op, size=rank + 1)] for rank in range(4)}
    dumps = {rank: msgspec.convert(dump(rank, made), FlightDump) for rank, made in calls.items()}
    assert find_desync(dumps, {}) is None


def test_calls_that_have_ended_prove_nothing() -> None:
    calls = {rank: [call(7, "send" if rank else "recv", ended=True)] for rank in range(4)}
    dumps = {rank: msgspec.convert(dump(rank, made), FlightDump) for rank, made in calls.items()}
    assert find_desync(dumps, {}) is None


def test_the_same_operations_in_another_order() -> None:
    turned = [call(7, "broadcast"), call(8, "all_reduce")]
    straight = [call(7, "all_reduce"), call(8, "broadcast")]
    found = find({rank: [DONE, *(turned if rank == 3 else straight)] for rank in range(4)})
    assert (found.code, found.ranks) == ("other_order", (3,))


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    pair = {"name": "1", "desc": "tp", "ranks": [0, 1]}
    found = find({0: [DONE, call(7, "all_reduce")], 1: [DONE, call(1, "all_gather", group=pair)]}, pair)
    assert found.code == "other_order"
    assert "#7" in found.message
    assert "#1 of group tp" in found.message


def test_a_hang_is_told_by_the_dumps_of_its_workers() -> None:
    changes: dict[int, dict[str, Any] | None] = {
        rank: {"flight": json.dumps(dump(rank, [DONE, *([call(7, "all_reduce")] if rank != 3 else [])]))}
        for rank in range(4)
    }
    late = stack("load_batch train.py:70")
    found = explain({**changes, 3: {**(changes[3] or {}), "stack": late}})
    assert found.message == (
        "rank 3 has not entered all_reduce #7 (train.py:12), and is in load_batch (train.py:70); ranks 0-2 wait in "
        "this collective for 41 s"
    )
    assert (found.code, found.node, found.rank) == ("missing_rank", "node1", 3)
    assert found.stack == "/home/a/train.py:70 in load_batch"


def test_an_answer_that_is_no_dump_is_passed_over() -> None:
    assert explain({rank: {"flight": "{" if rank else '{"entries": 3}'} for rank in range(4)}).code == "all_wait"


def test_a_pickle_is_read_without_its_line_breaks_and_with_its_frames() -> None:
    made = dump(0, [{**DONE, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all\nreduce"}])
    made["entries"][0]["frames"] = [{"name": "main", "filename": "/home/a/train.py", "line": 88}]
    told = read_flight(pickle.dumps(made, protocol=2))
    assert told is not None
    assert told.entries[0].frames[0].line == 88
    assert "\n" not in told.entries[0].op


class _Command:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("executed",)


def _nested() -> list[Any]:
    values: list[Any] = []
    for _ in range(40):
        values = [values, values]
    return values


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": _Command()}),
        pickle.dumps({"entries": _nested()}),
        pickle.dumps({"entries": 3}),
        pickle.dumps(3),
        b"\x80\x02",
        b"",
        b"[1]",
    ],
    ids=["code", "bomb", "type", "number", "cut", "empty", "list"],
)
def test_a_file_of_anything_else_is_no_dump(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_flight(data) is None
    assert capsys.readouterr().out == ""


def test_torchs_pickle_holds_itself_but_once() -> None:
    values: list[Any] = []
    values.append(values)
    file = io.BytesIO()
    pickle.Pickler(file).dump({"entries": values})
    assert read_flight(file.getvalue()) is None


def early(*ranks: int, last: int) -> list[NodeEvidence]:
    """Two ranks that ended, on a node each; these raised an error of their connection."""
    told = [dump(rank, [DONE, *([call(7, "all_reduce", ended=True)] if rank in ranks else [])]) for rank in (0, 1)]
    if last == 1:
        # It has destroyed its groups.
        told[1]["pg_config"] = {}
    failed = (
        "Traceback (most recent call last):\n"
        '  File "/home/a/train.py", line 88, in <module>\n'
        f"RuntimeError: {GLOO.message}\n"
    )
    return [
        NodeEvidence(
            run=ended(rank, exit_code=1 if rank in ranks else 0),
            exceptions=[msgspec.structs.replace(GLOO, rank=rank, traceback=failed)] if rank in ranks else [],
            flights=[FlightSample(rank=rank, flight=json.dumps(told[rank]))],
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("last", [0, 1], ids=["with-groups", "without"])
def test_a_rank_that_ended_before_a_collective_is_the_first_cause(last: int) -> None:
    failure = first_failure(early(0, last=last))
    assert failure is not None
    assert failure.message.startswith("rank 1 has not entered all_reduce #7 (train.py:88), and has ended; rank 0 waits")
    assert (failure.rank, failure.node) == (1, "node1")
    assert "Connection closed by peer" in failure.consequences[0]


def test_ranks_that_all_lost_their_connection_are_told_as_before() -> None:
    failure = first_failure(early(0, 1, last=0))
    assert failure is not None
    assert "Connection closed by peer" in failure.message


ABORTED = (
    "Root Cause (first observed failure):\n"
    "[0]:\n"
    "  time      : 2026-11-29_04:50:30\n"
    "  host      : node0\n"
    "  rank      : 1 (local_rank: 1)\n"
    "  exitcode  : -6 (pid: 7)\n"
    "  error_file: <N/A>\n"
    "  traceback : Signal 6 (SIGABRT) received by PID 7\n"
)


def aborted(*sizes: int, op: str = "all_reduce", log: str = ABORTED) -> list[NodeEvidence]:
    """One rank on each node, which wrote its calls down; a rank on the first node was aborted, and no Python ran."""
    group = {**WORLD, "ranks": [*range(len(sizes))]}
    flights = [
        FlightSample(
            rank=rank,
            flight=json.dumps(dump(rank, [DONE, call(7, op if size else "barrier", size=size)], group)),
            source="calls",
        )
        for rank, size in enumerate(sizes)
    ]
    return [
        NodeEvidence(run=ended(rank, exit_code=1, ended_s=float(rank)), flights=[flight], log=log if rank == 0 else "")
        for rank, flight in enumerate(flights)
    ]


def test_another_size_that_made_gloo_abort_another_rank_is_the_first_cause() -> None:
    failure = first_failure(aborted(8, 8, 8192, 8))
    assert failure is not None
    assert (failure.rank, failure.node, failure.kind, failure.signal) == (2, "node2", "desync", None)
    assert failure.message.startswith(
        "rank 2 called all_reduce of 8192 elements (Float), but ranks 0, 1, 3 wait in all_reduce of 8 elements (Float) "
        "#7"
    )
    assert failure.consequences == ("node0: rank 1 was killed by SIGABRT",)


def test_two_ranks_that_differ_are_both_told_and_neither_is_blamed() -> None:
    failure = first_failure(aborted(8, 8192))
    assert failure is not None
    assert failure.rank is None
    assert failure.message.startswith(
        "rank 1 called all_reduce of 8192 elements (Float), but rank 0 waits in all_reduce"
    )
    assert failure.message.endswith("; the same number of ranks made each call, so either call may be wrong")


def test_another_operation_that_made_gloo_abort_is_the_first_cause() -> None:
    failure = first_failure(aborted(8, 8, 0))
    assert failure is not None
    assert (failure.rank, failure.kind) == (2, "desync")
    assert failure.message.startswith("rank 2 called barrier, but ranks 0, 1 wait in all_reduce #7")


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(aborted(8, 8, 8), id="all-alike"),
        pytest.param(aborted(8, 9, 9, op="all_to_all"), id="sizes-may-differ"),
    ],
)
def test_a_worker_that_aborts_in_a_collective_that_all_called_alike_is_told_by_its_signal(
    nodes: list[NodeEvidence],
) -> None:
    failure = first_failure(nodes)
    assert failure is not None
    assert (failure.message, failure.kind) == ("rank 1 was killed by SIGABRT", "crashed")


def test_what_a_worker_raised_itself_is_not_explained_by_its_calls() -> None:
    nodes = aborted(8, 8, 8192)
    own = msgspec.structs.replace(GLOO, rank=1, type="ValueError", message="bad data")
    nodes[1].exceptions.append(own)
    failure = first_failure(nodes)
    assert failure is not None
    assert failure.message == "rank 1 raised ValueError: bad data"


def test_a_rank_that_was_ended_before_it_called_is_not_blamed_by_its_calls() -> None:
    nodes = aborted(8, 8, 8)
    flight = msgspec.structs.replace(nodes[2].flights[0], flight=json.dumps(dump(2, [DONE])))
    nodes[2] = msgspec.structs.replace(nodes[2], flights=[flight])
    failure = first_failure(nodes)
    assert failure is not None
    assert failure.message == "rank 1 was killed by SIGABRT"


def timed_out(*last: int) -> list[NodeEvidence]:
    """Ranks whose watchdog left a dump, with the number of their last call, which each waits in from the seventh on."""
    log = ABORTED.replace("rank      : 1", "rank      : 0")
    return [
        NodeEvidence(
            run=ended(rank, exit_code=1, ended_s=float(rank)),
            flights=[
                FlightSample(
                    rank=rank,
                    flight=json.dumps(dump(rank, [DONE, call(7, "all_reduce")][: number - 5], WORLD)),
                    source="watchdog",
                )
            ],
            log=log if rank == 0 else "",
        )
        for rank, number in enumerate(last)
        if number
    ]


@pytest.mark.parametrize(
    ("last", "rank", "message"),
    [
        pytest.param(
            (7, 7, 6, 7), 2, "rank 2 has not entered all_reduce #7; ranks 0, 1, 3 wait in this collective", id="missing"
        ),
        pytest.param((7, 7, 7, 0), 3, "rank 3 left no dump; ranks 0-2 wait in all_reduce #7", id="without"),
        pytest.param((7, 7, 7, 7), None, "all 4 ranks have entered all_reduce #7, but it has not finished", id="all"),
    ],
)
def test_dumps_of_a_watchdog_name_the_collective_that_ended_the_run(
    last: tuple[int, ...], rank: int | None, message: str
) -> None:
    failure = first_failure(timed_out(*last))
    assert failure is not None
    assert failure.message.startswith(message)
    assert failure.consequences == ("node0: rank 0 was killed by SIGABRT",)
    assert failure.rank == rank
