"""The prelude: the user's shell text, which a login bash runs before the job; then our own code becomes the job.

What the user asked for is applied once more after it: profiles set PATH anew, and variables too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn, Optional

from ..channel import AgentError, Record
from ..rundir import RunDir
from .job import HANDED_FD, Job, execute_job, prepare_job

__all__ = ["PROGRAM", "become_job", "prelude_trouble", "prepare_with_prelude"]

PROGRAM = "become-job"
_FILE = "prelude.json"
_NOT_FOUND = 127
# Nothing is pasted into the script: words come as arguments, and the text, which may hold secrets, before the request,
# where no list of processes shows it. The prelude, and what it may leave in the background, does not see the request.
_SCRIPT = f'IFS= read -r -d "" <&{HANDED_FD}; eval "$REPLY" {HANDED_FD}<&- || exit; exec "$@"'


def prepare_with_prelude(request: Record, run: RunDir, umask: int) -> Job:
    """The job of a supervise request; where that has a prelude, a bash that runs it and then becomes the job.

    Raises:
        AgentError: the directory does not exist, there is no program, or a string cannot be handed to the kernel.
    """
    prelude: Optional[str] = request.get("prelude")
    if not prelude:
        return prepare_job(request, run, umask)
    shell = prepare_job({**request, "argv": ["bash"]}, run, umask)
    # argv[0] is the agent's archive, as the channel's command line has it.
    become = [sys.executable, "-I", os.path.abspath(sys.argv[0]), PROGRAM]
    kept = ("run_id", "argv", "env", "unset", "cwd", "path_first", "instrument")
    return shell._replace(
        argv=["bash", "-l", "-c", _SCRIPT, "bash", *become],
        handed=f"{prelude}\0{json.dumps({name: request.get(name) for name in kept})}".encode(),
    )


def become_job() -> NoReturn:
    """Turn this process, which the prelude's bash has become, into the job."""
    with open(HANDED_FD, "rb") as file:
        request: Record = json.loads(file.read())
    run = RunDir(request["run_id"])
    try:
        umask = os.umask(0o077)
        job = prepare_job(request, run, umask)
        run.write(_FILE, {"schema": 1, "trouble": None})
        os.umask(umask)
        execute_job(job)
    except (AgentError, OSError) as error:
        trouble = f"{error.message} after the prelude" if isinstance(error, AgentError) else str(error)
        hint = f": {error.hint}" if isinstance(error, AgentError) and error.hint else ""
        run.write(_FILE, {"schema": 1, "trouble": trouble + hint})
        sys.stderr.write(f"multinode: {trouble}{hint}\n")
    sys.exit(_NOT_FOUND)


def prelude_trouble(request: Record, run: RunDir, how: str) -> Optional[str]:
    """Why a job that has ended never began: its prelude failed, or left no program to start; None where it did begin.

    Args:
        request: the supervise request.
        run: the run.
        how: how the process ended, in words.
    """
    if not request.get("prelude"):
        return None
    found = run.read(_FILE)
    if found is None:
        return f"the prelude {how}, and the job was not started"
    trouble: Optional[str] = found["trouble"]
    return trouble
