from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.check.rule import CheckFinding
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import Gpu, GpuProcess, NodeFacts
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import Interrupted
from multinode.job.job import ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.launch.context import Launch, RunContext, StopRequest
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.series.series import find_holder, wait_for_gpus
from multinode.stats.unknown import or_empty
from multinode.sweep.measure import measure_cell
from multinode.transport.fake import FakeTransport

CLUSTER: Cluster = parse_hostfile("a gpus=6,7 addr=10.0.0.1\nb gpus=1,6 addr=10.0.0.2\n", "hosts")
JOB = ScriptJob(argv=("train.py",))
FREE: tuple[GpuProcess, ...] = ()
OTHERS = (GpuProcess(pid=77, user="eve", command="python", memory_mib=9000.0),)
OURS = (GpuProcess(pid=78, user="me", command="python", memory_mib=9000.0, run_id="another-run.0"),)


def facts(node: str, held: dict[int, tuple[GpuProcess, ...]]) -> NodeFacts:
    gpus = tuple(
        Gpu(
            index=index,
            name="RTX 4090",
            memory_total_mib=24000.0,
            memory_used_mib=9000.0 if held.get(index) else 10.0,
            processes=held.get(index, FREE),
        )
        for index in range(8)
    )
    return NodeFacts(node=node, gpus=gpus)


def plan_of(workers: int) -> LaunchPlan:
    return plan_launch(CLUSTER, JOB, {}, "r", LaunchOptions(workers_per_node=workers))


def holder(workers: int, **held: dict[int, tuple[GpuProcess, ...]]) -> str | None:
    found = find_holder(CLUSTER, plan_of(workers), {name: facts(name, held.get(name, {})) for name in "ab"})
    return None if found is None else f"{found.node}: {found.message}"


def test_only_the_gpus_that_the_cell_uses_are_looked_at() -> None:
    assert holder(2) is None
    assert holder(2, a={0: OTHERS, 5: OTHERS}) is None
    # With one worker a node, the second card of the hostfile is nobody's.
    assert holder(1, b={6: OTHERS}) is None
    held = holder(2, b={6: OTHERS})
    assert held is not None
    assert held.startswith("b: GPU 6 is in use by python (pid 77, user eve, 8.79 GiB)")


def test_another_run_of_ours_holds_a_gpu_as_anybody_does() -> None:
    held = holder(1, a={6: OURS})
    assert held is not None
    assert held.startswith("a: GPU 6 is in use by python (pid 78")


def test_nodes_without_gpus_have_nothing_to_be_held() -> None:
    cluster: Cluster = parse_hostfile("a addr=10.0.0.1\n", "hosts")
    plan = plan_launch(cluster, JOB, {}, "r", LaunchOptions())
    assert find_holder(cluster, plan, {"a": NodeFacts(node="a")}) is None


class Cards:
    """Nodes whose first probes find node b's card held; `held` says in how many more of them."""

    def __init__(self, runs: Path, held: int) -> None:
        self.held = held
        self.probes = 0
        self.said: list[str] = []
        self.stop = StopRequest()
        self.context = RunContext(FakeTransport(self._answer), runs, stop=self.stop, say=self.said.append)

    def wait(self, **options: float) -> CheckFinding | None:
        found = {"a": facts("a", {}), "b": facts("b", {1: OTHERS} if self.held else {})}
        prepared = StoredRun(RunDirectory(Path())).having(plan=plan_of(1), facts=found)
        return wait_for_gpus(prepared, CLUSTER, self.context, **options)

    def _answer(self, node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        held: dict[int, tuple[GpuProcess, ...]] = {}
        if node.name == "b":
            self.probes += 1
            held = {1: OTHERS} if self.probes < self.held else {}
        return [_record(facts(node.name, held))]


def _record(found: NodeFacts) -> bytes:
    gpus: list[dict[str, Any]] = [
        {
            "index": gpu.index,
            "name": gpu.name,
            "memory_total_mib": gpu.memory_total_mib,
            "memory_used_mib": gpu.memory_used_mib,
            "processes": [{"pid": one.pid, "memory_mib": one.memory_mib} for one in or_empty(gpu.processes)],
        }
        for gpu in or_empty(found.gpus)
    ]
    addr = {"a": "10.0.0.1/24", "b": "10.0.0.2/24"}[found.node]
    card = {"name": "eth0", "addresses": [addr], "up": True}
    return json.dumps({"kind": "facts", "gpus": gpus, "interfaces": [card], "home": "/root"}).encode() + b"\n"


def test_free_gpus_cost_no_probe_and_held_ones_are_waited_for(tmp_path: Path) -> None:
    free = Cards(tmp_path, held=0)
    assert free.wait() is None
    assert (free.probes, free.said) == (0, [])
    held = Cards(tmp_path, held=3)
    assert held.wait(every_s=0.0) is None
    assert held.probes == 3
    (said,) = held.said
    assert said.startswith("waiting up to 60 s: b: GPU 1 is in use by python (pid 77")


def test_patience_has_an_end(tmp_path: Path) -> None:
    held = Cards(tmp_path, held=1000)
    found = held.wait(patience_s=0.0)
    assert found is not None
    assert found.node == "b"


def test_the_user_need_not_wait(tmp_path: Path) -> None:
    held = Cards(tmp_path, held=1000)
    held.stop.ask("SIGINT")
    assert held.wait() is not None
    assert held.probes == 0


def test_a_cell_whose_gpu_stays_held_fails_with_its_reason_and_is_listed(tmp_path: Path) -> None:
    held = Cards(tmp_path, held=1000)
    what = Launch(cluster=CLUSTER, hostfile="", job=JOB, check=False, run_id="cell")
    run = measure_cell(what, held.context, patience_s=0.0).launched.run
    assert run.status == "failed"
    assert run.first_failure is not None
    assert run.first_failure.node == "b"
    assert run.first_failure.message.startswith("GPU 1 is in use by a process (pid 77")
    assert "nvidia-smi" in (run.first_failure.hint or "")
    assert RunDirectory.open(tmp_path, "last").read("run.json", Run) == run
    held.stop.ask("SIGINT")
    with pytest.raises(Interrupted):
        measure_cell(Launch(cluster=CLUSTER, hostfile="", job=JOB, check=False, run_id="next"), held.context)
