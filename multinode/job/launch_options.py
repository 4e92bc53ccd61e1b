"""LaunchOptions: how a job is laid out over the nodes and started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from multinode.job.engines.engine import Engine
from multinode.job.job import JobEnvironment
from multinode.levers.levers import NONE, Levers
from multinode.records.invocation import Invocation
from multinode.records.plan import Observation

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is laid out over the nodes and started.

    Attributes:
        workers_per_node: None takes each node's slots.
        master_port: of the rendezvous, on node 0; None takes a free one derived from the run id.
        observation: what is recorded of the run.
        levers: what changes the training itself.
        environment: variables and setup commands of the job.
        agent: path of the agent on a node, relative to the home directory; set for benchmarks.
        engine: what starts the workers; None takes the job's default.
        code: files that are copied to every node, in which the job runs there; None runs it in the node's directory.
        command: the command line that asks for it, kept with the run; None without one.
    """

    workers_per_node: int | None = None
    master_port: int | None = None
    observation: Observation = Observation()
    levers: Levers = NONE
    agent: str | None = None
    engine: Engine | None = None
    environment: JobEnvironment = JobEnvironment()
    code: CodeTree | None = None
    command: Invocation | None = None
