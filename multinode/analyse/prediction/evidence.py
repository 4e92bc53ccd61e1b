"""gather: stored runs that were named, and those beside them -> Evidence: all that predictions start from. Pure.

Composes; which runs are taken is `run_selection`', and what is asked of them is `forecast`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.prediction.calibration import Calibration
from multinode.analyse.prediction.ground import calibration_inputs
from multinode.analyse.prediction.holdout_runs import HoldoutRun, holdout_runs
from multinode.analyse.prediction.record import Record, settled
from multinode.analyse.prediction.run_selection import RunSelection, select_runs
from multinode.analyse.prediction.scenario import Scenario
from multinode.analyse.prediction.variants import Subject

__all__ = ["Evidence", "gather"]

_NO_SWEEP = "no nccl-test of these nodes is stored: the link's stated rate is taken, and the intervals are wide"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions start from.

    Attributes:
        calibration: of the runs that were named.
        today: the scenario that was measured: on several nodes, where that was; else on those of the network.
        today_samples_per_s: of it; None where it was not measured.
        grad_compress: the hook that was used.
        holdouts: stored runs of the same training, each with a calibration that does not know it.
        sources: what all this was made from, a sentence each.
        notes: what had to be taken for granted, a sentence each.
    """

    calibration: Calibration
    today: Scenario
    today_samples_per_s: float | None = None
    subject: Subject
    grad_compress: str | None = None
    holdouts: tuple[HoldoutRun, ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def gather(named: Sequence[Record], others: Sequence[Record] = (), link_measured: float | None = None) -> Evidence:
    """Sort the records and calibrate.

    Args:
        named: the runs that the user named, oldest first.
        others: all other stored runs, oldest first: for an nccl-test of the same nodes, and to test the model.
        link_measured: rate in Gbit/s of the link that they used, where their cards did not say it.

    Raises:
        UsageError: what they tell is too little, or they are of different trainings.
    """
    mine, theirs = ([settled(record) for record in records] for records in (named, others))
    chosen, stored = select_runs(mine, theirs), [*theirs, *mine]
    inputs = calibration_inputs(chosen, stored, link_measured)
    calibration = inputs.calibrated(chosen.single, chosen.several)
    return Evidence(
        calibration=calibration,
        today=inputs.scenario_of(chosen.newest),
        today_samples_per_s=chosen.newest.samples_per_s if chosen.several else None,
        subject=inputs.subject,
        grad_compress=inputs.subject.settings.grad_compress,
        holdouts=tuple(holdout_runs(inputs, chosen, stored)),
        sources=chosen.sources,
        notes=(*calibration.notes, *_other_workers(chosen), *([_NO_SWEEP] if chosen.sweep is None else [])),
    )


def _other_workers(chosen: RunSelection) -> tuple[str, ...]:
    """What speed-ups are over, where one node had other workers than each of several."""
    single, many = chosen.single, chosen.newest.layout
    if single is None or many.nodes == 1 or single.layout.workers == many.workers_per_node:
        return ()
    told = f"one node was measured with {single.layout.workers} workers, at {single.samples_per_s:.4g} samples/s"
    workers = max(many.workers_per_node, single.layout.workers)
    return (f"{told}; speed-up, efficiency and break-even are over one node with {workers}",)
