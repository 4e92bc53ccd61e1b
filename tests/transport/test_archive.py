from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from multinode.check.probe import SentFacts
from multinode.cluster.cluster import Node
from multinode.errors import MultinodeError
from multinode.launch.node_runs import NodeRuns
from multinode.transport.agent import AgentArchive, AgentStream, AgentTransport, build_archive, load_archive
from multinode.transport.base import Completed
from multinode.transport.fake import FakeStream, FakeTransport
from multinode.transport.local import LocalStream, LocalTransport
from tests.golden import Golden, error_of


def run(home: Path, command: list[str], stdin: bytes) -> Completed:
    """What a program makes of it on a node."""
    done = subprocess.run(command, env={"HOME": str(home)}, input=stdin, capture_output=True, timeout=30, check=False)
    return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_it_is_the_same_byte_for_byte_each_time_and_named_by_its_content() -> None:
    data = build_archive()
    assert data == build_archive()
    archive = AgentArchive(data)
    assert archive.path == f".multinode/agent/{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    assert AgentArchive(data + b"x").path != archive.path
    assert load_archive() is load_archive()


def test_it_holds_all_of_the_agent_uncompressed_and_nothing_else_of_ours() -> None:
    source = Path(__file__).parents[2] / "multinode"
    parts = [path.relative_to(source) for part in ("node", "worker") for path in (source / part).rglob("*.py")]
    expected = {f"multinode_agent/{path}" for path in (*parts, "__init__.py")}
    with zipfile.ZipFile(io.BytesIO(build_archive())) as archive:
        names = set(archive.namelist())
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    assert names - {"pynvml.py"} == expected | {"__main__.py"}


def test_a_copy_with_compiled_modules_is_kept_beside_it_and_goes_before_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "agent.pyz", tmp_path / f"agent.{sys.implementation.cache_tag}.pyz"
    path.write_bytes(build_archive())
    command = [sys.executable, "-I", "-S", str(path), "runs"]
    request = b'{"schema": 1, "run_id": "none"}\n'
    first = run(tmp_path, command, request)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([path.name, copy.name])
    assert copy.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(copy) as compiled:
        names = set(compiled.namelist())
    assert {
        "multinode_agent/node/main.py",
        "multinode_agent/node/main.pyc",
        "multinode_agent/worker/hooks.pyc",
    } <= names
    # Of the archive itself the first module alone is left.
    with zipfile.ZipFile(io.BytesIO(build_archive())) as whole, zipfile.ZipFile(path, "w") as rest:
        rest.writestr("__main__.py", whole.read("__main__.py"))
    again = run(tmp_path, command, request)
    assert again == first
    # To an interpreter of another version the sources in it are all that there is.
    with zipfile.ZipFile(copy, "w") as other, zipfile.ZipFile(io.BytesIO(build_archive())) as whole:
        for name in whole.namelist():
            other.writestr(name, whole.read(name))
            other.writestr(f"{name}c", b"not of this version")
        other.comment = bytes(64)
    data = copy.read_bytes()[:-64]
    copy.write_bytes(data + hashlib.sha256(data).hexdigest().encode())
    other_version = run(tmp_path, command, request)
    assert (other_version, first.exit_code) == (first, 0)


def test_a_bare_interpreter_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(build_archive())
    command = [sys.executable, "-I", "-S", str(path), "no-such-verb"]
    ended = run(tmp_path, command, b"{}\n")
    assert (ended.exit_code, ended.stderr) == (1, b"")
    assert [json.loads(line)["kind"] for line in ended.stdout.split(b"\n") if line] == ["agent", "error"]


@pytest.mark.parametrize("sent", [1.0, 0.5])
def test_a_node_gets_all_of_it_or_nothing_and_its_senders_have_names_of_their_own(
    tmp_path: Path, sent: float, golden: Golden
) -> None:
    archive = AgentArchive(b"print('here')\n" * 100)
    used: list[str] = []

    def answer(_: Node, command: str, stdin: bytes) -> Completed:
        if command.startswith("sh -c"):
            used.append(command)
            return run(tmp_path, ["sh", "-c", command], stdin[: int(len(stdin) * sent)])
        ended = run(tmp_path, ["sh", "-c", command.replace("python3", sys.executable)], stdin)
        if ended.exit_code == 0:
            return Completed(exit_code=0, stdout=b'{"kind":"facts"}\n', stderr=b"")
        return ended

    def call() -> None:
        AgentTransport(FakeTransport(answer), archive).call(Node(name="a"), "probe", {}, SentFacts, deadline_s=5)

    if sent < 1:
        for _ in range(2):
            golden.check_errors("not_stored", {"half of it arrived": error_of(call)})
        # Two senders on nodes that share a home, a host name and process ids use two names.
        assert len(set(used)) == 2
    else:
        call()
    assert [path.name for path in (tmp_path / ".multinode/agent").iterdir()] == ([Path(archive.path).name] * int(sent))


def spoil(path: Path, how: str) -> None:
    """Damage a file as a power failure, a bad disk or a careless copy does."""
    data = path.read_bytes()
    if how == "whole":
        return
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "zeros":
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    elif how == "a byte":
        at = data.index(b"def say_hello")
        path.write_bytes(data[:at] + b"deg" + data[at + 3 :])
    elif how == "other code":
        with zipfile.ZipFile(path, "w") as other:
            other.writestr("__main__.py", "print('hello')")
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "copy"),
    [
        *((how, "missing") for how in ("missing", "empty", "cut", "zeros", "a byte", "other code")),
        *(("whole", copy) for copy in ("empty", "cut", "zeros", "other code")),
        ("empty", "cut"),
        ("other code", "whole"),
    ],
)
def test_a_damaged_archive_or_copy_is_noticed_and_healed(tmp_path: Path, how: str, copy: str) -> None:
    sent: list[str] = []

    class Recorded(LocalTransport):
        def open(self, node: Node, command: str, *, deadline_s: float) -> LocalStream:
            if command.startswith("sh -c"):
                sent.append(command)
            return super().open(node, command, deadline_s=deadline_s)

    def call() -> None:
        agent, node = AgentTransport(Recorded(tmp_path)), Node(name="a", python=sys.executable)
        request = {"schema": 1, "run_id": "none"}
        assert not agent.call(node, "runs", request, NodeRuns, deadline_s=20).runs
        # It compiles its modules first, which takes seconds where others use the processors.
        agent.close(60.0)

    call()
    archive = tmp_path / load_archive().path
    compiled = archive.with_suffix(f".{sys.implementation.cache_tag}.pyz")
    assert sorted(archive.parent.iterdir()) == sorted([archive, compiled])
    good = compiled.read_bytes()
    spoil(archive, how)
    spoil(compiled, copy)
    call()
    call()
    assert archive.read_bytes() == load_archive().data
    assert compiled.read_bytes()[-64:] == hashlib.sha256(compiled.read_bytes()[:-64]).hexdigest().encode()
    assert len(good) == compiled.stat().st_size
    assert len(sent) == (1 if how == "whole" else 2)


def test_what_other_releases_left_goes_when_it_is_old_and_no_run_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / ".multinode" / "agent"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / ".multinode").chmod(0o700)
    runs = tmp_path / ".multinode" / "runs" / "r.0"
    runs.mkdir(parents=True, mode=0o700)
    (runs / "status.json").write_text('{"state": "running"}')
    (runs / "request.json").write_text(json.dumps({"archive": f"{'b' * 16}.pyz"}))
    old, new = ["a" * 16, "b" * 16], "c" * 16
    for name in (*old, new):
        for path in (folder / f"{name}.pyz", folder / f"{name}.cpython-39.pyz", folder / f".{name}.pyz.{'0' * 16}"):
            path.write_text("")
            if name in old:
                os.utime(path, (0, 0))
    (folder / "mine.txt").write_text("")
    os.utime(folder / "mine.txt", (0, 0))
    archive = folder / Path(load_archive().path).name
    archive.write_bytes(load_archive().data)
    os.utime(archive, (0, 0))
    ended = run(tmp_path, [sys.executable, "-I", "-S", str(archive), "runs"], b'{"schema": 1, "run_id": "none"}\n')
    assert (ended.exit_code, ended.stderr) == (0, b"")
    left = {path.name.lstrip(".").split(".")[0] for path in folder.iterdir()}
    assert left == {"b" * 16, "c" * 16, "mine", archive.stem}
    assert archive.stat().st_mtime > 1e9, "it is used"


def test_its_first_lines_are_for_any_python_3_and_say_which_one_it_is(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(build_archive())
    with zipfile.ZipFile(path) as archive:
        main = archive.read("__main__.py").decode()
    ast.parse(main, feature_version=(3, 4))
    # As an old interpreter sees it: nothing of the agent itself is read.
    old = "import runpy, sys; sys.version_info = (3, 6, 15); runpy.run_path(sys.argv[1])"
    ended = run(tmp_path, [sys.executable, "-I", "-S", "-c", old, str(path)], b"")
    assert (ended.exit_code, ended.stderr) == (1, b"")
    assert json.loads(ended.stdout) == {"kind": "agent", "schema": 1, "python": "3.6.15"}
    errors: dict[str, MultinodeError] = {}
    for node in (Node(name="a"), Node(name="a", python="/old/python")):
        fake = FakeTransport(lambda *_: ended)
        stream = AgentStream[SentFacts](Raw(fake, node, "agent"), node)
        errors[node.python or "python3"] = error_of(stream.greet, 5)
    golden.check_errors("old_pythons", errors)


class Raw(FakeStream):
    """One that does not greet by itself."""

    def read_line(self, deadline_s: float) -> bytes | None:
        self.sent = self.sent or b"\n"
        return super().read_line(deadline_s)
