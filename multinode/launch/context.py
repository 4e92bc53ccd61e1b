"""Input and result of a launch: the request, the connection, the plan, the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multinode.check.rule import CheckFinding
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.job.job import Job
from multinode.job.planning import LaunchOptions
from multinode.launch.request import ExecuteOptions, StopRequest
from multinode.records.benchmark import Benchmark
from multinode.records.plan import CODE_FILE, CodeCopy, LaunchPlan
from multinode.records.progress import RunProgress
from multinode.records.run import VERDICT_FILE, EarlyVerdict, Run
from multinode.records.run_directory import RunDirectory
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Transport

if TYPE_CHECKING:
    from multinode.launch.outcome import LaunchDocument
    from multinode.profile.summary import Summary


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be launched.

    Attributes:
        cluster: the nodes.
        hostfile: its text, stored with the run.
        job: a training, or a measurement instead.
        options: how it is laid out and started.
        execute: how it is followed and stopped.
        check: whether findings that would break the run prevent its start.
        run_id: its name; None creates one.
    """

    cluster: Cluster
    hostfile: str
    job: Job | Benchmark
    options: LaunchOptions = LaunchOptions()
    execute: ExecuteOptions = ExecuteOptions()
    check: bool = True
    run_id: str | None = None


class RunContext:
    """What a launch needs from outside: the network, a directory for runs, and callbacks.

    Args:
        observe: is called with the progress, a few times per second.
        say: is called with each stage in a few words.
    """

    def __init__(
        self,
        transport: Transport | AgentTransport,
        runs: Path,
        *,
        stop: StopRequest | None = None,
        observe: Callable[[RunProgress], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.agent = transport if isinstance(transport, AgentTransport) else AgentTransport(transport)
        self.runs = runs
        self.stop = stop or StopRequest()
        self.observe = observe
        self.say = say

    def with_stop(self, stop: StopRequest) -> RunContext:
        """The same, with another request to stop."""
        other = copy.copy(self)
        other.stop = stop
        return other


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended."""

    run: Run
    summary: Summary
    plan: LaunchPlan
    directory: RunDirectory

    def document(self) -> LaunchDocument:
        """The document of `launch --json`."""
        from multinode.launch.outcome import launch_document

        verdict = self.directory.read(VERDICT_FILE, EarlyVerdict)
        code = self.directory.read(CODE_FILE, CodeCopy)
        return launch_document(self.run, self.summary, str(self.directory), verdict, code)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that has been planned, checked and stored; nothing of it runs yet."""

    what: Launch
    facts: dict[str, NodeFacts]
    plan: LaunchPlan
    findings: tuple[CheckFinding, ...]  # of the checks, without errors
    directory: RunDirectory
