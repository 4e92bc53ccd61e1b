from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.findings.finding import Finding, message_of
from multinode.records.run import Failure, NodeRun, Run
from multinode.records.status import Status
from multinode.series.grid import (
    BATCH,
    CellOutcome,
    CellRecord,
    Grid,
    GridRecord,
    begin,
    due_turns,
    give_up,
    is_finished,
    judge_run,
    retry_failed,
    settle,
    skip_larger,
    without_runs,
)
from multinode.sweep.grid_plan import plan_grid
from tests import make

CLUSTER: Cluster = parse_hostfile("a\nb\n", "hosts")
MEASURED = CellOutcome(state="measured")
FAILED = CellOutcome(state="failed", why=Finding(message="a: boom"))
OUT = CellOutcome(state="out_of_memory", out_of="gpu", why=Finding(message="a: CUDA out of memory"))


def grid_of(batches: tuple[Any, ...] = (1, 2, 4), nodes: tuple[int, ...] = (1,), repeats: int = 1) -> GridRecord:
    grid = Grid(settings={BATCH: batches}, nodes=nodes, repeats=repeats)
    cells = tuple(CellRecord(cell=cell) for cell in plan_grid(grid, CLUSTER))
    return GridRecord(fingerprint="f", command="job", grid=grid, cells=cells)


def end(record: GridRecord, index: int, outcome: CellOutcome, run_id: str = "r") -> GridRecord:
    return settle(begin(record, index, run_id), index, outcome, took_s=2.0)


def due(record: GridRecord) -> list[tuple[int, int]]:
    return [(turn.cell, turn.number) for turn in due_turns(record)]


def test_what_was_measured_is_never_due_again() -> None:
    record = end(grid_of(), 0, MEASURED, "r-1")
    cell = record.cells[0]
    assert (cell.state, cell.run_ids, cell.current, cell.attempts, cell.took_s) == (
        "measured",
        ("r-1",),
        None,
        1,
        (2.0,),
    )
    assert due(record) == [(1, 1), (2, 1)]
    assert not is_finished(record)


def test_a_run_under_way_keeps_the_sweep_from_being_finished() -> None:
    record = end(end(grid_of((1, 2)), 0, MEASURED), 1, MEASURED)
    assert is_finished(record)
    running = begin(record, 1, "again")
    assert (running.cells[1].state, running.cells[1].current) == ("running", "again")
    assert not is_finished(running)


@pytest.mark.parametrize("outcome", [FAILED, OUT])
def test_what_failed_or_ran_out_of_memory_is_not_tried_again(outcome: CellOutcome) -> None:
    record = end(grid_of((1, 2), repeats=2), 0, outcome)
    assert record.cells[0].state == outcome.state
    assert record.cells[0].why == outcome.why
    assert due(record) == [(1, 1), (1, 2)]


def test_larger_batches_that_are_otherwise_equal_are_skipped() -> None:
    record, skipped = skip_larger(end(grid_of(nodes=(1, 2)), 1, OUT), 1)
    assert skipped == ("1-node-batch4",)
    assert record.cells[2].state == "skipped"
    assert message_of(record.cells[2].why) == "1-node-batch2 already ran out of GPU memory"
    # Two nodes are another matter.
    assert [cell.state for cell in record.cells] == ["waiting", "out_of_memory", "skipped", *["waiting"] * 3]
    assert due(record) == [(0, 1), (3, 1), (4, 1), (5, 1)]


def test_a_batch_that_is_no_number_is_neither_larger_nor_smaller() -> None:
    record, skipped = skip_larger(end(grid_of((1, "auto", True)), 0, OUT), 0)
    assert (skipped, len(due(record))) == ((), 2)


def test_a_repeat_that_runs_out_of_memory_is_the_last_and_takes_no_figures_away() -> None:
    record = end(end(grid_of((1, 2), repeats=3), 1, MEASURED), 1, OUT)
    cell = record.cells[1]
    assert (cell.state, len(cell.run_ids), cell.out_of) == ("measured", 1, OUT.out_of)
    assert message_of(cell.why) == f"a repeat ran out of memory: {message_of(OUT.why)}"
    assert due(record) == [(0, 1), (0, 2), (0, 3)]
    assert due(retry_failed(record)) == due(record)


def test_a_run_that_is_no_longer_stored_is_made_again() -> None:
    record = grid_of((1, 2), repeats=2)
    first, second = "first", "second"
    for run_id in (first, second):
        record = settle(begin(record, 0, run_id), 0, MEASURED)
    assert without_runs(record, ["another"]) == record
    one_left = without_runs(record, [first])
    assert (one_left.cells[0].state, one_left.cells[0].run_ids) == ("measured", (second,))
    none_left = without_runs(record, [first, second])
    assert (none_left.cells[0].state, none_left.cells[0].run_ids) == ("waiting", ())
    assert [turn for turn in due(none_left) if turn[0] == 0] == [(0, 1), (0, 2)]
    skipped = skip_larger(end(grid_of((1, 2)), 0, OUT), 0)[0]
    assert without_runs(skipped, ["r"]) == skipped


def test_a_repeat_that_fails_leaves_what_was_measured() -> None:
    record = end(end(grid_of((1, 2), repeats=3), 0, MEASURED), 0, FAILED)
    cell = record.cells[0]
    assert (cell.state, cell.failed_runs, message_of(cell.why)) == ("measured", 1, "a repeat failed: a: boom")
    assert [one for one in due(record) if one[0] == 0] == [(0, 3)]
    again = retry_failed(record)
    assert (again.cells[0].state, again.cells[0].why) == ("measured", None)
    assert [one for one in due(again) if one[0] == 0] == [(0, 2), (0, 3)]


def test_a_run_that_was_given_up_is_made_again() -> None:
    record = give_up(begin(grid_of((1, 2)), 0, "r"), 0)
    assert (record.cells[0].state, record.cells[0].current, record.cells[0].attempts) == ("waiting", None, 1)
    assert settle(begin(grid_of((1, 2)), 0, "r"), 0, CellOutcome(state="stopped")) == record
    measured = end(grid_of((1, 2), repeats=2), 0, MEASURED)
    assert give_up(begin(measured, 0, "r"), 0).cells[0].state == "measured"


def test_only_what_failed_is_tried_again_on_request() -> None:
    record = end(end(end(grid_of(), 0, FAILED), 1, OUT), 2, FAILED)
    assert due(record) == []
    assert due(retry_failed(record)) == [(0, 1), (2, 1)]
    some = retry_failed(record, [2])
    assert [cell.state for cell in some.cells] == ["failed", "out_of_memory", "waiting"]


def test_a_record_comes_back_from_its_file_as_it_was() -> None:
    record, _ = skip_larger(end(end(grid_of((1, 2, 4)), 0, MEASURED), 1, OUT), 1)
    assert msgspec.json.decode(msgspec.json.encode(record), type=GridRecord) == record


def run_of(status: str, oom_kills: int | None = None, message: str = "it broke", **failure: Any) -> Run:
    failed = Failure(node="b", node_rank=1, message=message, **failure)
    return make.run(
        "a",
        NodeRun(name="b", node_rank=1, status=Status(oom_kills=oom_kills)),
        status=status,
        first_failure=failed if status in {"failed", "lost"} else None,
    )


RAISED = "rank 0 raised ValueError: no such template"


@pytest.mark.parametrize(
    ("run", "in_time", "lacks", "state", "reason"),
    [
        (run_of("succeeded"), False, None, "measured", ""),
        (run_of("succeeded"), False, "it recorded no step", "failed", "it recorded no step"),
        (run_of("stopped"), True, None, "measured", ""),
        (run_of("stopped"), True, "it recorded no step", "failed", "it recorded no step: use a larger --minutes"),
        (run_of("stopped"), False, None, "stopped", "it was stopped"),
        (run_of("failed", message="boom\ntraceback"), False, None, "failed", "b: boom"),
        # An exception has its own cause, whatever the kernel killed meanwhile.
        (run_of("failed", 1, message=RAISED), False, None, "failed", f"b: {RAISED}"),
        (run_of("failed", 1, message=RAISED, kind="missing_file"), False, None, "failed", f"b: {RAISED}"),
    ],
)
def test_a_run_is_measured_when_it_went_well_or_was_stopped_at_its_time(
    *, run: Run, in_time: bool, lacks: str | None, state: str, reason: str
) -> None:
    outcome = judge_run(run, in_time=in_time, lacks=lacks)
    assert (outcome.state, message_of(outcome.why), outcome.out_of, outcome.unreachable) == (state, reason, None, False)


@pytest.mark.parametrize(
    ("run", "out_of", "reason"),
    [
        (run_of("failed", message="no memory\nand more", kind="out_of_gpu_memory"), "gpu", "b: no memory"),
        (run_of("failed", message="no memory\nand more", kind="out_of_memory"), "node", "b: no memory"),
        # What the kernel killed is that, whatever its peers say; on the GPU it ran out whatever was killed beside it.
        (run_of("failed", 2, kind="connection"), "node", "b: the kernel killed 2 processes because memory ran out"),
        (run_of("failed", 1, signal="SIGXCPU"), "node", "b: the kernel killed a process because memory ran out"),
        (
            run_of("failed", 1, kind="out_of_memory", signal="SIGKILL"),
            "node",
            "b: the kernel killed a process because memory ran out",
        ),
        (run_of("failed", 1, kind="out_of_gpu_memory"), "gpu", "b: it broke"),
    ],
)
def test_running_out_of_memory_is_a_result_that_says_whose(run: Run, out_of: str, reason: str) -> None:
    outcome = judge_run(run, in_time=False, lacks="no step")
    assert (outcome.state, outcome.out_of, message_of(outcome.why)) == ("out_of_memory", out_of, reason)
    assert outcome.failure == run.first_failure


def test_a_node_that_was_lost_says_nothing_about_the_cell() -> None:
    lost = judge_run(run_of("lost"), in_time=False, lacks=None)
    assert (lost.state, lost.unreachable) == ("failed", True)
