from __future__ import annotations

import json
from pathlib import Path

import pytest

from multinode.core.cluster import Cluster
from multinode.core.hostfile import parse_hostfile
from multinode.core.job import ScriptJob, parse_llamafactory
from multinode.core.planning import LaunchOptions
from multinode.core.surroundings import Surroundings
from multinode.launch.request import ExecuteOptions
from multinode.transport.fake import FakeTransport
from multinode.workflows.launch import Launch, Outside, probe_nodes

CLUSTER: Cluster = parse_hostfile("a addr=10.0.0.1\n", "hosts")


@pytest.mark.parametrize(("kind", "asked"), [("launch", "no"), ("contrast", "yes"), ("sweep", "yes")])
def test_what_is_compared_is_asked_for_its_versions_though_nothing_is_checked(
    tmp_path: Path, kind: str, asked: str
) -> None:
    fake = FakeTransport(lambda *_: [b'{"kind": "facts"}\n'])
    outside = Outside(fake, tmp_path)
    execute = ExecuteOptions(kind=kind)
    what = Launch(cluster=CLUSTER, hostfile="", job=ScriptJob(argv=("train.py",)), execute=execute, check=False)
    probe_nodes(what, outside.agent)
    (stdin,) = [stdin for _, _, stdin in fake.ran if stdin]
    assert json.loads(stdin)["packages"] is (asked == "yes")


@pytest.mark.parametrize(
    ("hosts", "surroundings", "checked", "asked"),
    [
        ("a addr=10.0.0.1\n", Surroundings(), True, ["model_name_or_path", "stage"]),
        ("a addr=10.0.0.1\n", Surroundings(), False, []),
        # Behind a prelude may be another LLaMA-Factory than the one that is found without it.
        ("a addr=10.0.0.1\n", Surroundings(prelude="conda activate env"), True, []),
        ("a addr=10.0.0.1\n", Surroundings(env={"ALLOW_EXTRA_ARGS": "1"}), True, []),
        ("a addr=10.0.0.1 env.USE_MCA=1\n", Surroundings(), True, []),
    ],
)
def test_keys_are_looked_for_in_the_llamafactory_that_will_run(
    tmp_path: Path, hosts: str, surroundings: Surroundings, *, checked: bool, asked: list[str]
) -> None:
    fake = FakeTransport(lambda *_: [b'{"kind": "facts"}\n'])
    job = parse_llamafactory("model_name_or_path: m\nstage: sft\n", "sft.yaml")
    options = LaunchOptions(surroundings=surroundings)
    what = Launch(cluster=parse_hostfile(hosts, "hosts"), hostfile="", job=job, options=options, check=checked)
    probe_nodes(what, Outside(fake, tmp_path).agent)
    (stdin,) = [stdin for _, _, stdin in fake.ran if stdin]
    assert json.loads(stdin)["arguments"] == asked
