"""Nodes that say what a test tells them to, and a run on them: FakeTransport's streams, kept open and spoken to."""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import Command
from multinode.errors import ContactLost
from multinode.launch import execute
from multinode.launch.context import ExecuteOptions, RunContext, StopRequest
from multinode.records.progress import RunProgress
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.base import MAX_ANSWER_BYTES, Completed, Transport
from multinode.transport.fake import GREETING
from tests import make

DEADLINE_S = 20.0
HELLO = {"kind": "hello", "schema": 1, "run_id": "r", "run_dir": "/r", "time_s": 0.0}
RUNNING = {"kind": "status", "state": "running"}


class Talk:
    """One channel to a node, as the node sees it: what it was sent, and what it says."""

    def __init__(self, node: Node, verb: str, note_closed: Callable[[], None]) -> None:
        self.node = node
        self.verb = verb
        self.received: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lines: queue.Queue[bytes | Exception | None] = queue.Queue()
        self._note_closed = note_closed
        self.closed = threading.Event()
        self.closed_by_us = threading.Event()
        self.is_deaf = False
        self.most_bytes = MAX_ANSWER_BYTES
        self._lines.put(GREETING)

    def say(self, *records: dict[str, Any]) -> None:
        for record in records:
            self._lines.put(json.dumps(record).encode())

    def chunk(self, name: str, offset: int, data: bytes) -> None:
        self.say({"kind": "chunk", "file": name, "offset": offset, "data": base64.b64encode(data).decode()})

    def end(self, **status: Any) -> None:
        """The last record; by default of a job that went well."""
        whole = {"state": "ended", "exit_code": 0, "cause": "exited", "ended_s": time.time(), **status}
        self.say({"kind": "end", **whole})

    def hang_up(self) -> None:
        self._lines.put(ContactLost("the cable is out", node=self.node.name))

    def order(self, op: str) -> dict[str, Any]:
        """The next order of this kind."""
        while (order := self.received.get(timeout=DEADLINE_S)).get("op") != op:
            pass
        return order

    def stop(self) -> dict[str, Any]:
        """Wait for the order to stop, and end by it; the order."""
        order = self.order("stop")
        self.end(exit_code=None, signal="SIGTERM", cause="stopped")
        return order

    def orders(self) -> list[dict[str, Any]]:
        """What was sent and not read yet."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.received.get_nowait())
        return found

    # What the controller calls, as `Stream` has it.
    def send(self, data: bytes) -> None:
        if self.is_deaf:
            raise ContactLost("it takes no more", node=self.node.name)
        self.received.put(json.loads(data))

    def read_line(self, deadline_s: float) -> bytes | None:
        try:
            line = self._lines.get(timeout=min(deadline_s, DEADLINE_S))
        except queue.Empty:
            raise ContactLost("no answer in time", node=self.node.name) from None
        if isinstance(line, Exception):
            raise line
        return line

    def finish(self, deadline_s: float) -> Completed:
        del deadline_s
        return Completed(exit_code=0, stdout=b"", stderr=b"")

    def close_stdin(self) -> None:
        self.closed_by_us.set()

    def close(self) -> None:
        self._lines.put(None)
        if not self.closed.is_set():
            self.closed.set()
            self._note_closed()


class ScriptedNodes(Transport):
    """A transport on which each channel that is opened is played by `play(talk)` in a thread of its own.

    What a script raises, an assertion for one, is raised again by `check`.
    """

    def __init__(self, play: Callable[[Talk], None]) -> None:
        self._play = play
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.opened = 0
        self.closed = 0

    def open(self, node: Node, command: str, *, deadline_s: float) -> Talk:
        del deadline_s
        self.opened += 1
        talk = Talk(node, command.rsplit(maxsplit=1)[-1], self._note_closed)
        thread = threading.Thread(target=self._run, args=(talk,))
        thread.start()
        self._threads.append(thread)
        return talk

    def run(self, node: Node, command: str, *, stdin: bytes = b"", deadline_s: float) -> Completed:
        raise AssertionError(f"{node.name} was asked to run {command} with {len(stdin)} bytes within {deadline_s} s")

    def close(self) -> None:
        pass

    def check(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a script waits for what never comes"
        for failure in self._failures:
            raise failure

    def _note_closed(self) -> None:
        self.closed += 1

    def _run(self, talk: Talk) -> None:
        try:
            self._play(talk)
        except BaseException as failure:  # noqa: BLE001 - raised again in the test's own thread
            self._failures.append(failure)
            talk.hang_up()


class Execution:
    """A run on scripted nodes with two workers each; `options` are fields of ExecuteOptions."""

    def __init__(self, root: Path, *names: str, **options: Any) -> None:
        self._plan = make.plan(
            *(
                make.node_plan(
                    name,
                    rank,
                    workers=2,
                    command=Command(argv=("train", name), env={"A": "b c"}, unset=("RANK",), cwd="/work"),
                )
                for rank, name in enumerate(names)
            )
        )
        self._options = msgspec.structs.replace(ExecuteOptions(lease_s=60.0, grace_s=5.0), **options)
        self.directory = RunDirectory.create(root / "runs", "r")  # its run directory
        self.stop = StopRequest()  # how the user stops it
        self.seen: list[RunProgress] = []  # every progress that was shown
        self.observe: Callable[[RunProgress], None] = self.seen.append

    def wait_until(self, is_so: Callable[[RunProgress], bool]) -> None:
        """Until such a progress was shown."""
        end = time.monotonic() + DEADLINE_S
        while not any(map(is_so, list(self.seen))):
            assert time.monotonic() < end, "it was never shown"
            time.sleep(0.01)

    def run(self, play: Callable[[Talk], None]) -> Run:
        nodes = ScriptedNodes(play)
        cluster = make.cluster(*(node.place.node for node in self._plan.nodes))
        try:
            agent = AgentTransport(nodes, AgentArchive(b""))
            context = RunContext(agent, self.directory.path.parent, stop=self.stop, observe=self.observe)
            stored = StoredRun(self.directory).having(plan=self._plan)
            run = execute.Execution(stored, cluster, context, self._options).run()
        finally:
            nodes.check()
        # A node that was given up is let go of by its own thread, a moment later.
        end = time.monotonic() + DEADLINE_S
        while nodes.closed < nodes.opened:
            assert time.monotonic() < end, "a channel was left open"
            time.sleep(0.01)
        return run
