"""Contrast and its sides: figures of one node and many; names of sides, figures and modes."""

from __future__ import annotations

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.model.workload import FullRun
from multinode.predict.advice import Advice
from multinode.predict.forecast import Forecast
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.measured import EFFICIENCY, SPEEDUP, Measured, measured_values
from multinode.profile.step_bytes import NIC_TRAFFIC, PAYLOAD, BytesPerStep
from multinode.profile.step_split import KnownSteps, WorkerSplit
from multinode.stats.estimate import Estimate, Spread
from multinode.stats.unknown import UNMEASURED, Unknown, or_none
from multinode.units import BITS_PER_BYTE, format_count, format_figure, format_rate, goodput_gb_per_s


class Side(Measured, frozen=True, kw_only=True):
    """One side of a contrast: the job on some nodes, with its role and where its steps spend their time."""

    # `baseline`, `candidate`, `point` (of a scaling curve, between the two) or `each-node` (one node alone, to tell a
    # slow node from a slow network)
    role: str
    nodes: int
    workers_per_node: int
    world_size: int
    samples_per_s: Estimate
    step_time_ms: Estimate
    step_spread: Spread
    versions: dict[str, str] = msgspec.field(default_factory=dict)  # of torch, the engine and NCCL, by package
    steady_steps: int  # measured steps of all repeats
    split: WorkerSplit | Unknown = UNMEASURED  # of the step, mean of the repeats
    exposed_ms: Estimate | Unknown = UNMEASURED  # exposed communication; `exposed_share` of the step
    exposed_share: float | Unknown = UNMEASURED
    exposed_steps: KnownSteps = KnownSteps()  # in which it is known, of all repeats
    bytes_per_step: BytesPerStep = BytesPerStep()  # of the last repeat
    bottleneck: Bottleneck  # of the last repeat
    link_gbit_per_s: float | Unknown = UNMEASURED  # of its slowest node's NIC
    stragglers: tuple[str, ...] = ()  # nodes named by a repeat, the latest first
    late_ms: float | Unknown = UNMEASURED  # wait of the others for the latest, mean of the repeats; 0 without any
    power_w: float | Unknown = UNMEASURED  # of all its GPUs
    whole: FullRun = FullRun()  # the full run of the job
    speedup: Estimate = Estimate(value=1.0, low=1.0, high=1.0)  # samples/s over those of the baseline
    efficiency: float = 1.0  # speed-up over the ratio of workers: 1 is ideal scaling
    # of a node alone, where several were measured alone: a worker's samples/s over those of the fastest node's worker
    relative: float | None = None


class SlowdownAttribution(Finding, frozen=True, kw_only=True):
    """Cost of a candidate's step beyond ideal scaling, in ms; None if unknown. Its node is the slowest.

    No node is named if none stands out.
    """

    # the candidate's step with a network of no cost and nodes as fast as the fastest alone
    ideal_ms: float | None = None
    relative: float | None = None  # speed of the slowest node over that of the fastest or the others
    node_ms: float | None = None  # its cost
    network_ms: float | None = None  # exposed communication of the candidate beyond the baseline's
    other_ms: float | None = None  # the unexplained rest; negative if they explain too much
    cause: str  # `network`, `node`, `none` (no noticeable loss) or `unknown`


def side_row(side: Side) -> Row:
    """The values of a side, by the names of its figures."""
    values = measured_values(side)
    payload, nic = side.bytes_per_step.calls, side.bytes_per_step.nic
    if side.role == "baseline":
        values |= {SPEEDUP.name: None, EFFICIENCY.name: None}
    return Row(side, values | {PAYLOAD.name: payload, NIC_TRAFFIC.name: nic})


NODE = Figure[str]("node_names", "node", about="names of the nodes", cell=lambda row: ", ".join(row.item.node_names))
OF_THE_FASTEST = Figure[float](
    "relative", "of the fastest", form="percent", about="samples/s per worker relative to the fastest node"
)
STEADY_STEPS = Figure[int](
    "steady_steps", "measured steps", form="number", about="measured steps of all repeats, excluding warm-up"
)
POWER = Figure[float](
    "power_w", "power", "W", form="whole", about="power draw of all GPUs", line="power of the GPUs (W)"
)


SCHEMA = "multinode.contrast/5"


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of one node with several. It is stored as `contrast.json` in the directory of the run.

    Attributes:
        mode: `same-workers` (the same workers on both sides), `scale-out` (every node full, the same batch per worker),
            `fixed-global-batch` (every node full, the same samples per step) or `compare` (two stored runs).
        why: reason for the mode.
        baseline: the side with the fewest nodes.
        candidate: the side with the most nodes.
        scaling: kind of efficiency: `weak` (the same batch per worker), `strong` (the same samples per step) or `same
            workers`.
        loss: how the candidate's time is spent.
        verdict: whether the candidate is faster, and what limits it; its message is a sentence.
        reasons: up to three reasons for the verdict.
        differences: differences between the sides that are not part of the comparison.
        forecast: predictions for other networks and settings.
        advice: changes that would affect the verdict, best first.
        rule: which steps are measured.
    """

    schema: str = SCHEMA
    mode: str
    why: Finding
    job: str
    baseline: Side
    candidate: Side
    others: tuple[Side, ...] = ()
    scaling: str
    loss: SlowdownAttribution
    verdict: Finding = Finding(message="")
    reasons: tuple[Finding, ...] = ()
    differences: tuple[Finding, ...] = ()
    forecast: Forecast | Unknown = UNMEASURED
    advice: tuple[Advice, ...] = ()
    rule: str

    @property
    def measured(self) -> tuple[Side, ...]:
        """Baseline, points of the curve and candidate, by nodes; without the sides of one node alone."""
        points = sorted((side for side in self.others if side.role == "point"), key=lambda side: side.nodes)
        return (self.baseline, *points, self.candidate)

    @property
    def alone(self) -> tuple[Side, ...]:
        """Every node alone, in node order; empty if fewer than two were measured."""
        return tuple(side for side in (self.baseline, *self.others) if side.relative is not None)

    @property
    def speedup(self) -> Estimate:
        """The candidate's."""
        return self.candidate.speedup

    @property
    def efficiency(self) -> float:
        """The candidate's."""
        return self.candidate.efficiency


def name_nodes(side: Side) -> str:
    """`1 node`, `2 nodes`; for one node alone its name."""
    if side.role == "each-node" and side.node_names:
        return side.node_names[0]
    return format_count(side.nodes, "node")


def name_side(side: Side, mode: str) -> str:
    """A side within a sentence: `2 nodes`, `n2 alone`; for two stored runs `run 20260104-ab`.

    Args:
        side: of a contrast.
        mode: of the contrast.
    """
    if mode == "compare":
        return f"run {side.run_ids[-1]}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def on_side(side: Side, mode: str) -> str:
    """Where a side's figure was measured: `on 2 nodes`, `in run 20260104-ab`."""
    return f"{'in' if mode == 'compare' else 'on'} {name_side(side, mode)}"


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest is unchanged, including names of nodes."""
    return sentence[:1].upper() + sentence[1:]


_BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e9
_MS_PER_S = 1e3


def network_words(side: Side) -> str:
    """Bytes per step through the busiest NIC, and the share of its link; empty if unknown."""
    seen = side.bytes_per_step
    counted = next((size for size in (seen.nic, seen.expected) if not isinstance(size, Unknown)), None)
    step_s = side.step_time_ms.value / _MS_PER_S
    if not counted or not step_s or side.nodes == 1:
        return ""
    gbit_per_s = counted * BITS_PER_BYTE / _BYTES_PER_GB / step_s
    by_rule = "" if not isinstance(seen.nic, Unknown) else " (expected from the strategy, not counted)"
    text = f"{format_figure(counted / _BYTES_PER_MB)} MB per step each way{by_rule}"
    link = or_none(side.link_gbit_per_s)
    most = goodput_gb_per_s(link) * BITS_PER_BYTE if link else 0.0
    if not link or not most:
        return f"{text}, on average {format_rate(gbit_per_s)}"
    return f"{text}; {gbit_per_s / most:.0%} of {format_rate(most)} (TCP over {format_rate(link)})"


def channel(side: Side) -> str:
    """What its workers exchange data over, in words."""
    return "the network" if side.nodes > 1 else "communication inside the node"


MODES = RuleGroup("Why a contrast has its mode")
ASKED = MODES.rule("asked", about="the mode was set with an option", message="set with --mode")
TWO_RUNS = MODES.rule("two-runs", about="two stored runs", message="run {candidate} compared with run {baseline}")
NAMED_GPUS = MODES.rule(
    "named-gpus",
    about="the GPUs of the baseline were named",
    message="with --baseline-gpus, the baseline uses {gpus} GPUs on node 0",
    figures=("gpus",),
)
ENOUGH_SLOTS = MODES.rule(
    "enough-slots",
    about="the first nodes have enough slots for the workers of all nodes",
    message="{first}, enough for all workers of the {nodes} nodes",
    figures=("slots", "nodes"),
)
TOO_FEW_SLOTS = MODES.rule(
    "too-few-slots",
    about="the first nodes have too few slots for the workers of all nodes",
    message="{first}, too few for {workers} on each of the {nodes} nodes",
    figures=("slots", "nodes"),
)
INDIVISIBLE = MODES.rule(
    "indivisible",
    about="no number of workers is divisible by every number of nodes",
    message="no number of workers can be divided evenly among {counts} nodes",
)
