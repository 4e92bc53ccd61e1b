from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import parse_hostfile
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, JobEnvironment, ScriptJob, parse_training
from multinode.launch.context import ExecuteOptions, Launch, RunContext
from multinode.launch.launch import prepare, probe_nodes
from multinode.transport.fake import FakeTransport
from tests.golden import Golden, error_of

CLUSTER: Cluster = parse_hostfile("a addr=10.0.0.1\n", "hosts")


@pytest.mark.parametrize(("kind", "asked"), [("launch", "no"), ("contrast", "yes"), ("sweep", "yes")])
def test_what_is_compared_is_asked_for_its_versions_though_nothing_is_checked(
    tmp_path: Path, kind: str, asked: str
) -> None:
    fake = FakeTransport(lambda *_: [b'{"kind": "facts"}\n'])
    context = RunContext(fake, tmp_path)
    execute = ExecuteOptions(kind=kind)
    what = Launch(cluster=CLUSTER, hostfile="", job=ScriptJob(argv=("train.py",)), execute=execute, check=False)
    probe_nodes(what, context.agent)
    (stdin,) = [stdin for _, _, stdin in fake.ran if stdin]
    assert json.loads(stdin)["packages"] is (asked == "yes")


@pytest.mark.parametrize(
    ("hosts", "environment", "checked", "asked"),
    [
        ("a addr=10.0.0.1\n", JobEnvironment(), True, ["model_name_or_path", "stage"]),
        ("a addr=10.0.0.1\n", JobEnvironment(), False, []),
        # Behind a prelude may be another LLaMA-Factory than the one that is found without it.
        ("a addr=10.0.0.1\n", JobEnvironment(prelude="conda activate env"), True, []),
        ("a addr=10.0.0.1\n", JobEnvironment(env={"ALLOW_EXTRA_ARGS": "1"}), True, []),
        ("a addr=10.0.0.1 env.USE_MCA=1\n", JobEnvironment(), True, []),
    ],
)
def test_keys_are_looked_for_in_the_llamafactory_that_will_run(
    tmp_path: Path, hosts: str, environment: JobEnvironment, *, checked: bool, asked: list[str]
) -> None:
    fake = FakeTransport(lambda *_: [b'{"kind": "facts"}\n'])
    job = parse_training("model_name_or_path: m\nstage: sft\n", "sft.yaml")
    cluster = parse_hostfile(hosts, "hosts")
    what = Launch(cluster=cluster, hostfile="", job=job, environment=environment, check=checked)
    probe_nodes(what, RunContext(fake, tmp_path).agent)
    (stdin,) = [stdin for _, _, stdin in fake.ran if stdin]
    assert json.loads(stdin)["arguments"] == asked


FACTS = {
    "kind": "facts",
    "home": "/home/me",
    "python": "/env/bin/python",
    "packages": {"is": "entries", "values": {"torch": "2.8.0", "llamafactory": "0.9.5"}},
    "cwd": "/work",
}
SFT = parse_training(
    "model_name_or_path: /models/m\nstage: sft\ndataset: d\ndataset_dir: data\noutput_dir: out\n", "sft.yaml"
)
SCRIPT = ScriptJob(argv=("train.py",))
PROGRAM = ScriptJob(argv=("train",), form="executable")


def without(missing: str | None) -> FakeTransport:
    """Nodes that lack this file."""

    def answer(_node: Node, _command: str, stdin: bytes) -> list[bytes]:
        asked = json.loads(stdin)
        paths = [{"path": path, "kind": "missing" if path == missing else "directory"} for path in asked["paths"]]
        tools = {name: f"/bin/{name}" for name in asked["tools"]}
        return [json.dumps({**FACTS, "paths": paths, "tools": tools}).encode() + b"\n"]

    return FakeTransport(answer)


def test_a_job_whose_files_are_missing_is_not_started(tmp_path: Path, golden: Golden) -> None:
    cases: tuple[tuple[Job, str], ...] = ((SFT, "/models/m"), (SFT, "data/dataset_info.json"), (SCRIPT, "train.py"))
    golden.check_errors(
        "missing_files",
        {
            missing: error_of(
                prepare,
                Launch(cluster=CLUSTER, hostfile="", job=job, check=True),
                RunContext(without(missing), tmp_path / "runs"),
            )
            for job, missing in cases
        },
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("job", "options", "checked", "missing"),
    [
        (SFT, {}, True, None),
        (SFT, {}, False, "/models/m"),
        # The setup may bring the files, and a program is looked for along PATH.
        (SFT, {"environment": JobEnvironment(prelude="mount /models")}, True, "/models/m"),
        (PROGRAM, {"engine": Engine(name="exec")}, True, "train"),
    ],
)
def test_a_job_whose_files_are_there_or_may_come_is_started(
    tmp_path: Path, job: Job, options: dict[str, Any], missing: str | None, *, checked: bool
) -> None:
    what = Launch(cluster=CLUSTER, hostfile="", job=job, check=checked, **options)
    context = RunContext(without(missing), tmp_path / "runs")
    assert prepare(what, context).directory.read("findings.json", list[Any]) == []


@pytest.mark.parametrize(("asked", "busy"), [(None, 2), (29500, 1)])
def test_a_port_that_is_taken_is_passed_over_unless_it_was_asked_for(
    tmp_path: Path, asked: int | None, busy: int, golden: Golden
) -> None:
    ports: list[int] = []

    def answer(_node: Node, _command: str, stdin: bytes) -> list[bytes]:
        ports.extend(json.loads(stdin)["ports"])
        users = [{"port": port, "taken": True, "user": "python3 (pid 7, user eve)"} for port in ports[:busy]]
        paths = [{"path": path, "kind": "file"} for path in json.loads(stdin)["paths"]]
        return [json.dumps({**FACTS, "ports": users, "paths": paths}).encode() + b"\n"]

    context = RunContext(FakeTransport(answer), tmp_path / "runs")
    what = Launch(cluster=CLUSTER, hostfile="", job=SCRIPT, master_port=asked, check=True)
    if asked is None:
        assert prepare(what, context).require_plan().rendezvous.port == ports[busy]
        return
    golden.check_errors("busy_port", {"--master-port 29500": error_of(prepare, what, context)})
    assert ports == [29500]


class Unverified(FakeTransport):
    """Nobody compares host keys."""

    def verifies(self, node: Node) -> bool:
        del node
        return False


@pytest.mark.parametrize(("forwarded", "refused"), [((), False), (("HF_TOKEN",), True)])
def test_no_secret_goes_to_a_node_whose_host_key_nobody_compares(
    tmp_path: Path, forwarded: tuple[str, ...], golden: Golden, *, refused: bool
) -> None:
    transport = Unverified(lambda *_: [json.dumps(FACTS).encode() + b"\n"])
    context = RunContext(transport, tmp_path / "runs")
    environment = JobEnvironment(env=dict.fromkeys(forwarded, "value"), forwarded=forwarded)
    what = Launch(cluster=CLUSTER, hostfile="", job=SCRIPT, environment=environment, workers_per_node=1, check=False)
    if not refused:
        assert prepare(what, context).require_plan().nodes
        return
    golden.check_errors("unverified", {"--env HF_TOKEN": error_of(prepare, what, context)})
    assert b"value" not in b"".join(stdin for _, _, stdin in transport.ran)
