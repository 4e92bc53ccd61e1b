from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.check.connectivity import (
    Attempted,
    ConnectivityPlan,
    ConnectivityResult,
    Listening,
    run_connectivity_test,
)
from multinode.cluster.cluster import Node
from multinode.errors import AuthError, MultinodeError, NodeFailed
from multinode.traffic.pair_speeds import PairSpeed
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport

NODES = tuple(Node(name=name) for name in "ab")
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
BOTH_WAYS = ConnectivityPlan(pairs=(("a", "b"), ("b", "a")), master_port=29500, ephemeral=1)
ENDED = {"kind": "ended"}


def listening(*ports: int, **failed: str) -> dict[str, Any]:
    return {"kind": "listening", "ports": list(ports), "failed": failed}


def attempts(addr: str, *errors: str | None) -> dict[str, Any]:
    results = [{"addr": addr, "port": 29500 + i, "error": error, "ms": 0.5} for i, error in enumerate(errors)]
    return {"kind": "attempts", "results": results}


def meet(
    plan: ConnectivityPlan, **answers: Any
) -> tuple[ConnectivityResult, tuple[MultinodeError, ...], FakeTransport]:
    """Nodes that answer with these records, or raise these errors."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        answer = answers[node.name]
        if isinstance(answer, Exception):
            raise answer
        return [json.dumps(record).encode() + b"\n" for record in answer]

    fake = FakeTransport(handle)
    agent = AgentTransport(fake, AgentArchive(b""))
    result = run_connectivity_test(agent, NODES, ADDRESSES, plan)
    agent.close()
    assert all(stream.is_closed for stream in fake.streams)
    return *result, fake


def test_what_every_node_found_at_every_other_is_kept_in_order() -> None:
    connectivity, errors, fake = meet(
        BOTH_WAYS,
        a=[listening(29500, 40000), attempts("10.0.0.2", None), ENDED],
        b=[listening(29501), attempts("10.0.0.1", None, "timed out"), ENDED],
    )
    assert errors == ()
    assert connectivity.listening == (Listening(node="a", ports=(29500, 40000)), Listening(node="b", ports=(29501,)))
    assert connectivity.attempts == (
        Attempted(node="a", peer="b", addr="10.0.0.2", port=29500, error=None, ms=0.5),
        Attempted(node="b", peer="a", addr="10.0.0.1", port=29500, error=None, ms=0.5),
        Attempted(node="b", peer="a", addr="10.0.0.1", port=29501, error="timed out", ms=0.5),
    )
    tokens = {json.loads(stdin)["token"] for _, _, stdin in fake.ran}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32


def test_two_meetings_never_share_a_secret() -> None:
    tokens = set()
    for _ in range(2):
        *_, fake = meet(BOTH_WAYS, a=[listening(), ENDED], b=[listening(), ENDED])
        tokens.add(json.loads(fake.ran[0][2])["token"])
    assert len(tokens) == 2


def test_streams_go_both_ways_and_add_up_over_their_connections() -> None:
    def arrived(size_bytes: int | None, error: str | None = None) -> dict[str, Any]:
        return {"kind": "streams", "results": [{"size_bytes": size_bytes, "time_s": 0.5, "error": error}]}

    plan = ConnectivityPlan(pairs=(), master_port=29500, stream_s=0.3)
    connectivity, errors, _ = meet(
        plan,
        a=[listening(40000), arrived(62_500_000), ENDED],
        b=[listening(40000), arrived(None, "wrong answer"), ENDED],
    )
    assert errors == ()
    assert connectivity.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=1.0),
        PairSpeed(source="b", target="a", error="wrong answer"),
    )


def streams(*speeds: float) -> list[dict[str, Any]]:
    return [{"kind": "streams", "results": [{"size_bytes": speed * 125e6, "time_s": 1.0}]} for speed in speeds]


def test_a_stream_that_was_slow_for_a_moment_is_tried_again() -> None:
    plan = ConnectivityPlan(
        pairs=(), master_port=29500, stream_s=0.3, least_gbit_per_s={("a", "b"): 0.66, ("b", "a"): 0.66}
    )
    connectivity, errors, _ = meet(
        plan,
        a=[listening(40000), *streams(0.292, 0.94), ENDED],
        b=[listening(40000), *streams(0.94), ENDED],
    )
    assert errors == ()
    assert connectivity.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=0.94, worse_gbit_per_s=0.292),
        PairSpeed(source="b", target="a", gbit_per_s=0.94),
    )


def test_streams_that_would_outlast_the_meeting_are_left_out() -> None:
    plan = ConnectivityPlan(pairs=(("a", "b"),), master_port=29500, ephemeral=1, stream_s=0.3, deadline_s=10.0)
    connectivity, errors, fake = meet(
        plan, a=[listening(40000), attempts("10.0.0.2", None), ENDED], b=[listening(40000), ENDED]
    )
    assert (connectivity.streams, errors) == ((), ())
    assert len(connectivity.attempts) == 1
    assert [json.loads(stdin.splitlines()[0])["deadline_s"] for _, _, stdin in fake.ran] == [10.0, 10.0]


@pytest.mark.parametrize(
    "answers",
    [
        AuthError("refused"),
        [{"kind": "listening", "ports": "all"}],
        [{"kind": "listening", "failed": {"http": "x"}}],
        [listening(29500), {"kind": "attempts"}],
        [listening(29500), {"kind": "attempts", "results": []}],
        [listening(29500), {"kind": "attempts", "results": {"b": 1}}],
        [listening(29500), {"kind": "attempts", "results": ["yes"]}],
        [listening(29500), {"kind": "attempts", "results": [{"addr": "x", "port": "y"}]}],
        [listening(29500), {"kind": "streams", "results": [{}]}],
        [listening(29500)],
    ],
)
def test_a_node_that_cannot_be_asked_or_lies_hides_no_other(answers: Any) -> None:
    plan = ConnectivityPlan(pairs=(("a", "b"), ("b", "a")), master_port=29500)
    connectivity, errors, _ = meet(plan, a=[listening(29500), attempts("10.0.0.2", None), ENDED], b=answers)
    assert [error.node for error in errors] == ["b"]
    assert isinstance(errors[0], MultinodeError)
    if not isinstance(answers, Exception) and answers[0] == listening(29500):
        assert connectivity.attempts == (Attempted(node="a", peer="b", addr="10.0.0.2", port=29500, ms=0.5),)


def test_a_lie_is_the_nodes_failure_and_not_a_lost_contact() -> None:
    _, errors, _ = meet(BOTH_WAYS, a=[{"kind": "listening", "ports": "all"}], b=[listening(), ENDED])
    assert isinstance(errors[0], NodeFailed)
    assert "cannot read its answer" in errors[0].message
