"""Balance: how fast the workers of each node are, and what dealing samples out by that would give. Pure.

What a worker does of a step apart from the others is its own work. Of that, computing and waiting for batches grow with
its samples; the rest of the step, and the communication that the last worker exposes, stay as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from multinode.levers.balance import deal_step
from multinode.profile.exposure import Exposure
from multinode.profile.figures import BalanceOutlook, NodePace
from multinode.profile.observed import Observed
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.stats.estimate import Estimate, estimate_rate, known_mean
from multinode.stats.unknown import Unknown, or_zero

_LEAST_STEPS = 4
# Of computing, what may not shrink with the samples: kernels that few samples do not fill, and their launches.
_FIXED = 0.25
# Two runs of one training do not agree better.
_REPEATS_DIFFER = 0.05
# A node that is slower than this by its fixed work alone still gets samples.
_LEAST_SHARE = 0.01


class _Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    node: str  # its node's name
    rank: int
    own_us: tuple[float, ...]  # its own work in each step; `own_ms` the mean
    samples: float  # in a step
    growing: float  # part of its own work that grows with its samples

    @property
    def own_ms(self) -> float:
        return statistics.fmean(self.own_us) / 1000

    def own_us_with(self, samples: float, growing: float) -> list[float]:
        """Its own work in each step with so many samples."""
        return [own_us * (1 + growing * (samples / self.samples - 1)) for own_us in self.own_us]


def find_balance(observed: Observed, exposure: Exposure, split: StepSplit) -> BalanceOutlook | None:
    """The outlook of a training on several nodes; None where what its workers do, or how long it takes, is unknown."""
    workers = _workers(observed, exposure, split)
    nodes = tuple(dict.fromkeys(worker.node for worker in workers))
    if len(nodes) < 2:  # noqa: PLR2004 - a peer
        return None
    shares = _even_shares(workers)
    by_node = {node: statistics.fmean(_of_node(node, workers, shares)) for node in nodes}
    speeds = {node: share / min(by_node.values()) for node, share in by_node.items()}
    passes = max(1, round(_mean_of(exposure, "micro_steps") or 1))
    whole = max(len(workers), round(sum(worker.samples for worker in workers) / passes))
    dealt = deal_step(whole, [speeds[worker.node] for worker in workers], passes)
    return BalanceOutlook(
        nodes=tuple(
            NodePace(
                node=node,
                own_ms=statistics.fmean(worker.own_ms for worker in workers if worker.node == node),
                samples=statistics.fmean(worker.samples for worker in workers if worker.node == node),
                balanced_samples=statistics.fmean(_of_node(node, workers, dealt)),
                speed=speeds[node],
            )
            for node in nodes
        ),
        gain=_gain(exposure, workers, dealt),
    )


def _workers(observed: Observed, exposure: Exposure, split: StepSplit) -> tuple[_Worker, ...]:
    """All workers in rank order; empty where something of one is unknown."""
    if isinstance(exposure.source, Unknown) or exposure.source == "alone" or len(exposure.steps) < _LEAST_STEPS:
        return ()
    node_of = {rank: node.name for node in observed.nodes for rank in node.ranks}
    workers = []
    for worker in split.workers:
        steps = [step[worker.rank] for step in exposure.steps]
        own_us = tuple(step.step_us - (step.exposed_us or 0.0) for step in steps)
        samples = [step.record.samples for step in steps if step.record.samples]
        if len(samples) < len(steps) or min(own_us) <= 0:
            return ()
        workers.append(
            _Worker(
                node=node_of[worker.rank],
                rank=worker.rank,
                own_us=own_us,
                samples=statistics.fmean(samples),
                growing=_growing(worker),
            )
        )
    return tuple(workers)


def _growing(worker: WorkerSplit) -> float:
    """Computing and batches; all of it where computing is not told apart."""
    if isinstance(worker.compute_ms, Unknown):
        return 1.0
    grows_ms = worker.compute_ms + or_zero(worker.data_ms)
    stays_ms = or_zero(worker.optimizer_ms) + or_zero(worker.host_ms)
    return grows_ms / (grows_ms + stays_ms) if grows_ms > 0 else 1.0


def _even_shares(workers: Sequence[_Worker]) -> list[float]:
    """Samples with which all workers' own work would take as long, by rank."""
    stays_ms = [worker.own_ms * (1 - worker.growing) for worker in workers]
    sample_ms = [worker.own_ms * worker.growing / worker.samples for worker in workers]
    samples = sum(worker.samples for worker in workers)
    even_ms = (samples + sum(stay / per_sample for stay, per_sample in zip(stays_ms, sample_ms, strict=True))) / sum(
        1 / per_sample for per_sample in sample_ms
    )
    least = _LEAST_SHARE * samples / len(workers)
    return [max(least, (even_ms - stay) / per_sample) for stay, per_sample in zip(stays_ms, sample_ms, strict=True)]


def _of_node(node: str, workers: Sequence[_Worker], values: Sequence[float]) -> list[float]:
    return [value for worker, value in zip(workers, values, strict=True) if worker.node == node]


def _mean_of(exposure: Exposure, field: str) -> float | None:
    return known_mean(getattr(worker.record, field) for step in exposure.steps for worker in step.values())


def _gain(exposure: Exposure, workers: Sequence[_Worker], dealt: Sequence[int]) -> Estimate:
    """Step time over what it would be; its range is of how much of a worker's work grows with its samples."""
    now_us = [statistics.fmean(worker.step_us for worker in step.values()) for step in exposure.steps]
    exposed_us = [min(worker.exposed_us or 0.0 for worker in step.values()) for step in exposure.steps]
    estimates = []
    for of_growing in (lambda growing: growing, lambda growing: growing * (1 - _FIXED), lambda _: 1.0):
        own_us = [
            worker.own_us_with(samples, of_growing(worker.growing))
            for worker, samples in zip(workers, dealt, strict=True)
        ]
        then_us = [max(each) + exposed for *each, exposed in zip(*own_us, exposed_us, strict=True)]
        estimates.append(estimate_rate(now_us, then_us))
    off = 1 + _REPEATS_DIFFER
    return Estimate(
        value=estimates[0].value,
        low=min(estimate.low for estimate in estimates) / off,
        high=max(estimate.high for estimate in estimates) * off,
    )
