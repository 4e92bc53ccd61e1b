"""The job on this node: from the request to argv, environment, files and directory, and from there to a process.

A prelude is the user's shell text, which a login bash runs before the job. The bash then becomes our own code by exec,
which applies the request once more, since profiles set PATH and variables, and becomes the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from typing import NamedTuple, NoReturn, Optional

from .. import last_calls
from ..channel import AgentError, Record
from ..programs import find_program
from ..rundir import RunDir

# Descriptor of what a program gets besides its environment.
_HANDED_FD = 9
_RUN_DIR_MARK = "{run_dir}"
_ERROR_BYTES = 4096
_PRELUDE_FILE = "prelude.json"
# Fields of the request that are applied again after the prelude.
_AFTER_PRELUDE = frozenset({"run_id", "command", "place", "observation", "failures_only"})
_NOT_FOUND = 127
# Nothing is pasted into the script. The job's words are arguments. The prelude's text may contain secrets, so it comes
# over the descriptor, where `ps` does not show it; the request follows it there. The descriptor is closed for the
# prelude, so the prelude and its background processes do not see the request.
_PRELUDE_SCRIPT = f'IFS= read -r -d "" <&{_HANDED_FD}; eval "$REPLY" {_HANDED_FD}<&- || exit; exec "$@"'


class Job(NamedTuple):
    """The process to start.

    Attributes:
        handed: what the process can read from `_HANDED_FD`; empty if nothing.
    """

    program: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    umask: int
    handed: bytes = b""


def prepare_job(request: Record, run: RunDir, umask: int) -> Job:
    """The job of a supervise request; with a prelude, a bash that runs the prelude and then becomes the job."""
    prelude: Optional[str] = request["command"].get("prelude")
    if not prelude:
        return _prepare(request, run, umask)
    shell = _prepare({**request, "command": {**request["command"], "argv": ["bash"]}}, run, umask)
    # sys.argv[0] is the agent's archive.
    become = [sys.executable, "-I", os.path.abspath(sys.argv[0]), "become-job"]
    environment = {name: value for name, value in request.items() if name in _AFTER_PRELUDE}
    return shell._replace(
        argv=["bash", "-l", "-c", _PRELUDE_SCRIPT, "bash", *become],
        handed=f"{prelude}\0{json.dumps(environment)}".encode(),
    )


def start_job(job: Job) -> int:
    """Start the job in a session of its own, with stdout and stderr in its log, and return its pid.

    Raises:
        AgentError: the job could not be started.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(job, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        # The write end closes on exec; otherwise the child writes why exec failed.
        trouble = pipe.read(_ERROR_BYTES)
    if trouble:
        os.waitpid(pid, 0)
        raise AgentError(f"the job could not be started: {trouble.decode(errors='replace')}")
    return pid


def become_job() -> NoReturn:
    """Turn this process, in which the prelude has run, into the job."""
    with open(_HANDED_FD, "rb") as file:
        request: Record = json.loads(file.read())
    run = RunDir(request["run_id"])
    try:
        umask = os.umask(0o077)
        job = _prepare(request, run, umask)
        run.write(_PRELUDE_FILE, {"schema": 1, "trouble": None})
        os.umask(umask)
        _execute(job)
    except (AgentError, OSError) as error:
        trouble = f"after the setup, {error.message}" if isinstance(error, AgentError) else str(error)
        hint = f": {error.hint}" if isinstance(error, AgentError) and error.hint else ""
        run.write(_PRELUDE_FILE, {"schema": 1, "trouble": trouble + hint})
        sys.stderr.write(f"multinode: {trouble}{hint}\n")
    sys.exit(_NOT_FOUND)


def prelude_trouble(request: Record, run: RunDir, how: str) -> Optional[str]:
    """Why the job never began: its prelude failed, or the program was not found after it; None if it began.

    `how` is how the process ended, in words.
    """
    if not request["command"].get("prelude"):
        return None
    prelude = run.read(_PRELUDE_FILE)
    if prelude is None:
        return f"the setup {how}, so the job was not started"
    trouble: Optional[str] = prelude["trouble"]
    return trouble


def data_nics(request: Record) -> list[str]:
    """The interfaces that carry the job's data: those that the hostfile names, or that of the node's address."""
    endpoint = request["place"]["endpoint"]
    return endpoint.get("ifnames") or [name for name in (endpoint["ifname"],) if name is not None]


def hold_files(run: RunDir, files: list[Record]) -> None:
    """Keep the files marked `in_memory` in this process, since they may hold secrets; they vanish with it.

    A link in the run directory leads to each, so workers can open it as often as they like.
    """
    for file in files:
        if file.get("in_memory"):
            fd = open_unnamed()
            with open(fd, "wb", closefd=False) as held:
                held.write(file["text"].encode())
            # Each open through /proc has an offset of its own, so everyone reads from the beginning.
            run.add_link(file["path"], f"/proc/{os.getpid()}/fd/{fd}")


def hold_last_calls(run: RunDir, request: Record) -> Optional[int]:
    """Make the memory for the last collectives of the workers, with a link to it in the run directory.

    Returns its descriptor; None for workers that do not write them.
    """
    if not request["observation"]["profile"] or request.get("failures_only"):
        return None
    fd = open_unnamed()
    run.add_link(last_calls.NAME, f"/proc/{os.getpid()}/fd/{fd}")
    return fd


def _prepare(request: Record, run: RunDir, umask: int) -> Job:
    command = request["command"]
    argv = [_expand_home(word.replace(_RUN_DIR_MARK, run.path)) for word in command["argv"]]
    env = _environment(request, run)
    _check_strings(argv, env)
    cwd = os.path.abspath(_expand_home(command.get("cwd") or "~"))
    if not os.path.isdir(cwd):
        raise AgentError(f"the directory {cwd} does not exist", hint="set another with workdir= in the hostfile")
    program = find_program(argv[0], env["PATH"], cwd) if argv else None
    if program is None:
        raise AgentError(
            f"the program {argv[0] if argv else '(none)'} was not found or is not executable",
            hint=f"looked in {cwd}" if argv and "/" in argv[0] else f"PATH is {env['PATH']}",
        )
    return Job(program, argv, env, cwd, run.log, umask)


def _execute(job: Job) -> NoReturn:
    """Replace this process by the job's program; raises OSError if the kernel refuses."""
    _reset_signals()
    os.chdir(job.cwd)
    os.execve(job.program, job.argv, job.env)  # noqa: S606 - argv comes as data; a shell would reinterpret it


def _environment(request: Record, run: RunDir) -> dict[str, str]:
    command = request["command"]
    unset: list[str] = command.get("unset", [])
    prefixes = tuple(name[:-1] for name in unset if name.endswith("*"))
    env = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith(prefixes)}
    env.update({name: _expand_home(value.replace(_RUN_DIR_MARK, run.path)) for name, value in command["env"].items()})
    env.update(MULTINODE_RUN_ID=run.run_id, MULTINODE_RUN_DIR=run.path)
    path_first: Optional[str] = command.get("path_first")
    env["PATH"] = _prepend(_expand_home(path_first) if path_first else None, env.get("PATH") or os.defpath)
    observation = request["observation"]
    if observation["profile"]:
        env["PYTHONPATH"] = _prepend(_instrument_path(), env.get("PYTHONPATH"))
        env["MULTINODE_SAMPLES"] = run.samples
        env["MULTINODE_IFNAMES"] = ",".join(data_nics(request))
        if request.get("failures_only"):
            env["MULTINODE_FAILURES_ONLY"] = "1"
        if observation["trace"]:
            env["MULTINODE_TRACE"] = json.dumps(observation["trace"])
    return env


def _instrument_path() -> str:
    # Python can import from a directory inside an archive.
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.path.join(package, "worker", "start")


def _prepend(first: Optional[str], rest: Optional[str]) -> str:
    return os.pathsep.join(part for part in (first, rest) if part)


def _expand_home(text: str) -> str:
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def _check_strings(argv: list[str], env: dict[str, str]) -> None:
    if any("\0" in text for text in (*argv, *env, *env.values())):
        raise AgentError("an argument or variable contains a NUL character")
    bad = [name for name in env if not name or "=" in name]
    if bad:
        raise AgentError(f"not a variable name: {bad[0]!r}")


def _become(job: Job, writer: int) -> NoReturn:
    """Turn this forked child into the job; if that fails, write the reason to `writer`."""
    try:
        os.setsid()
        os.umask(job.umask)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job.handed:
            writer = _hand_over(job, writer)
        _execute(job)
    except OSError as error:
        os.write(writer, os.fsencode(f"{error.strerror}: {error.filename}")[:_ERROR_BYTES])
    finally:
        os._exit(_NOT_FOUND)


def _hand_over(job: Job, writer: int) -> int:
    """Make `handed` readable from `_HANDED_FD`; returns `writer`, which moves if it had this number."""
    moved = os.dup(writer) if writer == _HANDED_FD else writer
    # Not a pipe: nobody reads while we write. Not a file on a disk: it may contain secrets.
    with open(open_unnamed(), "wb") as file:
        file.write(job.handed)
        file.seek(0)
        # The file may have this number already, and leaving the block would close it.
        copy = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, _HANDED_FD + 1)
    os.dup2(copy, _HANDED_FD)
    os.close(copy)
    return moved


def _reset_signals() -> None:
    # The job would inherit signals that we block or ignore, and SIGPIPE, which Python ignores.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def open_unnamed() -> int:
    """Descriptor of a file without a name; programs do not inherit it."""
    try:
        return os.memfd_create("multinode")
    except (AttributeError, OSError):
        # The kernel, or the C library that Python was built for, lacks it.
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
