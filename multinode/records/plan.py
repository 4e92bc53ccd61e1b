"""LaunchPlan: what will be done on each node. Data only; `plan_launch` makes it, `launch.execute` runs it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.cluster.dataplane import Endpoint
from multinode.cluster.hostfile import fold_numbers
from multinode.cluster.quoting import Command, bracketed, render_command
from multinode.errors import printable_line
from multinode.findings.finding import Finding
from multinode.levers.levers import NONE, Levers
from multinode.records.benchmark import Benchmark
from multinode.records.invocation import Invocation
from multinode.secret_values import FORWARDED, redact, redact_file
from multinode.units import format_count, format_size, is_link_rate


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Address and port of the rendezvous, and the number of workers."""

    addr: str  # of node 0
    port: int
    workers: tuple[Annotated[int, Meta(ge=1, le=1024)], ...]  # of each node, in node-rank order

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.workers)

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return sum(self.workers)

    def ranks(self, node_rank: int) -> tuple[int, ...]:
        """Ranks of a node's workers: torchrun and DeepSpeed's launcher number the workers node by node."""
        first = sum(self.workers[:node_rank])
        return tuple(range(first, first + self.workers[node_rank]))


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node's place in a job: what its engine is told of it."""

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    endpoint: Endpoint  # its address and interface for data
    hcas: tuple[str, ...] = ()  # RDMA devices for NCCL, where the hostfile names them
    accelerator: str | None = None  # what kind it has; None is unknown
    # for its workers, as the accelerator's variable names them; None leaves the choice to the engine
    devices: tuple[str, ...] | None = None
    python: str | None = None  # the job's interpreter on the node; None is `python3` of its PATH
    packages: dict[str, str] = {}  # of the packages that the engine asks for, versions that are known
    run_dir: str
    cwd: str | None = None  # the directory of its files; None is unknown, or the user's home
    code_dir: str | None = None  # where the job runs instead, in a copy of the user's files

    @property
    def nproc(self) -> int:
        """Workers of this node."""
        return len(self.ranks)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that travels to the node's run directory, mode 0600."""

    path: str  # relative to the run directory
    text: str
    in_memory: bool = False  # whether it has a secret: the node then writes it on no disk


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node does; also its part of the request that starts it (docs/reference/agent-protocol.md)."""

    place: Place
    gpus: tuple[int, ...] | None = None  # ids of the GPUs that its workers use; None where it has none
    command: Command
    files: tuple[PlanFile, ...] = ()  # what is written into the run directory first
    # values that a probe would find and that are assumed instead, in addition to those of the endpoint
    assumed: tuple[str, ...] = ()
    # port on which the job answers requests on this node; None if it answers none there
    serves: int | None = None
    # where relative paths of what the job writes start, if that is not its directory, a copy of the code
    output_cwd: str | None = None


CODE_FILE = "code.json"
"""The CodeCopy of a run, in its directory."""


class SentCode(msgspec.Struct, frozen=True, kw_only=True):
    """What of the code a node did not have yet."""

    files: int
    size_bytes: int


class CodeCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The copy of the user's files that a job runs in."""

    source: str  # the directory that is copied, on the controller
    digest: str  # of names and content
    files: int
    size_bytes: int
    sent: dict[str, SentCode] = {}  # what each node lacked of it, by its name; empty before it was sent


class TraceWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that torch.profiler records on some workers."""

    steps: int  # number of steps to record
    after: int = 10  # the step after which the trace starts. If the run is too short, the trace starts earlier
    ranks: tuple[int, ...] = ()  # ranks to trace. Default: the first rank of each node


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What to record during a run.

    Attributes:
        profile: whether the workers record the times of their steps.
        trace: steps that torch.profiler records after the warm-up. If None, torch.profiler is not used.
        sample_interval_s: interval between two samples of the NICs, CPUs and GPUs of a node.
        nccl_inspector: whether NCCL's Inspector plugin records every operation.
    """

    profile: bool = True
    trace: TraceWindow | None = None
    sample_interval_s: float = 1.0
    nccl_inspector: bool = False


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every node does for a job: its command, its files, and its place in the job.

    Attributes:
        engine: name of the engine, which starts the workers (job/engines/engine.py).
        job: the job in a few words, for people.
        framework: framework of the training (job/frameworks); empty for a script.
        verb: verb of the framework, such as the kind of training; empty: the first one.
        config_path: path of the YAML, as the user gave it; empty for a script.
        observation: what to record during the run.
        levers: options that change the training itself, without those that have no effect on one node.
        test: what a benchmark measures; None for any other job.
        code: files that are copied to the nodes first, and in which the job runs.
        command: command line of the launch; None if there is none, as from Python.
    """

    schema: str = "multinode.plan/2"
    run_id: str
    engine: str
    job: str
    framework: str = ""
    verb: str = ""
    config_path: str = ""
    rendezvous: Rendezvous
    observation: Observation = Observation()
    levers: Levers = NONE
    test: Benchmark | None = None
    code: CodeCopy | None = None
    command: Invocation | None = None
    nodes: tuple[NodePlan, ...]
    notes: tuple[Finding, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """Each node's place, in node-rank order."""
        return tuple(node.place for node in self.nodes)

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of each node, in node-rank order."""
        return self.rendezvous.workers

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.rendezvous.world_size

    def document(self) -> dict[str, Any]:
        """The plan for files and screens: without forwarded values, and without the secrets of files.

        Whoever writes it takes out those that their names tell (`redacted`).
        """
        document: dict[str, Any] = msgspec.to_builtins(self)
        for node in document["nodes"]:
            command = node["command"]
            command["env"] |= dict.fromkeys(command["forwarded"], FORWARDED)
            for file in node["files"]:
                file["text"] = redact_file(file["text"])
        return document

    @property
    def link_gbit_per_s(self) -> float | None:
        """Rate of the slowest NIC; None on one node, or if a NIC reports no rate that a link can have."""
        rates = [place.endpoint.link_gbit_per_s for place in self.places]
        known = [rate for rate in rates if rate is not None and is_link_rate(rate)]
        return min(known) if len(known) == len(rates) > 1 else None


def has_secret(node: NodePlan) -> bool:
    """Whether a node hears a secret with its part of the plan."""
    if node.command.forwarded or any(file.in_memory for file in node.files):
        return True
    return msgspec.json.encode(redact(msgspec.to_builtins(node))) != msgspec.json.encode(node)


_DIGITS = 16


def plan_text(plan: LaunchPlan) -> str:
    """The plan: comment lines, then each node's command; secrets are redacted."""
    header = [
        f"# {plan.job}: {_describe_workers(plan)}",
        f"# rendezvous at {bracketed(plan.rendezvous.addr)}:{plan.rendezvous.port}",
        *(f"# note: {note.message}" for note in plan.notes),
    ]
    if plan.code is not None:
        code = plan.code
        size = f"{format_count(code.files, 'file')}, {format_size(code.size_bytes)}"
        header.append(
            f"# copied to every node first: {size} of {printable_line(code.source)} (digest {code.digest[:_DIGITS]})"
        )
    return "\n".join(header) + "\n" + "\n".join(_node_text(node) for node in plan.nodes)


def _describe_workers(plan: LaunchPlan) -> str:
    workers = format_count(plan.world_size, "worker")
    if len(plan.nodes) == 1:
        return f"{workers} on 1 node"
    if len(set(plan.workers)) > 1:
        return f"{workers} on {len(plan.nodes)} nodes: {', '.join(map(str, plan.workers))}"
    return f"{workers}, {plan.workers[0]} on each of {len(plan.nodes)} nodes"


def _node_text(node: NodePlan) -> str:
    place, endpoint = node.place, node.place.endpoint
    where = f"{endpoint.addr} on {endpoint.ifname or 'unknown'}"
    lines = [
        "",
        f"# --- {place.node}: node rank {place.node_rank}, ranks {fold_numbers(place.ranks)}, {where}",
        *(f"# assumed: {assumption}" for assumption in (*endpoint.assumed, *node.assumed)),
        *(f"# sent first: {place.run_dir}/{file.path}" for file in node.files),
        render_command(node.command),
    ]
    return "\n".join(lines)
