"""One node's part in a copy: what it refuses of a peer, of one without the token and of one that has it."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.copy.chain import make_credentials
from multinode.node.channel import AgentError
from multinode.node.copies import wire
from multinode.node.copies.store import CopyTarget
from multinode.node.copies.wire import Credentials, PeerError, Wire
from multinode.node.manifest import (
    BLOCK_BYTES,
    Manifest,
    make_manifest,
    pack_flags,
    stays_below,
    unpack_flags,
)

from .localnode import Conversation, LocalNode, wait_until

HERE = "127.0.0.1"


def credentials() -> Credentials:
    made = make_credentials()
    return Credentials(made.certificate, made.key, made.token)


OURS = credentials()


@contextlib.contextmanager
def receiving(node: LocalNode, path: str = "model") -> Iterator[tuple[Conversation, int]]:
    """A receiver of one path in its home directory, and its port."""
    request = {"paths": [str(node.home / path)], "addr": HERE, "source": False, "delete": False, **OURS._asdict()}
    with node.talk("copy", request) as talk:
        port = talk.take("listening")["port"]
        talk.send({"next": None})
        yield talk, port


@contextlib.contextmanager
def call(port: int, ours: Credentials = OURS) -> Iterator[Wire]:
    with contextlib.closing(wire.call(HERE, port, HERE, ours)) as peer:
        yield peer


def entries(*found: list[Any], roots: tuple[int | None, ...] = (0o755,)) -> bytes:
    return json.dumps({"roots": roots, "entries": found}).encode()


def file(name: str, size: int = 3) -> list[Any]:
    return [0, "f", name, size, 0o644, 0]


def trouble(talk: Conversation) -> str:
    return str(talk.read_until(kind="trouble")["message"])


def left_on(node: LocalNode) -> set[str]:
    """What stands in its home directory and beside it, but for the agent's own."""
    return {path.name for path in [*node.home.iterdir(), *node.home.parent.iterdir()]} - {".multinode", node.home.name}


def send_file(peer: Wire, talk: Conversation, data: bytes, digest: bytes | None = None) -> None:
    """The whole of a copy of one file `a` in the directory, as the node before it would send it."""
    peer.send(wire.MANIFEST, entries(file("a", len(data))))
    talk.read_until(kind="candidates")
    peer.send(wire.DIGESTS, pack_flags(b"\0"))
    talk.read_until(kind="need")
    assert peer.read(wire.HAVE, most_bytes=1) == b"\0"
    peer.send(wire.BLOCK, struct.pack(">Q32s", 0, digest or hashlib.sha256(data).digest()), data)
    peer.send(wire.DONE)


def test_a_peer_without_certificate_or_token_writes_nothing_and_keeps_nobody_out(node: LocalNode) -> None:
    with receiving(node) as (talk, port):
        with socket.create_connection((HERE, port)) as plain:
            plain.sendall(b"x" * 100_000)
            with contextlib.suppress(ConnectionError):
                while plain.recv(1000):
                    pass
        silent = socket.create_connection((HERE, port))
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((HERE, port)) as plain,
            bare.wrap_socket(plain) as anonymous,
            contextlib.suppress(OSError),
        ):
            anonymous.sendall(OURS.token.encode())
            assert anonymous.recv(10) == b""
        with pytest.raises(PeerError), call(port, credentials()._replace(token=OURS.token)):
            pass
        with pytest.raises(PeerError), call(port, OURS._replace(token="0" * len(OURS.token))):
            pass
        assert left_on(node) == set()
        with silent, call(port) as peer:
            send_file(peer, talk, b"abc")
            assert left_on(node) == set(), "nothing may be written before the controller says so"
            talk.send({"go": True})
            talk.read_until(kind="copied")
            talk.read_until(kind="ended")
    assert (node.home / "model" / "a").read_bytes() == b"abc"


def test_a_caller_believes_only_the_certificate_of_its_copy(node: LocalNode) -> None:
    other = OURS._replace(certificate=make_credentials().certificate)
    # Its key does not fit, either: it shows none.
    with receiving(node) as (_, port), pytest.raises((PeerError, ssl.SSLError)), call(port, other):
        pass


def test_the_port_is_closed_once_the_peer_has_called(node: LocalNode) -> None:
    def is_closed(port: int) -> bool:
        with socket.socket() as plain:
            return plain.connect_ex((HERE, port)) == errno.ECONNREFUSED

    with receiving(node) as (_, port), call(port):
        wait_until(lambda: is_closed(port))


@pytest.mark.parametrize(
    "found",
    [
        [file("../x")],
        [file("/tmp/x")],
        [[0, "d", "..", 0o755], file("../x")],
        [[0, "d", ".", 0o755], file("./x")],
        [[0, "d", "sub", 0o755], file("sub/../../x")],
        [file("sub/x")],
        [file(".multinode-copy")],
        [file("a"), file("a")],
        [file("a\0b")],
        [[0, "l", "out", "../x"]],
        [[0, "l", "out", "/etc"]],
        [[0, "l", "out", "b/../../x"]],
        [[0, "l", "sub", "elsewhere"], file("sub/x")],
        [[1, "f", "x", 3, 0o644, 0]],
        [[-1, "f", "x", 3, 0o644, 0]],
        [[0, "f", "x", -3, 0o644, 0]],
        [[0, "f", "x", 1 << 60, 0o644, 0]],
        [[0, "f", "x", 3, 0o4755, 0]],
        [[0, "f", "x"]],
        [[0, "p", "x"]],
        ["x"],
    ],
)  # fmt: skip
def test_a_manifest_that_leads_elsewhere_is_refused(found: list[Any]) -> None:
    with pytest.raises(AgentError, match="refused"):
        Manifest(entries(*found))


def test_a_peer_with_the_token_that_names_another_place_writes_nothing(node: LocalNode) -> None:
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries(file("../x")))
        assert "refused" in trouble(talk)
    assert left_on(node) == set()


def test_a_link_on_the_receiver_is_not_followed_out_of_the_path(node: LocalNode) -> None:
    outside = node.home / "outside"
    outside.mkdir()
    (node.home / "model").mkdir()
    (node.home / "model" / "sub").symlink_to(outside)
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries([0, "d", "sub", 0o755], file("sub/x")))
        assert "sub is a link here" in trouble(talk)
    assert list(outside.iterdir()) == []


def test_what_is_damaged_on_its_way_is_not_put_in_place(node: LocalNode) -> None:
    with receiving(node) as (talk, port):
        talk.send({"go": True})
        with call(port) as peer:
            with contextlib.suppress(PeerError):
                send_file(peer, talk, b"abc", hashlib.sha256(b"abd").digest())
            assert "damaged" in trouble(talk)
    assert not (node.home / "model").exists()


def test_a_peer_that_ends_early_leaves_nothing_that_looks_whole(node: LocalNode) -> None:
    with receiving(node) as (talk, port):
        talk.send({"go": True})
        with call(port) as peer:
            peer.send(wire.MANIFEST, entries(file("a")))
            peer.send(wire.DIGESTS, pack_flags(b"\0"))
            peer.send(wire.DONE)
            assert "less than it has" in trouble(talk)
    assert not (node.home / "model").exists()


def test_a_receiver_ends_with_its_controller(node: LocalNode) -> None:
    with receiving(node) as (talk, port), call(port):
        assert talk.hang_up() == 0


def test_an_answer_of_megabytes_for_a_list_of_blocks_is_refused(node: LocalNode) -> None:
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries(file("a")))
        talk.read_until(kind="candidates")
        with contextlib.suppress(PeerError):
            peer.send(wire.DIGESTS, bytes(1 << 20))
        assert "something else" in trouble(talk)


def test_a_relay_carries_bytes_both_ways(node: LocalNode) -> None:
    with socket.create_server((HERE, 0)) as server:
        with node.talk("relay", {"addr": HERE, "port": server.getsockname()[1]}) as talk:
            talk.take("data")
            accepted, _ = server.accept()
            with accepted:
                talk.send({"data": base64.b64encode(b"question").decode()})
                assert accepted.recv(100) == b"question"
                accepted.sendall(b"answer")
                assert base64.b64decode(talk.take("data")["data"]) == b"answer"
            assert talk.read() is None
        closed = server.getsockname()[1]
    assert "refused" in node.error("relay", {"addr": HERE, "port": closed})


def test_where_a_link_leads() -> None:
    below = [("a", 0), ("a/b", 0), ("../a", 1), ("../../a", 2), ("./a", 0)]
    out = [("", 0), ("/a", 5), ("../a", 0), ("a/../b", 1), ("../../a", 1), ("a/..", 3), ("..", 0), ("./../a", 3)]
    assert [stays_below(*one) for one in below] == [True] * len(below)
    assert [stays_below(*one) for one in out] == [False] * len(out)


def test_a_manifest_has_what_links_out_of_it_lead_to(tmp_path: Path) -> None:
    store, top = tmp_path / "blobs", tmp_path / "snapshot"
    (store / "deep").mkdir(parents=True)
    top.mkdir()
    (store / "weights").write_bytes(b"w" * 5)
    (store / "deep" / "inner").symlink_to("../weights")
    (top / "weights").symlink_to("../blobs/weights")
    (top / "same").symlink_to("weights")
    (top / "deep").symlink_to(store / "deep")
    (top / ".multinode-copy").mkdir()
    found = make_manifest([str(top)])
    assert {(one.name, one.size_bytes) for one in found.files} == {("weights", 5), ("deep/inner", 5)}
    assert [(root, name) for root, name, _ in found.directories] == [(0, "deep")]
    assert found.links == [(0, "same", "weights")]
    (top / "gone").symlink_to("/nowhere")
    with pytest.raises(AgentError, match="gone is a link to nowhere"):
        make_manifest([str(top)])
    (top / "gone").unlink()
    (top / "loop").symlink_to(tmp_path)
    with pytest.raises(AgentError, match="a link to a directory that it lies in"):
        make_manifest([str(top)])
    (top / "loop").unlink()
    os.mkfifo(top / "pipe")
    with pytest.raises(AgentError, match="pipe is neither"):
        make_manifest([str(top)])


def test_blocks_are_numbered_over_all_files() -> None:
    sizes = [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 0, 3 * BLOCK_BYTES]
    found = Manifest(entries(*(file(str(number), size) for number, size in enumerate(sizes))))
    assert [len(one.blocks) for one in found.files] == [0, 1, 1, 2, 0, 3]
    places = [found.place(block) for block in range(found.block_count)]
    assert [(one.name, offset // BLOCK_BYTES, size) for one, offset, size in places] == [
        ("1", 0, 1),
        ("2", 0, BLOCK_BYTES),
        ("3", 0, BLOCK_BYTES),
        ("3", 1, 1),
        ("5", 0, BLOCK_BYTES),
        ("5", 1, BLOCK_BYTES),
        ("5", 2, BLOCK_BYTES),
    ]
    assert found.size_bytes == sum(sizes)


@pytest.mark.parametrize("flags", [b"", b"\1", b"\0\0\0", b"\1\0\1" * 5, b"\0" * 8 + b"\1"])
def test_flags_come_back_as_they_went(flags: bytes) -> None:
    assert unpack_flags(pack_flags(flags), len(flags)) == flags
    with pytest.raises(ValueError, match="more flags"):
        unpack_flags(b"\xff" * (len(flags) // 8 + 1), len(flags))


def test_two_copies_do_not_write_to_one_place(tmp_path: Path) -> None:
    found = Manifest(entries(file("a")))
    first, second = (CopyTarget(found, [str(tmp_path / "model")]) for _ in range(2))
    first.find_candidates()
    first.prepare()
    child = os.fork()
    if child == 0:
        # Locks are a process's own.
        try:
            second.find_candidates()
        except AgentError as error:
            os._exit(0 if "another copy is writing" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
