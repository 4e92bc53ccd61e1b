from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from multinode.node.connectivity.connections import Connections, Ping
from multinode.node.facts.network import read_port_range
from tests.warm import free_port

from .localnode import DEADLINE_S, Conversation, LocalNode

TOKEN = "5f3a9c"
PING_BYTES = 8


@contextlib.contextmanager
def meeting(node: LocalNode, *ports: int, **changes: Any) -> Iterator[tuple[Conversation, dict[str, Any]]]:
    request = {"addr": "127.0.0.1", "ports": list(ports), "token": TOKEN, "deadline_s": 20.0, **changes}
    with node.talk("connectivity", request) as talk:
        yield talk, talk.take("listening")


def attempt(talk: Conversation, *targets: tuple[str, int], timeout_s: float = 3.0, whole: bool = False) -> list[Any]:
    """The errors of attempts at these targets."""
    asked = [{"addr": addr, "port": port, "whole": whole} for addr, port in targets]
    talk.send({"attempts": asked, "timeout_s": timeout_s})
    answer = talk.take("attempts")
    assert [(result["addr"], result["port"]) for result in answer["results"]] == list(targets)
    assert all(result["ms"] >= 0 for result in answer["results"])
    return [result["error"] for result in answer["results"]]


def can_bind(port: int) -> bool:
    """Whether not even a connection in TIME_WAIT is left, which would keep a plain bind from succeeding."""
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
    return True


def test_nodes_meet_on_named_and_on_ephemeral_ports_and_nothing_remains(node: LocalNode) -> None:
    port = free_port()
    with meeting(node, port, ephemeral=4) as (host, listening), meeting(node) as (caller, nothing):
        first, *ephemeral = listening["ports"]
        assert (first, len(set(ephemeral)), nothing["ports"]) == (port, 4, [])
        low, high = read_port_range()
        # One in each quarter of the range, so that a block of a part of it is seen.
        assert sorted((one - low) * 4 // (high - low + 1) for one in ephemeral) == [0, 1, 2, 3]
        everywhere = [("127.0.0.1", one) for one in listening["ports"]]
        assert attempt(caller, *everywhere) == [None] * 5
        assert attempt(caller, *everywhere, whole=True) == [None] * 5
        with socket.create_connection(("127.0.0.1", port)):
            assert attempt(caller, ("127.0.0.1", port)) == [None]
            host.send({"end": True})
            host.take("ended")
        assert all(can_bind(one) for one in listening["ports"])
        assert host.hang_up() == 0


def test_the_channel_serves_the_next_verb(node: LocalNode) -> None:
    with meeting(node, then=True) as (talk, _):
        talk.send({"end": True})
        talk.take("ended")
        talk.send({"schema": 1, "verb": "probe", "packages": False})
        talk.take("facts")


def test_a_stream_is_measured_where_it_arrives(node: LocalNode) -> None:
    with meeting(node, free_port()) as (_, listening), meeting(node) as (caller, _):
        target = {"addr": "127.0.0.1", "port": listening["ports"][0], "seconds": 0.2}
        caller.send({"streams": [target, target], "timeout_s": 10.0})
        answer = caller.take("streams")
    assert [result["error"] for result in answer["results"]] == [None, None]
    for result in answer["results"]:
        # The beginning is not counted; loopback carries far more than a megabyte in what is left.
        assert 0.05 < result["time_s"] < 5
        assert result["size_bytes"] > 1_000_000


def test_every_failure_has_its_word(node: LocalNode) -> None:
    port = free_port()
    with meeting(node, port) as (talk, _), socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [("127.0.0.1", free_port()), ("255.255.255.255", port), silent.getsockname(), ("127.0.0.1", 70000)]
        refused, unreachable, wrong, impossible = attempt(talk, *targets, timeout_s=1.0)
        assert refused == "refused"
        assert unreachable in {"no route", "Permission denied"}
        assert wrong == "wrong answer"
        assert impossible
        assert attempt(talk, ("127.0.0.1", port)) == [None]


def test_who_does_not_know_the_token_hears_nothing(node: LocalNode) -> None:
    port = free_port()
    with meeting(node, port), meeting(node, token="guess") as (other, _), meeting(node, token=TOKEN + "0") as (near, _):
        assert attempt(other, ("127.0.0.1", port)) == ["wrong answer"]
        assert attempt(near, ("127.0.0.1", port)) == ["wrong answer"]
        # Reset, or closed: either says nothing.
        with socket.create_connection(("127.0.0.1", port), 10) as flood, contextlib.suppress(ConnectionError):
            flood.sendall(b"x" * 100_000)
            assert flood.recv(1) == b""


def test_large_packets_that_vanish_are_told_from_a_silent_port(node: LocalNode) -> None:
    with meeting(node) as (talk, _), socket.create_server(("127.0.0.1", 0)) as half_deaf:
        talk.send(
            {"attempts": [{"addr": "127.0.0.1", "port": half_deaf.getsockname()[1], "whole": True}], "timeout_s": 1}
        )
        connection, _ = half_deaf.accept()
        with connection:
            connection.recv(200)
            connection.sendall(b"multinode\n")
            answer = talk.take("attempts")
    assert answer["results"][0]["error"] == "large packets lost"


def test_a_connection_that_is_never_taken_times_out(node: LocalNode) -> None:
    with socket.socket() as full, meeting(node) as (talk, _):
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.settimeout(0)
            second.connect_ex(address)
            began = time.monotonic()
            assert attempt(talk, address, timeout_s=0.5) == ["timed out"]
            assert time.monotonic() - began < 10


def test_a_port_in_use_names_its_user_and_the_others_are_opened(node: LocalNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        port = free_port()
        with meeting(node, taken, port) as (_, listening):
            assert listening["ports"] == [port]
            assert "in use by" in listening["failed"][str(taken)]
            assert "pid" in listening["failed"][str(taken)]


def test_an_address_that_is_not_ours_cannot_be_listened_on(node: LocalNode) -> None:
    with meeting(node, 29500, addr="192.0.2.77", ephemeral=2) as (_, listening):
        assert listening["failed"] == {"29500": "Cannot assign requested address"}
        assert listening["ports"] == []


def test_it_leaves_at_its_deadline_and_with_its_controller(node: LocalNode) -> None:
    port = free_port()
    with meeting(node, port, deadline_s=0.5) as (talk, _):
        assert talk.read_all()[-1] == {"kind": "ended"}
        assert talk.process.wait(10) == 0
    with meeting(node, port) as (talk, _):
        assert talk.hang_up() == 0
    assert can_bind(port)


def test_a_silent_caller_is_sent_away_and_does_not_keep_others_out(node: LocalNode) -> None:
    port = free_port()
    with meeting(node, port) as (talk, _), socket.create_connection(("127.0.0.1", port)) as silent:
        assert attempt(talk, ("127.0.0.1", port)) == [None]
        silent.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def ping(*ports: int, count: int, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    connections = Connections()
    calls = [Ping({"addr": "127.0.0.1", "port": port, "count": count}, TOKEN, timeout_s) for port in ports]
    for call in calls:
        connections.begin(call)
    while any(call.result is None for call in calls):
        connections.turn(timeout_s)
    return [call.result or {} for call in calls]


def answer_pings(server: socket.socket, count: int, answer: bytes | None = None) -> None:
    """What a door does, for so many round trips; then silence, with the connection left open until the server ends."""
    connection, _ = server.accept()
    with connection:
        connection.recv(200)
        connection.sendall(b"multinode\n")
        for _ in range(count):
            connection.sendall(answer or connection.recv(PING_BYTES))
        with contextlib.suppress(ConnectionError):
            while connection.recv(PING_BYTES):
                pass


@contextlib.contextmanager
def half_a_listener(count: int, answer: bytes | None = None) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_pings, args=(server, count, answer))
        thread.start()
        yield server.getsockname()[1]
        thread.join(DEADLINE_S)


def test_round_trips_are_timed_one_by_one_and_bounded(node: LocalNode) -> None:
    with meeting(node, free_port()) as (_, listening), meeting(node) as (caller, _):
        port = listening["ports"][0]
        (few,) = ping(port, count=20)
        assert few["error"] is None
        assert len(few["times_us"]) == 20
        # Between a system call and a deadline guard: it is microseconds that are told.
        assert all(1 < time_us < 1e6 for time_us in few["times_us"])
        (many,) = ping(port, count=1_000_000)
        assert len(many["times_us"]) == 100
        assert attempt(caller, ("127.0.0.1", port)) == [None]


def test_a_peer_that_stops_answering_in_the_middle_fails_alone(node: LocalNode) -> None:
    with meeting(node, free_port()) as (_, listening), half_a_listener(12) as silent:
        stopped, good = ping(silent, listening["ports"][0], count=30, timeout_s=1.0)
        assert (stopped["error"], good["error"]) == ("stopped answering", None)
        assert len(good["times_us"]) == 30
        (refused,) = ping(free_port(), count=3)
        assert (refused["error"], refused["times_us"]) == ("refused", [])


def test_a_peer_that_sends_something_else_back_is_no_peer() -> None:
    with half_a_listener(1, b"ABCDEFGH") as liar:
        assert [one["error"] for one in ping(liar, count=3)] == ["wrong answer"]
