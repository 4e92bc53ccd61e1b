"""Parts of a Summary that not every run has: what finds them is imported only for a run that has several workers."""

from __future__ import annotations

import msgspec

from multinode.figures.figure import Figure
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.levers.balance import Balance
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.units import format_list

_MOST_NAMED = 4
NOTES = RuleGroup("What limits the figures of a run")


class FigureNote(Finding, frozen=True, kw_only=True):
    """Why figures are missing, or what limits them."""

    concerns: str  # `gpus`, `gpu 3`, `node1, rank 2` (which reported it), `trace of rank 0`, `transfer` (of a trace)


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison group of a slow machine or worker."""

    kind: str = "nodes"  # `nodes`, `workers` (others of its own node), or `alone` (itself, while no other measured)
    names: tuple[str, ...] = ()  # of the nodes

    def __str__(self) -> str:
        if self.kind == "nodes":
            return format_list(self.names, _MOST_NAMED)
        return "the other workers on its node" if self.kind == "workers" else "the same device alone"


class LikelyCause(Finding, frozen=True, kw_only=True):
    """One possible cause of a slow machine: what was observed, and the fix. Figures of peers start with `peers_`."""

    # `cpu`, `gpu_clocks`, `gpu_power`, `gpu_heat`, `pcie`, `disk`, `data`, `memory`, `work` (more tokens); of a device
    # also `threads`, `other_load`, `shared_processors`, `device`, `software`, `usual`; otherwise `unknown`
    cause: str
    peers: Peers | None = None  # the nodes it is compared with; None without a comparison


class Straggler(Finding, frozen=True, kw_only=True):
    """A node whose workers the others wait for: how much slower it is, and the fix."""

    node: str
    ranks: tuple[int, ...]  # the late workers
    late_ms: float  # wait of the others, median over the steps
    share: float  # of the step
    # its workers' time for a sample over that of its peers; None if unknown, or if it has more work
    slower: float | None = None
    causes: tuple[LikelyCause, ...] = ()  # the evidence, best first; for an unknown cause, what was compared

    @property
    def cause(self) -> str:
        """The likeliest, as in `LikelyCause`."""
        return self.causes[0].cause if self.causes else "unknown"


LATE = Figure[float]("late_ms", about="time per step for which the other nodes wait for this node")


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Waits between nodes, whoever is late; on a single node, between its workers."""

    late_ms: float | None = None  # wait of the others for the last one, mean over the steps; None if unknown
    take_turns: bool = False  # whether different ones are last


class NodePace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a node is."""

    node: str
    # a worker's own work in a step, mean of its workers: the step without exposed communication and waiting
    own_ms: float
    samples: float  # of a worker in a step; `balanced_samples` what dealing by speed gives it
    balanced_samples: float
    speed: float  # samples that its workers should get where those of the slowest node get one


class BalanceOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What dealing samples out by speed would give (`launch --balance`)."""

    nodes: tuple[NodePace, ...]  # in node-rank order
    # samples/s over those of the run; its interval: what of a worker's own work grows with its samples, and scatter
    gain: Estimate

    @property
    def balance(self) -> Balance:
        """What `--balance` would be given."""
        return Balance(speeds={node.node: node.speed for node in self.nodes})


class WorkerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one worker, mean per step."""

    rank: int  # global rank
    steps: int  # optimizer steps in the window
    step_ms: float  # the window over its steps
    comm_ms: float  # union of the intervals of collectives
    exposed_ms: float  # the part that no computation overlapped
    overlap: float | None  # |communication and computation| / |communication|; None without communication
    compute_ms: float  # union of the intervals of computation


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """All windows of a run."""

    workers: tuple[WorkerTrace, ...] = ()  # by rank
    comm_ms: float | None = None  # transfer per step: `WorkerTrace.comm_ms` of the worker that waited least
    exposed_ms: float | None = None  # exposed communication per step of that worker
    overlap: float | None = None  # of that worker
    busbw_gb_per_s: float | Unknown = UNMEASURED  # of its all-reduces: factor x bytes / union of their transfer times
    message_bytes: tuple[int, ...] = ()  # sizes of the all-reduces of `busbw_gb_per_s`, per step
    findings: tuple[Finding, ...] = ()  # how it compares with the trace-free figures
    notes: tuple[FigureNote, ...] = ()  # what limits these figures


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """The nccl-test result for the same messages on the same nodes."""

    run_id: str  # of the nccl-test
    busbw_gb_per_s: float  # factor x bytes of the messages / sum of their times


class InTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Busbw of the training's all-reduces."""

    busbw_gb_per_s: float | Unknown = UNMEASURED  # factor x bytes of a step's all-reduces / their time
    sizes_bytes: tuple[int, ...] = ()  # of a step's all-reduces; empty if unknown
    # `trace` (transfers in a profiler window), `nccl inspector` (NCCL's records) or `ddp span` (first to last bucket,
    # including waits for buckets: a lower bound, tight if the link is the limit)
    source: str | None = None
    bytes_per_step: float | None = None  # of all-reduces, by the source; None if unknown
    # recorded share of the operations, if the source numbers them; with gaps, neither sizes nor bytes are known
    recorded: float = 1.0
    asked_bytes: float | None = None  # requested by the calls of a worker per step, for comparison
    alone: Alone | None = None  # nccl-test's result, if a run of the same nodes and workers is stored
    findings: tuple[Finding, ...] = ()  # the bandwidth and what it is compared with; none without a bandwidth
