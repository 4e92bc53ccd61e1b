"""This machine as a node: commands run in its shell, in the home directory, without SSH.

Streams behave as over SSH: a deadline on every wait, bounded memory, and releasing one stops nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from multinode.cluster.cluster import Node
from multinode.errors import ContactLost, NodeFailed
from multinode.transport.base import BufferedStream, Transport
from multinode.units import signal_name

_CHUNK_BYTES = 1 << 16
# Maximum delay until a wait notices that the stream was closed, or that a full pipe has space.
_LOOK_UP_S = 1.0
_DRAIN_EVERY_S = 0.02
_MS_PER_S = 1000
# Variables of the controller's own SSH session: it is not the way to this node.
_NOT_PASSED_ON = frozenset({"SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"})


class LocalTransport(Transport):
    """Runs commands here, whatever the node's name.

    Args:
        home: the node's home directory; None is the user's own.
    """

    # There is no login to hide.
    starts_early = False

    def __init__(self, home: Path | None = None) -> None:
        self._home = home

    def open(self, node: Node, command: str, *, deadline_s: float) -> LocalStream:
        """Start a command and communicate with it. See `Transport.open`.

        Raises:
            NodeFailed: the shell could not be started, or there is no home directory.
        """
        try:
            home = str(self._home or Path.home())
            kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
            process = start_piped(["sh", "-c", command], {**kept, "HOME": home}, home)
        except (OSError, RuntimeError) as error:
            raise NodeFailed(
                f"cannot start a command in the home directory: {error}", node=node.name, hint="ls -ld ~"
            ) from error
        return LocalStream(process, node.name, send_deadline_s=deadline_s)

    def close(self) -> None:
        """Nothing is kept open."""


def start_piped(argv: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Start a program with pipes; Ctrl-C in the controller's terminal does not reach it, as over SSH."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
    )


def ask_program(
    argv: Sequence[str], env: Mapping[str, str], *, stdin: str = "", deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """The output of a program without a terminal."""
    return subprocess.run(
        argv,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=deadline_s,
        check=False,
        start_new_session=True,
    )


class LocalStream(BufferedStream):
    """A command that is running here. See `Stream`.

    Args:
        process: it, with pipes.
        node: the node's name, for messages.
        send_deadline_s: how long it may leave input unread.
    """

    # how long a client program may take to end after its pipes are closed; None for the command itself
    client_end_s: float | None = None

    def __init__(self, process: subprocess.Popen[bytes], node: str, *, send_deadline_s: float) -> None:
        super().__init__(node, send_deadline_s=send_deadline_s)
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process needs pipes")
        self._process = process
        self._pipes: tuple[IO[bytes], ...] = (process.stdin, process.stdout, process.stderr)
        self._stdin, self._stdout, self._stderr_pipe = self._pipes
        self._ended: set[IO[bytes]] = set()
        self._closed = False
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    def send(self, data: bytes) -> None:
        """Write to its standard input. See `Stream.send`."""
        end = time.monotonic() + self._send_deadline_s
        rest = memoryview(data)
        # A command that ended early has closed its stdin; its output says more than a broken pipe.
        with self._sending, contextlib.suppress(BrokenPipeError):
            while rest and not self._stdin.closed:
                rest = rest[self._stdin.write(rest) or 0 :]
                if rest:
                    self._wait_for_room(end)

    def close_stdin(self) -> None:
        """Signal the end of the input."""
        with self._sending:
            self._stdin.close()

    def close(self) -> None:
        """Release the command; it is not stopped."""
        self._closed = True
        with self._sending, self._reading:
            for pipe in self._pipes:
                pipe.close()
        if self._process.poll() is None:
            threading.Thread(target=self._reap, name=f"reap-{self._process.pid}", daemon=True).start()

    def _reap(self) -> None:
        """Wait for the process in the background, to leave no zombie."""
        try:
            self._process.wait(self.client_end_s)
        except subprocess.TimeoutExpired:
            # srun would forward a signal that it can handle to the step.
            self._process.kill()
            self._process.wait()

    def _receive(self, end: float) -> bool:
        before = len(self._pending)
        while self._stdout not in self._ended:
            self._read_outputs()
            if len(self._pending) > before:
                return True
            if self._stdout in self._ended:
                break
            left_s = self._left(end, "no answer in time")
            self._poll_outputs(min(left_s, _LOOK_UP_S))
        return False

    def _poll_outputs(self, wait_s: float) -> None:
        poll = select.poll()
        for pipe in {self._stdout, self._stderr_pipe} - self._ended:
            poll.register(pipe, select.POLLIN)
        poll.poll(wait_s * _MS_PER_S)

    def _wait_for_room(self, end: float) -> None:
        """Read the command's output meanwhile; otherwise it may never read its input."""
        left_s = self._left(end, "the command does not read its input")
        if self._reading.acquire(blocking=False):
            try:
                if len(self._pending) <= self.most_bytes:
                    self._read_outputs()
            finally:
                self._reading.release()
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        poll.poll(min(left_s, _DRAIN_EVERY_S) * _MS_PER_S)

    def _wait(self, end: float) -> int:
        # stderr is read until then: a full pipe would keep the command from ending.
        while (exit_code := self._process.poll()) is None:
            left_s = min(self._left(end, "the command did not finish in time"), _DRAIN_EVERY_S)
            if self._stderr_pipe in self._ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(left_s)
            else:
                self._poll_outputs(left_s)
                self._read_outputs()
        self._read_outputs()
        if exit_code < 0:
            raise ContactLost(f"the command was killed by {signal_name(-exit_code)}", node=self._node)
        return exit_code

    def _left(self, end: float, trouble: str) -> float:
        """Seconds until `end`."""
        if self._closed:
            raise ContactLost("it was abandoned", node=self._node)
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise ContactLost(trouble, node=self._node)
        return left_s

    def _read_outputs(self) -> None:
        self._pending += self._read_from(self._stdout)
        self._keep_stderr(self._read_from(self._stderr_pipe))

    def _read_from(self, pipe: IO[bytes]) -> bytes:
        data = pipe.read(_CHUNK_BYTES) if pipe not in self._ended else None
        if data == b"":
            self._ended.add(pipe)
        return data or b""
