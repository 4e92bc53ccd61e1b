from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.core.cluster import Cluster, Node
from multinode.errors import AuthError, ContactLost, NodeFailed
from multinode.preflight.connect import Reached, probe_port
from multinode.transport.agent import AgentTransport
from multinode.transport.archive import AgentArchive
from multinode.transport.fake import FakeTransport

CLUSTER = Cluster(nodes=tuple(Node(name=name) for name in "abc"), source="hosts")
LISTENING = {"kind": "listening", "ports": [29500], "failed": {}}


def connected(*, ok: bool = True, error: str | None = None) -> dict[str, Any]:
    return {"kind": "connected", "results": [{"addr": "10.0.0.1", "port": 29500, "ok": ok, "error": error, "ms": 1.5}]}


def network(answers: dict[str, Any]) -> FakeTransport:
    """Nodes that answer with these records, or raise these errors."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        answer = answers[node.name]
        if isinstance(answer, Exception):
            raise answer
        return [json.dumps(answer).encode()]

    return FakeTransport(handle)


def ask(fake: FakeTransport) -> Any:
    return probe_port(AgentTransport(fake, AgentArchive(b"")), CLUSTER, "10.0.0.1", 29500)


def test_the_first_node_listens_and_each_other_connects_with_the_same_secret() -> None:
    fake = network({"a": LISTENING, "b": connected(), "c": connected(ok=False, error="timed out")})
    listening, reached = ask(fake)
    assert listening.ports == (29500,)
    assert reached.require() == (
        Reached(addr="10.0.0.1", port=29500, ok=True, ms=1.5),
        Reached(addr="10.0.0.1", port=29500, ok=False, error="timed out", ms=1.5),
    )
    requests = {node: (command.split()[-1], json.loads(stdin)) for node, command, stdin in fake.ran}
    assert [requests[name][0] for name in "abc"] == ["listen", "connect", "connect"]
    tokens = {request["token"] for _, request in requests.values()}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32


def test_two_checks_never_share_a_secret() -> None:
    fake = network({"a": LISTENING, "b": connected(), "c": connected()})
    ask(fake)
    ask(fake)
    assert len({json.loads(stdin)["token"] for _, _, stdin in fake.ran}) == 2


def test_a_port_that_is_taken_is_not_connected_to() -> None:
    fake = network({"a": {"kind": "listening", "ports": [], "failed": {"29500": "in use by nginx"}}})
    listening, reached = ask(fake)
    assert listening.failed == {29500: "in use by nginx"}
    assert len(reached) == 0


def test_a_node_that_cannot_be_asked_hides_no_other() -> None:
    _, reached = ask(network({"a": LISTENING, "b": AuthError("refused"), "c": connected()}))
    assert [error.node for error in reached.errors] == ["b"]
    assert reached.values[0].ok


@pytest.mark.parametrize("error", [AuthError("refused"), ContactLost("gone")])
def test_a_first_node_that_cannot_be_asked_is_an_error(error: Exception) -> None:
    with pytest.raises(type(error)):
        ask(network({"a": error}))


@pytest.mark.parametrize("lie", [{"kind": "listening", "ports": "all"}, {"kind": "listening", "failed": {"http": "x"}}])
def test_a_first_node_that_lies_has_failed(lie: dict[str, Any]) -> None:
    with pytest.raises(NodeFailed, match="cannot be read") as caught:
        ask(network({"a": lie}))
    assert caught.value.node == "a"


@pytest.mark.parametrize(
    "lie",
    [
        {"kind": "connected"},
        {"kind": "connected", "results": []},
        {"kind": "connected", "results": {"b": 1}},
        {"kind": "connected", "results": [{"addr": "x", "port": "y", "ok": 1}]},
    ],
)
def test_another_node_that_lies_has_failed_alone(lie: dict[str, Any]) -> None:
    _, reached = ask(network({"a": LISTENING, "b": lie, "c": connected()}))
    (error,) = reached.errors
    assert isinstance(error, NodeFailed)
    assert error.node == "b"
    assert len(reached.values) == 1
