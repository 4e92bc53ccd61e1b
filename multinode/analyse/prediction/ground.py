"""CalibrationInputs: what the calibrations of one training share: what is trained, what it sends, which network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from multinode.analyse.collectives.traffic import Layout
from multinode.analyse.job.step_calls import Work
from multinode.analyse.job.workload import read_work
from multinode.analyse.prediction.calibration import (
    Calibration,
    Measured,
    calibrate,
    calibrate_without_single,
    gradient_factor,
)
from multinode.analyse.prediction.carried_network import Link, NetworkModel
from multinode.analyse.prediction.measured_network import network_of_scan, stated_network
from multinode.analyse.prediction.record import Record, is_alike, is_rate, job_of, settings_of, strategy_of
from multinode.analyse.prediction.residual import carry_residual
from multinode.analyse.prediction.run_selection import CONTRAST, RunSelection
from multinode.analyse.prediction.scenario import Scenario
from multinode.analyse.prediction.seen_work import work_of_calls
from multinode.analyse.prediction.variants import Subject
from multinode.errors import JobError, UsageError

__all__ = ["CalibrationInputs", "calibration_inputs"]

_MS_PER_S = 1e3
# Of times in ms and of samples, and of how far they scatter: beyond these a figure is none.
_LEAST, _MOST, _MOST_CV = 1e-6, 1e9, 100.0
_MEASURE_AGAIN = f"measure anew: {CONTRAST}"


class CalibrationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one training.

    Attributes:
        link_measured: rate of the link that the runs used, Gbit/s, where their cards did not say it.
    """

    subject: Subject
    work: Work
    network: NetworkModel
    link_measured: float | None = None

    def calibrated(self, single: Record | None, several: Sequence[Record]) -> Calibration:
        """From a run on one node, and from the last of several on more.

        Raises:
            UsageError: they tell too little, or what they tell cannot be.
        """
        many = self.measured(several[-1]) if several else None
        if single is not None:
            found = calibrate(self.measured(single), self.work, self.network, many)
        elif many is not None:
            found = calibrate_without_single(many, self.work, self.network)
        else:
            raise UsageError("no training was named", hint=f"measure one: {CONTRAST}")
        if not _is_credible(found):
            names = " and ".join(one.run_id for one in (single, *several[-1:]) if one is not None)
            raise UsageError(f"what the summary of run {names} says of its steps cannot be", hint=_MEASURE_AGAIN)
        return found if many is None else carry_residual(found, many, self._sent_as(many, several[-1]))

    def _sent_as(self, run: Measured, record: Record) -> Scenario:
        """What it ran as, its gradients as they were sent."""
        factor = gradient_factor(self.work.load) if run.grad_compress else 1.0
        return msgspec.structs.replace(self.scenario_of(record), gradient_factor=factor)

    def measured(self, record: Record) -> Measured:
        """The run with its link.

        Raises:
            UsageError: it has no summary.
        """
        if record.summary is None:
            raise UsageError(f"run {record.run_id} has no summary", hint="use a run that has ended")
        summary, settings = record.summary, settings_of(record)
        if summary.micro_steps is None and settings.accumulation is not None:
            # Of an older release, or of a training whose passes could not be counted.
            summary = msgspec.structs.replace(summary, micro_steps=float(settings.accumulation))
        return Measured(
            summary=summary,
            layout=record.layout,
            link=self.link_of(record),
            grad_compress=settings.grad_compress is not None,
            overlap=settings.overlap is not False,
        )

    def link_of(self, record: Record) -> Link | None:
        """Between its nodes; None is unknown."""
        rate = record.link_gbit_per_s or self.link_measured
        return None if rate is None else msgspec.structs.replace(self.network.link, gbit_per_s=rate)

    def scenario_of(self, record: Record) -> Scenario:
        """What a run ran as: of one on one node, as it would on those of the network.

        Raises:
            UsageError: it has no summary.
        """
        settings, one_node = settings_of(record), record.layout.nodes == 1
        summary = self.measured(record).summary
        accumulation = max(1, round(summary.micro_steps or 1))
        return Scenario(
            link=(None if one_node else self.link_of(record)) or self.network.link,
            layout=self.network.layout if one_node else record.layout,
            # Of a script as its samples tell.
            per_device_batch=float(settings.per_device_batch or 0) or _seen_batch(record, accumulation),
            accumulation=accumulation,
            strategy=strategy_of(record) or self.work.strategy,
            overlap=settings.overlap is not False,
        )


def calibration_inputs(
    chosen: RunSelection, stored: Sequence[Record], link_measured: float | None
) -> CalibrationInputs:
    """What the runs that were chosen have in common.

    Args:
        chosen: the runs.
        stored: all that are stored, oldest first: one alike may know what these do not.
        link_measured: as CalibrationInputs has it.

    Raises:
        UsageError: what they communicate is not known, or nothing tells of their network.
    """
    newest = chosen.newest
    runs = [newest, *([chosen.single] if chosen.single is not None else []), *chosen.several]
    model = next((one.model for one in runs if one.model is not None), None)
    alike = [one for one in reversed(stored) if one.is_training and is_alike(one, newest)]
    return CalibrationInputs(
        subject=Subject(settings=settings_of(newest), job=job_of(newest), model=model),
        work=_work([*runs, *alike], model),
        network=_network(chosen, link_measured),
        link_measured=link_measured,
    )


def _is_credible(found: Calibration) -> bool:
    """A file may hold anything."""
    costs = found.costs
    least = (costs.compute_ms, found.per_device_batch)
    parts = (*least, costs.optimizer_ms, costs.host_ms, costs.data_ms, found.local_ms)
    return (
        all(part > _LEAST for part in least)
        and all(0 <= part < _MOST for part in parts)
        and 0 <= found.scatter < _MOST_CV
    )


def _network(chosen: RunSelection, link_measured: float | None) -> NetworkModel:
    sweep, newest = chosen.sweep, chosen.newest
    if sweep is not None and sweep.sweep is not None:
        rate = sweep.sweep.link_gbit_per_s or sweep.link_gbit_per_s or link_measured
        return network_of_scan(sweep.sweep, rate if rate is not None and is_rate(rate) else None)
    rate = newest.link_gbit_per_s or link_measured
    if rate is None:
        raise UsageError(
            "nothing tells how fast the network between the nodes is",
            hint="measure it: multinode nccl-test --hosts H, or name its rate: --link-measured 1",
        )
    layout = newest.layout if newest.layout.nodes > 1 else Layout(nodes=2, workers_per_node=newest.plan.nproc_per_node)
    return stated_network(Link(gbit_per_s=rate), layout, _backend(newest))


def _backend(record: Record) -> str:
    calls = record.summary.comm.calls if record.summary is not None else ()
    told = next((call.backend for call in calls if call.backend), None)
    return told or ("nccl" if any(node.gpus for node in record.plan.nodes) else "gloo")


def _seen_work(record: Record) -> Work | None:
    """As its workers' calls tell, its gradients as wide as without a hook."""
    if record.summary is None:
        return None
    is_compressed = settings_of(record).grad_compress is not None
    return work_of_calls(record.summary, record.layout, compressed=is_compressed)


def _work(runs: Sequence[Record], model: dict[str, Any] | None) -> Work:
    """By the files of the first run's job; else by those of one alike; else by what its workers were seen to call."""
    newest = runs[0]
    alike = [one for one in runs if strategy_of(one) is strategy_of(newest)]
    known = next((one.workload.work for one in alike if one.workload is not None and one.workload.work), None)
    if known is not None:
        return known
    job, reason = job_of(newest), newest.workload.reason if newest.workload is not None else ""
    if job is not None:
        try:
            return read_work(job, model, newest.layout)
        except JobError as error:
            reason = error.message
    # Those whose gradients were sent as they are come first.
    alike.sort(key=lambda one: settings_of(one).grad_compress is not None)
    seen = (_seen_work(one) for one in alike)
    found = next((work for work in seen if work is not None), None)
    if found is None:
        told = f": {reason}" if reason else ""
        raise UsageError(
            f"what run {newest.run_id} communicates is not known, and its workers' calls were not seen{told}",
            hint=_MEASURE_AGAIN,
        )
    return found


def _seen_batch(record: Record, accumulation: int) -> float:
    summary = record.summary
    if summary is None or summary.step_time_ms is None:
        return 1.0
    mean = summary.split.mean
    step_ms = mean.step_ms if mean is not None else summary.step_time_ms.median
    samples = record.samples_per_s * step_ms / _MS_PER_S / (record.layout.workers * accumulation)
    return float(round(samples)) or samples
