"""A sweep of a real program under a real supervisor, on this very machine as the node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from multinode.cluster.cluster import local_cluster
from multinode.job.engines.engine import Engine
from multinode.job.job import ScriptJob
from multinode.launch.context import ExecuteOptions, Launch, RunContext
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import load_runs
from multinode.series.grid import Grid, GridRecord
from multinode.series.series import GRID_FILE, Resume
from multinode.sweep.grid_plan import plan_grid
from multinode.sweep.measure import CellTraining, GridRequest, Swept, sweep
from multinode.transport.local import LocalTransport

DEADLINE_S = 60.0
STEPS = str(Path(__file__).with_name("steps.py"))


class Here:
    """This machine with a home of its own, and a sweep over the number of workers."""

    def __init__(self, root: Path, arguments: tuple[str, ...], minutes: float | None = None) -> None:
        self.root = root
        self.runs = root / "runs"  # directory of all runs
        self.started = root / "started"
        self.said: list[str] = []  # every stage
        (root / "home").mkdir(exist_ok=True)
        job = ScriptJob(argv=(sys.executable, STEPS, *arguments, str(self.started)))
        grid = Grid(nodes=(1,), workers_per_node=(1, 2))
        cluster = local_cluster(2, sys.executable)
        cells = plan_grid(grid, cluster)
        launch = Launch(
            cluster=cluster,
            hostfile=f"localhost slots=2 addr=127.0.0.1 ifname=lo python={sys.executable}\n",
            job=job,
            engine=Engine(name="exec"),
            execute=ExecuteOptions(kind="sweep", grace_s=2.0, lease_s=30.0),
            check=False,
        )
        self.asked = GridRequest(
            launch=launch,
            job=job,
            grid=grid,
            cells=cells,
            jobs={cell.label: job for cell in cells},
            training=CellTraining(minutes=minutes),
        )

    @contextlib.contextmanager
    def context(self) -> Iterator[RunContext]:
        context = RunContext(LocalTransport(self.root / "home"), self.runs, say=self.said.append)
        try:
            yield context
        finally:
            context.agent.close()

    def sweep(self) -> Swept:
        with self.context() as context:
            return sweep(self.asked, context, Resume(), lambda *_: None)

    def left_on_node(self) -> list[str]:
        return [path.name for path in (self.root / "home" / ".multinode" / "runs").glob("*")]


def run_in_background(root: str, arguments: tuple[str, ...], minutes: float | None) -> None:
    """What the process that a test kills does."""
    Here(Path(root), arguments, minutes).sweep()


@contextlib.contextmanager
def controller(here: Here, arguments: tuple[str, ...], minutes: float | None = None) -> Iterator[None]:
    """Another process that makes this sweep; it is killed at the end."""
    call = f"go({str(here.root)!r}, {arguments!r}, {minutes!r})"
    program = f"from {__name__} import run_in_background as go; {call}"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def test_every_cell_is_measured_and_nothing_stays_on_the_node(tmp_path: Path) -> None:
    here = Here(tmp_path, ("20", "0.01"))
    swept = here.sweep()
    assert [cell.state for cell in swept.record.cells] == ["measured", "measured"]
    stored = {one.run.run_id: one for one in load_runs(here.runs)}
    assert {one.run.kind for one in stored.values()} == {"sweep"}
    assert len(stored) == 3
    for cell in swept.record.cells:
        summary = stored[cell.run_ids[0]].summary
        assert summary is not None
        assert (summary.steps, summary.rule) == (20, "the first 5 of 20 steps are excluded as warm-up")
    assert here.left_on_node() == []


def test_a_training_without_end_is_stopped_at_its_time_and_measured(tmp_path: Path) -> None:
    here = Here(tmp_path, ("0", "0.02"), minutes=1 / 60)
    swept = here.sweep()
    assert [cell.state for cell in swept.record.cells] == ["measured", "measured"]
    for cell in swept.record.cells:
        directory = RunDirectory.open(here.runs, cell.run_ids[0])
        steps = sum(b'"step"' in line for line in directory.sample_lines(0))
        assert steps >= 20
    assert here.left_on_node() == []


def test_kill_9_and_the_same_command_measures_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    arguments = ("40", "0.05")
    here = Here(tmp_path, arguments)
    with controller(here, arguments):
        wait_for_second_cell(here)
    (path,) = here.runs.glob(f"*/{GRID_FILE}")
    before = RunDirectory(path.parent).read(GRID_FILE, GridRecord)
    assert before is not None
    assert [cell.state for cell in before.cells] == ["measured", "running"]
    pids = [int(line) for line in here.started.read_text().split()]

    swept = here.sweep()
    assert swept.directory == path.parent
    assert swept.record.cells[0] == before.cells[0]
    assert swept.record.cells[1].run_ids == (f"{path.parent.name}-1x2-try2",)
    assert len(here.started.read_text().split()) == 3
    # The run that was cut off was ended before it was measured again.
    assert not Path(f"/proc/{pids[1]}").exists()
    assert here.left_on_node() == []


def test_a_cell_that_trained_for_its_time_while_its_controller_was_dead_is_not_trained_again(tmp_path: Path) -> None:
    arguments, minutes = ("0", "0.05"), 1 / 30
    here = Here(tmp_path, arguments, minutes)
    with controller(here, arguments, minutes):
        wait_for_second_cell(here)
    wait_for_steps(here, "1x2", 2 + int(60 * minutes / 0.05))

    swept = here.sweep()
    name = swept.directory.name
    assert [cell.run_ids for cell in swept.record.cells] == [(f"{name}-1x1",), (f"{name}-1x2",)]
    assert f"run {name}-1x2 trained for the full 2.0 s and is valid" in here.said
    assert len(here.started.read_text().split()) == 2
    assert here.left_on_node() == []


def wait_for_steps(here: Here, cell: str, count: int) -> None:
    """What the node stores; nobody follows it any more. The deadline only guards against a hang."""
    end = time.monotonic() + DEADLINE_S
    node_runs = here.root / "home" / ".multinode" / "runs"
    while sum(path.read_text().count("\n") for path in node_runs.glob(f"*-{cell}.0/samples/rank-0.jsonl")) < count:
        assert time.monotonic() < end, "the training does not get on"
        time.sleep(0.05)


def wait_for_second_cell(here: Here) -> None:
    """The deadline only guards against a hang."""
    end = time.monotonic() + DEADLINE_S
    while not here.started.exists() or len(here.started.read_text().split()) < 2:
        assert time.monotonic() < end, "the second cell never began"
        time.sleep(0.05)
