"""holdout_runs: stored runs of one training, each with a calibration that does not know it, to test the model. Pure.

Predicts nothing: what the model makes of them is `scenarios`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.analyse.prediction.calibration import Calibration
from multinode.analyse.prediction.ground import CalibrationInputs
from multinode.analyse.prediction.record import Record, is_alike, settings_of, strategy_of
from multinode.analyse.prediction.run_selection import RunSelection
from multinode.analyse.prediction.scenario import Scenario
from multinode.analyse.prediction.variants import vary
from multinode.errors import UsageError
from multinode.units import format_rate

__all__ = ["HoldoutRun", "holdout_runs"]

# The newest: a cluster changes, and so does what is worth knowing of it.
_MOST = 100


class HoldoutRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a prediction can be held against.

    Attributes:
        calibration: made without it.
        scenario: what it ran as.
        samples_per_s: measured.
        grad_compress: the hook that it ran with.
    """

    name: str
    calibration: Calibration
    scenario: Scenario
    samples_per_s: float
    grad_compress: str | None = None


def holdout_runs(inputs: CalibrationInputs, chosen: RunSelection, stored: Sequence[Record]) -> Iterator[HoldoutRun]:
    """Every stored run on several nodes that the model can be held against.

    Args:
        inputs: of the training.
        chosen: what the predictions start from.
        stored: all runs, oldest first.
    """
    first = chosen.single or chosen.newest
    for record in stored[-_MOST:]:
        if _is_comparable(record, first) and inputs.link_of(record) is not None:
            # The overlap may be known from another run of this layout; a repeat of this one would give it away.
            rest = [one for one in chosen.several if one.layout == record.layout and not _is_repeat(one, record)]
            # It is of the strategy that it was measured with.
            rest = [one for one in rest if strategy_of(one) in {None, inputs.work.strategy}]
            found = _hold(inputs, chosen.single, record, rest)
            if found is not None:
                yield found


def _is_comparable(record: Record, first: Record) -> bool:
    return (
        record.is_training
        and record.layout.nodes > 1
        and set(first.node_names) <= set(record.node_names)
        and is_alike(record, first)
    )


def _is_repeat(one: Record, other: Record) -> bool:
    return one.link_gbit_per_s == other.link_gbit_per_s and settings_of(one) == settings_of(other)


def _hold(
    inputs: CalibrationInputs, single: Record | None, record: Record, rest: Sequence[Record]
) -> HoldoutRun | None:
    """None where nothing is left to calibrate from, or what the run sent is not known."""
    try:
        scenario = inputs.scenario_of(record)
        calibration = vary(inputs.calibrated(single, rest), inputs.subject, strategy=scenario.strategy)
        # A strategy that gathers all parameters needs their number.
        calibration.work.calls_of(scenario.strategy, record.layout)
    except (UsageError, ValueError):
        return None
    return HoldoutRun(
        name=f"{record.run_id}, {record.layout.nodes} nodes at {format_rate(scenario.link.gbit_per_s)}",
        calibration=calibration,
        scenario=scenario,
        samples_per_s=record.samples_per_s,
        grad_compress=settings_of(record).grad_compress,
    )
