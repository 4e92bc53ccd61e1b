"""The cheapest cell of a table by a deadline. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.measured import WHOLE_COST
from multinode.stats.unknown import Unknown, or_none, unknown_fields
from multinode.sweep.comparability import currency_unit, differing, list_currencies, other_job, untold
from multinode.sweep.figures import MEASURED, CellTable, Cheapest, Offer
from multinode.units import format_duration

_EQUAL = 1e-6
CHEAPEST = RuleGroup("The cheapest cell of a table by a deadline")
_FOUND = CHEAPEST.rule(
    "found", about="the cheapest cell, its duration and its cost", message="{label} is the cheapest {offer}"
)
_OTHER_JOBS = CHEAPEST.rule(
    "other_jobs",
    about="no cheapest cell, because the full runs of the cells differ",
    message="The cells {other}, so the costs of their full runs cannot be compared. To select one value: "
    "--where {column}=...",
    figures=("other", "column"),
)
_UNTIMED = CHEAPEST.rule(
    "untimed",
    about="no cheapest cell, because the duration of the full run is unknown",
    message="The duration of the full run is unknown for every cell: {reason}.",
    figures=("reason",),
)
_TOO_LATE = CHEAPEST.rule(
    "too_late",
    about="no cheapest cell, because no cell finishes in time",
    message="No cell finishes within {within}. The fastest, {label}, takes {takes}.",
)
_NO_PRICE = CHEAPEST.rule(
    "no_price",
    about="no cheapest cell, because no cell that finishes in time has a price",
    message="No cell that finishes in time has a price. Set price= in the hostfile, or use a prices file.",
)
_CURRENCIES = CHEAPEST.rule(
    "currencies",
    about="no cheapest cell, because prices are in several currencies",
    message="Prices are in {currencies}, so the cheapest cell is unknown.",
)


def cheapest(table: CellTable, deadline_s: float) -> Cheapest:
    """The cheapest cell whose full run ends by the deadline; of equal ones the one that ends first.

    Of cells whose full runs are different jobs none is the cheapest.

    Args:
        table: with prices.
        deadline_s: how long the full run may take.
    """

    def judged(rule: Rule, words: Mapping[str, object], **data: Any) -> Cheapest:
        return Cheapest(**rule.fields(None, words), deadline_s=deadline_s, **data)

    measured = [row for row in table.cells if row.state == MEASURED]
    timed = [(row, row.whole_s) for row in measured if not isinstance(row.whole_s, Unknown)]
    rows = [row for row, _ in timed]
    if other := other_job(rows):
        column = next(iter((*differing(rows), *untold(rows))), "label")
        return judged(_OTHER_JOBS, {"other": other, "column": column})
    if not timed:
        reason = next((unknown.reason for row in measured if (unknown := unknown_fields(row).get("whole_s"))), "")
        return judged(_UNTIMED, {"reason": reason or "none was measured"})
    all_offers = [
        Offer(label=row.label, time_s=time_s, cost=or_none(row.whole_cost), currency=row.currency)
        for row, time_s in timed
    ]
    early = [offer for offer in all_offers if offer.time_s.value <= deadline_s]
    if not early:
        fastest = min(all_offers, key=lambda offer: offer.time_s.value)
        takes, within = format_duration(fastest.time_s.value), format_duration(deadline_s)
        return judged(_TOO_LATE, {"within": within, "label": fastest.label, "takes": takes}, best=fastest)
    priced = [(offer.cost, offer) for offer in early if offer.cost is not None]
    if not priced:
        return judged(_NO_PRICE, {}, unpriced=len(early))
    paid = tuple(dict.fromkeys(offer.currency for _, offer in priced))
    if len(paid) > 1:
        return judged(_CURRENCIES, {"currencies": list_currencies(paid)}, currencies=paid)
    priced.sort(key=lambda offer: (offer[0], offer[1].time_s.value))
    (least, best), *others = priced
    offers = Cheapest(
        message="",
        deadline_s=deadline_s,
        label=best.label,
        best=best,
        equal=tuple(offer.label for cost, offer in others if math.isclose(cost, least, rel_tol=_EQUAL)),
        safe=next((offer for _, offer in priced if offer.time_s.high <= deadline_s), None),
        in_time=len(priced),
        unpriced=len(early) - len(priced),
    )
    said = _FOUND.fields(None, {"label": best.label, "offer": " ".join(_offer_words(best, offers))})
    return msgspec.structs.replace(offers, **said)


def _offer_words(best: Offer, offers: Cheapest) -> Iterator[str]:
    takes, limit = format_duration(best.time_s.value), format_duration(offers.deadline_s)
    if offers.equal:
        also = f"within the deadline of {limit}, with {', '.join(offers.equal)}"
        yield f"{also}: each costs {_amount(best)}, and {best.label} is the fastest ({takes})."
    else:
        yield f"within the deadline of {limit}: the full run costs {_amount(best)} and takes {takes}."
    if best.time_s.high > offers.deadline_s:
        late = (
            f"According to its 95% confidence interval, it may take {format_duration(best.time_s.high)} and miss the "
            "deadline"
        )
        if offers.safe is not None:
            yield f"{late}; the cheapest cell that will not miss it is {offers.safe.label}, for {_amount(offers.safe)}."
        else:
            yield f"{late}, like every other cell." if offers.in_time > 1 else f"{late}."
    if offers.unpriced:
        is_one = offers.unpriced == 1
        count = "1 cell that finishes" if is_one else f"{offers.unpriced} cells that finish"
        yield f"{count} in time {'has' if is_one else 'have'} no price."


def _amount(offer: Offer) -> str:
    return f"{WHOLE_COST.text(offer.cost or 0.0)} {currency_unit([offer.currency])}"
