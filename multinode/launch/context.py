"""Input and result of a launch: options, connection, plan, run; and the request to every node."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from multinode.cluster.cluster import Cluster, local_cluster
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.errors import UsageError
from multinode.job.job import Job
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import Benchmark
from multinode.records.hostfile import RunningLab, find_hosts, load_hostfile
from multinode.records.plan import LaunchPlan, PlanFile
from multinode.records.progress import RunProgress
from multinode.records.run import NodeRun, Run, node_run_id
from multinode.records.run_directory import RunDirectory, runs_root
from multinode.records.settings import find_fan_out, find_ssh_client, load_settings
from multinode.secret_values import redacted
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Transport, set_fan_out
from multinode.transport.choice import asked_transport, choose_transport


class ExecuteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to execute a plan.

    Attributes:
        lease_s: how long a node keeps running the job without contact with the controller. If None, there is no limit
            (detached).
        grace_s: time between SIGTERM and SIGKILL when the run is stopped.
        silence_s: time without a message from a node after which its connection counts as lost. Nodes send one every
            second.
        verify_s: time limit for verifying that no process is left, after a stop and its grace period.
        kind: kind of the run: `launch`, `nccl-test`, `bench`, `contrast`, `advise`, `sweep` or `tune`.
        attach: whether to follow an active run instead of starting one.
        leave_when_running: whether to stop following the run as soon as the job is running on every node.
        leave_on_stop: whether the run continues on the nodes after a request to stop. If the request was made because
            one node is faster, the run is stopped anyway.
        stall_s: time without progress on any node after which the run counts as hung. If None, hangs are not detected.
        on_stall: what to do with a hung run: only report it, or also stop it.
        log_limit_bytes: maximum size of the job's log on a node. If None, there is no limit.
    """

    lease_s: float | None = 120.0
    grace_s: float = 10.0
    silence_s: float = 10.0
    verify_s: float = 20.0
    kind: str = "launch"
    attach: bool = False
    leave_when_running: bool = False
    leave_on_stop: bool = False
    stall_s: float | None = 300.0
    on_stall: Literal["report", "stop"] = "report"
    log_limit_bytes: int | None = 2 << 30


# How soon a node sends news. With many nodes each waits a little longer, so that all of them send a few hundred times
# per second: the controller reads each of them in a thread.
_POLL_S = (0.1, 1.0)
_POLLS_PER_S = 128


def supervise_requests(plan: LaunchPlan, options: ExecuteOptions) -> list[dict[str, Any]]:
    """The request for each node, in node-rank order (docs/reference/agent-protocol.md)."""
    common = {
        "schema": 1,
        "lease_s": options.lease_s,
        "grace_s": options.grace_s,
        "log_limit_bytes": options.log_limit_bytes,
        "observation": msgspec.to_builtins(plan.observation),
        # A collective test measures itself: hooks in its calls would be measured, too.
        "failures_only": plan.test is not None,
        "detach": False,
        "offsets": {},
        "poll_s": min(max(_POLL_S[0], len(plan.nodes) / _POLLS_PER_S), _POLL_S[1]),
    }
    # The plan is sent to node 0, so that another machine with the hostfile can follow the run.
    plan_file = PlanFile(path="plan.json", text=msgspec.json.encode(redacted(plan)).decode())
    keepers = [msgspec.structs.replace(node, files=(*node.files, plan_file)) for node in plan.nodes[:1]]
    return [
        common | msgspec.to_builtins(node) | {"run_id": node_run_id(plan.run_id, node.place.node_rank)}
        for node in (*keepers, *plan.nodes[1:])
    ]


STOP_FILE = "stop.json"


class StopOrder(msgspec.Struct, frozen=True):
    """Left by another process in the directory of a run with restarts, to end it."""

    grace_s: float


class StopRequest:
    """Counts requests to stop: once is TERM and a grace period, twice is KILL.

    Has only plain fields, because a signal handler must not block.
    """

    def __init__(self) -> None:
        self.count = 0
        # whether a run is followed that reads the count; otherwise the current work is interrupted
        self.is_heard = False
        self.reason = ""
        self.grace_s: float | None = None  # the requested grace period; None is the run's own
        self.lease_s: float | None = None  # of the followed run; None without a lease, or if nothing is followed

    def ask(self, reason: str, grace_s: float | None = None) -> None:
        """Ask once more."""
        self.grace_s = grace_s
        self.count += 1
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While the count is read a few times per second."""
        before, self.is_heard = self.is_heard, True
        try:
            yield
        finally:
            self.is_heard = before


if TYPE_CHECKING:
    from multinode.profile.summary import Summary
    from multinode.runs.document import RunDocument


class Launch(LaunchOptions, frozen=True, kw_only=True):
    """What to launch, on which nodes, and how.

    Attributes:
        cluster: the nodes.
        hostfile: text of the hostfile, stored with the run.
        job: a training run or a measurement.
        execute: how to follow and stop the run.
        check: whether to check the nodes first. If a problem would break the run, the run is not started.
        run_id: id of the run. If None, one is created.
    """

    cluster: Cluster
    hostfile: str
    job: Job | Benchmark
    execute: ExecuteOptions = ExecuteOptions()
    check: bool = True
    run_id: str | None = None


class RunContext:
    """What a launch needs from its caller: connections, a directory for runs, and callbacks.

    Args:
        observe: called with the progress, a few times per second.
        say: called at each stage with a short description of the stage.

    Attributes:
        observe_log: called with a node and the new part of its log, as the job wrote it.
        part_of: the run that all launches of this context are parts of. None: each is a run by itself.
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
        self.observe_log: Callable[[NodeRun, bytes], None] = lambda _node, _data: None
        self.say = say
        self.part_of: str | None = None

    def with_part_of(self, run_id: str | None) -> RunContext:
        """Copy of the context for parts of this run."""
        other = copy.copy(self)
        other.part_of = run_id
        return other

    def with_stop(self, stop: StopRequest) -> RunContext:
        """Copy of the context with another request to stop."""
        other = copy.copy(self)
        other.stop = stop
        return other


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run."""

    run: Run
    summary: Summary
    plan: LaunchPlan
    directory: RunDirectory

    def document(self) -> RunDocument:
        """The run as JSON."""
        from multinode.runs.stored_run import StoredRun

        return StoredRun(self.directory).document(self.run)


# An interrupt does not wait for frozen nodes.
_HASTE_S = 0.3


@contextlib.contextmanager
def connect(
    cluster: Cluster,
    *,
    runs: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    observe: Callable[[RunProgress], None] = lambda _: None,
    local: bool = False,
) -> Iterator[RunContext]:
    """Connect to the nodes. Use Slurm steps if the nodes belong to a Slurm job, and SSH otherwise.

    Args:
        cluster: the nodes.
        runs: the directory of all runs. Default: $MULTINODE_RUNS, or `runs` in the working directory.
        say: called at each stage with a short description of the stage.
        observe: called with the progress of a run, a few times per second.
        local: whether to use this machine as the only node, without SSH.

    Yields:
        The context that every command takes.

    Raises:
        UsageError: only some of the nodes are in a Slurm job, or $MULTINODE_FAN_OUT or $MULTINODE_SSH is invalid.
    """
    if not local:
        require_connectable(cluster)
    most = find_fan_out(os.environ, load_settings(Path.cwd()))
    if most is not None:
        set_fan_out(most)
    transport = _open_transport(cluster, local=local)
    try:
        # A login takes as long as the remaining imports: both run in parallel.
        from multinode.transport.agent import AgentTransport

        agent = AgentTransport(transport, refresh=_refresher(cluster))
        if transport.starts_early:
            agent.start_early(cluster.nodes)

        try:
            yield RunContext(agent, runs or runs_root(), say=say, observe=observe)
        except KeyboardInterrupt:
            agent.close(_HASTE_S)
            raise
        finally:
            agent.close()
    finally:
        transport.close()


def _refresher(cluster: Cluster) -> Callable[[], None]:
    if any(node.is_virtual for node in cluster.nodes):
        from multinode.lab.cluster import refresh

        return refresh
    return lambda: None


def _open_transport(cluster: Cluster, *, local: bool) -> Transport:
    if local:
        from multinode.transport.local import LocalTransport

        return LocalTransport()
    return choose_transport(cluster, find_ssh_client(os.environ, load_settings(Path.cwd())))()


def require_connectable(cluster: Cluster) -> None:
    """Refuse what says how to reach nodes and cannot be right, before any of them is asked.

    Raises:
        UsageError: only some of the nodes are in a Slurm job, or $MULTINODE_FAN_OUT or $MULTINODE_SSH is invalid.
    """
    settings = load_settings(Path.cwd())
    find_fan_out(os.environ, settings)
    if asked_transport(cluster) is None:
        find_ssh_client(os.environ, settings)


class Nodes(NamedTuple):
    """A cluster, and the text of its hostfile."""

    cluster: Cluster
    hostfile: str

    def with_python(self, python: str) -> Nodes:
        """Copy of the nodes with this interpreter.

        Raises:
            UsageError: the hostfile names another one for a node.
        """
        for node in self.cluster.nodes:
            if node.python not in {None, python}:
                raise UsageError(
                    f"the command starts {python}, but {self.cluster.source} has python={node.python}",
                    node=node.name,
                    hint="remove one of them",
                )
        nodes = tuple(msgspec.structs.replace(node, python=python) for node in self.cluster.nodes)
        cluster = msgspec.structs.replace(self.cluster, nodes=nodes)
        return Nodes(cluster, render_hostfile(cluster))


def load_nodes(
    hosts: str | None = None, count: int | None = None, note: Callable[[str], None] = lambda _: None
) -> Nodes:
    """Load nodes from a hostfile or another source.

    Args:
        hosts: same as for `--hosts`: a file, `a:2,b:2`, `FILE:GROUP`, `@NAME`, `lab` or `auto`. Default:
            $MULTINODE_HOSTS, multinode.toml, or the lab that was started in this directory.
        count: use only the first `count` nodes. Default: all nodes.
        note: called with each message for the user. For example, messages name the hostfile that is used if `hosts` is
            None, and the parts of an inventory that are ignored.

    Raises:
        UsageError: there is no hostfile, it is invalid, or it has fewer nodes than `count`.
    """
    path, named_by = find_hosts(hosts, dict(os.environ), load_settings(Path.cwd()), _find_lab)
    if path is None:
        from multinode.records.allocation import load_allocation

        cluster, text = load_allocation(os.environ, note)
    else:
        cluster, text = load_hostfile(path, note)
    if hosts is None:
        note(f"hostfile: {cluster.source} ({named_by})")
    else:
        cluster = msgspec.structs.replace(cluster, hosts=hosts)
    if count is not None and count > len(cluster.nodes):
        raise UsageError(f"{count} nodes are requested, but {cluster.source} has {len(cluster.nodes)}")
    return Nodes(cluster if count is None else cluster.first(count), text)


def _find_lab() -> RunningLab | None:
    from multinode.lab.state import load_lab

    lab = load_lab()
    return RunningLab(Path(lab.hostfile), Path(lab.directory)) if lab is not None else None


def local_nodes(workers: int, python: str = sys.executable) -> Nodes:
    """Return this machine as the only node. Connect with `connect(..., local=True)`, which does not use SSH.

    Args:
        workers: maximum number of workers.
        python: path of the Python interpreter of the training environment.
    """
    return Nodes(local_cluster(workers, python), "# This machine, without SSH\n")


def parse_nodes(hostfile: str) -> Nodes:
    """Parse the text of a hostfile. It has one line per node, such as `gpu-a addr=192.0.2.1 slots=4`.

    Raises:
        HostfileError: a line is invalid.
    """
    return Nodes(parse_hostfile(hostfile, "the text"), hostfile)
