"""What goes into a launch and what comes out of it: the request, the way to the nodes, the plan, the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multinode.check.rule import Finding
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.job.job import Job
from multinode.job.planning import LaunchOptions
from multinode.launch.early_verdict import VERDICT_FILE, EarlyVerdict
from multinode.launch.request import ExecuteOptions, StopRequest
from multinode.records.benchmark import Benchmark
from multinode.records.plan import CODE_FILE, CodeCopy, LaunchPlan
from multinode.records.progress import RunProgress
from multinode.records.run import Run
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
        hostfile: the text that describes them; it is kept with the run.
        job: a training, or what is measured in its place.
        options: how it is laid out and started.
        execute: how it is followed and stopped.
        check: whether findings that would break the run stop it before it starts.
        run_id: its name; None makes one.
    """

    cluster: Cluster
    hostfile: str
    job: Job | Benchmark
    options: LaunchOptions = LaunchOptions()
    execute: ExecuteOptions = ExecuteOptions()
    check: bool = True
    run_id: str | None = None


class RunContext:
    """What a launch needs from outside: the network, a place for runs, and whoever watches.

    Args:
        observe: is shown the progress, a few times per second.
        say: is told each stage in a few words.
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
        """The same, with another way to ask for a stop."""
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
        """What `launch --json` prints."""
        from multinode.launch.outcome import launch_document  # noqa: PLC0415 - it lays out tables, too

        verdict = self.directory.read(VERDICT_FILE, EarlyVerdict)
        code = self.directory.read(CODE_FILE, CodeCopy)
        return launch_document(self.run, self.summary, str(self.directory), verdict, code)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that has been planned, checked and kept; nothing of it runs yet.

    Attributes:
        findings: what the checks found, no errors among them.
    """

    what: Launch
    facts: dict[str, NodeFacts]
    plan: LaunchPlan
    findings: tuple[Finding, ...]
    directory: RunDirectory
