"""Engine: what starts the workers on a node. Its kind, a module of this folder, says what it does and how.

Every engine gets the node's rank in the job and derives its workers' ranks. The user's own variables win.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import msgspec

from multinode.cluster.quoting import Command
from multinode.errors import UsageError
from multinode.job.engines import ENGINES
from multinode.job.engines.place import node_command
from multinode.job.job import Job
from multinode.records.plan import Place, PlanFile, Rendezvous

OF_SCRIPT = "torchrun"
"""The engine of scripts for which none is asked."""


class EngineKind(ABC):
    """What engines of one name do.

    Attributes:
        starts_workers: whether it starts a Python process for each worker; otherwise it starts a program once on each
            node, which starts what it needs.
        ends: whether what it starts comes to an end by itself.
        takes_configuration: whether the user may give a configuration of accelerate.
        sharded_by: the library of which each worker saves its own part of a checkpoint; None if the job decides.
        packages: those of the job's environment whose version decides how it is started.
        splits_words: whether a path with a space becomes two words of the command that it runs.
        assumed: what a plan assumes as long as nothing is known of a node; None is nothing.
    """

    starts_workers: bool = True
    ends: bool = True
    takes_configuration: bool = False
    sharded_by: str | None = None
    packages: tuple[str, ...] = ()
    splits_words: bool = False
    assumed: str | None = None

    def why_not(self, job: Job) -> UsageError | None:
        """Why it cannot run a job; None if it can."""
        return None

    @abstractmethod
    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        """The program of one node, with its arguments; `env` are the user's variables."""

    def variables(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> dict[str, str]:
        """Variables of one node beside those that all engines get (`node_command`)."""
        return {}

    def files(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> tuple[PlanFile, ...]:
        """Files that the engine itself reads on the node."""
        return ()

    def serves(self, place: Place, job: Job) -> int | None:
        """The port on which the job answers requests on this node; None if it answers none there."""
        return None


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher that starts the workers. `name` is one of `ENGINES`; `accelerate` is an accelerate configuration."""

    name: str
    accelerate: dict[str, Any] = {}
    passes_local_rank: bool = False  # torchrun gives scripts `--local-rank=N`, as torch.distributed.launch does

    @property
    def kind(self) -> EngineKind:
        """What it does.

        Raises:
            UsageError: there is no such engine.
        """
        kind = find_kind(self.name)
        if kind is None:
            raise UsageError(f"unknown engine {self.name!r}", hint=f"use one of {', '.join(ENGINES)}")
        return kind

    def command(self, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]) -> Command:
        """The command of one node; `env` is the user's and wins."""
        argv = self.kind.argv(self, rendezvous, place, job, env)
        return node_command(rendezvous, place, argv, self.kind.variables(self, rendezvous, place), env)

    def files(self, rendezvous: Rendezvous, place: Place) -> tuple[PlanFile, ...]:
        """Files that the engine itself reads on the node."""
        return self.kind.files(self, rendezvous, place)


@functools.cache
def find_kind(name: str) -> EngineKind | None:
    """What an engine of this name does; None if there is none."""
    kind: EngineKind | None = import_module(f"multinode.job.engines.{name}").ENGINE if name in ENGINES else None
    return kind


def choose_engine(
    job: Job,
    engine: str | None = None,
    accelerate: dict[str, Any] | None = None,
    *,
    passes_local_rank: bool = False,
) -> Engine:
    """The engine that was asked for, or the job's default: that of its framework, torchrun for a script.

    Raises:
        UsageError: the engine is unknown, or cannot run such a job.
    """
    name = engine if engine is not None else job.kind.engine
    chosen = Engine(name=name, accelerate=accelerate or {}, passes_local_rank=passes_local_rank)
    refusal = chosen.kind.why_not(job)
    if refusal is not None:
        raise refusal
    if accelerate is not None and not chosen.kind.takes_configuration:
        raise UsageError(f"--accelerate-config needs --engine accelerate; the engine is {name}")
    return chosen
