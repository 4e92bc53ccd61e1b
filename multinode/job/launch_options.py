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
    """How a job is distributed over the nodes and started.

    Attributes:
        workers_per_node: number of workers on each node. Default: the slots of each node.
        master_port: rendezvous port on node 0. Default: a free port that is derived from the run id.
        observation: what to record during the run.
        levers: options that change the training itself, such as gradient compression.
        environment: variables and setup commands of the job.
        agent: path of the agent on a node, relative to the home directory. Only benchmarks set it.
        engine: the launcher that starts the workers. Default: the usual launcher of the job.
        code: files to copy to every node. The job runs in the copy. If None, it runs in the job's directory there.
        command: the command line that started the launch, which is stored with the run. None if there is none.
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
