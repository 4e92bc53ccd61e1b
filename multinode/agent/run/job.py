"""The job on this node: from the request to argv, environment and directory, and from there to a process.

Knows nothing of who watches it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tempfile
from typing import NamedTuple, NoReturn, Optional

from ..channel import AgentError, Record
from ..programs import find_program
from ..rundir import RunDir

__all__ = ["HANDED_FD", "Job", "execute_job", "prepare_job", "start_job"]

# Where a program finds what it is handed beside its environment.
HANDED_FD = 9

_RUN_DIR_MARK = "{run_dir}"
_ERROR_BYTES = 4096


class Job(NamedTuple):
    """What is going to be executed.

    Attributes:
        program: absolute path.
        argv: arguments, the program's name first.
        env: the whole environment.
        cwd: absolute.
        log: where stdout and stderr go.
        umask: for the files it makes.
        handed: what it can read from `HANDED_FD`; empty is nothing.
    """

    program: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    umask: int
    handed: bytes = b""


def prepare_job(request: Record, run: RunDir, umask: int) -> Job:
    """Make the job from a supervise request.

    Raises:
        AgentError: its directory or its program does not exist, or a string cannot be handed to the kernel.
    """
    argv = [_expand_home(word.replace(_RUN_DIR_MARK, run.path)) for word in request["argv"]]
    env = _environment(request, run)
    _check_strings(argv, env)
    cwd = os.path.abspath(_expand_home(request.get("cwd") or "~"))
    if not os.path.isdir(cwd):
        raise AgentError(f"the directory {cwd} does not exist", hint="workdir= in the hostfile names another")
    program = find_program(argv[0], env["PATH"], cwd) if argv else None
    if program is None:
        raise AgentError(
            f"the program {argv[0] if argv else '(none)'} was not found, or may not be executed",
            hint=f"looked in {cwd}" if argv and "/" in argv[0] else f"PATH is {env['PATH']}",
        )
    return Job(program, argv, env, cwd, run.log, umask)


def start_job(job: Job) -> int:
    """Start it in a session of its own, with stdout and stderr in its log, and return its pid.

    Raises:
        AgentError: it could not be started.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(job, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        # The writer's end closes when the program replaces our code, or says why it did not.
        trouble = pipe.read(_ERROR_BYTES)
    if trouble:
        os.waitpid(pid, 0)
        raise AgentError(f"the job could not be started: {trouble.decode(errors='replace')}")
    return pid


def execute_job(job: Job) -> NoReturn:
    """Replace this process by the job's program.

    Raises:
        OSError: the kernel refuses.
    """
    _reset_signals()
    os.chdir(job.cwd)
    os.execve(job.program, job.argv, job.env)  # noqa: S606 - argv comes as data; a shell would reinterpret it


def _environment(request: Record, run: RunDir) -> dict[str, str]:
    unset: list[str] = request.get("unset", [])
    prefixes = tuple(name[:-1] for name in unset if name.endswith("*"))
    env = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith(prefixes)}
    env.update({name: _expand_home(value.replace(_RUN_DIR_MARK, run.path)) for name, value in request["env"].items()})
    env.update(MULTINODE_RUN_ID=run.run_id, MULTINODE_RUN_DIR=run.path)
    path_first: Optional[str] = request.get("path_first")
    env["PATH"] = _prepend(_expand_home(path_first) if path_first else None, env.get("PATH") or os.defpath)
    if request.get("instrument"):
        env["PYTHONPATH"] = _prepend(_instrument_path(), env.get("PYTHONPATH"))
        env["MULTINODE_SAMPLES"] = run.samples
        env["MULTINODE_IFNAMES"] = ",".join(request.get("sample_ifnames", []))
        if request.get("failures_only"):
            env["MULTINODE_FAILURES_ONLY"] = "1"
        if request.get("trace"):
            env["MULTINODE_TRACE"] = json.dumps(request["trace"])
    return env


def _instrument_path() -> str:
    # A directory inside the archive: Python imports from it as it stands.
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "instrument")


def _prepend(first: Optional[str], rest: Optional[str]) -> str:
    return os.pathsep.join(part for part in (first, rest) if part)


def _expand_home(text: str) -> str:
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def _check_strings(argv: list[str], env: dict[str, str]) -> None:
    if any("\0" in text for text in (*argv, *env, *env.values())):
        raise AgentError("an argument or a variable holds a NUL character")
    bad = [name for name in env if not name or "=" in name]
    if bad:
        raise AgentError(f"not the name of a variable: {bad[0]!r}")


def _become(job: Job, writer: int) -> NoReturn:
    """Turn this forked child into the job; the reason goes to `writer` when that fails."""
    try:
        os.setsid()
        os.umask(job.umask)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job.handed:
            writer = _hand_over(job, writer)
        execute_job(job)
    except OSError as error:
        os.write(writer, os.fsencode(f"{error.strerror}: {error.filename}")[:_ERROR_BYTES])
    finally:
        os._exit(127)


def _hand_over(job: Job, writer: int) -> int:
    """Put what is handed where the program finds it; returns `writer`, which may have had to make room."""
    moved = os.dup(writer) if writer == HANDED_FD else writer
    # No pipe: nobody would read while we write. No name either: it may hold secrets.
    with tempfile.TemporaryFile(dir=os.path.dirname(job.log)) as file:
        file.write(job.handed)
        file.seek(0)
        # The file may itself have the number that it shall get, which closing it would close.
        copy = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, HANDED_FD + 1)
    os.dup2(copy, HANDED_FD)
    os.close(copy)
    return moved


def _reset_signals() -> None:
    # What we block or ignore (and what Python ignores: SIGPIPE) would otherwise be inherited by the job.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
