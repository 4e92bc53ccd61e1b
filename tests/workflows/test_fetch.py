from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from multinode.core.cluster.cluster import Node
from multinode.errors import MultinodeError
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from multinode.workflows.run.fetch import Fetched, Wanted, fetch_files

END = {"kind": "fetched"}


def listed(*sizes: int) -> dict[str, Any]:
    return {"kind": "files", "files": [{"name": f"out/{n}", "size_bytes": size} for n, size in enumerate(sizes)]}


def data(number: int, content: bytes) -> dict[str, Any]:
    return {"kind": "data", "file": number, "data": base64.b64encode(content).decode()}


def fetch(to: Path, *records: dict[str, Any]) -> Fetched:
    fake = FakeTransport(lambda *_: [json.dumps(record).encode() + b"\n" for record in records])
    agent = AgentTransport(fake, AgentArchive(b""))
    return fetch_files(agent, Wanted(node=Node(name="a"), paths=("out",), cwd=None), to)


def test_what_was_announced_comes_home(tmp_path: Path) -> None:
    fetched = fetch(tmp_path / "to", listed(4, 0, 2), data(0, b"ab"), data(2, b"ef"), data(0, b"cd"), END)
    assert (fetched.files, fetched.size_bytes) == (("out/0", "out/1", "out/2"), 6)
    assert [path.read_bytes() for path in sorted((tmp_path / "to" / "out").iterdir())] == [b"abcd", b"", b"ef"]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((listed(4, 9), data(0, b"abc"), data(0, b"de"), END), "it sent more of out/0 than it had announced"),
        ((listed(4), data(0, b"abc"), END), "it sent less of out/0 than it had announced"),
        ((listed(1 << 62), data(0, b"abc")), "are free for it"),
        ((listed(-1),), "cannot be read"),
        (({"kind": "files", "files": [{"name": "x", "size_bytes": 0}] * 100_001},), "cannot be read"),
    ],
)
def test_a_node_that_sends_other_than_it_announced_fills_no_disk(
    tmp_path: Path, records: tuple[dict[str, Any], ...], said: str
) -> None:
    with pytest.raises(MultinodeError, match=said):
        fetch(tmp_path / "to", *records)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 3
