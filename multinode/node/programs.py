"""Programs of the node: finds one as a shell would, and runs several at once, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Optional


def find_program(name: str, path: str, cwd: str = "/") -> Optional[str]:
    """Absolute path of the program `name`: along `path`, or relative to `cwd` if the name has a slash."""
    folders = [cwd] if "/" in name else [os.path.join(cwd, folder) for folder in path.split(os.pathsep)]
    candidates = (os.path.join(folder, name) for folder in folders)
    return next(filter(is_program, candidates), None)


def is_program(path: str) -> bool:
    """Whether the path is an executable file."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


_READY_S = 1.0


class QueryFailed(Exception):
    """The program gave no answer; the message is the reason, the detail its whole output."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Query:
    """One running program, whose standard output is the answer."""

    def __init__(
        self,
        argv: list[str],
        *,
        deadline_s: float,
        cwd: Optional[str] = None,
        stdin: str = "",
        env: Optional[dict[str, str]] = None,
    ) -> None:
        self._name = os.path.basename(argv[0])
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._text: Optional[str] = None
        self._stdin = stdin.encode()
        self._trouble: Optional[QueryFailed] = None
        self.waited_s: Optional[float] = None
        """Seconds from its start to its answer; None if it had answered before it was asked."""
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._trouble = QueryFailed(f"{argv[0]} could not be started: {error.strerror}")

    def answer(self) -> str:
        """Wait for the program and return its standard output; later calls return it again.

        Raises:
            QueryFailed: it did not start, failed, or passed its deadline, and was killed.
        """
        if self._text is None and self._trouble is None and self._process is not None:
            try:
                self._text = self._wait(self._process)
            except QueryFailed as error:
                self._trouble = error
        if self._text is None:
            raise self._trouble or QueryFailed(f"{self._name} was killed")
        return self._text

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        late = process.poll() is None
        # After the deadline there is still time to read an answer that is ready, even one larger than a pipe's buffer.
        left_s = max(_READY_S, self._deadline - time.monotonic())
        try:
            stdout, stderr = process.communicate(self._stdin or None, timeout=left_s)
        except subprocess.TimeoutExpired as error:
            self._kill(process)
            raise QueryFailed(f"{self._name} did not answer within {self._deadline_s:.0f} s") from error
        if late:
            self.waited_s = self._deadline_s - (self._deadline - time.monotonic())
        text = stdout.decode(errors="replace")
        if process.returncode != 0:
            detail = stderr.decode(errors="replace").strip() or text.strip()
            message = detail.splitlines()[-1].strip() if detail else "no message"
            raise QueryFailed(f"{self._name} exited with code {process.returncode}: {message}", detail)
        return text

    def close(self) -> None:
        """Kill the program if it still runs; there is no answer then."""
        if self._process is not None and self._process.poll() is None:
            self._kill(self._process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # The program has a session of its own, so children of a wrapper script are killed, too. It has not been reaped,
        # so nobody else has its process group id.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
