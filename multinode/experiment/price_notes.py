"""What is to be noted of a table's prices: the file that they are of, what it lacks, and currencies that are taken."""

from __future__ import annotations

import msgspec

from multinode.cluster.prices import Prices
from multinode.experiment.cell_prices import lack_currency, unpriced_devices
from multinode.experiment.cells import CellTable

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
