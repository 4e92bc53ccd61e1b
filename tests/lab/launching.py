"""Running the multinode command against the lab, and looking for what it may have left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import pytest

from multinode.cli.main import run
from multinode.lab.cluster import ns_command
from multinode.lab.state import LabNode

REPOSITORY = Path(__file__).parents[2]
MULTINODE = (sys.executable, "-m", "multinode")
SCRIPT = "configs/ddp_tiny.py"
DEADLINE_S = 150.0
# A training imports for ten seconds, and for minutes where others use the machine.
RUN_DEADLINE_S = 600

T = TypeVar("T")


def call_here(*arguments: str, runs: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The multinode command in this very process, which saves the start of an interpreter.

    One that does not come to its end is interrupted, as its job would be in the way of others.
    """
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr), _interrupted():
        patch.setattr(sys, "argv", ["multinode", *arguments])
        patch.chdir(REPOSITORY)
        if runs is not None:
            patch.setenv("MULTINODE_RUNS", str(runs))
        with pytest.raises(SystemExit) as ended:
            run()
    code = ended.value.code
    assert isinstance(code, int)
    stdout.seek(0)
    stderr.seek(0)
    return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


@contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C, as it were, for a command that takes too long."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.alarm(RUN_DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Command:
    """The multinode command with a run directory of its own."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, in this process."""
        return call_here(*arguments, runs=self.runs)

    def document(self, *arguments: str) -> dict[str, Any]:
        """Run it with --json (put by the caller) and read what it printed, whatever its exit code."""
        return self.code_and_document(*arguments)[1]

    def code_and_document(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Likewise, with the exit code."""
        done = self.run(*arguments)
        assert done.stdout, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, document

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run it in the background; ended by its process id when the test is done with it."""
        process = subprocess.Popen(
            [*MULTINODE, *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"MULTINODE_RUNS": str(self.runs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=DEADLINE_S)

    def run_id(self) -> str:
        """The id of the one run that was started."""
        (directory,) = wait_for(lambda: list(self.runs.glob("*/run.json")))
        return directory.parent.name

    def steps(self, node_rank: int) -> int:
        """Steps that this node's workers have recorded so far, as they reached the controller."""
        texts = [path.read_text() for path in self.runs.glob(f"*/samples/node-{node_rank}/*.jsonl")]
        return sum(text.count('"kind": "step"') for text in texts)


@contextmanager
def listener(node: LabNode, port: int) -> Iterator[None]:
    """Somebody else's process on a node that holds a port; it ends when its stdin does."""
    program = f"import socket,sys; s=socket.create_server(('0.0.0.0',{port})); print('up',flush=True); sys.stdin.read()"
    argv = [*ns_command(node), sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "up\n"
            yield
        finally:
            holder.stdin.close()
            holder.wait(timeout=DEADLINE_S)


def assert_succeeded(document: dict[str, Any]) -> None:
    """The run came to its end; else all that it says of its failure: what pytest shows of a dict is cut off."""
    if document["status"] != "succeeded":
        failure = document.get("first_failure") or {}
        parts = "\n".join(f"{name}: {value}" for name, value in failure.items())
        pytest.fail(f"{document['run_id']} {document['status']}\n{parts}")


def processes_of(run_id: str, node_rank: int | None = None) -> list[int]:
    """Processes of a run on any lab node, or on one: their environments are readable from here, where all are seen."""
    wanted = f"MULTINODE_RUN_ID={run_id}.{'' if node_rank is None else node_rank}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables) and not _is_zombie(path):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def agents() -> list[int]:
    """Supervisors, sentinels and followers of any run on any lab node."""
    networks = {path.stat().st_ino for path in Path("/run/netns").glob("mn-*")}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # Agents that other programs started on this very machine are nobody's here.
            of_lab = (path / "ns" / "net").stat().st_ino in networks
            if of_lab and b".multinode/agent/" in (path / "cmdline").read_bytes() and not _is_zombie(path):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def assert_no_agents() -> None:
    """No agent is left on any node, now or in the moment that a process of its own would have taken to end."""
    wait_for(lambda: not agents())


def assert_nothing_left(command: Command) -> None:
    """Nothing of any run is left on any node, likewise."""
    runs = [path.parent.name for path in command.runs.glob("*/run.json")]
    wait_for(lambda: not any(map(processes_of, runs)))
    assert_no_agents()


def command_line(pid: int) -> str:
    """A process's argv, spaced."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def kill(pid: int) -> None:
    """kill -9, by its id."""
    os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], T], deadline_s: float = DEADLINE_S, state: Callable[[], object] = str) -> T:
    """The condition's value once it is true; `state` is told if it does not become true in time."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not become true in time {state()}"
        time.sleep(0.1)
    return value


def _is_zombie(path: Path) -> bool:
    return path.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
