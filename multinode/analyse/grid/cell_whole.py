"""Whole job: how long the user's whole job would take in each cell of a sweep. Pure; what it costs is `cell_prices`'.

Every cell trains the same samples, or one with a small batch would seem quick for doing less. A job that asks for
epochs means its data so often. One that asks for optimizer steps means those of its own file's batch, whatever the
sweep sets, on the most workers that the sweep has: where the job is to run in the end, as a contrast takes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.grid.cell_row import MEASURED
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.workload import Whole
from multinode.analyse.stats.ranged import Ranged
from multinode.core.text.plausible import plausible_count

__all__ = ["with_whole_job"]

# More passes over its data than anybody has time for; sums of such figures stay far from what a float can hold.
_MOST_EPOCHS = 1e9


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples the whole job trains, by row, or why that is not known; and the rule in a sentence."""

    samples: tuple[float | str, ...]
    rule: str


def with_whole_job(
    rows: Sequence[CellRow], whole: Whole, worker_batch: int | None = None, least_workers: int | None = None
) -> tuple[tuple[CellRow, ...], str]:
    """The rows of one sweep with the time of the whole job, at the rate of their steady state; and the rule in words.

    Args:
        rows: of one sweep.
        whole: what the job asks for when it is not cut short.
        worker_batch: samples of a worker's step as the job's own file has it; None takes the sweep's first cell that
            has the most workers.
        least_workers: of the sweep's largest cell, where that is known: such a cell may not be measured yet.
    """
    most = max([plausible_count(least_workers) or 0, *(row.world_size or 0 for row in rows)])
    asked = _asked(rows, whole, worker_batch, most)
    timed = tuple(_timed(row, samples) for row, samples in zip(rows, asked.samples, strict=True))
    return timed, asked.rule


def _asked(rows: Sequence[CellRow], whole: Whole, worker_batch: int | None, workers: int) -> _Asked:
    steps = plausible_count(whole.steps)
    if steps:
        return _of_steps(rows, steps, worker_batch, workers)
    if whole.epochs is None or not 0 < whole.epochs <= _MOST_EPOCHS:
        return _unknown(rows, "the job does not say how many steps or epochs it is to run")
    # A cell that cuts or packs its data otherwise has another number of samples, and they are the same data.
    known = next((count for row in rows if (count := plausible_count(row.dataset_samples))), None)
    if known is None:
        return _unknown(rows, "how many samples the data set has is not known")
    samples = tuple(whole.epochs * (plausible_count(row.dataset_samples) or known) for row in rows)
    times = "1 epoch" if whole.epochs == 1 else f"{whole.epochs:g} epochs"
    size = f" ({known:,} samples)" if len(set(samples)) == 1 else ""
    rule = f"The whole job is {times} of the data set{size}, at the rate of the steps that count."
    return _Asked(samples=samples, rule=rule)


def _of_steps(rows: Sequence[CellRow], steps: int, worker_batch: int | None, workers: int) -> _Asked:
    if not workers:
        return _unknown(rows, "how many workers the job has is not known")
    own = plausible_count(worker_batch)
    if not own:
        told = [(row.world_size, row.global_batch) for row in rows if row.world_size and row.global_batch]
        if not told:
            return _unknown(rows, "the batch of a worker is not known")
        widest, batch = max(told, key=lambda one: one[0])
        own = batch // widest
    samples = float(steps * own * workers)
    rule = (
        f"The whole job is {samples:,.0f} samples in every cell ({steps:,} steps of {own:,} samples a worker on "
        f"{workers:,} workers), at the rate of the steps that count."
    )
    return _Asked(samples=(samples,) * len(rows), rule=rule)


def _unknown(rows: Sequence[CellRow], reason: str) -> _Asked:
    return _Asked(samples=(reason,) * len(rows), rule="")


def _timed(row: CellRow, samples: float | str) -> CellRow:
    rate = row.samples_per_s
    if row.state != MEASURED or rate is None or rate.low <= 0:
        return row
    if isinstance(samples, str):
        return msgspec.structs.replace(row, missing=row.missing | {"whole_s": samples})
    whole_s = Ranged(value=samples / rate.value, low=samples / rate.high, high=samples / rate.low, repeats=rate.repeats)
    return msgspec.structs.replace(row, whole_s=whole_s)
