"""bench over this machine as its nodes: real agents and no SSH; real workers where torch=None, others elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from multinode.bench.measure import bench, load_bench
from multinode.cluster.cluster import Node
from multinode.errors import ConnectError, Interrupted, RunFailed
from multinode.launch.context import ExecuteOptions, Launch, RunContext
from multinode.records.benchmark import DeviceTest
from multinode.records.progress import RunProgress
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import load_run
from multinode.transport.agent import load_archive
from multinode.transport.base import Completed
from multinode.transport.local import LocalStream, LocalTransport
from tests import make
from tests.golden import Golden, raised
from tests.torch_stand_in import put_torch
from tests.warm import free_port

from .made_up_bench import verdict

pytestmark = [pytest.mark.torch]

TINY = DeviceTest(kinds=("matmul",), dtypes=("fp32",), sizes=(64,), seconds=0.05)


class SomeGone(LocalTransport):
    """This machine under several names, some of which cannot be reached."""

    def __init__(self, home: Path, gone: set[str]) -> None:
        super().__init__(home)
        self._gone = gone

    def run(self, node: Node, command: str, *, stdin: bytes = b"", deadline_s: float) -> Completed:
        self._refuse(node)
        return super().run(node, command, stdin=stdin, deadline_s=deadline_s)

    def open(self, node: Node, command: str, *, deadline_s: float) -> LocalStream:
        self._refuse(node)
        return super().open(node, command, deadline_s=deadline_s)

    def _refuse(self, node: Node) -> None:
        if node.name in self._gone:
            raise ConnectError("it refuses connections", node=node.name)


def launch_of(*names: str, torch: Path | None) -> Launch:
    """A bench of these nodes; `torch` holds a stand-in for it, None is the real one."""
    path = {} if torch is None else {"PYTHONPATH": str(torch)}
    nodes = tuple(
        Node(
            name=name,
            slots=1,
            addr="127.0.0.1",
            ifname="lo",
            python=sys.executable,
            env={"OMP_NUM_THREADS": "1", **path},
        )
        for name in names
    )
    return Launch(
        cluster=make.cluster(*nodes),
        hostfile="",
        job=TINY,
        agent=load_archive().path,
        master_port=free_port(),
        execute=ExecuteOptions(kind="bench", lease_s=30.0),
        check=False,
        run_id="b",
    )


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """Where a stand-in for torch is."""
    return put_torch(tmp_path / "torch")


@pytest.fixture
def gone() -> set[str]:
    """Names of nodes that cannot be reached."""
    return set()


@pytest.fixture
def context(tmp_path: Path, gone: set[str]) -> Iterator[RunContext]:
    (tmp_path / "home").mkdir()
    context = RunContext(SomeGone(tmp_path / "home", gone), tmp_path / "runs")
    yield context
    context.agent.close()


def test_a_node_that_cannot_be_reached_costs_the_others_nothing(
    tmp_path: Path, context: RunContext, gone: set[str], torch: Path, golden: Golden
) -> None:
    gone.add("gone")
    found = bench(launch_of("here", "gone", torch=torch), ("alone", "together"), context)
    here, missing = found.nodes
    (worker,) = here.workers
    (test,) = worker.tests
    assert test.label == "matmul 64 fp32"
    assert test.alone is not None
    assert test.together is not None
    assert test.alone.value.value > 0
    assert worker.threads == 1
    # It was not asked for a second time.
    assert [failure.figures for failure in missing.failures] == [{"phase": "alone", "error": "it refuses connections"}]
    golden.check("verdict_without_a_node.txt", "\n".join(verdict(found)))
    kept = json.loads((tmp_path / "runs" / "b" / "bench.json").read_text())
    assert kept["schema"] == "multinode.bench/3"
    run = RunDirectory(tmp_path / "runs" / "b").read("run.json", Run)
    assert run is not None
    assert (run.kind, run.engine, run.status, run.job) == ("bench", "torchrun", "failed", "bench matmul")
    assert [(node.name, node.state) for node in run.nodes] == [("here", "ended"), ("gone", "lost")]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["b", "b-alone-0", "b-together-0"]
    # What went well leaves nothing on its node.
    assert list((tmp_path / "home" / ".multinode" / "runs").iterdir()) == []


def test_two_workers_alone_and_together_are_shown_as_one_run(context: RunContext, torch: Path) -> None:
    seen: list[RunProgress] = []
    context.observe = seen.append
    found = bench(launch_of("one", "two", torch=torch), ("together",), context)
    assert [[worker.rank for worker in node.workers] for node in found.nodes] == [[0], [0]]
    assert found.phases == ("together",)
    last = seen[-1]
    assert [(node.name, node.node_rank) for node in last.nodes] == [("one", 0), ("two", 1)]
    assert (last.run_id, last.world_size) == ("b-together", 2)
    assert last.nodes[0].step == 1


def test_a_worker_that_is_alone_is_not_measured_twice(context: RunContext) -> None:
    found = bench(launch_of("here", torch=None), ("alone", "together"), context)
    assert found.phases == ("alone",)
    ((worker,),) = (node.workers for node in found.nodes)
    assert worker.threads == 1
    ((alone, together),) = ((test.alone, test.together) for test in worker.tests)
    assert alone is not None
    assert alone.value.value > 0
    assert together is None


def test_where_no_node_answers_the_first_error_is_the_result(context: RunContext, gone: set[str], torch: Path) -> None:
    gone |= {"a", "b"}
    with pytest.raises(ConnectError) as caught:
        bench(launch_of("a", "b", torch=torch), ("alone", "together"), context)
    assert caught.value.node == "a"


def test_a_worker_that_dies_is_told_by_what_it_said(tmp_path: Path, context: RunContext) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('LOCAL_RANK'):\n    print('no device here', flush=True)\n    os._exit(3)\n"
    )
    what = launch_of("here", torch=None)
    (node,) = what.cluster.nodes
    broken = msgspec.structs.replace(node, env=node.env | {"PYTHONPATH": str(tmp_path)})
    what = msgspec.structs.replace(what, cluster=make.cluster(broken))
    with pytest.raises(RunFailed) as caught:
        bench(what, ("alone",), context)
    assert caught.value.node == "here"
    assert caught.value.message == "rank 0 exited with code 3"
    # It is kept with its log, for whoever looks.
    assert "no device here" in (tmp_path / "runs" / "b-alone-0" / "logs" / "node-0.log").read_text()


def test_a_stop_keeps_what_was_measured_before(
    tmp_path: Path, context: RunContext, torch: Path, golden: Golden
) -> None:
    def stop_in_the_second(progress: RunProgress) -> None:
        if progress.run_id == "b-alone-1":
            context.stop.ask("SIGINT")

    context.observe = stop_in_the_second
    interrupted = raised(Interrupted, bench, launch_of("one", "two", torch=torch), ("alone", "together"), context)
    golden.check_errors("bench_stopped", {"Ctrl-C": interrupted}, tmp_path)
    kept = json.loads((tmp_path / "runs" / "b" / "bench.json").read_text())
    assert kept["nodes"][0]["workers"][0]["tests"]
    assert json.loads((tmp_path / "runs" / "b" / "run.json").read_text())["status"] == "stopped"
    stopped = load_bench(RunDirectory(tmp_path / "runs" / "b"))
    assert stopped is not None
    assert verdict(stopped)[0] == "interrupted while measuring two alone; not yet measured: one, two together"


def test_it_is_listed_from_its_beginning_and_tells_where_it_is(
    tmp_path: Path, context: RunContext, torch: Path
) -> None:
    seen: dict[str, tuple[str, str]] = {}

    def look(progress: RunProgress) -> None:
        stored = load_run(tmp_path / "runs", "b")
        found = load_bench(stored.directory)
        assert found is not None
        seen[progress.run_id] = (stored.run.status, verdict(found)[0])

    context.observe = look
    found = bench(launch_of("one", "two", torch=torch), ("alone", "together"), context)
    assert seen == {
        "b-alone-0": ("running", "still measuring one alone; not yet measured: two alone; one, two together"),
        "b-alone-1": ("running", "still measuring two alone; not yet measured: one, two together"),
        "b-together": ("running", "still measuring one, two together"),
    }
    assert found.left == ()
    assert load_bench(RunDirectory(tmp_path / "runs" / "b")) == found
    assert load_run(tmp_path / "runs", "b").run.status == "succeeded"


def bench_until(root: str, said: str) -> None:
    """What the process does that dies as soon as it says this."""

    def say(text: str) -> None:
        if text.startswith(said):
            signal.raise_signal(signal.SIGKILL)

    bench(
        launch_of("one", "two", torch=Path(root) / "torch"),
        ("alone", "together"),
        RunContext(LocalTransport(Path(root)), Path(root) / "runs", say=say),
    )


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("said", "broken_off", "states"),
    [
        ("[1/3] one alone", "one alone; not yet measured: two alone; one, two together", ["waiting", "waiting"]),
        ("[2/3] two alone", "two alone; not yet measured: one, two together", ["ended", "waiting"]),
        ("[3/3] one, two together", "one, two together", ["ended", "ended"]),
    ],
)
def test_a_controller_that_is_killed_loses_nothing_that_was_measured_and_resumes(
    tmp_path: Path, said: str, broken_off: str, states: list[str]
) -> None:
    program = f"from {__name__} import bench_until as go; go({str(tmp_path)!r}, {said!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False, timeout=200)
    assert done.returncode == -signal.SIGKILL
    stored = load_run(tmp_path / "runs", "b")
    assert (stored.run.kind, stored.run.status) == ("bench", "stopped")
    assert [node.state for node in stored.run.nodes] == states
    found = load_bench(stored.directory)
    assert found is not None
    assert verdict(found)[0] == f"interrupted while measuring {broken_off}"
    measured = [test.alone for node in found.nodes for worker in node.workers for test in worker.tests]
    assert [speed is not None and speed.value.value > 0 for speed in measured] == [True] * states.count("ended")
    before = {path.parent.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("b-*/run.json")}
    lines: list[str] = []
    context = RunContext(LocalTransport(tmp_path), tmp_path / "runs", say=lines.append)
    try:
        whole = bench(launch_of("one", "two", torch=tmp_path / "torch"), ("alone", "together"), context)
    finally:
        context.agent.close()
    assert lines[0].startswith("resuming bench b (3 steps: ")
    assert all(test.alone and test.together for node in whole.nodes for worker in node.workers for test in worker.tests)
    after = {path.parent.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("b-*/run.json")}
    assert sorted(after) == ["b-alone-0", "b-alone-1", "b-together-0", "b-together-1"]
    assert before == {name: after[name] for name in before}
