from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.cluster import Node
from multinode.copy.transfer import Fetched, Wanted, fetch_files
from multinode.errors import ContactLost, MultinodeError
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from multinode.transport.local import LocalTransport
from tests.launch.scripted import DEADLINE_S, ScriptedNodes, Talk

WANTED = Wanted(node=Node(name="a"), paths=("out",), cwd=None)
END = {"kind": "fetched"}


def listed(*sizes: int) -> dict[str, Any]:
    return {"kind": "files", "files": [{"name": f"out/{n}", "size_bytes": size} for n, size in enumerate(sizes)]}


def data(number: int, content: bytes) -> dict[str, Any]:
    return {"kind": "data", "file": number, "data": base64.b64encode(content).decode()}


def fetch(to: Path, *records: dict[str, Any], say: Callable[[str], None] = lambda _: None) -> Fetched:
    fake = FakeTransport(lambda *_: [json.dumps(record).encode() + b"\n" for record in records])
    agent = AgentTransport(fake, AgentArchive(b""))
    return fetch_files(agent, WANTED, to, say)


def test_what_was_announced_comes_home(tmp_path: Path) -> None:
    fetched = fetch(tmp_path / "to", listed(4, 0, 2), data(0, b"ab"), data(2, b"ef"), data(0, b"cd"), END)
    assert (fetched.files, fetched.size_bytes) == (("out/0", "out/1", "out/2"), 6)
    assert [path.read_bytes() for path in sorted((tmp_path / "to" / "out").iterdir())] == [b"abcd", b"", b"ef"]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((listed(4, 9), data(0, b"abc"), data(0, b"de"), END), "it sent more of out/0 than announced"),
        ((listed(4), data(0, b"abc"), END), "it sent less of out/0 than announced"),
        ((listed(1 << 62), data(0, b"abc")), "are free"),
        ((listed(-1),), "cannot read its answer"),
        (({"kind": "files", "files": [{"name": "x", "size_bytes": 0}] * 100_001},), "cannot read its answer"),
        (({"kind": "files", "files": [{"name": "x", "size_bytes": 2}] * 2}, data(0, b"ab"), END), "named a file twice"),
    ],
)
def test_a_node_that_sends_other_than_it_announced_fills_no_disk(
    tmp_path: Path, records: tuple[dict[str, Any], ...], said: str
) -> None:
    with pytest.raises(MultinodeError, match=said):
        fetch(tmp_path / "to", *records)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("out", "gone", "log.txt"), "gone is not there; everything else was fetched"),
        (("gone", "out", "lost/x", "log.txt"), "gone, lost/x are not there; everything else was fetched"),
        (("gone",), "gone is not there"),
    ],
)
def test_a_path_that_is_not_there_costs_none_of_the_others(
    tmp_path: Path, asked: tuple[str, ...], message: str
) -> None:
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "out" / "a.bin").write_bytes(b"abcd")
    (work / "log.txt").write_text("done")
    (tmp_path / "home").mkdir()
    agent = AgentTransport(LocalTransport(tmp_path / "home"))
    wanted = Wanted(node=Node(name="localhost"), paths=asked, cwd=str(work))
    with pytest.raises(MultinodeError) as raised:
        fetch_files(agent, wanted, tmp_path / "to")
    agent.close()
    assert raised.value.message == message
    missing = [str(work / path) for path in asked if not (work / path).exists()]
    assert raised.value.hint == f"localhost says: looked for {', '.join(missing)}"
    came = {path.name: path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert came == ({"a.bin": b"abcd", "log.txt": b"done"} if len(asked) > 1 else {})


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "out/../../run.json", "out/..", "..", "", "."])
def test_a_node_cannot_choose_where_its_files_lie(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json").write_text("ours")
    files = {"kind": "files", "files": [{"name": name, "size_bytes": 4}]}
    with pytest.raises(MultinodeError):
        fetch(tmp_path / "to", files, data(0, b"evil"), END)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "run.json"]
    assert (tmp_path / "run.json").read_text() == "ours"


def test_what_is_said_of_a_file_is_one_line_whatever_it_is_called(tmp_path: Path) -> None:
    said: list[str] = []
    files = {"kind": "files", "files": [{"name": "a\nerror: node0: all is lost\x1b[2J", "size_bytes": 1}]}
    fetch(tmp_path / "to", files, data(0, b"x"), END, say=said.append)
    assert said
    assert all(line.isprintable() for line in said)


def test_a_node_that_trickles_is_let_go_of(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say(listed(1 << 20))
        end = time.monotonic() + DEADLINE_S
        while not talk.closed.wait(0.02):
            assert time.monotonic() < end, "it is waited for without end"
            talk.say(data(0, b"x"))

    nodes = ScriptedNodes(play)
    with pytest.raises(ContactLost, match="the transfer is too slow"):
        fetch_files(AgentTransport(nodes, AgentArchive(b"")), WANTED, tmp_path / "to", patience_s=1.0)
    nodes.check()
