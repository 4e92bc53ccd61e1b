"""calibrate: stored runs -> Calibration: what a step costs without a network between nodes, and how it overlaps. Pure.

Reads summaries alone; the network comes from an nccl-test. What follows from it for other networks is `predict`'s.
"""

from __future__ import annotations

import msgspec

from multinode.analyse.carried_network import CarriedNetwork, comm_times
from multinode.analyse.cost_model import CommTimes, StepCall, StepCosts, calls_of_strategy, step_parts
from multinode.analyse.step_split import WorkerSplit
from multinode.analyse.summary import Summary
from multinode.analyse.traffic import Layout, Load, Strategy
from multinode.errors import UsageError

__all__ = ["Calibration", "Measured", "Work", "calibrate"]

_MS_PER_S = 1e3


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained.

    Attributes:
        strategy: as the calibrating runs share the model out.
        load: what it moves; its accumulation does not matter.
        bucket_bytes: the most that a reduction carries at once; None is no limit.
        calls: of a step by strategy, where they are known as the engine cuts them; of others they follow from `load`.
    """

    strategy: Strategy
    load: Load
    bucket_bytes: float | None = None
    calls: dict[Strategy, tuple[StepCall, ...]] = {}

    def calls_of(self, strategy: Strategy, layout: Layout) -> tuple[StepCall, ...]:
        """The calls of a step, as they are known best.

        Raises:
            ValueError: the strategy gathers all parameters, and how many there are is not known.
        """
        known = self.calls.get(strategy)
        return known or calls_of_strategy(strategy, self.load, layout, bucket_bytes=self.bucket_bytes)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A stored run and where it ran."""

    summary: Summary
    layout: Layout


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a prediction starts from.

    Attributes:
        costs: of a step, without communication.
        local_ms: exposed communication of a step of one node, among its own workers.
        layout: of the run that they were measured in.
        per_device_batch: samples of a micro-batch, of one worker.
        accumulation: micro-batches a step.
        work: what is trained.
        network: what was measured of, or is known of, the network between the nodes.
        scatter: cv of the step times that it was made from.
        tokens_per_sample: padded; None is unknown.
        notes: what had to be taken for granted, a sentence each.
    """

    costs: StepCosts
    local_ms: float = 0.0
    layout: Layout
    per_device_batch: float
    accumulation: int = 1
    work: Work
    network: CarriedNetwork
    scatter: float = 0.0
    tokens_per_sample: float | None = None
    notes: tuple[str, ...] = ()


def calibrate(single: Measured, work: Work, network: CarriedNetwork, several: Measured | None = None) -> Calibration:
    """What a run on one node tells, and, where there is one, a run on several.

    The single run gives compute, data, optimizer and host; its own workers' communication is taken out. The run on
    several nodes gives the overlap alone.

    Raises:
        UsageError: a run has no steady step or no samples a second, the single one ran on several nodes, or the network
            was measured on one.
    """
    summary = single.summary
    if single.layout.nodes != 1:
        raise UsageError(
            f"run {summary.run_id} ran on {single.layout.nodes} nodes: it does not tell what a step costs without them",
            hint="add a run on one node: multinode contrast makes one",
        )
    if network.layout.nodes == 1:
        raise UsageError(
            "the collectives were measured on one node: that tells nothing of a network",
            hint="measure on several: multinode nccl-test --hosts H",
        )
    accumulation = _accumulation(summary)
    costs, local_ms, notes = _costs(summary, accumulation)
    cv = summary.step_time_ms.cv if summary.step_time_ms is not None else 0.0
    seen = Calibration(
        costs=costs,
        local_ms=local_ms,
        layout=single.layout,
        per_device_batch=_batch(summary, single.layout.workers, accumulation),
        accumulation=accumulation,
        work=work,
        network=network,
        scatter=cv,
        tokens_per_sample=summary.tokens_per_sample,
        notes=notes,
    )
    return seen if several is None else _with_overlap(seen, several)


def _accumulation(summary: Summary) -> int:
    return max(1, round(summary.micro_steps or 1))


def _batch(summary: Summary, workers: int, accumulation: int) -> float:
    if summary.samples_per_s is None or summary.step_time_ms is None:
        reason = summary.missing.get("samples_per_s", "it recorded no steady step")
        raise UsageError(
            f"run {summary.run_id} tells no samples/s to predict others from: {reason}",
            hint="use a run of a LLaMA-Factory job, or more steps (--steps)",
        )
    mean = summary.split.mean
    step_ms = mean.step_ms if mean is not None else summary.step_time_ms.median
    samples = summary.samples_per_s * step_ms / _MS_PER_S / (workers * accumulation)
    # A micro-batch has a whole number of samples, unless the last one of an epoch was short.
    return float(round(samples)) or samples


def _costs(summary: Summary, accumulation: int) -> tuple[StepCosts, float, tuple[str, ...]]:
    """Costs, exposed local communication, and what was taken for granted."""
    mean = summary.split.mean
    if mean is None or mean.exposed_ms is None:
        step_ms = summary.step_time_ms.median if summary.step_time_ms is not None else 0.0
        reason = summary.split.missing.get("exposed_ms", "it was not recorded")
        note = f"the whole step counts as computing, its own workers' communication included: {reason}"
        return StepCosts(compute_ms=step_ms / accumulation), 0.0, (note,)
    # The mean of the split, scaled to the median step, which is what predictions are of.
    scale = summary.step_time_ms.median / mean.step_ms if summary.step_time_ms is not None and mean.step_ms else 1.0
    optimizer_ms, data_ms = mean.optimizer_ms or 0.0, mean.data_ms or 0.0
    compute_ms, host_ms, notes = _own_ms(mean, optimizer_ms + data_ms)
    costs = StepCosts(
        # A step is as long as that of its slowest worker: what the others wait for it is its computing.
        compute_ms=scale * (compute_ms + (mean.wait_ms or 0.0)) / accumulation,
        optimizer_ms=scale * optimizer_ms,
        host_ms=scale * host_ms,
        data_ms=scale * data_ms / accumulation,
    )
    return costs, scale * mean.exposed_ms, notes


def _own_ms(mean: WorkerSplit, known_ms: float) -> tuple[float, float, tuple[str, ...]]:
    """Compute and host; together where the run does not tell them apart."""
    exposed_ms, wait_ms = mean.exposed_ms or 0.0, mean.wait_ms or 0.0
    if mean.compute_ms is not None:
        return mean.compute_ms, mean.host_ms or 0.0, ()
    rest_ms = max(0.0, mean.step_ms - exposed_ms - wait_ms - known_ms)
    return rest_ms, 0.0, ("what is neither communication, data nor optimizer counts as computing",)


def _with_overlap(seen: Calibration, several: Measured) -> Calibration:
    """Rho from the exposed communication of a run on several nodes: (C - x) / t_hide.

    It is taken to have run on the network that was measured. Where computation could have hidden all of it, what is
    exposed all the same is the tail, and rho stays unknown.
    """
    summary, costs = several.summary, seen.costs
    accumulation = _accumulation(summary)
    calls = seen.work.calls_of(seen.work.strategy, several.layout)
    comm = comm_times(seen.network, calls, seen.network.link, several.layout)
    mean = summary.split.mean
    if mean is not None and mean.exposed_ms is not None:
        exposed_ms = mean.exposed_ms
    elif summary.step_time_ms is not None:
        alone = step_parts(costs, CommTimes(), accumulation=accumulation, overlap=0.0)
        exposed_ms = max(0.0, summary.step_time_ms.median - alone.step_ms)
    else:
        return seen
    hideable_ms = comm.step_ms + accumulation * comm.micro_batch_ms
    hide_ms = costs.t_hide_ms * (accumulation if comm.micro_batch_ms else 1)
    exposed_ms -= comm.after_ms
    if hideable_ms <= hide_ms:
        costs = msgspec.structs.replace(costs, tail_ms=min(max(0.0, exposed_ms), hideable_ms))
    else:
        rho = min(1.0, max(0.0, (hideable_ms - exposed_ms) / hide_ms)) if hide_ms else 0.0
        costs = msgspec.structs.replace(costs, overlap=rho)
    return msgspec.structs.replace(seen, costs=costs)
