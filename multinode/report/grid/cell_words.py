"""The words of a table of cells: what disturbed its rows, and which is the cheapest that ends in time, or why none."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.grid.cells import CellTable, Cheapest, Offer
from multinode.report.telemetry.cause_words import disturbance_words
from multinode.units import format_duration

__all__ = ["with_words"]


def with_words(table: CellTable) -> CellTable:
    """The table with every sentence, from its codes and figures; what an earlier release has worded stays."""
    rows = (
        msgspec.structs.replace(row, disturbances=tuple(map(disturbance_words, row.disturbed)) or row.disturbances)
        for row in table.cells
    )
    cheapest = table.cheapest
    if cheapest is not None and cheapest.outcome:
        cheapest = msgspec.structs.replace(cheapest, sentence=_cheapest(cheapest))
    return msgspec.structs.replace(table, cells=tuple(rows), cheapest=cheapest)


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
