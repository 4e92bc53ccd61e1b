"""clean: which runs are meant by an id, the beginning of one, or `last`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multinode.cluster.cluster import Node
from multinode.errors import ConnectError
from multinode.launch.node_runs import clean, find_runs
from multinode.records.run import new_run
from multinode.transport.agent import AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make
from tests.golden import Golden, error_of

CLUSTER = make.cluster("a", "b")
ON_NODES = {"a": ["r1-aa.0", "r1-aa-1.0", "r2-bb.0"], "b": ["r1-aa.1", "r3-cc.1"]}


def answer(node: Node, command: str, _stdin: bytes) -> list[bytes]:
    runs = [{"run_id": run_id, "created_s": 1.0} for run_id in ON_NODES[node.name]]
    kind = (
        {"kind": "runs", "runs": runs} if command.endswith("runs") else {"kind": "cleaned", "removed": [], "kept": []}
    )
    return [json.dumps(kind).encode() + b"\n"]


def find(runs: Path, *asked: str) -> tuple[str, ...]:
    return find_runs(AgentTransport(FakeTransport(answer)), CLUSTER, runs, asked)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Of this machine: one that lies on no node any more."""
    make.store(tmp_path, "r4-dd", run=new_run(make.plan("a", "b", workers=2), 1.0))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("r2-bb", ("r2-bb",)),
        ("r2", ("r2-bb",)),
        ("r3-cc", ("r3-cc",)),
        # One that was restarted, with its attempts; and one of these alone.
        ("r1", ("r1-aa", "r1-aa-1")),
        ("r1-aa-1", ("r1-aa-1",)),
        ("last", ("r4-dd",)),
        ("r4", ("r4-dd",)),
    ],
)
def test_a_run_is_named_as_help_promises(runs: Path, asked: str, ids: tuple[str, ...]) -> None:
    assert find(runs, asked) == ids
    assert find(runs, asked, asked, "r3") == tuple(dict.fromkeys((*ids, "r3-cc")))


def test_what_names_no_run_or_several_is_refused(runs: Path, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "empty").mkdir()
    golden.check_errors(
        "refused_clean",
        {
            "no such run": error_of(find, runs, "r2", "nosuch"),
            "several runs": error_of(find, runs, "r2", "r"),
            "last of no runs": error_of(find, tmp_path / "empty", "last"),
        },
        tmp_path,
    )


def test_a_node_that_cannot_be_asked_hides_no_run_of_the_others_and_is_told(runs: Path) -> None:
    def half(node: Node, command: str, stdin: bytes) -> list[bytes]:
        if node.name == "a":
            raise ConnectError("no route", node="a")
        return answer(node, command, stdin)

    agent = AgentTransport(FakeTransport(half))
    assert find_runs(agent, CLUSTER, runs, ["r3"]) == ("r3-cc",)
    assert [node.error for node in clean(agent, CLUSTER, ["r3-cc"], 0.0)] == ["no route", None]

    def none(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        raise ConnectError("no route", node=node.name)

    unreached = error_of(find_runs, AgentTransport(FakeTransport(none)), CLUSTER, runs, ["r3"])
    assert (type(unreached), unreached.message) == (ConnectError, "no route")
