"""Rows of a sweep: what became of a cell, and the runs that measured it -> its CellRow. Pure.

`make_row` has the figures of a contrast's side, `fill_rows` the settings of cells without figures, and
`with_full_run` how long the user's full run would take in each. Prices of the hostfile come with the runs
(`profile/measured.py`), others from a file of prices (`prices`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from multinode.contrast.figures import Side
from multinode.contrast.side import make_side
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.levers.levers import NONE
from multinode.model.workload import FullRun, JobSettings, Setting, global_batch
from multinode.profile.measured import Measured, asked_epochs, dataset_size, full_run_s
from multinode.profile.summary import Summary
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import NO_FIGURES, CellRecord
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, known, or_none, or_unknown
from multinode.sweep.figures import BY_NAME, MEASURED, CellRow, has_speed
from multinode.sweep.notes import FULL_RUN_OF_EPOCHS, FULL_RUN_OF_STEPS

_UNEQUAL = Unknown("the nodes have unequal numbers of workers")
_UNPRICED = "not every node has a price (price_purchase= in the hostfile)"
_UTILISATION = ("model_tflops", "hardware_tflops", "mfu", "hfu")


def make_row(record: CellRecord, runs: Sequence[StoredRun] = ()) -> CellRow:
    """The row of one cell and its runs; one that was not measured, or has no speed, says why and has no figures."""
    cell = record.cell
    row = CellRow(
        label=cell.label,
        state=record.state if record.state != "running" else "waiting",
        out_of=record.out_of,
        why=record.why,
        run_ids=record.run_ids,
        varied=cell.settings,
        device=device_of(runs[-1].devices) if runs else UNMEASURED,
        node_devices=runs[-1].devices if runs else (),
        nodes=cell.nodes,
        workers_per_node=or_unknown(cell.workers_per_node),
        world_size=UNMEASURED if cell.workers_per_node is None else cell.nodes * cell.workers_per_node,
        price_purchase=or_unknown(runs[-1].price_purchase, _UNPRICED) if runs else UNMEASURED,
    )
    if record.state != MEASURED:
        return row
    lacks = "its runs are no longer stored"
    try:
        if runs:
            return _measured(row, make_side("point", runs), runs)
    except UsageError as error:
        # A run that ended well and tells no speed, as a script's may, has failed at what it was run for.
        lacks = error.message
    return msgspec.structs.replace(row, state="failed", why=row.why or NO_FIGURES.found(None, lacks=lacks))


def _measured(row: CellRow, side: Side, runs: Sequence[StoredRun]) -> CellRow:
    summaries = [run.require_summary() for run in runs]
    is_alike = len(set(runs[-1].workers)) == 1
    return msgspec.structs.replace(
        row,
        **{
            **{name: getattr(side, name) for name in Measured.__struct_fields__},
            "settings": or_none(side.settings) or JobSettings(),
            "workers_per_node": side.workers_per_node if is_alike else _UNEQUAL,
        },
        network_share=side.exposed_share,
        exposed_steps=side.exposed_steps,
        peak_memory_gib=_peak_memory_gib(summaries),
        tokens_per_sample=found(lambda: statistics.median(known(summary.tokens_per_sample) for summary in summaries)),
        **{name: found(partial(_utilisation, summaries, name)) for name in _UTILISATION},
    )


def _peak_memory_gib(summaries: Sequence[Summary]) -> float | Unknown:
    nodes = [node for summary in summaries for node in summary.nodes]
    peaks = (gib for node in nodes for gib in node.peak_worker_memory_gib.values())
    return or_unknown(max(peaks, default=None), "no worker reported its memory")


def _utilisation(summaries: Sequence[Summary], name: str) -> float:
    """Median of a figure of the repeats' utilisation; a rate over a peak is unknown where that is."""
    used = [known(summary.utilisation) for summary in summaries]
    shares: list[float | None] = [getattr(each, name) for each in used]
    given = [share for share in shares if share is not None]
    if len(given) < len(shares):
        raise UnknownError(used[-1].denominator or "not every repeat has it")
    return statistics.median(given)


def device_of(devices: Sequence[Mapping[str, int]]) -> str | Unknown:
    """The name of the device, of different ones how many of each.

    Args:
        devices: of each node.
    """
    counts: Counter[str] = Counter()
    for names in devices:
        counts.update(names)
    if len(counts) == 1:
        return next(iter(counts))
    mixed = " + ".join(f"{count} x {name}" for name, count in counts.items())
    return mixed or Unknown("the nodes did not report their devices")


T = TypeVar("T")


def fill_rows(rows: Sequence[CellRow]) -> tuple[CellRow, ...]:
    """The rows of one sweep, those without figures with all that is certain of them."""
    measured = [row for row in rows if row.state == MEASURED]
    return tuple(row if row.state == MEASURED else _filled(row, measured) for row in rows)


def _filled(row: CellRow, measured: Sequence[CellRow]) -> CellRow:
    names = (name for name in JobSettings.__struct_fields__ if name != "levers")
    levers = _agreed(other.settings.levers for other in measured)
    settings = JobSettings(**{name: _setting(row, name, measured) for name in names}, levers=levers or NONE)
    alike = [other for other in measured if other.nodes == row.nodes]
    nodes = or_none(row.nodes)
    workers = or_none(row.workers_per_node) or _agreed(or_none(other.workers_per_node) for other in alike)
    world_size = _agreed(or_none(other.world_size) for other in alike)
    if nodes is not None and workers is not None:
        world_size = nodes * workers
    return msgspec.structs.replace(
        row,
        settings=settings,
        device=or_unknown(or_none(row.device) or _agreed(or_none(other.device) for other in alike or measured)),
        workers_per_node=or_unknown(workers),
        world_size=or_unknown(world_size),
        global_batch=or_unknown(global_batch(settings, world_size)),
    )


def _setting(row: CellRow, name: str, measured: Sequence[CellRow]) -> Any:
    setting = BY_NAME[name]
    if not isinstance(setting, Setting):
        return None
    keys = [key for key in setting.keys if key in row.varied]
    alike = [other for other in measured if all(other.varied.get(key) == row.varied[key] for key in keys)]
    if alike:
        return _agreed(getattr(other.settings, name) for other in alike)
    if keys != [setting.key]:
        return None
    value = row.varied[setting.key]
    is_fit = type(value) is int and value > 0 if setting.form == "number" else isinstance(value, str)
    return value if is_fit else None


def _agreed(values: Iterable[T]) -> T | None:
    given = list(values)
    return given[0] if given and all(value == given[0] for value in given) else None


def with_full_run(
    rows: Sequence[CellRow], whole: FullRun, worker_batch: int | None = None, least_workers: int | None = None
) -> tuple[tuple[CellRow, ...], tuple[Finding, ...]]:
    """The rows of one sweep with the time of the full run, at the rate of their steady state; and what it trains.

    Args:
        rows: of one sweep.
        whole: what the job asks for when it is not cut short.
        worker_batch: samples of a worker's step as the job's own file has it; None takes the sweep's first cell that
            has the most workers.
        least_workers: of the sweep's largest cell, where that is known: such a cell may not be measured yet.
    """
    most = max([least_workers or 0, *(or_none(row.world_size) or 0 for row in rows)])
    work = found(partial(_asked, rows, whole, worker_batch, most))
    samples, trains = ([0.0] * len(rows), None) if isinstance(work, Unknown) else work
    return tuple(
        msgspec.structs.replace(
            row, whole_s=work if isinstance(work, Unknown) else full_run_s(known(row.samples_per_s), count)
        )
        if _is_timed(row)
        else row
        for row, count in zip(rows, samples, strict=True)
    ), () if trains is None else (trains,)


def _asked(
    rows: Sequence[CellRow], whole: FullRun, worker_batch: int | None, workers: int
) -> tuple[Sequence[float], Finding]:
    """How many samples the full run trains, by row, and as a note."""
    if (steps := whole.steps) is not None:
        own = _worker_batch(rows, worker_batch, workers)
        samples = steps * own * workers
        note = FULL_RUN_OF_STEPS.found(None, samples=samples, steps=steps, batch=own, workers=workers)
        return [float(samples)] * len(rows), note
    epochs = asked_epochs(whole)
    # A cell that cuts or packs its data otherwise has another number of samples, and they are the same data.
    dataset_samples = dataset_size(or_none(row.dataset_samples) for row in rows)
    counts = [epochs * (or_none(row.dataset_samples) or dataset_samples) for row in rows]
    times = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    size = f" ({dataset_samples:,} samples)" if len(set(counts)) == 1 else ""
    return counts, FULL_RUN_OF_EPOCHS.found(None, times=times, size=size, epochs=epochs)


def _worker_batch(rows: Sequence[CellRow], worker_batch: int | None, workers: int) -> int:
    if not workers:
        raise UnknownError("the number of workers is unknown")
    if worker_batch:
        return worker_batch
    told = [(or_none(row.world_size), or_none(row.global_batch)) for row in rows]
    batches = [(workers, batch) for workers, batch in told if workers and batch]
    if not batches:
        raise UnknownError("the batch per worker is unknown")
    widest, batch = max(batches, key=lambda pair: pair[0])
    return batch // widest


def _is_timed(row: CellRow) -> bool:
    return row.state == MEASURED and has_speed(row)
