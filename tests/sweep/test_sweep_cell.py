"""What becomes of a sweep whose controller was killed in the middle of a cell."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.errors import MultinodeError
from multinode.findings.finding import message_of
from multinode.launch.context import RunContext, StopRequest
from multinode.launch.progress_table import progress_line
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import StepSample
from multinode.records.status import Status
from multinode.series.grid import GridRecord, begin
from multinode.series.series import GRID_FILE
from multinode.sweep.measure import STEPS_WITHOUT_END, GridRequest, TimedStop, cell_launch, with_time_limit
from multinode.transport.fake import FakeTransport
from tests.golden import error_of
from tests.sweep.sweeping import BATCH, OUT_OF_MEMORY, Elsewhere, End, keep_run, sweep_of

ASKED = sweep_of({BATCH: (1, 2, 4)})
# Each cell trains for 30 seconds.
BY_TIME = sweep_of({BATCH: (1, 2, 4)}, minutes=0.5)


@pytest.fixture
def killed(tmp_path: Path) -> Elsewhere:
    return kill(tmp_path, ASKED)


@pytest.fixture
def killed_by_time(tmp_path: Path) -> Elsewhere:
    return kill(tmp_path, BY_TIME)


def kill(runs: Path, asked: GridRequest) -> Elsewhere:
    """Nodes with a sweep whose first cell is measured, and whose second was under way."""
    nodes = Elsewhere(runs)
    nodes.ends = lambda label: 10.0 if label.endswith("batch1") else MultinodeError("stop here")
    assert error_of(nodes.sweep, asked).message == "stop here"
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
    what = msgspec.structs.replace(cell_launch(ASKED, ASKED.cells[1], (2, 2)), run_id=run_id)
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
    ended = tuple(msgspec.structs.replace(node, state="ended", status=Status(cause=cause)) for node in run.nodes)
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
    assert f"run {run_id} was interrupted; checking that none of its processes are left" in killed.said
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
    assert f"run {run_id} trained for the full 30.0 s and is valid" in killed_by_time.said


@pytest.mark.parametrize(
    ("trained_s", "cause", "why"),
    [
        (29, "lease_expired", "a trained for only 29.0 s of 30.0 s"),
        (1, "stopped", "too few steps of a are stored to know how long it trained"),
        (40, "exited", "it was not stopped on a (exited)"),
        (40, "supervisor_lost", "it was not stopped on a (supervisor lost)"),
    ],
)
def test_a_run_of_which_that_is_not_known_is_made_again_and_why_is_said(
    killed_by_time: Elsewhere, trained_s: int, cause: str, why: str
) -> None:
    run_id = leave_stopped(killed_by_time, trained_s, cause)
    killed_by_time.sweep(BY_TIME)
    assert f"repeating run {run_id}: {why}" in killed_by_time.said
    assert killed_by_time.order == ["1-node-batch2-try2", "1-node-batch4"]


def test_a_time_that_was_too_short_for_figures_is_no_shorter_the_second_time(killed_by_time: Elsewhere) -> None:
    leave_stopped(killed_by_time, 30, end=0.0)
    swept = killed_by_time.sweep(BY_TIME)
    assert swept.record.cells[1].state == "failed"
    assert message_of(swept.record.cells[1].why) == "no step was recorded: use a larger --minutes"


def test_a_run_of_steps_that_was_stopped_is_made_again_however_long_it_trained(killed: Elsewhere) -> None:
    leave_stopped(killed, 40)
    killed.sweep(ASKED)
    assert killed.order == ["1-node-batch2-try2", "1-node-batch4"]


def at_step(step: int | None, total_steps: int | None = STEPS_WITHOUT_END) -> RunProgress:
    trains = NodeProgress(name="b", node_rank=1, ranks=(1,), state="running", step=step, recent_us=(1e6,))
    nodes = (
        NodeProgress(name="a", node_rank=0, ranks=(0,)),
        msgspec.structs.replace(trains, total_steps=total_steps if step else None),
    )
    return RunProgress(run_id="r", job="j", world_size=2, nodes=nodes)


class Watch:
    """A training of ten seconds, and a clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.user = StopRequest()
        self.timed = TimedStop(self.user, 10.0, lambda: self.now_s)

    def look(self, now_s: float, step: int | None = None) -> int:
        self.now_s = now_s
        self.timed.look(at_step(step))
        return self.timed.stop.count


def test_the_time_begins_with_the_first_step() -> None:
    watch = Watch()
    assert watch.look(200) == 0
    assert watch.look(1000, 1) == 0
    assert watch.look(1009.9, 50) == 0
    assert watch.look(1010, 51) == 1
    assert watch.timed.is_over
    # Once is enough: a second request would cut the grace period short.
    assert watch.look(1020, 51) == 1


def test_what_the_user_asks_is_passed_on_and_is_no_end_in_time() -> None:
    watch = Watch()
    watch.look(0, 1)
    watch.user.ask("SIGINT")
    assert watch.look(1, 2) == 1
    assert watch.timed.stop.reason == "SIGINT"
    assert not watch.timed.is_over
    watch.user.ask("SIGINT")
    assert watch.look(2, 2) == 2


def test_the_user_may_be_impatient_after_the_time_is_over() -> None:
    watch = Watch()
    watch.look(0, 1)
    assert watch.look(10, 2) == 1
    watch.user.ask("SIGINT")
    assert watch.look(11, 2) == 2
    # What it has trained until then is what was asked for.
    assert watch.timed.is_over


def test_the_view_is_shown_all_the_same(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    context = RunContext(FakeTransport(lambda *_: ()), tmp_path, observe=seen.append)
    limited, timed = with_time_limit(context, 0.0)
    limited.observe(at_step(1))
    limited.observe(at_step(2))
    assert [one.nodes[1].step for one in seen] == [1, 2]
    assert [one.nodes[1].total_steps for one in seen] == [None, None]
    assert seen[-1].training is not None
    assert limited.stop is timed.stop
    assert timed.is_over
    assert context.stop.count == 0


def test_what_is_shown_counts_the_time_and_no_step_that_nobody_means_to_make() -> None:
    watch = Watch()
    watch.look(200)
    before = watch.timed.show(at_step(None))
    assert progress_line(before) == "0.0 s, trained 0.0 s of 10.0 s  a connecting | b running, importing"
    watch.look(1000, 1)
    watch.look(1004, 5)
    shown = watch.timed.show(at_step(5))
    assert progress_line(shown) == "0.0 s, trained 4.0 s of 10.0 s, about 6.0 s left  a connecting | b step 5 1,000 ms"


def test_a_script_that_ends_before_its_time_shows_its_own_steps() -> None:
    watch = Watch()
    watch.look(1000, 1)
    watch.look(1004, 5)
    shown = watch.timed.show(at_step(5, total_steps=8))
    assert shown.nodes[1].total_steps == 8
    assert shown.left_s == 3.0
