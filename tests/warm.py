"""Runs scripts that import torch, in processes which do not pay for that: forks of an interpreter that has it.

What comes before a script's own first line (PYTHONPATH, sitecustomize, the environment) is as in an interpreter of its
own. What tests that start, or functions of torch that others keep in tables, starts a real one: ColdProcess.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_SERVER = Path(__file__).parent / "warm_server.py"
_START_S = 100.0


class _Server:
    """An interpreter of this process's own that has imported torch; it ends with it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)

    def status(self) -> int | None:
        """How it ended; None while it serves."""
        return self._process.poll()

    def _end(self) -> None:
        self._requests.close()
        self._process.wait(_START_S)


_servers: list[_Server] = []


def _server() -> _Server:
    """The one that serves; one that has ended (a script may have killed it) has failed a test, and not all others."""
    if not _servers or _servers[-1].status() is not None:
        _servers.append(_Server())
    return _servers[-1]


class WarmProcess:
    """A script that runs.

    Args:
        argv: as behind `python`: a path, or -c and the text, and arguments.
        env: all of its environment.
    """

    def __init__(self, argv: Sequence[str | Path], env: Mapping[str, str], cwd: str | Path = "/") -> None:
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until the script has ended
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._said = ("", "")
        self.returncode: int | None = None
        self.pid = self._start([str(each) for each in argv], dict(env), str(cwd))

    def wait(self, timeout: float) -> int:
        """Its exit status, as that of subprocess."""
        if self.returncode is None:
            self.returncode = self._wait(timeout)
            self._said = self._read_output()
            self._stdout.close()
            self._stderr.close()
        return self.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        """What it has written to stdout and stderr."""
        return self._said if self._stdout.closed else self._read_output()

    def _read_output(self) -> tuple[str, str]:
        files = (self._stdout.fileno(), self._stderr.fileno())
        stdout, stderr = (os.pread(each, os.fstat(each).st_size, 0).decode() for each in files)
        return stdout, stderr

    def _start(self, argv: list[str], env: dict[str, str], cwd: str) -> int:
        self._status, status = os.pipe()
        try:
            files = [self._stdout.fileno(), self._stderr.fileno(), status]
            _server().send({"argv": argv, "env": env, "cwd": cwd}, files)
        finally:
            os.close(status)
        return self._read(_START_S)

    def _wait(self, timeout: float) -> int:
        status = self._read(timeout)
        os.close(self._status)
        return status

    def _read(self, timeout: float) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a script of tests/warm.py", timeout)
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            if not byte:
                raise RuntimeError(
                    f"{_SERVER.name} did not see the end of a script; its own status is {_servers[-1].status()}"
                )
            line += byte
        return int(line)


class ColdProcess(WarmProcess):
    """The same in an interpreter of its own, which imports torch itself."""

    def _start(self, argv: list[str], env: dict[str, str], cwd: str) -> int:
        self._process = subprocess.Popen(
            [sys.executable, *argv],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
        )
        return self._process.pid

    def _wait(self, timeout: float) -> int:
        return self._process.wait(timeout)


def run_warm(
    argv: Sequence[str | Path], env: Mapping[str, str], *, timeout: float, cwd: str | Path = "/"
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    process = WarmProcess(argv, env, cwd)
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout)
        raise
    return subprocess.CompletedProcess(list(argv), status, *process.output())


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
