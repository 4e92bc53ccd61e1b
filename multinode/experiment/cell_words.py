"""Notes on a table of cells: what its rows and their prices give occasion to say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.cluster.prices import Prices
from multinode.experiment.cell_prices import lack_currency, unpriced_devices
from multinode.experiment.cell_table import combine
from multinode.experiment.cells import (
    CellRow,
    CellTable,
    currencies,
    differing,
    has_speed,
    other_work,
)
from multinode.units import format_list

_BATCH = (
    "Batch is what Hugging Face calls per_device_train_batch_size and DeepSpeed train_micro_batch_size_per_gpu; "
    "accumulation is gradient_accumulation_steps of both; the global batch, their product over all workers, is Hugging "
    "Face's total train batch size and DeepSpeed's train_batch_size."
)
_IMPORTED = "Imported rows were measured elsewhere, with unknown methods."
_CURRENCIES = "Prices are in "
# How the notes begin that follow from the rows alone.
_GENERAL = (_BATCH, "Rows differ in ", "Rows do not all have ", _IMPORTED, _CURRENCIES)


def with_notes(table: CellTable) -> CellTable:
    """The table with what its rows give occasion to say behind its own notes."""
    notes = tuple(dict.fromkeys((*_own_notes(table), *_general(table.cells))))
    return msgspec.structs.replace(table, notes=notes)


def combined(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one, with the notes that all of its rows give occasion to."""
    own = [msgspec.structs.replace(table, notes=tuple(_own_notes(table))) for table in tables]
    return with_notes(combine(own))


def _own_notes(table: CellTable) -> list[str]:
    return [note for note in table.notes if not note.startswith(_GENERAL)]


def _general(rows: Sequence[CellRow]) -> list[str]:
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
        said.append(f"{_CURRENCIES}{format_list(paid)}, which cannot be compared.")
    return said


def _so(rows: Sequence[CellRow]) -> str:
    names = differing(rows)
    if not names:
        return "a sample may be different work in each, so samples/s may not be comparable"
    tokens = "compare tokens/s" if names == ("sequence_length",) else "samples/s are not comparable"
    return f"a sample is different work in each, so {tokens}"


_FILE, _UNPRICED = "Prices in the file are in ", "The prices file has no price of "
_TAKEN = "Prices without a currency, from a hostfile or an imported table, are assumed to be in "


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
        notes.append(f"{_UNPRICED}{', '.join(unpriced)}; their cells have no price.")
    return msgspec.structs.replace(shown, notes=tuple(dict.fromkeys(notes)))
