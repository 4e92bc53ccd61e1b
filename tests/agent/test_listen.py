from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from .localnode import LocalNode

TOKEN = "5f3a9c"


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def connect(node: LocalNode, *targets: tuple[str, int], token: str = TOKEN, timeout_s: float = 3.0) -> list[Any]:
    request = {"targets": [{"addr": a, "port": p} for a, p in targets], "token": token, "timeout_s": timeout_s}
    code, records = node.call("connect", request)
    assert code == 0
    assert [record["kind"] for record in records] == ["connected"]
    results: list[Any] = records[0]["results"]
    assert [(result["addr"], result["port"]) for result in results] == list(targets)
    assert all(result["ok"] == (result["error"] is None) and result["ms"] >= 0 for result in results)
    return [result["error"] for result in results]


def listen(*ports: int, deadline_s: float = 20.0, addr: str = "127.0.0.1") -> dict[str, Any]:
    return {"addr": addr, "ports": list(ports), "token": TOKEN, "deadline_s": deadline_s}


def test_nodes_reach_each_other_and_nothing_remains(node: LocalNode) -> None:
    ports = [free_port(), free_port()]
    with node.talk("listen", listen(*ports)) as talk:
        assert talk.read() == {"kind": "listening", "ports": ports, "failed": {}}
        assert connect(node, *[("127.0.0.1", port) for port in ports]) == [None, None]
        with socket.create_connection(("127.0.0.1", ports[0])):
            assert connect(node, ("127.0.0.1", ports[0])) == [None]
            assert talk.hang_up() == 0
    for port in ports:
        # Not even a connection in TIME_WAIT, which would keep a plain bind from succeeding.
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", port))


def test_every_failure_has_its_word(node: LocalNode) -> None:
    port = free_port()
    with node.talk("listen", listen(port)) as talk, socket.create_server(("127.0.0.1", 0)) as silent:
        talk.read()
        targets = [
            ("127.0.0.1", free_port()),
            ("255.255.255.255", port),
            silent.getsockname(),
            ("127.0.0.1", 70000),
        ]
        refused, unreachable, wrong, impossible = connect(node, *targets, timeout_s=1.0)
        assert refused == "refused"
        assert unreachable in {"no route", "Permission denied"}
        assert wrong == "wrong answer"
        assert impossible
        assert connect(node, ("127.0.0.1", port), token="guess") == ["wrong answer"]
        assert connect(node, ("127.0.0.1", port), token=TOKEN + "0") == ["wrong answer"]
        assert connect(node, ("127.0.0.1", port)) == [None]


def test_a_connection_that_is_never_taken_times_out(node: LocalNode) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.settimeout(0)
            second.connect_ex(address)
            began = time.monotonic()
            assert connect(node, address, timeout_s=0.5) == ["timed out"]
            assert time.monotonic() - began < 10


def test_a_port_in_use_names_its_user_and_the_others_are_opened(node: LocalNode) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with node.talk("listen", listen(taken, port)) as talk:
            record = talk.read()
            assert record is not None
            assert record["ports"] == [port]
            assert "in use by" in record["failed"][str(taken)]
            assert "pid" in record["failed"][str(taken)]


def test_an_address_that_is_not_ours_cannot_be_listened_on(node: LocalNode) -> None:
    with node.talk("listen", listen(29500, addr="192.0.2.77")) as talk:
        record = talk.read()
        assert record is not None
        assert record["failed"] == {"29500": "Cannot assign requested address"}


def test_a_listener_leaves_at_its_deadline(node: LocalNode) -> None:
    with node.talk("listen", listen(free_port(), deadline_s=0.5)) as talk:
        assert len(talk.read_all()) == 1
        assert talk.process.wait(10) == 0


def test_a_silent_caller_is_sent_away_and_does_not_keep_others_out(node: LocalNode) -> None:
    port = free_port()
    with node.talk("listen", listen(port)) as talk:
        talk.read()
        with socket.create_connection(("127.0.0.1", port)) as silent:
            assert connect(node, ("127.0.0.1", port)) == [None]
            silent.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
