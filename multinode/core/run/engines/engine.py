"""Engine: what starts the workers on a node. Which one a job takes, and from there to command and files of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from multinode.core.job.job import Job, LlamaFactoryJob, ScriptJob
from multinode.core.run.command import Command
from multinode.core.run.engines.accelerate import accelerate_command, accelerate_file
from multinode.core.run.engines.command import program_command
from multinode.core.run.engines.deepspeed import deepspeed_command
from multinode.core.run.engines.llamafactory import llamafactory_command, llamafactory_worker
from multinode.core.run.engines.place import Place
from multinode.core.run.engines.torchrun import torchrun_command
from multinode.core.run.plan import PlanFile
from multinode.errors import UsageError

__all__ = ["ENGINES", "Engine", "choose_engine", "engine_command", "engine_files"]

ENGINES = ("torchrun", "llamafactory", "deepspeed", "accelerate", "command")


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the workers.

    Attributes:
        name: one of `ENGINES`.
        accelerate: the user's configuration of accelerate; empty where there is none.
    """

    name: str
    accelerate: dict[str, Any] = {}


def choose_engine(job: Job, asked: str | None = None, accelerate: dict[str, Any] | None = None) -> Engine:
    """The engine that was asked for, else the job's own: LLaMA-Factory for its YAML, torchrun for a script.

    Raises:
        UsageError: there is none of this name, or it does not run such a job.
    """
    own = "llamafactory" if isinstance(job, LlamaFactoryJob) else "torchrun"
    name = asked if asked is not None else own
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    if name == "llamafactory" and isinstance(job, ScriptJob):
        raise UsageError(
            "the engine llamafactory runs a YAML, and this is a script",
            hint="multinode launch train.yaml, or another --engine",
        )
    if name == "command" and isinstance(job, LlamaFactoryJob):
        raise UsageError(
            "the engine command starts a program of yours, and this is a LLaMA-Factory YAML",
            hint="leave --engine out, or put the program after --",
        )
    if accelerate is not None and name != "accelerate":
        raise UsageError(f"--accelerate-config is for --engine accelerate, and the engine is {name}")
    return Engine(name=name, accelerate=accelerate or {})


def engine_command(engine: Engine, place: Place, job: Job, env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `env` is the user's and wins.

    Raises:
        UsageError: the engine cannot place the workers as the environment has it.
    """
    if engine.name == "llamafactory":
        return llamafactory_command(place, env, cwd)
    if engine.name == "accelerate":
        return accelerate_command(place, _program(engine, place, job), engine.accelerate, env, cwd)
    return _COMMANDS[engine.name](place, _program(engine, place, job), env, cwd)


def engine_files(engine: Engine, place: Place) -> tuple[PlanFile, ...]:
    """What the engine itself reads on the node."""
    return (accelerate_file(place, engine.accelerate),) if engine.name == "accelerate" else ()


_COMMANDS: dict[str, Callable[[Place, tuple[str, ...], dict[str, str], str | None], Command]] = {
    "torchrun": torchrun_command,
    "deepspeed": deepspeed_command,
    "command": program_command,
}


def _program(engine: Engine, place: Place, job: Job) -> tuple[str, ...]:
    if isinstance(job, ScriptJob):
        return job.argv
    worker = llamafactory_worker(place)
    # LLaMA-Factory takes its first argument for the YAML.
    return ("--no_local_rank", *worker) if engine.name == "deepspeed" else worker
