from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.check.check import CheckOptions, CheckReport, check_cluster
from multinode.cluster.cluster import Node
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make

CLUSTER = make.cluster("a", "b")
PORTS = [29500, 40000]


def facts(name: str) -> dict[str, Any]:
    addresses = [f"10.0.0.{'ab'.index(name) + 1}/24"]
    nic = {"name": "eth0", "addresses": addresses, "up": True, "mtu": 1500, "speed_gbit_per_s": 1.0}
    return {"kind": "facts", "python": "/env/bin/python", "interfaces": [nic]}


def meeting(*gbit_per_s: float) -> list[dict[str, Any]]:
    """What a node says whose peer has two ports open and whose streams reach so much."""
    streams: list[dict[str, Any]] = [
        {"kind": "streams", "results": [{"size_bytes": 125e6 * one, "time_s": 1.0}]} for one in gbit_per_s
    ]
    attempts = [{"addr": "10.0.0.1", "port": port} for port in PORTS]
    return [
        {"kind": "listening", "ports": PORTS},
        {"kind": "attempts", "results": attempts},
        *streams,
        {"kind": "ended"},
    ]


def check(**gbit_per_s: tuple[float, ...]) -> CheckReport:
    """Two nodes whose streams reach so much, one try after the other."""

    def handle(node: Node, _command: str, stdin: bytes) -> list[bytes]:
        # Who is asked to meet the others is given a token for it.
        asked_to_meet = "token" in json.loads(stdin.splitlines()[0])
        records = meeting(*gbit_per_s[node.name]) if asked_to_meet else [facts(node.name)]
        return [json.dumps(record).encode() + b"\n" for record in records]

    return check_cluster(AgentTransport(FakeTransport(handle), AgentArchive(b"")), CLUSTER, None, CheckOptions())


@pytest.mark.parametrize(("second", "is_told"), [(0.93, False), (0.25, True)])
def test_a_moment_of_a_busy_machine_is_no_slow_network(second: float, *, is_told: bool) -> None:
    report = check(a=(0.292, second), b=(0.93,))
    told = [one.message for one in report.findings if one.message.startswith("a stream from")]
    assert bool(told) is is_told
    speeds = {one.source: (one.gbit_per_s, one.worse_gbit_per_s) for one in report.streams}
    assert speeds == {"a": (max(0.292, second), min(0.292, second)), "b": (0.93, None)}


@pytest.mark.parametrize(
    ("supervised", "asked", "streams"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_no_stream_takes_what_a_run_in_progress_needs_unless_it_is_asked_for(
    supervised: bool,  # noqa: FBT001 - a case's value
    asked: bool | None,  # noqa: FBT001
    streams: bool,  # noqa: FBT001
) -> None:
    working = {"pid": 7, "run_id": "20260101-000000-abcd.0", "supervised": supervised}

    def handle(node: Node, _command: str, stdin: bytes) -> list[bytes]:
        asked_to_meet = "token" in json.loads(stdin.splitlines()[0])
        records = meeting(0.93, 0.93) if asked_to_meet else [{**facts(node.name), "run_processes": [working]}]
        return [json.dumps(record).encode() + b"\n" for record in records]

    transport = AgentTransport(FakeTransport(handle), AgentArchive(b""))
    report = check_cluster(transport, CLUSTER, None, CheckOptions(bandwidth=asked))
    assert bool(report.streams) is streams


def test_a_host_key_that_is_compared_with_none_is_warned_of() -> None:
    class Unverified(FakeTransport):
        def verifies(self, node: Node) -> bool:
            return node.name == "a"

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        return [json.dumps(facts(node.name) | {"interfaces": []}).encode() + b"\n"]

    agent = AgentTransport(Unverified(handle), AgentArchive(b""))
    report = check_cluster(agent, CLUSTER, None, CheckOptions())
    told = [one for one in report.findings if "StrictHostKeyChecking no" in one.message]
    assert [(one.node, one.severity) for one in told] == [("b", "warning")]
