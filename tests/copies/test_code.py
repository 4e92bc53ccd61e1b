"""copy_code: what is sent to each node, and what goes wrong on the way."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.copy.code import copy_code
from multinode.errors import AgentFailed, ContactLost, MultinodeError
from multinode.job.code_tree import CodeTree, read_code
from multinode.node.copies import wire
from multinode.node.copies.wire import Pipe, Wire
from multinode.node.manifest import BLOCK_BYTES
from multinode.records.plan import SentCode
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.base import Transport
from multinode.transport.local import LocalTransport
from tests import make
from tests.golden import Golden, error_of
from tests.launch.scripted import DEADLINE_S, ScriptedNodes, Talk

CLUSTER = make.cluster("a", "b")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    for number in range(20):
        (made / f"{number}.py").write_text(str(number))
    (made / "large.py").write_bytes(bytes(range(256)) * 1000)
    return made


class Homes(Transport):
    """This machine as several nodes, each with a home directory of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, node: Node, command: str, *, deadline_s: float) -> Any:
        home = self._root / node.name
        home.mkdir(exist_ok=True)
        return LocalTransport(home).open(node, command, deadline_s=deadline_s)

    def close(self) -> None:
        pass


def copy(tmp_path: Path, code: CodeTree, run_id: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    agent = AgentTransport(Homes(tmp_path))
    try:
        copied = copy_code(agent, CLUSTER, code, run_id, say)
    finally:
        agent.close()
    assert (copied.source, copied.digest, copied.files) == (code.source, code.digest, len(code.files))
    return copied.sent


def test_after_an_edit_of_one_file_that_one_is_sent_to_every_node(tmp_path: Path, source: Path) -> None:
    said: list[str] = []
    first = read_code(source, source)
    assert copy(tmp_path, first, "r1", said.append) == dict.fromkeys(
        "ab", SentCode(files=len(first.files), size_bytes=first.size_bytes)
    )
    assert said[-1] == f"sent at most 21 files ({said[0].partition('(')[2].partition(')')[0]}) per node"
    (source / "3.py").write_text("edited")
    edited = read_code(source, source)
    assert copy(tmp_path, edited, "r2") == dict.fromkeys("ab", SentCode(files=1, size_bytes=6))
    for node in "ab":
        made = tmp_path / node / ".multinode" / "code"
        names = [file.path for file in edited.files]
        assert [(made / "r2" / "tree" / name).read_bytes() for name in names] == [
            (source / name).read_bytes() for name in names
        ]
        assert (made / "r1" / "tree" / "3.py").read_text() == "3"
    # Another attempt of the first run, after the edit: its tree is still there.
    again = msgspec.structs.replace(first, run_id="r1")
    assert copy(tmp_path, again, "r1-2") == dict.fromkeys("ab", SentCode(files=0, size_bytes=0))


def test_a_file_that_changed_since_it_was_read_is_not_taken_for_the_other(
    tmp_path: Path, source: Path, golden: Golden
) -> None:
    code = read_code(source, source)
    (source / "3.py").write_text("4")
    errors = {"another text": error_of(copy, tmp_path, code, "r1")}
    (source / "3.py").write_text("3")
    (source / "large.py").write_text("shorter")
    errors["another size"] = error_of(copy, tmp_path, code, "r1")
    (source / "large.py").unlink()
    (source / "large.py").symlink_to("/etc/passwd")
    errors["a link"] = error_of(copy, tmp_path, code, "r1")
    golden.check_errors("code_that_changed", errors, source)
    assert not list(tmp_path.glob("*/.multinode/code/r1"))


def ask(source: Path, play: Callable[[Talk], None]) -> MultinodeError:
    nodes = ScriptedNodes(play)
    agent = AgentTransport(nodes, AgentArchive(b""))
    with pytest.raises(MultinodeError) as caught:
        copy_code(agent, CLUSTER.first(1), read_code(source, source), "r1", lambda _: None)
    nodes.check()
    return caught.value


def have(data: bytes) -> dict[str, Any]:
    """A node's answer: the blocks that it has, a bit each."""
    said: list[bytes] = []
    Wire(Pipe(lambda piece: said.append(bytes(piece)), bytes)).send(wire.HAVE, data)
    return {"kind": "data", "data": base64.b64encode(b"".join(said)).decode()}


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\xff" * 9])
def test_a_node_is_sent_only_what_it_was_told_of(source: Path, data: bytes, golden: Golden) -> None:
    sent: list[dict[str, Any]] = []

    def play(talk: Talk) -> None:
        talk.received.get(timeout=DEADLINE_S)
        talk.say(have(data))
        assert talk.closed.wait(DEADLINE_S)
        sent.extend(talk.orders())

    golden.check_errors(f"asked_for_more_{len(data)}", {f"{len(data)} bytes of flags": ask(source, play)})
    assert sent == []


def test_a_node_that_takes_no_more_says_why(source: Path) -> None:
    def play(talk: Talk) -> None:
        talk.received.get(timeout=DEADLINE_S)
        talk.is_deaf = True
        talk.say(have(b"\0\0\0"), {"kind": "error", "message": "no space left", "hint": "df -h ~"})

    error = ask(source, play)
    assert isinstance(error, AgentFailed)
    assert str(error) == "a: no space left"


def test_a_node_that_goes_away_is_named(source: Path) -> None:
    def play(talk: Talk) -> None:
        talk.received.get(timeout=DEADLINE_S)
        talk.say(have(b"\0\0\0"))
        piece = base64.b64decode(talk.received.get(timeout=DEADLINE_S)["data"])
        assert piece.endswith(hashlib.sha256(b"0").digest() + b"0")
        talk.hang_up()

    error = ask(source, play)
    assert isinstance(error, ContactLost)
    assert error.node == "a"


def test_a_large_file_is_sent_in_blocks_and_what_changed_of_it_alone(tmp_path: Path, source: Path) -> None:
    large = bytearray(os.urandom(2 * BLOCK_BYTES + 5))
    (source / "large.py").write_bytes(large)
    assert copy(tmp_path, read_code(source, source), "r1")["a"].size_bytes > len(large)
    large[BLOCK_BYTES + 7] ^= 1
    (source / "large.py").write_bytes(large)
    sent = copy(tmp_path, read_code(source, source), "r2")
    assert sent == dict.fromkeys("ab", SentCode(files=1, size_bytes=BLOCK_BYTES))
    assert (tmp_path / "b" / ".multinode" / "code" / "r2" / "tree" / "large.py").read_bytes() == large
