"""A copy as a whole, over loopback: every node is this machine with a home directory of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.cluster import Node
from multinode.copy.chain import (
    Copied,
    CopyProgress,
    Member,
    Participant,
    Room,
    Trouble,
    _Need,
    find_failures,
    require_room,
)
from multinode.copy.paths import (
    CONTROLLER,
    CopiedNode,
    CopyReport,
    CopyRequest,
    PathLook,
    choose_source,
    copy_paths,
    progress_text,
)
from multinode.copy.screen import show
from multinode.errors import ConnectError, MultinodeError
from multinode.findings.finding import Finding, message_of
from multinode.node.manifest import BLOCK_BYTES
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Stream, Transport
from multinode.transport.fake import FakeTransport
from multinode.transport.local import LocalTransport
from tests import make
from tests.golden import Golden, error_of

PATH = "~/model"
WEIGHTS = bytes(range(256)) * (2 * BLOCK_BYTES // 256) + b"the rest"
Hook = Callable[[Any, bytes], None]


class Homes(Transport):
    """Nodes that are this machine, each with a home directory; `hooks` see what is sent to a node's agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.down: set[str] = set()
        self.hooks: dict[str, Hook] = {}

    def open(self, node: Node, command: str, *, deadline_s: float) -> Stream:
        if node.name in self.down:
            raise ConnectError("connection refused", node=node.name)
        home = self.folder / node.name
        home.mkdir(exist_ok=True)
        stream = LocalTransport(home).open(node, command, deadline_s=deadline_s)
        hook = self.hooks.get(node.name)
        if hook is not None:
            send = stream.send

            def watched(data: bytes) -> None:
                send(data)
                hook(stream, data)

            stream.send = watched  # type: ignore[method-assign]
        return stream

    def close(self) -> None:
        pass


class Nodes:
    """Some of them, and the command."""

    def __init__(self, folder: Path) -> None:
        self.homes = Homes(folder)
        self.folder = folder

    def model(self, node: str) -> Path:
        return self.folder / node / "model"

    def write(self, node: str, **files: bytes) -> Path:
        for name, data in files.items():
            path = self.model(node) / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.model(node)

    def copy(
        self,
        nodes: str = "abc",
        path: str = PATH,
        observe: Callable[[CopyProgress], None] = lambda _: None,
        **more: Any,
    ) -> CopyReport:
        cluster = make.cluster(*(Node(name=name, addr="127.0.0.1") for name in nodes))
        agent = AgentTransport(self.homes)
        here = LocalTransport(self.folder / CONTROLLER)
        try:
            (self.folder / CONTROLLER).mkdir(exist_ok=True)
            return copy_paths(agent, cluster, CopyRequest(paths=(path,), **more), observe, here=here)
        finally:
            agent.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    yield Nodes(tmp_path)
    # No node keeps anything but what was copied and the agent's own.
    for home in tmp_path.iterdir():
        assert not list(home.rglob("*.multinode-copy")), "what was staged stays"


def contents(top: Path) -> dict[str, Any]:
    """All below a directory: content, mode and time of files, texts of links."""
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        name = os.fsdecode(os.fsencode(path.relative_to(top)))
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_dir():
            found[name] = path.stat().st_mode
        else:
            found[name] = (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
    return found


def states(report: CopyReport) -> list[tuple[str, str, int]]:
    return [(node.name, node.state, node.received_bytes) for node in report.nodes]


def test_a_model_is_equal_on_all_nodes_and_a_second_copy_sends_nothing(nodes: Nodes) -> None:
    model = nodes.write("b", weights=WEIGHTS, config=b"{}", empty=b"", sub__deep__more=b"x" * 1000)
    (model / "sub" / "run").write_bytes(b"#!")
    (model / "sub" / "run").chmod(0o750)
    (model / "link").symlink_to("sub/deep")
    (model / "nothing in it").mkdir(mode=0o700)
    (model / "line\nbreak").write_bytes(b"1")
    Path(os.fsdecode(os.fsencode(model) + b"/not-utf-8-\xff")).write_bytes(b"2")
    os.utime(model / "config", ns=(1, 1_500_000_000_123_456_789))
    report = nodes.copy()
    size = len(WEIGHTS) + 2 + 1000 + 2 + 2
    assert states(report) == [("a", "copied", size), ("b", "source", 0), ("c", "copied", size)]
    assert (report.ok, report.files, report.size_bytes) == (True, 7, size)
    assert contents(nodes.model("a")) == contents(model)
    assert contents(nodes.model("c")) == contents(model)
    again = nodes.copy(source="b")
    assert states(again) == [("a", "equal", 0), ("b", "source", 0), ("c", "equal", 0)]
    assert again.digest == report.digest


def test_only_what_differs_is_sent_and_more_is_removed_only_if_asked(nodes: Nodes) -> None:
    files = {"weights": WEIGHTS, "config": b"{}", "sub__x": b"old"}
    nodes.write("a", **files)
    nodes.write("b", **files | {"config": b"[]", "extra": b"1", "sub__extra": b"2", "more__than__one": b"3"})
    nodes.write("c", **files | {"weights": WEIGHTS[:-1] + b"!"})
    report = nodes.copy(source="a")
    assert states(report) == [("a", "source", 0), ("b", "copied", 2), ("c", "copied", len(WEIGHTS))]
    assert [node.extra_files for node in report.nodes] == [0, 3, 0]
    assert (nodes.model("b") / "extra").exists()
    assert (nodes.model("c") / "weights").read_bytes() == WEIGHTS
    report = nodes.copy(source="a", delete=True)
    assert [node.extra_files for node in report.nodes] == [0, 3, 0]
    assert contents(nodes.model("b")) == contents(nodes.model("a")) == contents(nodes.model("c"))


def test_what_an_earlier_copy_has_left_is_not_sent_again(nodes: Nodes) -> None:
    nodes.write("a", weights=WEIGHTS, config=b"{}")
    for node, came in (("b", WEIGHTS[: BLOCK_BYTES + 5]), ("c", b"!" + WEIGHTS[1 : 2 * BLOCK_BYTES])):
        tree = nodes.folder / node / ".model.multinode-copy" / "tree"
        tree.mkdir(parents=True)
        tree.parent.chmod(0o700)
        (tree / "weights").write_bytes(came)
        (tree / "of another copy").write_bytes(b"1")
    report = nodes.copy()
    rest = len(WEIGHTS) - BLOCK_BYTES + len(b"{}")
    assert states(report) == [("a", "source", 0), ("b", "copied", rest), ("c", "copied", rest)]
    assert contents(nodes.model("b")) == contents(nodes.model("c")) == contents(nodes.model("a"))


def test_one_file_and_a_path_that_is_a_link_to_another_disk(nodes: Nodes) -> None:
    nodes.write("a", weights=WEIGHTS)
    disk = nodes.folder / "b" / "disk"
    disk.mkdir(parents=True)
    nodes.model("b").symlink_to(disk / "models")
    assert nodes.copy("ab").ok
    assert (disk / "models" / "weights").read_bytes() == WEIGHTS
    assert nodes.model("b").is_symlink()
    (nodes.model("a") / "weights").write_bytes(b"new")
    report = nodes.copy("ab", PATH + "/weights", source="a")
    assert states(report)[1] == ("b", "copied", 3)
    assert (disk / "models" / "weights").read_bytes() == b"new"


def test_files_of_this_machine_go_to_the_nodes_through_the_first_of_them(nodes: Nodes) -> None:
    nodes.write(CONTROLLER, weights=WEIGHTS, config=b"{}")
    report = nodes.copy()
    size = len(WEIGHTS) + 2
    assert states(report) == [
        (CONTROLLER, "source", 0),
        ("a", "copied", size),
        ("b", "copied", size),
        ("c", "copied", size),
    ]
    assert contents(nodes.model("c")) == contents(nodes.model(CONTROLLER))


def test_a_node_that_is_down_is_left_out_and_the_rest_get_theirs(nodes: Nodes) -> None:
    nodes.write("a", weights=WEIGHTS)
    nodes.homes.down.add("b")
    report = nodes.copy()
    assert states(report) == [("a", "source", 0), ("b", "failed", 0), ("c", "copied", len(WEIGHTS))]
    assert (report.ok, report.unreached, message_of(report.nodes[1].failure)) == (False, True, "connection refused")
    assert report.nodes[1].failure == Finding(code="left-out", node="b", message="connection refused")


def test_a_node_that_dies_in_the_middle_of_the_chain_takes_nobody_with_it(nodes: Nodes) -> None:
    nodes.write("a", weights=WEIGHTS)

    def die(stream: Any, data: bytes) -> None:
        if b'"go"' in data:
            os.killpg(stream._process.pid, signal.SIGKILL)  # noqa: SLF001 - the node dies, not the transport

    nodes.homes.hooks["b"] = die
    report = nodes.copy("abcd")
    assert [node.state for node in report.nodes] == ["source", "failed", "copied", "copied"]
    assert contents(nodes.model("c")) == contents(nodes.model("d")) == contents(nodes.model("a"))
    assert not nodes.model("b").exists()
    nodes.homes.hooks.clear()
    assert nodes.copy("ab").ok


def test_the_first_node_dies_while_it_gets_files_of_this_machine(nodes: Nodes) -> None:
    nodes.write(CONTROLLER, weights=WEIGHTS)

    def die(stream: Any, data: bytes) -> None:
        if b'"go"' in data:
            os.killpg(stream._process.pid, signal.SIGKILL)  # noqa: SLF001 - the node dies, not the transport

    nodes.homes.hooks["a"] = die
    report = nodes.copy("ab")
    assert [node.state for node in report.nodes] == ["source", "failed", "copied"]
    assert contents(nodes.model("b")) == contents(nodes.model(CONTROLLER))
    nodes.homes.hooks.clear()
    assert nodes.copy("ab", source=CONTROLLER).ok


def test_a_node_where_something_is_in_the_way_says_so_and_the_rest_get_theirs(nodes: Nodes) -> None:
    nodes.write("a", sub__x=b"1")
    nodes.write("b", sub=b"a file")
    report = nodes.copy(source="a")
    assert [node.state for node in report.nodes] == ["source", "failed", "copied"]
    assert "model/sub is a file here and a directory on the source" in message_of(report.nodes[1].failure)
    assert contents(nodes.model("b")).keys() == {"sub"}


def test_an_interrupted_copy_says_that_nothing_is_lost(nodes: Nodes, golden: Golden) -> None:
    nodes.write("a", weights=WEIGHTS)

    def interrupt(_: CopyProgress) -> None:
        raise KeyboardInterrupt

    golden.check_errors("interrupted", {"Ctrl-C": error_of(nodes.copy, observe=interrupt)})
    assert nodes.copy().ok


def test_a_file_that_changes_meanwhile_is_no_copy(nodes: Nodes, tmp_path: Path, golden: Golden) -> None:
    weights = nodes.write("a", weights=WEIGHTS) / "weights"

    def change(_: Any, data: bytes) -> None:
        if b'"hash"' in data:
            weights.write_bytes(WEIGHTS + b"more")

    nodes.homes.hooks["a"] = change
    golden.check_errors("source_that_changed", {"while it was copied": error_of(nodes.copy)}, tmp_path)
    assert not nodes.model("b").exists()
    nodes.homes.hooks.clear()
    assert nodes.copy().ok


def test_a_home_directory_is_never_copied(nodes: Nodes, golden: Golden) -> None:
    errors = {path: error_of(nodes.copy, "ab", path) for path in ("~", "/", "~/..", "~/.")}
    golden.check_errors("home_directory", errors)


def look(*, exists: bool = True, digest: str = "1", path: str = "m", **more: Any) -> PathLook:
    return PathLook(path=path, full=f"/{path}", exists=exists, digest=digest, files=2, size_bytes=3, **more)


MISSING = look(exists=False)


@pytest.mark.parametrize(
    ("asked", "looks", "here", "found"),
    [
        (None, {"a": MISSING, "b": look()}, MISSING, "b"),
        (None, {"a": look(), "b": look()}, MISSING, "a"),
        (None, {"a": MISSING, "b": MISSING}, look(), CONTROLLER),
        ("b", {"a": look(), "b": look(digest="2")}, MISSING, "b"),
        (CONTROLLER, {"a": look()}, look(), CONTROLLER),
    ],
)
def test_who_has_the_files_is_the_source(
    asked: str | None, looks: dict[str, PathLook], here: PathLook, found: str
) -> None:
    request = CopyRequest(paths=("m",), source=asked)
    assert choose_source(request, {name: (one,) for name, one in looks.items()}, (here,)) == found


def test_without_one_source_it_is_refused(golden: Golden) -> None:
    cases: dict[str, tuple[str | None, dict[str, PathLook]]] = {
        "different files": (None, {"a": look(), "b": look(digest="2")}),
        "no files": (None, {"a": MISSING, "b": MISSING}),
        "not on that node": ("a", {"a": MISSING, "b": look()}),
        "no such node": ("x", {"a": look()}),
        "a broken link": (None, {"a": look(reason="a/b is a broken link")}),
    }
    both = {"a": (look(), look(exists=False, path="d")), "b": (MISSING, look(path="d"))}
    golden.check_errors(
        "refused_source",
        {
            case: error_of(
                choose_source,
                CopyRequest(paths=("m",), source=asked),
                {name: (one,) for name, one in looks.items()},
                (MISSING,),
            )
            for case, (asked, looks) in cases.items()
        }
        | {
            "paths of several nodes": error_of(
                choose_source, CopyRequest(paths=("m", "d")), both, (MISSING, look(exists=False, path="d"))
            )
        },
    )


def member(name: str, *said: Any, error: MultinodeError | None = None) -> Member:
    agent = AgentTransport(FakeTransport(lambda *_: []))
    made = Member(Participant(Node(name=name), agent, "127.0.0.1", ("/m",)))
    for record in said:
        made.take(record)
    made.error = error
    return made


UP = Trouble(where="upstream", message="it closed the connection")
DONE = Copied(digest="1", extra=0)


def test_of_a_broken_chain_the_first_that_fails_counts() -> None:
    down = Trouble(where="downstream", message="refused")
    failures = find_failures([member("a", down), member("b", UP), member("c", UP)])
    assert failures.certain == {}
    assert failures.suspect is not None
    assert (failures.suspect[0], str(failures.suspect[1])) == ("b", "b: a cannot send to it: refused")
    gone = ConnectError("gone", node="b")
    assert find_failures([member("a", down), member("b", error=gone), member("c", UP)]) == ({"b": gone}, None)
    here = Trouble(where="here", message="No space left on device", hint="make room")
    (name, error) = next(iter(find_failures([member("a", down), member("b", here), member("c")]).certain.items()))
    assert (name, error.message, error.hint) == ("b", "No space left on device", "make room")
    behind = find_failures([member("a"), member("b", DONE, down), member("c", UP)])
    assert behind.suspect is not None
    assert behind.suspect[0] == "c"
    alone = find_failures([member("a"), member("b"), member("c", UP)])
    assert alone.suspect is not None
    assert alone.suspect[0] == "b"
    first = error_of(find_failures, [member("a", here), member("b", UP)])
    assert (first.message, first.hint) == ("No space left on device", "make room")


def test_a_node_without_room_is_named_with_what_it_lacks(golden: Golden) -> None:
    fits, full = Room("/data", 1 << 30, 2 << 30), Room("/data", 3 << 30, 2 << 30)
    need = [_Need(receive_bytes=1, places=places) for places in ((fits,), (full,), (fits, full))]
    require_room([member("a", need[0])])
    full_nodes = error_of(require_room, [member(name, one) for name, one in zip("abc", need, strict=True)])
    golden.check_errors("no_room", {"on b and c": full_nodes})


def test_progress_is_that_of_the_slowest_node() -> None:
    assert progress_text(CopyProgress(hashed_bytes={})) == "comparing existing files"
    assert progress_text(CopyProgress(hashed_bytes={"a": 1 << 20})) == "comparing existing files: 1 MiB"
    half = CopyProgress(
        hashed_bytes={},
        moved_bytes={"b": 1 << 30, "c": 1 << 29},
        receive_bytes={"b": 1 << 30, "c": 1 << 30},
        time_s=5.0,
    )
    assert progress_text(half) == "copying: c has 50% of 1 GiB, 0.107 GB/s, 5.0 s left"


def test_the_screen_names_every_node(golden: Golden) -> None:
    nodes = (
        CopiedNode(name="gpu-a", state="source"),
        CopiedNode(name="gpu-b", state="copied", received_bytes=15 << 30, extra_files=3, cpu_s=10.0),
        CopiedNode(name="gpu-c", state="equal"),
        CopiedNode(
            name="gpu-d",
            state="failed",
            failure=Finding(message="no answer within 45 s", hint="see whether it is up: ssh gpu-d true"),
        ),
    )
    report = CopyReport(
        ok=False,
        paths=("models/qwen", "my data"),
        source="gpu-a",
        files=12,
        size_bytes=15 << 30,
        digest="0123456789abcdef" * 4,
        nodes=nodes,
        deleted=False,
        transfer_s=140.0,
        time_s=150.0,
        unreached=True,
    )
    golden.check_answer("copy", show(report))
