"""cheapest: the cell that does the whole job for the least money and ends in time. Pure; prices are cell_prices'.

In time is by the figure itself; where its spread reaches beyond the deadline, the sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from multinode.analyse.grid.cell_row import MEASURED
from multinode.analyse.grid.cell_work import differing, other_job, untold
from multinode.analyse.grid.cells import CellRow, CellTable, Cheapest
from multinode.analyse.stats.ranged import Ranged
from multinode.units import format_duration

__all__ = ["cheapest"]

_EQUAL = 1e-6


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that does the whole job: how long it takes and what it costs."""

    row: CellRow
    time: Ranged
    cost: float

    @property
    def words(self) -> str:
        """What it costs, for people."""
        figure = f"{self.cost:,.2f}" if self.cost >= 1 else f"{self.cost:.3g}"
        return figure if self.row.currency is None else f"{figure} {self.row.currency}"


def cheapest(table: CellTable, deadline_s: float) -> Cheapest:
    """The cheapest cell whose whole job ends by the deadline; of equal ones the one that ends first.

    Of cells whose whole jobs are different jobs none is the cheapest.

    Args:
        table: with prices.
        deadline_s: how long the whole job may take.
    """
    timed = [row for row in table.cells if row.state == MEASURED and row.whole_s is not None]
    if other := other_job(timed):
        return Cheapest(deadline_s=deadline_s, sentence=_of_other_jobs(timed, other))
    early = [row for row in timed if row.whole_s is not None and row.whole_s.value <= deadline_s]
    offers = [
        _Offer(row=row, time=row.whole_s, cost=row.whole_cost)
        for row in early
        if row.whole_s is not None and row.whole_cost is not None
    ]
    if not offers:
        return Cheapest(deadline_s=deadline_s, sentence=_why_none(table, timed, early, deadline_s))
    currencies = {offer.row.currency for offer in offers}
    if len(currencies) > 1:
        named = " and ".join(sorted(currency or "a currency that is not told" for currency in currencies))
        return Cheapest(
            deadline_s=deadline_s, sentence=f"Prices are in {named}: which cell is the cheapest is unknown."
        )
    offers.sort(key=lambda offer: (offer.cost, offer.time.value))
    said = [_best(offers), _spread(offers, deadline_s), _unpriced(len(early) - len(offers))]
    return Cheapest(
        deadline_s=deadline_s, label=offers[0].row.label, sentence=" ".join(sentence for sentence in said if sentence)
    )


def _of_other_jobs(timed: Sequence[CellRow], other: str) -> str:
    name = next(iter((*differing(timed), *untold(timed))), "label")
    told = f"Cells {other}, so that their whole jobs are not the same one, and none is the cheapest"
    return f"{told}: --where {name}=... shows those of one."


def _best(offers: Sequence[_Offer]) -> str:
    best = offers[0]
    takes = format_duration(best.time.value)
    equal = [other for other in offers[1:] if math.isclose(other.cost, best.cost, rel_tol=_EQUAL)]
    if not equal:
        return f"{best.row.label} is the cheapest in time: the whole job costs {best.words} and takes {takes}."
    also = ", ".join(other.row.label for other in equal)
    return f"{best.row.label} is the cheapest in time, with {also}: each costs {best.words}; it takes least, {takes}."


def _spread(offers: Sequence[_Offer], deadline_s: float) -> str:
    best = offers[0]
    if best.time.high <= deadline_s:
        return ""
    sentence = f"By its spread it may take {format_duration(best.time.high)}, and miss the deadline"
    safe = next((offer for offer in offers if offer.time.high <= deadline_s), None)
    if safe is None:
        return f"{sentence}; so may every other." if len(offers) > 1 else f"{sentence}."
    return f"{sentence}; the cheapest that cannot is {safe.row.label}, for {safe.words}."


def _unpriced(count: int) -> str:
    if not count:
        return ""
    return "1 cell that ends in time has no price." if count == 1 else f"{count} cells that end in time have no price."


def _why_none(table: CellTable, timed: Sequence[CellRow], early: Sequence[CellRow], deadline_s: float) -> str:
    if early:
        return "No cell that ends in time has a price: price= in the hostfile, or a prices file."
    fastest = min(timed, key=lambda row: row.whole_s.value if row.whole_s is not None else math.inf, default=None)
    if fastest is None or fastest.whole_s is None:
        reasons = (row.missing.get("whole_s") for row in table.cells if row.state == MEASURED)
        reason = next((reason for reason in reasons if reason), "none was measured")
        return f"How long the whole job takes is known of no cell: {reason}."
    takes = format_duration(fastest.whole_s.value)
    return f"No cell ends within {format_duration(deadline_s)}: the fastest, {fastest.label}, takes {takes}."
