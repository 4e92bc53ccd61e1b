from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.analyse.nccl_test.pair_speeds import PairSpeed, RoundTrip
from multinode.core.cluster.cluster import Node
from multinode.errors import AuthError, MultinodeError, NodeFailed
from multinode.preflight.network.meeting import Attempted, Listening, Meeting
from multinode.preflight.network.reach import MAX_PINGS, Agenda, Hall, hold_meeting
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport

NODES = tuple(Node(name=name) for name in "ab")
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
BOTH_WAYS = Agenda(pairs=(("a", "b"), ("b", "a")), master_port=29500, ephemeral=1)
ENDED = {"kind": "ended"}


def listening(*ports: int, **failed: str) -> dict[str, Any]:
    return {"kind": "listening", "ports": list(ports), "failed": failed}


def attempts(addr: str, *errors: str | None) -> dict[str, Any]:
    results = [{"addr": addr, "port": 29500 + i, "error": error, "ms": 0.5} for i, error in enumerate(errors)]
    return {"kind": "attempts", "results": results}


def meet(agenda: Agenda, **answers: Any) -> tuple[Meeting, tuple[MultinodeError, ...], FakeTransport]:
    """Nodes that answer with these records, or raise these errors."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        answer = answers[node.name]
        if isinstance(answer, Exception):
            raise answer
        return [json.dumps(record).encode() + b"\n" for record in answer]

    fake = FakeTransport(handle)
    return *hold_meeting(AgentTransport(fake, AgentArchive(b"")), NODES, ADDRESSES, agenda), fake


def test_what_every_node_found_at_every_other_is_kept_in_order() -> None:
    meeting, errors, fake = meet(
        BOTH_WAYS,
        a=[listening(29500, 40000), attempts("10.0.0.2", None), ENDED],
        b=[listening(29501), attempts("10.0.0.1", None, "timed out"), ENDED],
    )
    assert errors == ()
    assert meeting.listening == (Listening(node="a", ports=(29500, 40000)), Listening(node="b", ports=(29501,)))
    assert meeting.attempts == (
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

    agenda = Agenda(pairs=(), master_port=29500, stream_s=0.3)
    meeting, errors, _ = meet(
        agenda,
        a=[listening(40000), arrived(62_500_000), ENDED],
        b=[listening(40000), arrived(None, "wrong answer"), ENDED],
    )
    assert errors == ()
    assert meeting.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=1.0),
        PairSpeed(source="b", target="a", error="wrong answer"),
    )


def streams(*speeds: float) -> list[dict[str, Any]]:
    return [{"kind": "streams", "results": [{"size_bytes": speed * 125e6, "time_s": 1.0}]} for speed in speeds]


def test_a_stream_that_was_slow_for_a_moment_is_tried_again() -> None:
    agenda = Agenda(pairs=(), master_port=29500, stream_s=0.3, least_gbit_per_s={("a", "b"): 0.66, ("b", "a"): 0.66})
    meeting, errors, _ = meet(
        agenda,
        a=[listening(40000), *streams(0.292, 0.94), ENDED],
        b=[listening(40000), *streams(0.94), ENDED],
    )
    assert errors == ()
    assert meeting.streams == (
        PairSpeed(source="a", target="b", gbit_per_s=0.94, worse_gbit_per_s=0.292),
        PairSpeed(source="b", target="a", gbit_per_s=0.94),
    )


def test_streams_that_would_outlast_the_meeting_are_left_out() -> None:
    agenda = Agenda(pairs=(("a", "b"),), master_port=29500, ephemeral=1, stream_s=0.3, meeting_s=10.0)
    meeting, errors, fake = meet(
        agenda, a=[listening(40000), attempts("10.0.0.2", None), ENDED], b=[listening(40000), ENDED]
    )
    assert (meeting.streams, errors) == ((), ())
    assert len(meeting.attempts) == 1
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
    agenda = Agenda(pairs=(("a", "b"), ("b", "a")), master_port=29500)
    meeting, errors, _ = meet(agenda, a=[listening(29500), attempts("10.0.0.2", None), ENDED], b=answers)
    assert [error.node for error in errors] == ["b"]
    assert isinstance(errors[0], MultinodeError)
    if not isinstance(answers, Exception) and answers[0] == listening(29500):
        assert meeting.attempts == (Attempted(node="a", peer="b", addr="10.0.0.2", port=29500, ms=0.5),)


def test_a_lie_is_the_nodes_failure_and_not_a_lost_contact() -> None:
    _, errors, _ = meet(BOTH_WAYS, a=[{"kind": "listening", "ports": "all"}], b=[listening(), ENDED])
    assert isinstance(errors[0], NodeFailed)
    assert "cannot be read" in errors[0].message


def pings(*times_us: float, error: str | None = None) -> dict[str, Any]:
    return {"kind": "pings", "results": [{"times_us": times_us, "error": error}]}


def ping(count: int, **answers: list[dict[str, Any]]) -> tuple[tuple[RoundTrip, ...], list[MultinodeError]]:
    """Nodes that answer with these records after `listening`."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        records = [listening(40000), *answers[node.name], ENDED]
        return [json.dumps(record).encode() + b"\n" for record in records]

    agent = AgentTransport(FakeTransport(handle), AgentArchive(b""))
    with Hall(agent, NODES, ADDRESSES, Agenda(pairs=(), master_port=29500)) as hall:
        return hall.ping((("a", "b"), ("b", "a")), count), hall.errors


def test_round_trips_are_summed_up_for_each_pair() -> None:
    pinged, errors = ping(4, a=[pings(40.0, 20.0, 30.0, 900.0)], b=[pings(25.0, error="stopped answering")])
    assert errors == []
    assert pinged == (
        RoundTrip(source="a", target="b", median_us=35.0, p95_us=900.0),
        RoundTrip(source="b", target="a", error="stopped answering"),
    )


@pytest.mark.parametrize(
    "answer",
    [
        pings(20.0),
        pings(20.0, 30.0, 40.0),
        pings(20.0, -1.0),
        pings(20.0, 0.0),
        {"kind": "pings", "results": [{"times_us": "fast"}]},
        {"kind": "pings", "results": []},
        {"kind": "streams", "results": [{"times_us": [20.0, 30.0]}]},
        {"kind": "pings"},
    ],
)
def test_a_node_that_lies_of_its_round_trips_hides_no_other(answer: dict[str, Any]) -> None:
    pinged, errors = ping(2, a=[pings(20.0, 30.0)], b=[answer])
    assert [one.source for one in pinged] == ["a"]
    assert [(error.node, type(error)) for error in errors] == [("b", NodeFailed)]


@pytest.mark.parametrize("count", [0, MAX_PINGS + 1])
def test_more_round_trips_than_an_agent_makes_are_not_asked_for(count: int) -> None:
    with pytest.raises(ValueError, match="round trips"):
        ping(count, a=[], b=[])
