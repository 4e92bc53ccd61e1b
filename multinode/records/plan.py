"""LaunchPlan: what will be done on each node. Data only; `plan_launch` makes it, `launch.execute` runs it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.hostfile import fold_numbers
from multinode.cluster.quoting import Command, bracketed, render_command, shown_environment
from multinode.decoding import convert
from multinode.errors import printable_line
from multinode.levers.levers import NONE, Levers
from multinode.records.benchmark import Benchmark
from multinode.records.invocation import Invocation
from multinode.secret_values import redact, redact_file
from multinode.units import format_count, format_size, is_link_rate


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that travels to the node's run directory, mode 0600."""

    path: str  # relative to the run directory
    text: str


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node does."""

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    addr: str | None
    ifname: str | None  # its data-plane interface; None is unknown
    link_gbit_per_s: float | None = None
    ifnames: tuple[str, ...] = ()  # all that the hostfile names, where those are several
    gpus: tuple[int, ...] | None = None  # ids of the GPUs that its workers use; None where it has none
    run_dir: str
    command: Command
    files: tuple[PlanFile, ...] = ()  # what is written into the run directory first
    assumed: tuple[str, ...] = ()  # what a probe would have told and was taken for granted instead
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

    steps: int
    after: int = 10  # the step after which it starts; earlier if the training is too short
    ranks: tuple[int, ...]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job, laid out over the nodes.

    Attributes:
        engine: what starts the workers, by name (job/engines/engine.py).
        job: the job in a few words, for people.
        config_path: the YAML as the user named it; empty for a script.
        profile: whether the workers record their steps.
        nproc_per_node: workers of a node; of unequal ones, of the node with the most.
        sample_interval_s: from one sample of a node's NICs, processors and GPUs to the next.
        levers: what changes the training itself, without those that have no effect on one node.
        test: what a benchmark measures; None of any other job.
        code: the files that the job runs in, where they are copied to the nodes first.
        command: the command line that asked for it; None if none did, as from Python.
    """

    schema: str = "multinode.plan/1"
    run_id: str
    engine: str
    job: str
    config_path: str = ""
    master_addr: str
    master_port: int
    nproc_per_node: Annotated[int, Meta(ge=1, le=1024)]
    world_size: int
    profile: bool = True
    trace: TraceWindow | None = None
    sample_interval_s: float = 1.0
    levers: Levers = NONE
    test: Benchmark | None = None
    code: CodeCopy | None = None
    command: Invocation | None = None
    nodes: tuple[NodePlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of each node, in node-rank order."""
        return tuple(len(node.ranks) for node in self.nodes)

    @property
    def link_gbit_per_s(self) -> float | None:
        """Rate of the slowest NIC; None on one node, or if a NIC reports no rate that a link can have."""
        rates = [node.link_gbit_per_s for node in self.nodes]
        known = [rate for rate in rates if rate is not None and is_link_rate(rate)]
        return min(known) if len(known) == len(rates) > 1 else None


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """The same plan without secrets in variables, arguments, setup commands and files."""
    shown = msgspec.structs.replace(plan, nodes=tuple(_redact_node(node) for node in plan.nodes))
    return convert(redact(msgspec.to_builtins(shown)), LaunchPlan)


def _redact_node(node: NodePlan) -> NodePlan:
    shown = msgspec.structs.replace(node.command, env=shown_environment(node.command))
    files = tuple(PlanFile(path=file.path, text=redact_file(file.text)) for file in node.files)
    return msgspec.structs.replace(node, command=shown, files=files)


_DIGITS = 16


def plan_text(plan: LaunchPlan) -> str:
    """The plan: comment lines, then each node's command; secrets are redacted."""
    header = [
        f"# {plan.job}: {_describe_workers(plan)}",
        f"# rendezvous at {bracketed(plan.master_addr)}:{plan.master_port}",
        *(f"# note: {note}" for note in plan.notes),
    ]
    if plan.code is not None:
        code = plan.code
        size = f"{format_count(code.files, 'file')}, {format_size(code.size_bytes)}"
        header.append(
            f"# copied to every node first: {size} of {printable_line(code.source)} (digest {code.digest[:_DIGITS]})"
        )
    return "\n".join(header) + "\n" + "\n".join(_node_text(node) for node in plan.nodes)


def _describe_workers(plan: LaunchPlan) -> str:
    if len(set(plan.workers)) > 1:
        return f"{plan.world_size} workers on {len(plan.nodes)} nodes: {', '.join(map(str, plan.workers))}"
    return f"{plan.world_size} workers, {plan.nproc_per_node} on each of {len(plan.nodes)} nodes"


def _node_text(node: NodePlan) -> str:
    ranks = fold_numbers(node.ranks)
    lines = [
        "",
        f"# --- {node.node}: node rank {node.node_rank}, ranks {ranks}, {node.addr} on {node.ifname or 'unknown'}",
        *(f"# assumed: {assumption}" for assumption in node.assumed),
        *(f"# sent first: {node.run_dir}/{file.path}" for file in node.files),
        render_command(node.command),
    ]
    return "\n".join(lines)
