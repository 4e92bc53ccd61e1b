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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.copy.chain import make_credentials
from multinode.node.channel import AgentError
from multinode.node.copies import tls, wire
from multinode.node.copies.store import CopyTarget
from multinode.node.copies.tls import Credentials
from multinode.node.copies.wire import PeerError, Wire
from multinode.node.manifest import (
    BLOCK_BYTES,
    Manifest,
    make_manifest,
    pack_flags,
    stays_below,
    unpack_flags,
)
from tests.golden import Golden, raised

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
    with contextlib.closing(tls.call(HERE, port, HERE, ours)) as peer:
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


def test_a_manifest_that_leads_elsewhere_is_refused(golden: Golden) -> None:
    manifests: list[list[Any]] = [
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
    ]  # fmt: skip
    golden.check_errors(
        "copy_manifests", {json.dumps(found): raised(AgentError, Manifest, entries(*found)) for found in manifests}
    )


def test_a_peer_with_the_token_that_names_another_place_writes_nothing(node: LocalNode, golden: Golden) -> None:
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries(file("../x")))
        golden.check("copy_another_place.txt", trouble(talk) + "\n")
    assert left_on(node) == set()


def test_a_link_on_the_receiver_is_not_followed_out_of_the_path(node: LocalNode, golden: Golden) -> None:
    outside = node.home / "outside"
    outside.mkdir()
    (node.home / "model").mkdir()
    (node.home / "model" / "sub").symlink_to(outside)
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries([0, "d", "sub", 0o755], file("sub/x")))
        golden.check("copy_link_here.txt", trouble(talk).replace(str(node.home), "HOME") + "\n")
    assert list(outside.iterdir()) == []


def test_what_is_damaged_on_its_way_is_not_put_in_place(node: LocalNode, golden: Golden) -> None:
    with receiving(node) as (talk, port):
        talk.send({"go": True})
        with call(port) as peer:
            with contextlib.suppress(PeerError):
                send_file(peer, talk, b"abc", hashlib.sha256(b"abd").digest())
            golden.check("copy_damaged.txt", trouble(talk) + "\n")
    assert not (node.home / "model").exists()


def test_a_peer_that_ends_early_leaves_nothing_that_looks_whole(node: LocalNode, golden: Golden) -> None:
    with receiving(node) as (talk, port):
        talk.send({"go": True})
        with call(port) as peer:
            peer.send(wire.MANIFEST, entries(file("a")))
            peer.send(wire.DIGESTS, pack_flags(b"\0"))
            peer.send(wire.DONE)
            golden.check("copy_ended_early.txt", trouble(talk) + "\n")
    assert not (node.home / "model").exists()


def copy_time_s(node: LocalNode, share: float) -> float:
    """From the order to send until eight blocks have come."""
    source, target = node.home / "source", node.home / f"target-{share}"
    source.write_bytes(os.urandom(8 * BLOCK_BYTES))
    request = {"addr": HERE, "delete": False, "share": share, **OURS._asdict()}
    with (
        node.talk("copy", {**request, "paths": [str(target)], "source": False}) as receiver,
        node.talk("copy", {**request, "paths": [str(source)], "source": True}) as sender,
    ):
        port = receiver.take("listening")["port"]
        receiver.send({"next": None})
        sender.send({"next": {"addr": HERE, "port": port}})
        sender.send({"hash": receiver.read_until(kind="candidates")["blocks"]})
        receiver.read_until(kind="need")
        began = time.monotonic()
        for talk in (sender, receiver):
            talk.send({"go": True})
        receiver.read_until(kind="copied")
        took_s = time.monotonic() - began
        sender.read_until(kind="ended")
    assert target.read_bytes() == source.read_bytes()
    return took_s


@pytest.mark.timing
def test_a_copy_with_a_share_of_the_time_leaves_the_link_to_others(node: LocalNode) -> None:
    assert copy_time_s(node, 0.02) > 4 * copy_time_s(node, 1.0)


def test_a_receiver_ends_with_its_controller(node: LocalNode) -> None:
    with receiving(node) as (talk, port), call(port):
        assert talk.hang_up() == 0


def test_an_answer_of_megabytes_for_a_list_of_blocks_is_refused(node: LocalNode) -> None:
    with receiving(node) as (talk, port), call(port) as peer:
        peer.send(wire.MANIFEST, entries(file("a")))
        talk.read_until(kind="candidates")
        with contextlib.suppress(PeerError):
            peer.send(wire.DIGESTS, bytes(1 << 20))
        assert "something other" in trouble(talk)


def test_a_receiver_takes_from_its_channel_what_the_controller_sends_and_opens_no_port_for_it(node: LocalNode) -> None:
    request = {"paths": [str(node.home / "model")], "addr": HERE, "source": False, "delete": False, **OURS._asdict()}
    with node.talk("copy", request) as talk:
        port = talk.take("listening")["port"]
        talk.send({"next": None, "previous": "channel"})
        came: list[bytes] = []
        read: list[dict[str, Any]] = []

        def receive() -> bytes:
            # Records of the copy itself may come before it, or after.
            while not (sent := [one for one in talk.records if one["kind"] == "data"][len(read) :]):
                assert talk.read() is not None
            read.append(sent[0])
            return base64.b64decode(sent[0]["data"])

        def send(piece: memoryview) -> None:
            came.append(bytes(piece))
            talk.send({"data": base64.b64encode(piece).decode()})

        peer = Wire(wire.Pipe(send, receive))
        data = bytes(range(256)) * 2000
        talk.send({"go": True})
        send_file(peer, talk, data)
        assert max(map(len, came)) == 1 << 17
        peer.receive(wire.COPIED, most_bytes=0)
        with pytest.raises(PeerError), call(port):
            pass
    assert (node.home / "model" / "a").read_bytes() == data


def test_a_channel_on_which_nothing_more_comes_leaves_nothing_that_looks_whole(node: LocalNode, golden: Golden) -> None:
    request = {"paths": [str(node.home / "model")], "addr": HERE, "source": False, "delete": False, **OURS._asdict()}
    with node.talk("copy", request) as talk:
        talk.take("listening")
        talk.send({"next": None, "previous": "channel"})
        talk.send({"data": ""})
        golden.check("copy_channel_closed.txt", trouble(talk) + "\n")
    assert left_on(node) == set()


def test_where_a_link_leads() -> None:
    below = [("a", 0), ("a/b", 0), ("../a", 1), ("../../a", 2), ("./a", 0)]
    out = [("", 0), ("/a", 5), ("../a", 0), ("a/../b", 1), ("../../a", 1), ("a/..", 3), ("..", 0), ("./../a", 3)]
    assert [stays_below(*one) for one in below] == [True] * len(below)
    assert [stays_below(*one) for one in out] == [False] * len(out)


def test_a_manifest_has_what_links_out_of_it_lead_to(tmp_path: Path, golden: Golden) -> None:
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
    errors = {"a broken link": raised(AgentError, make_manifest, [str(top)])}
    (top / "gone").unlink()
    (top / "loop").symlink_to(tmp_path)
    errors["a loop"] = raised(AgentError, make_manifest, [str(top)])
    (top / "loop").unlink()
    os.mkfifo(top / "pipe")
    errors["a pipe"] = raised(AgentError, make_manifest, [str(top)])
    golden.check_errors("copy_sources", errors, tmp_path)


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
    many = b"\xff" * (len(flags) // 8 + 1)
    assert str(raised(ValueError, unpack_flags, many, len(flags))) == "more flags than blocks"


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
