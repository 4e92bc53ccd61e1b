"""What becomes of a sweep whose controller was killed in the middle of a cell."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.core.grid.grid import GridRecord
from multinode.core.grid.grid_state import begin
from multinode.core.run.run import Run
from multinode.core.run.samples import StepSample
from multinode.errors import MultinodeError
from multinode.store.run_directory import RunDirectory
from multinode.workflows.grid.sweep_cell import AskedGrid, cell_launch
from multinode.workflows.grid.sweep_store import GRID_FILE
from tests.workflows.sweeping import BATCH, OUT_OF_MEMORY, Elsewhere, End, keep_run, sweep_of

ASKED = sweep_of({BATCH: (1, 2, 4)})
# Each cell trains for 30 seconds.
BY_TIME = sweep_of({BATCH: (1, 2, 4)}, minutes=0.5)


@pytest.fixture
def killed(tmp_path: Path) -> Elsewhere:
    return kill(tmp_path, ASKED)


@pytest.fixture
def killed_by_time(tmp_path: Path) -> Elsewhere:
    return kill(tmp_path, BY_TIME)


def kill(runs: Path, asked: AskedGrid) -> Elsewhere:
    """Nodes with a sweep whose first cell is measured, and whose second was under way."""
    nodes = Elsewhere(runs)
    nodes.ends = lambda label: 10.0 if label.endswith("batch1") else MultinodeError("stop here")
    with pytest.raises(MultinodeError, match="stop here"):
        nodes.sweep(asked)
    (path,) = runs.glob(f"*/{GRID_FILE}")
    directory = RunDirectory(path.parent)
    record = msgspec.json.decode(path.read_bytes(), type=GridRecord)
    directory.write(GRID_FILE, begin(record, 1, f"{directory.run_id}-1-node-batch2"))
    nodes.ends = lambda _: 10.0
    nodes.order.clear()
    return nodes


def leave(nodes: Elsewhere, end: End, status: str | None = None) -> str:
    """What the killed controller left of the run that was under way."""
    run_id = nodes.cell("1-node-batch2").current
    assert run_id is not None
    assert not isinstance(end, Exception)
    what = msgspec.structs.replace(cell_launch(ASKED, ASKED.cells[1], 2), run_id=run_id)
    launched = keep_run(nodes.runs, what, end)
    if status is not None:
        launched.directory.write("run.json", msgspec.structs.replace(launched.run, status=status))
    return run_id


def leave_stopped(nodes: Elsewhere, trained_s: int, cause: str = "stopped", end: float = 10.0) -> str:
    """A run that was stopped, and whether for its time nobody wrote down; a step of it took a second."""
    run_id = leave(nodes, end)
    directory = RunDirectory(nodes.runs / run_id)
    run = directory.read("run.json", Run)
    assert run is not None
    ended = tuple(msgspec.structs.replace(node, state="ended", cause=cause) for node in run.nodes)
    directory.write("run.json", msgspec.structs.replace(run, status="stopped", nodes=ended))
    for number in range(1, trained_s + 1):
        step = StepSample(rank=0, step=number, time_s=0.0, mono_ns=number * 1_000_000_000)
        directory.append_samples(0, "rank-0.jsonl", msgspec.json.encode(step) + b"\n")
    return run_id


def test_what_had_not_been_started_is_measured(killed: Elsewhere) -> None:
    killed.sweep(ASKED)
    assert killed.order == ["1-node-batch2", "1-node-batch4"]


def test_a_run_that_had_ended_well_is_taken_and_not_repeated(killed: Elsewhere) -> None:
    run_id = leave(killed, 10.0)
    swept = killed.sweep(ASKED)
    assert swept.record.cells[1].run_ids == (run_id,)
    assert killed.order == ["1-node-batch4"]


def test_a_run_that_had_run_out_of_memory_is_a_result(killed: Elsewhere) -> None:
    leave(killed, OUT_OF_MEMORY)
    killed.sweep(ASKED)
    assert killed.order == []
    assert [cell.state for cell in killed.grid().cells] == ["measured", "out_of_memory", "skipped"]


def test_a_run_that_went_on_is_stopped_and_measured_under_another_name(killed: Elsewhere) -> None:
    run_id = leave(killed, 10.0, status="running")
    killed.sweep(ASKED)
    assert f"run {run_id} was cut off: seeing that nothing of it goes on" in killed.said
    assert killed.order == ["1-node-batch2-try2", "1-node-batch4"]
    left = RunDirectory(killed.runs / run_id).read("run.json", Run)
    assert left is not None
    assert left.status != "running"


def test_an_empty_directory_of_a_run_keeps_its_name(killed: Elsewhere) -> None:
    run_id = killed.cell("1-node-batch2").current
    assert run_id is not None
    RunDirectory.create(killed.runs, run_id)
    killed.sweep(ASKED)
    assert killed.order == ["1-node-batch2-try2", "1-node-batch4"]


@pytest.mark.parametrize("cause", ["stopped", "lease_expired"])
def test_a_run_that_had_trained_for_its_time_is_taken(killed_by_time: Elsewhere, cause: str) -> None:
    run_id = leave_stopped(killed_by_time, 30, cause)
    swept = killed_by_time.sweep(BY_TIME)
    assert swept.record.cells[1].run_ids == (run_id,)
    assert killed_by_time.order == ["1-node-batch4"]
    assert f"run {run_id} had trained for its 30.0 s, and counts" in killed_by_time.said


@pytest.mark.parametrize(
    ("trained_s", "cause", "why"),
    [
        (29, "lease_expired", "a: it had trained for 29.0 s of its 30.0 s"),
        (1, "stopped", "a: it stored too few steps to tell how long it trained"),
        (40, "exited", "a: nobody stopped it there (exited)"),
        (40, "supervisor_lost", "a: nobody stopped it there (supervisor lost)"),
    ],
)
def test_a_run_of_which_that_is_not_known_is_made_again_and_why_is_said(
    killed_by_time: Elsewhere, trained_s: int, cause: str, why: str
) -> None:
    run_id = leave_stopped(killed_by_time, trained_s, cause)
    killed_by_time.sweep(BY_TIME)
    assert f"run {run_id} is made again: {why}" in killed_by_time.said
    assert killed_by_time.order == ["1-node-batch2-try2", "1-node-batch4"]


def test_a_time_that_was_too_short_for_figures_is_no_shorter_the_second_time(killed_by_time: Elsewhere) -> None:
    leave_stopped(killed_by_time, 30, end=0.0)
    swept = killed_by_time.sweep(BY_TIME)
    assert swept.record.cells[1].state == "failed"
    assert swept.record.cells[1].reason == "no step was recorded: it needs more --minutes"


def test_a_run_of_steps_that_was_stopped_is_made_again_however_long_it_trained(killed: Elsewhere) -> None:
    leave_stopped(killed, 40)
    killed.sweep(ASKED)
    assert killed.order == ["1-node-batch2-try2", "1-node-batch4"]
