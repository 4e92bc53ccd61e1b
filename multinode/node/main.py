"""Verb dispatch: reads the request, imports the verb that it names, and turns an AgentError into a record.

Owns the process: umask, exit code, and what happens when the reader goes away. Each verb is in a module of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Callable, NoReturn

from .channel import SCHEMA, AgentError, Channel, Record
from .rundir import check_home

# A verb is imported only when it is called: every call pays for the start-up on every node.
_VERBS = {
    "checkpoints": ".run.checkpoints:run",
    "clean": ".run.runs:clean",
    "code": ".copies.code:run",
    "copy": ".copies.session:run",
    "diagnose": ".hang.diagnose:run",
    "fetch": ".run.runs:fetch",
    "follow": ".run.follow:run",
    "connectivity": ".connectivity.connections:run",
    "look": ".copies.session:look",
    "probe": ".probe:run",
    "runs": ".run.runs:run",
    "stop": ".run.stop:run",
    "supervise": ".run.supervisor:run",
}
# Programs run as part of a job. They have no channel, and handle their own errors.
_PROGRAMS = {
    # torchrun starts it as a worker.
    "collectives": ".bench.collective_bench:main",
    # torchrun starts it as a worker, too.
    "devices": ".bench.device_bench:main",
    # The shell that ran the prelude becomes it by exec.
    "become-job": ".run.job:become_job",
}
# Set if this is the first process of a Slurm step: seconds between Slurm's SIGTERM and its SIGKILL.
_KILL_WAIT = "MULTINODE_KILL_WAIT_S"
_LOWEST_PRIORITY = 19


def main() -> NoReturn:
    """Run the verb on the command line, or those that the channel asks for; exit with 1 if one failed."""
    if len(sys.argv) == 2 and sys.argv[1] in _PROGRAMS:  # noqa: PLR2004 - a program's name and nothing else
        _find(_PROGRAMS[sys.argv[1]])()
        sys.exit(0)
    channel = Channel(umask=os.umask(0o077))
    # The job must not inherit it: the job is not a Slurm step.
    kill_wait = os.environ.pop(_KILL_WAIT, None)
    if kill_wait is None:
        sys.exit(_answer(channel))
    from .run.supervisor import stay_in_step, take_signals

    take_signals(kill_wait)
    try:
        code = _answer(channel)
    finally:
        stay_in_step()
    sys.exit(code)


def _answer(channel: Channel) -> int:
    """Run the verbs; returns the exit code."""
    try:
        check_home()
        _run_verbs(sys.argv[1:], channel)
        # The controller has its answers, so this costs it no time.
        importlib.import_module(".compiled", __package__).keep_compiled()
    except AgentError as error:
        with contextlib.suppress(BrokenPipeError):
            channel.emit({"kind": "error", "message": error.message, "hint": error.hint})
        return 1
    except BrokenPipeError:
        # The reader is gone, so nobody would receive an error record.
        return 1
    return 0


def _run_verbs(arguments: list[str], channel: Channel) -> None:
    """Run a verb, and then the verbs that the controller asks for on the same channel, which saves it a login.

    Without a verb on the command line, each request names its verb: the controller may start the agent before it
    knows what to ask.
    """
    if arguments:
        request = _parse_request(channel.first_line())
        _run_verb(arguments, request, channel)
    while not arguments or request.get("then"):
        try:
            line = channel.first_line()
        except AgentError:
            # No request came in time. An error record now would be read as the answer to a later request.
            return
        if not line and channel.closed:
            # The controller closed the channel.
            return
        request = _parse_request(line)
        arguments = [str(request.get("verb"))]
        _run_verb(arguments, request, channel)


def _run_verb(arguments: list[str], request: Record, channel: Channel) -> None:
    if len(arguments) != 1 or arguments[0] not in _VERBS:
        raise AgentError(f"no such verb: {' '.join(arguments) or '(none)'}", hint=f"use one of {', '.join(_VERBS)}")
    if request.get("background"):
        # The cores belong to the job beside it.
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    _find(_VERBS[arguments[0]])(request, channel)


def _find(place: str) -> Callable[..., None]:
    module, _, name = place.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module, __package__), name)
    return function


def _parse_request(line: bytes) -> Record:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise AgentError(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict) or request.get("schema") != SCHEMA:
        raise AgentError(f"the request is not of schema {SCHEMA}", hint="controller and agent differ in version")
    return request
