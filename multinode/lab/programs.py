"""Run the system's programs (ip, tc, ssh-keygen) by argv, with a deadline, and turn their failures into our errors."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from multinode.errors import MultinodeError

__all__ = ["run_all", "run_batch", "run_program"]

_DEADLINE_S = 60.0


def run_program(argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a program to its end and return its standard output.

    Raises:
        MultinodeError: it failed, or did not end within a minute.
    """
    return run_all([argv], stdin=stdin)[0]


def run_batch(argv: Sequence[str], lines: Sequence[str]) -> None:
    """Run `ip` or `tc` once for many commands, one a line.

    Raises:
        MultinodeError: one of the lines failed; those before it were carried out.
    """
    run_program([*argv, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))


def run_all(commands: Sequence[Sequence[str]], *, stdin: str = "") -> list[str]:
    """Run several programs at the same time and return their standard outputs, in order.

    Raises:
        MultinodeError: the first that failed, after all have ended.
    """
    started: list[subprocess.Popen[str]] = []
    failures: list[MultinodeError] = []
    outputs: list[str] = []
    try:
        for argv in commands:
            started.append(_start(argv))  # noqa: PERF401 - those before one that fails must be known to `finally`
        for argv, process in zip(commands, started, strict=True):
            stdout, stderr = process.communicate(stdin, timeout=_DEADLINE_S)
            outputs.append(stdout)
            if process.returncode != 0:
                failures.append(_failure(argv, stderr, f"ended with {process.returncode}"))
    except subprocess.TimeoutExpired as error:
        raise _failure(error.cmd, "", f"did not end within {_DEADLINE_S:.0f} s") from error
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=_DEADLINE_S)
    if failures:
        raise failures[0]
    return outputs


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        raise _failure(argv, "", f"cannot be started: {error.strerror}") from error


def _failure(argv: Sequence[str], stderr: str, otherwise: str) -> MultinodeError:
    lines = stderr.strip().splitlines()
    said = lines[-1] if lines else otherwise
    return MultinodeError(f"{argv[0]}: {said}", ran=shlex.join(argv), detail=stderr)
