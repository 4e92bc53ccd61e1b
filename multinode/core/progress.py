"""RunProgress: how far each node is, folded from its records as they come. What the live table shows; not a summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import msgspec

from multinode.core.collective_test import CollectiveTest, time_left_s
from multinode.core.plan import LaunchPlan
from multinode.core.samples import CollectiveSample, GpuSample, LossSample, NicSample, Sample, StepSample
from multinode.core.stall import Stall

__all__ = ["NodeProgress", "RunProgress", "advance_node", "start_progress"]

# The step time shown is the median of this many steps: recent enough to follow, steady enough to read.
_RECENT_STEPS = 10


class NodeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One node, now.

    Attributes:
        name: the node's name.
        node_rank: its node rank.
        ranks: its workers' global ranks.
        state: `waiting`, `starting`, `running`, `stopping`, `ended` or `lost`.
        message: one short line on the state, such as how it ended.
        step: last step that a worker of this node finished; of a collective test, messages measured.
        total_steps: None where unknown.
        recent_us: the last step times of its first worker, oldest first.
        samples_per_step: of all its workers; None is unknown.
        loss: last one logged; NaN where it was no finite number.
        nic: its last network sample.
        net_in_gbit_per_s: between the last two samples; `net_out_gbit_per_s` likewise.
        link_gbit_per_s: the link's rate where the card tells.
        gpus: SM use by GPU index, from their last samples.
        test: the collective test that runs; None for any other job.
    """

    name: str
    node_rank: int
    ranks: tuple[int, ...]
    state: str = "waiting"
    message: str = ""
    step: int | None = None
    total_steps: int | None = None
    recent_us: tuple[float, ...] = ()
    samples_per_step: int | None = None
    loss: float | None = None
    nic: NicSample | None = None
    net_in_gbit_per_s: float | None = None
    net_out_gbit_per_s: float | None = None
    link_gbit_per_s: float | None = None
    gpus: dict[int, float] = {}
    test: CollectiveTest | None = None

    @property
    def left_s(self) -> float | None:
        """A guess of how long the rest takes at the recent pace; None where that cannot be told."""
        if self.step is None or self.total_steps is None or self.step_time_us is None:
            return None
        if self.test is not None:
            return time_left_s(self.test, self.step, self.recent_us[-1])
        return max(0, self.total_steps - self.step) * self.step_time_us / 1e6

    @property
    def step_time_us(self) -> float | None:
        """Median of the recent steps."""
        return statistics.median(self.recent_us) if self.recent_us else None

    @property
    def samples_per_s(self) -> float | None:
        """Nominal samples a second of this node's workers, over the recent steps."""
        took_us = sum(self.recent_us)
        if self.samples_per_step is None or took_us <= 0:
            return None
        return self.samples_per_step * len(self.recent_us) / took_us * 1e6

    @property
    def gpu_percent(self) -> float | None:
        """Mean SM use of the node's GPUs."""
        return statistics.fmean(self.gpus.values()) if self.gpus else None


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, now.

    Attributes:
        run_id: its name.
        job: the job in a few words.
        elapsed_s: since it was started.
        world_size: workers in all.
        nodes: in node-rank order.
        stall: what is behind the standstill that lasts; None while the run gets on.
    """

    run_id: str
    job: str
    world_size: int
    nodes: tuple[NodeProgress, ...]
    elapsed_s: float = 0.0
    stall: Stall | None = None

    @property
    def left_s(self) -> float | None:
        """A guess of how long the run takes yet: that of the node which needs longest; None where nothing tells."""
        running = [node.left_s for node in self.nodes if node.state == "running"]
        return max((left_s for left_s in running if left_s is not None), default=None)


def start_progress(plan: LaunchPlan) -> RunProgress:
    """The progress of a run in which nothing has happened yet."""
    return RunProgress(
        run_id=plan.run_id,
        job=plan.job,
        world_size=plan.world_size,
        nodes=tuple(
            NodeProgress(
                name=node.node,
                node_rank=node.node_rank,
                ranks=node.ranks,
                link_gbit_per_s=node.link_gbit_per_s,
                test=plan.test,
                total_steps=len(plan.test.messages) if plan.test else None,
            )
            for node in plan.nodes
        ),
    )


def advance_node(node: NodeProgress, samples: Iterable[Sample]) -> NodeProgress:
    """The node after these samples."""
    for sample in samples:
        node = _advance(node, sample)
    return node


def _advance(node: NodeProgress, sample: Sample) -> NodeProgress:
    if isinstance(sample, StepSample):
        return _step(node, sample)
    if isinstance(sample, CollectiveSample):
        return _message(node, sample)
    if isinstance(sample, LossSample):
        return msgspec.structs.replace(node, loss=math.nan if sample.loss is None else sample.loss)
    if isinstance(sample, NicSample):
        return _nic(node, sample)
    if isinstance(sample, GpuSample) and sample.sm_percent is not None:
        return msgspec.structs.replace(node, gpus=node.gpus | {sample.index: sample.sm_percent})
    return node


def _step(node: NodeProgress, sample: StepSample) -> NodeProgress:
    if sample.rank != node.ranks[0]:
        return node
    recent = node.recent_us if sample.step_time_us is None else (*node.recent_us, sample.step_time_us)
    return msgspec.structs.replace(
        node,
        step=sample.step,
        total_steps=sample.total_steps,
        recent_us=recent[-_RECENT_STEPS:],
        samples_per_step=sample.samples * len(node.ranks) if sample.samples is not None else None,
    )


def _message(node: NodeProgress, sample: CollectiveSample) -> NodeProgress:
    """A message that was measured; its time is of one iteration."""
    step = sample.index + 1
    if sample.rank != node.ranks[0] or not sample.times_us or not 0 < step <= (node.total_steps or 0):
        return node
    return msgspec.structs.replace(node, step=step, recent_us=(statistics.median(sample.times_us),))


def _nic(node: NodeProgress, sample: NicSample) -> NodeProgress:
    before = node.nic
    if before is None or before.ifname != sample.ifname or sample.mono_ns <= before.mono_ns:
        return msgspec.structs.replace(node, nic=sample)
    nanoseconds = sample.mono_ns - before.mono_ns
    return msgspec.structs.replace(
        node,
        nic=sample,
        net_in_gbit_per_s=(sample.rx_bytes - before.rx_bytes) * 8 / nanoseconds,
        net_out_gbit_per_s=(sample.tx_bytes - before.tx_bytes) * 8 / nanoseconds,
    )
