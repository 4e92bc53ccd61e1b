"""The words of a table of cells: what disturbed its rows, what contradicts itself, which is the cheapest and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from multinode.cluster.prices import Prices
from multinode.experiment.cell_prices import lack_currency, unpriced_devices
from multinode.experiment.cell_rows import FullRunSamples
from multinode.experiment.cell_table import combine
from multinode.experiment.cells import (
    CellRow,
    CellTable,
    Cheapest,
    Offer,
    currencies,
    differing,
    has_speed,
    other_work,
)
from multinode.experiment.columns import COLUMNS
from multinode.experiment.contradictions import Contradiction
from multinode.units import format_duration, format_list

_BATCH = (
    "Batch is what Hugging Face calls per_device_train_batch_size and DeepSpeed train_micro_batch_size_per_gpu; "
    "accumulation is gradient_accumulation_steps of both; the global batch, their product over all workers, is Hugging "
    "Face's total train batch size and DeepSpeed's train_batch_size."
)
_IMPORTED = "Imported rows were measured elsewhere, by rules that are not known here."
_CURRENCIES = "Prices are in "
# How the notes begin that follow from the rows alone; `tell` is of earlier releases.
_GENERAL = (_BATCH, "Rows differ in ", "Rows do not all have ", "Rows do not all tell ", _IMPORTED, _CURRENCIES)
# Ways to a figure, by their formulas.
_WAYS = {
    "global_batch": "the global batch",
    "steps": "the number of steps",
    "tokens_per_s": "tokens/s",
    "tokens_per_s*whole_s": "tokens/s x runtime",
    "world_size*accumulation*per_device_batch": "GPUs x accumulation x batch of a GPU",
    "all_devices_batch": "the batch of all GPUs",
    "world_size*per_device_batch": "GPUs x batch of a GPU",
    "all_devices_batch*accumulation": "batch of all GPUs x accumulation",
    "world_size": "the number of GPUs",
    "nodes*workers_per_node": "nodes x workers per node",
    "samples_per_s*whole_s": "samples/s x runtime",
    "dataset_samples*epochs": "samples x epochs",
    "tokens*epochs": "tokens x epochs",
    "steps_per_s*whole_s": "steps/s x runtime",
    "dataset_samples*epochs/global_batch": "samples x epochs / global batch",
    "samples_per_s/steps_per_s": "samples/s over steps/s",
    "samples_per_s*step_time_ms": "samples/s x step time in ms",
    "1000*global_batch": "1000 x the global batch",
    "samples_per_s*tokens/dataset_samples": "samples/s x tokens / samples",
    "samples_per_s*tokens_per_sample": "samples/s x tokens per sample",
    "tokens_per_sample": "tokens per sample",
    "tokens/dataset_samples": "tokens / samples",
    "tgs*world_size": "tokens/s of a GPU x GPUs",
    "mfu*hardware_tflops": "MFU x the hardware's TFLOP/s",
    "hfu*model_tflops": "HFU x the model's TFLOP/s",
}


def with_words(table: CellTable) -> CellTable:
    """The table with every sentence, from its codes and figures; what an earlier release has worded stays."""
    rows = (
        msgspec.structs.replace(
            row,
            contradictions=tuple(map(contradiction_words, row.contradicted)) or row.contradictions,
        )
        for row in table.cells
    )
    cheapest = table.cheapest
    if cheapest is not None and cheapest.outcome:
        cheapest = msgspec.structs.replace(cheapest, sentence=_cheapest(cheapest))
    notes = tuple(dict.fromkeys((*_own_notes(table), *_general(table.cells))))
    return msgspec.structs.replace(table, cells=tuple(rows), cheapest=cheapest, notes=notes)


def sweep_with_words(table: CellTable, full_run: FullRunSamples | None) -> CellTable:
    """Likewise of a sweep, with what its full run trains."""
    told = (_full_run(full_run),) if full_run is not None else ()
    return with_words(msgspec.structs.replace(table, notes=(*told, *table.notes)))


def combined(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one, with the notes that all of its rows give occasion to."""
    own = [msgspec.structs.replace(table, notes=tuple(_own_notes(table))) for table in tables]
    return with_words(combine(own))


def _full_run(found: FullRunSamples) -> str:
    if found.steps:
        return (
            f"The full run is {found.samples or 0:,} samples in every cell ({found.steps:,} steps of "
            f"{found.worker_batch:,} samples per worker on {found.workers:,} workers), at the rate of the measured "
            "steps."
        )
    times = "1 epoch" if found.epochs == 1 else f"{found.epochs:g} epochs"
    size = f" ({found.samples:,} samples)" if found.samples is not None else ""
    return f"The full run is {times} of the data set{size}, at the rate of the measured steps."


def _own_notes(table: CellTable) -> list[str]:
    """Without those that follow from any rows."""
    return [note for note in table.notes if not note.startswith(_GENERAL)]


def _general(rows: Sequence[CellRow]) -> list[str]:
    """What rows give occasion to say: the batch in other words, and what is no comparison of like with like."""
    said = []
    if any(row.global_batch is not None or row.settings.per_device_batch is not None for row in rows):
        said.append(_BATCH)
    fast = [row for row in rows if has_speed(row)]
    work = other_work(fast)
    if work:
        said.append(f"Rows {work}: {_so(fast)}.")
    if any(row.source == "imported" for row in rows):
        said.append(_IMPORTED)
    paid = [currency or "an unknown currency" for currency in currencies(rows)]
    if len(paid) > 1:
        said.append(f"{_CURRENCIES}{format_list(paid)}: what is paid in one is no measure of the other.")
    return said


def _so(rows: Sequence[CellRow]) -> str:
    """What follows for their speeds from rows that are not known to be of the same work."""
    names = differing(rows)
    if not names:
        return "a sample may not be the same work in each, and samples/s may compare different work"
    tokens = "compare tokens/s" if names == ("sequence_length",) else "samples/s compare different work"
    return f"a sample is not the same work in each, so {tokens}"


def contradiction_words(found: Contradiction) -> str:
    """What does not fit together; a formula that is not known here stands as it is."""
    if len(found.values) < 2:  # noqa: PLR2004 - two ways to one figure
        told = [COLUMNS[name].words if name in COLUMNS else name for name in found.sides[1:]]
        return f"it ran out of memory, and has {' and '.join(told)} all the same"
    (one, other), (left, right) = (_WAYS.get(side, side) for side in found.sides[:2]), found.values[:2]
    apart = left / right - 1 if right else math.inf
    size = f"{100 * abs(apart):.1f} % {'more' if apart > 0 else 'less'}"
    return f"{one} is {_number(left)}, {other} is {_number(right)}: {size}"


def _number(value: float) -> str:
    """With as many digits as tell two figures apart that are a percent from each other."""
    return f"{value:.6g}" if value < 1e6 else f"{value:,.0f}"  # noqa: PLR2004 - above it .6g would write 1e+06


def _cheapest(found: Cheapest) -> str:
    match found.outcome:
        case "found" if found.best is not None:
            return " ".join(_found(found, found.best))
        case "too_late" if found.best is not None:
            takes = format_duration(found.best.time_s.value)
            within = format_duration(found.deadline_s)
            return f"No cell ends within {within}: the fastest, {found.best.label}, takes {takes}."
        case "other_jobs":
            told = f"Cells {found.reason}, so that their full runs are not the same one, and none is the cheapest"
            return f"{told}: --where {found.column}=... shows those of one."
        case "currencies":
            named = " and ".join(sorted(currency or "an unknown currency" for currency in found.currencies))
            return f"Prices are in {named}: which cell is the cheapest is unknown."
        case "no_price":
            return "No cell that ends in time has a price: price= in the hostfile, or a prices file."
    return f"How long the full run takes is known of no cell: {found.reason or 'none was measured'}."


def _found(found: Cheapest, best: Offer) -> Iterator[str]:
    takes = format_duration(best.time_s.value)
    if found.equal:
        also = f"{best.label} is the cheapest in time, with {', '.join(found.equal)}"
        yield f"{also}: each costs {_cost(best)}; it takes least, {takes}."
    else:
        yield f"{best.label} is the cheapest in time: the full run costs {_cost(best)} and takes {takes}."
    if best.time_s.high > found.deadline_s:
        late = f"By its 95 % interval it may take {format_duration(best.time_s.high)}, and miss the deadline"
        if found.safe is not None:
            yield f"{late}; the cheapest that cannot is {found.safe.label}, for {_cost(found.safe)}."
        else:
            yield f"{late}; so may every other." if found.in_time > 1 else f"{late}."
    if found.unpriced:
        one = found.unpriced == 1
        count = "1 cell that ends" if one else f"{found.unpriced} cells that end"
        yield f"{count} in time {'has' if one else 'have'} no price."


def _cost(offer: Offer) -> str:
    cost = offer.cost or 0.0
    figure = f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"
    return figure if offer.currency is None else f"{figure} {offer.currency}"


_FILE, _UNPRICED = "Prices of the file are in ", "The prices file has no price of "
_TAKEN = "Prices that came without a currency, of a hostfile or an imported table, are taken to be in "


def with_price_notes(shown: CellTable, before: CellTable, prices: Prices | None) -> CellTable:
    """The table with what is to be noted of its prices; notes of an earlier file give way to those of this one.

    Args:
        shown: with the prices, and the rows that are left of it.
        before: all of its rows as they were before they got this file's prices.
        prices: the file; None leaves the prices at what the rows have.
    """
    notes = [note for note in shown.notes if _UNPRICED not in note]
    if prices is not None:
        notes = [note for note in notes if _FILE not in note]
        if any(row.filed_prices for row in shown.cells):
            about = ", ".join(part for part in (prices.date, prices.source) if part)
            notes.append(f"{_FILE}{prices.currency}{f' ({about})' if about else ''}.")
        if shown.cells and lack_currency(before.cells):
            notes.append(f"{_TAKEN}{prices.currency}.")
    unpriced = unpriced_devices(shown.cells, prices) if prices is not None or len(notes) < len(shown.notes) else ()
    if unpriced:
        notes.append(f"{_UNPRICED}{', '.join(unpriced)}: their cells have none.")
    return msgspec.structs.replace(shown, notes=tuple(dict.fromkeys(notes)))
