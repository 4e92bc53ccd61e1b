from __future__ import annotations

import json
from pathlib import Path

import pytest

from multinode.core.cluster import Cluster
from multinode.core.hostfile import parse_hostfile
from multinode.core.job import ScriptJob
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
