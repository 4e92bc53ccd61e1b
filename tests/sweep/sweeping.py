"""A cluster that is not there, for tests of a sweep: what each run comes to is told by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.job.job import Job, parse_training
from multinode.launch.context import ExecuteOptions, Launch, Launched, RunContext, StopRequest
from multinode.profile.summary import StepTimes
from multinode.records.run import Failure
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import CellRecord, Grid, GridRecord
from multinode.series.series import GRID_FILE, Resume
from multinode.stats.estimate import exactly
from multinode.stats.unknown import Unknown
from multinode.sweep.grid_plan import cell_overrides, plan_grid
from multinode.sweep.measure import CellRun, CellTraining, GridRequest, Swept, sweep
from multinode.transport.fake import FakeTransport
from tests import make

HOSTS = "a slots=2\nb slots=2\n"
CLUSTER: Cluster = parse_hostfile(HOSTS, "hosts")
YAML = "model_name_or_path: m\nstage: sft\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
JOB = parse_training(YAML, "job.yaml")
OUT_OF_MEMORY = "out_of_gpu_memory"
BATCH = "per_device_train_batch_size"

# What a run comes to: samples/s, the kind of its failure, an error that keeps it from beginning, or None: it is lost.
End = float | str | Exception | None


def sweep_of(settings: dict[str, tuple[Any, ...]], **changed: Any) -> GridRequest:
    """A sweep on the first node, two workers on it, unless `changed` says otherwise."""
    job: Job = changed.pop("job", JOB)
    training = CellTraining(**{name: changed.pop(name) for name in ("steps", "minutes") if name in changed})
    grid = Grid(**{"settings": settings, "nodes": (1,), **changed})
    cells = plan_grid(grid, CLUSTER)
    jobs: dict[str, Job] = {
        cell.label: job if job is not JOB else parse_training(YAML, "job.yaml", cell_overrides(cell)) for cell in cells
    }
    launch = Launch(cluster=CLUSTER, hostfile=HOSTS, job=job, execute=ExecuteOptions(kind="sweep"))
    return GridRequest(launch=launch, job=job, grid=grid, cells=cells, jobs=jobs, training=training)


class Elsewhere:
    """The nodes: each run ends as `ends` says, by the label of its cell or the end of its id."""

    def __init__(self, runs: Path, ends: Callable[[str], End] = lambda _: 10.0) -> None:
        self.runs = runs
        self.ends = ends
        self.stop = StopRequest()
        self.order: list[str] = []  # ids of the runs that were begun, without the sweep's
        self.launches: list[Launch] = []  # what they were
        self.said: list[str] = []  # every stage
        self.tables = 0  # how often a table was made
        self.is_stopped_in_time = True  # whether Ctrl-C comes before the run that is under way has ended

    @property
    def context(self) -> RunContext:
        return RunContext(FakeTransport(lambda *_: ()), self.runs, stop=self.stop, say=self.said.append)

    def sweep(self, asked: GridRequest, *, anew: bool = False, retry_failed: bool = False) -> Swept:
        return sweep(asked, self.context, Resume(anew=anew, retry_failed=retry_failed), self._conclude, self.measure)

    def grid(self) -> GridRecord:
        """What is stored of the newest sweep."""
        paths = sorted(self.runs.glob(f"*/{GRID_FILE}"), key=lambda path: path.stat().st_mtime_ns)
        return msgspec.json.decode(paths[-1].read_bytes(), type=GridRecord)

    def cell(self, label: str) -> CellRecord:
        return next(one for one in self.grid().cells if one.cell.label == label)

    def measure(self, what: Launch, context: RunContext, minutes: float | None) -> CellRun:
        assert what.run_id is not None
        assert context.runs == self.runs
        stored = self.grid()
        running = [cell for cell in stored.cells if cell.state == "running"]
        # Whoever is killed now must be able to tell what was under way.
        assert [cell.current for cell in running] == [what.run_id]
        self.order.append(what.run_id.split("-", 3)[3])
        self.launches.append(what)
        end = self.ends(self.order[-1])
        if isinstance(end, Exception):
            raise end
        launched = keep_run(self.runs, what, end, is_stopped=self.stop.count > 0 and self.is_stopped_in_time)
        return CellRun(launched=launched, in_time=minutes is not None and not self.stop.count)

    def _conclude(self, directory: RunDirectory, root: Path) -> None:
        assert (directory.path / GRID_FILE).is_file()
        assert root == self.runs
        self.tables += 1


def keep_run(runs: Path, what: Launch, end: float | str | None, *, is_stopped: bool = False) -> Launched:
    """A run that ended so, with its record on disk."""
    status = "stopped" if is_stopped else "lost" if end is None else "failed" if isinstance(end, str) else "succeeded"
    failure = Failure(node="a", node_rank=0, message=f"{end} happened", kind=end) if isinstance(end, str) else None
    run = make.run(
        *(node.name for node in what.cluster.nodes),
        run_id=what.run_id or "",
        job="job.yaml",
        engine="llamafactory",
        status=status,
        ended_s=2.0,
        world_size=2,
        first_failure=failure,
        kind="sweep",
    )
    has_speed = isinstance(end, float) and end > 0
    summary = make.summary(
        run_id=run.run_id,
        steps=20,
        steady_steps=15,
        samples_per_s=exactly(end) if isinstance(end, float) and has_speed else Unknown("no step was recorded"),
        step_time_ms=StepTimes(median=exactly(100.0), p95=101.0, cv=0.01)
        if has_speed
        else Unknown("no step was recorded"),
    )
    plan = make.plan("a", "b", run_id=run.run_id)
    directory = RunDirectory.create(runs, run.run_id)
    directory.write_cluster(parse_hostfile(HOSTS, "hosts"), HOSTS)
    directory.write("plan.json", plan)
    directory.write("summary.json", summary)
    directory.write("run.json", run)
    return Launched(run=run, summary=summary, plan=plan, directory=directory)
