from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multinode.cluster.cluster import Node
from multinode.copy.fetch import Fetched, Wanted, fetch_files
from multinode.errors import ContactLost, MultinodeError
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from multinode.transport.local import LocalTransport
from tests.golden import Golden, error_of, raised
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


def test_a_node_that_sends_other_than_it_announced_fills_no_disk(tmp_path: Path, golden: Golden) -> None:
    twice = {"kind": "files", "files": [{"name": "x", "size_bytes": 2}] * 2}
    many = {"kind": "files", "files": [{"name": "x", "size_bytes": 0}] * 100_001}
    cases: dict[str, tuple[dict[str, Any], ...]] = {
        "more than announced": (listed(4, 9), data(0, b"abc"), data(0, b"de"), END),
        "less than announced": (listed(4), data(0, b"abc"), END),
        "a file twice": (twice, data(0, b"ab"), END),
        "a size below 0": (listed(-1),),
        "more files than may be": (many,),
    }
    refused = {case: error_of(fetch, tmp_path / case, *records) for case, records in cases.items()}
    golden.check_errors("refused_files", refused, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 3 * 3


def test_more_than_is_free_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 << 30))
    refused = {"more than is free": error_of(fetch, tmp_path, listed((3 << 30) + 1), data(0, b"abc"))}
    golden.check_errors("refused_for_the_disk", refused, tmp_path)
    assert list(tmp_path.iterdir()) == []
    fetch(tmp_path, listed(3), data(0, b"abc"), END)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("out", "gone", "log.txt"), "gone does not exist; everything else was fetched"),
        (("gone", "out", "lost/x", "log.txt"), "gone, lost/x do not exist; everything else was fetched"),
        (("gone",), "gone does not exist"),
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
    agent = AgentTransport(nodes, AgentArchive(b""))
    slow = raised(ContactLost, fetch_files, agent, WANTED, tmp_path / "to", patience_s=1.0)
    said = re.sub(r"\d+ B", "SOME B", slow.message)
    assert (slow.node, said) == ("a", "stopped at SOME B of 1 MiB: the transfer is too slow")
    nodes.check()
