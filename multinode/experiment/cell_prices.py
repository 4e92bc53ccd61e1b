"""What the cells of a table cost, by the hour and to buy, and which is the cheapest that ends in time. Pure.

A price that a row has already, from the hostfile or from an imported table, comes before the prices file's. In time is
by the figure itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from multinode.cluster.accelerators import short_device_name
from multinode.cluster.prices import Price, Prices
from multinode.experiment.cells import (
    MEASURED,
    CellRow,
    CellTable,
    Cheapest,
    Offer,
    differing,
    other_job,
    untold,
    value_of,
)
from multinode.stats.estimate import UnknownError, attempt
from multinode.units import format_duration

# What each price of a row is called in a prices file, and in the hostfile.
_PRICES = {"price_per_hour": ("hourly", "price="), "price_purchase": ("purchase", "price_purchase=")}
_MOST_PRICE = 1e12
_S_PER_HOUR = 3600.0
# Each cost as values of a row and a factor, over a value or a number.
_COSTS: dict[str, tuple[tuple[str, ...], float, str | float]] = {
    "whole_cost": (("price_per_hour", "whole_s"), 1.0, _S_PER_HOUR),
    "samples_per_money": (("samples_per_s",), _S_PER_HOUR, "price_per_hour"),
    "samples_per_s_per_purchase": (("samples_per_s",), 1.0, "price_purchase"),
    "cost_per_million_tokens": (("price_per_hour",), 1e6 / _S_PER_HOUR, "tokens_per_s"),
}
_EQUAL = 1e-6


def with_prices(table: CellTable, prices: Prices | None) -> CellTable:
    """The table with its rows' prices, and what follows from them: cost, samples for money, speed for money.

    What is to be noted of them is `experiment.cell_words`'.

    Args:
        table: with the figures of its rows; prices of an earlier file in it give way to those of this one.
        prices: of devices and nodes; None leaves it at what the rows have.
    """
    rows = tuple(_with_costs(_priced(row, prices)) for row in table.cells)
    return msgspec.structs.replace(table, cells=rows)


def _priced(row: CellRow, prices: Prices | None) -> CellRow:
    if prices is None:
        return row
    known = {name: None if name in row.filed_prices else getattr(row, name) for name in _PRICES}
    own = row.currency if any(price is not None for price in known.values()) else None
    if own not in {None, prices.currency}:
        return row
    missing = dict(row.missing)
    filed: dict[str, float] = {}
    for name, price in known.items():
        if price is None and (found := attempt(missing, name, partial(_of_file, row, prices, name))) is not None:
            filed[name] = found
    return msgspec.structs.replace(
        row,
        **(known | filed),
        # A hostfile and a table that have no word for their currency are in the file's.
        currency=prices.currency if any(price is not None for price in (known | filed).values()) else None,
        filed_prices=tuple(filed),
        missing=missing,
    )


def _of_file(row: CellRow, prices: Prices, name: str) -> float:
    """What the row's nodes, or its GPUs, cost by the file."""
    nodes = [prices.nodes.get(node) for node in row.node_names]
    if not any(nodes):
        told = _of_devices(_devices(row), prices, name)
    else:
        own = (_kind_of(node, name) for node in nodes)
        told = sum(
            price if price is not None else _of_devices(_devices(row, rank), prices, name)
            for rank, price in enumerate(own)
        )
    if told > _MOST_PRICE:
        raise UnknownError(f"a price of {told:g} is implausible")
    return told


def _devices(row: CellRow, rank: int | None = None) -> Mapping[str, int | None]:
    if not row.node_devices:
        count = row.world_size if rank is None else row.workers_per_node
        return {row.device: count} if row.device is not None else {}
    if rank is not None:
        return row.node_devices[rank] if rank < len(row.node_devices) else {}
    counts: Counter[str] = Counter()
    for devices in row.node_devices:
        counts.update(devices)
    return counts


def _of_devices(devices: Mapping[str, int | None], prices: Prices, name: str) -> float:
    if not devices:
        raise UnknownError("the device, and therefore its price, is unknown")
    total = 0.0
    for device, count in devices.items():
        each = _kind_of(prices.of_device(device), name)
        if each is None:
            kind, key = _PRICES[name]
            raise UnknownError(
                f"no {kind} price of {short_device_name(device)} in the prices file, and no {key} in the hostfile"
            )
        if count is None:
            raise UnknownError("the number of GPUs, and therefore their price, is unknown")
        total += each * count
    return total


def _kind_of(price: Price | None, name: str) -> float | None:
    found: float | None = getattr(price, _PRICES[name][0], None)
    return found


def _with_costs(row: CellRow) -> CellRow:
    if row.state != MEASURED:
        return row
    missing = dict(row.missing)
    for name, (_, key) in _PRICES.items():
        if getattr(row, name) is not None:
            missing.pop(name, None)
        else:
            missing.setdefault(name, f"it has no price; set {key} in the hostfile, or use a prices file")
    costs: dict[str, float | None] = {}
    for name in _COSTS:
        costs[name] = attempt(missing, name, partial(_cost, row, missing, name))
        if costs[name] is not None:
            missing.pop(name, None)
    return msgspec.structs.replace(row, **costs, missing=missing)


def _cost(row: CellRow, missing: Mapping[str, str], name: str) -> float:
    def known(part: str) -> float:
        value: float | None = value_of(row, part)
        if value is None:
            raise UnknownError(missing.get(part, "its speed is unknown"))
        return value

    parts, factor, under = _COSTS[name]
    cost = math.prod(map(known, parts), start=factor)
    divisor = known(under) if isinstance(under, str) else under
    cost = cost / divisor if divisor else math.inf
    if not math.isfinite(cost):
        raise UnknownError("it costs nothing")
    return cost


def unpriced_devices(rows: Sequence[CellRow], prices: Prices | None) -> tuple[str, ...]:
    """Devices of measured cells that the file, or one that gave the rows their prices before, does not have."""
    lacking = [
        row for row in rows if row.state == MEASURED and row.price_per_hour is None and row.price_purchase is None
    ]
    devices = (device for row in lacking for device in _devices(row) if not (prices and prices.of_device(device)))
    return tuple(dict.fromkeys(short_device_name(device) for device in devices))


def lack_currency(rows: Sequence[CellRow]) -> bool:
    """Whether one has a price without a currency; it is taken to be in that of the file that it gets."""
    return any(row.currency is None and any(getattr(row, name) is not None for name in _PRICES) for row in rows)


def cheapest(table: CellTable, deadline_s: float) -> Cheapest:
    """The cheapest cell whose full run ends by the deadline; of equal ones the one that ends first.

    Of cells whose full runs are different jobs none is the cheapest.

    Args:
        table: with prices.
        deadline_s: how long the full run may take.
    """
    timed = [(row, row.whole_s) for row in table.cells if row.state == MEASURED and row.whole_s is not None]
    rows = [row for row, _ in timed]
    if other := other_job(rows):
        column = next(iter((*differing(rows), *untold(rows))), "label")
        told = f"Cells {other}, so their full runs differ and none is the cheapest"
        sentence = f"{told}. To select one value: --where {column}=..."
        return Cheapest(deadline_s=deadline_s, outcome="other_jobs", reason=other, column=column, sentence=sentence)
    if not timed:
        reasons = (row.missing.get("whole_s") for row in table.cells if row.state == MEASURED)
        reason = next(filter(None, reasons), "")
        sentence = f"The duration of the full run is unknown for every cell: {reason or 'none was measured'}."
        return Cheapest(deadline_s=deadline_s, outcome="untimed", reason=reason, sentence=sentence)
    all_offers = [
        Offer(label=row.label, time_s=time_s, cost=row.whole_cost, currency=row.currency) for row, time_s in timed
    ]
    early = [offer for offer in all_offers if offer.time_s.value <= deadline_s]
    if not early:
        fastest = min(all_offers, key=lambda offer: offer.time_s.value)
        takes, within = format_duration(fastest.time_s.value), format_duration(deadline_s)
        sentence = f"No cell finishes within {within}: the fastest, {fastest.label}, takes {takes}."
        return Cheapest(deadline_s=deadline_s, outcome="too_late", best=fastest, sentence=sentence)
    priced = [(offer.cost, offer) for offer in early if offer.cost is not None]
    if not priced:
        sentence = "No cell that finishes in time has a price. Set price= in the hostfile, or use a prices file."
        return Cheapest(deadline_s=deadline_s, outcome="no_price", unpriced=len(early), sentence=sentence)
    paid = tuple(dict.fromkeys(offer.currency for _, offer in priced))
    if len(paid) > 1:
        named = " and ".join(sorted(currency or "an unknown currency" for currency in paid))
        sentence = f"Prices are in {named}, so the cheapest cell is unknown."
        return Cheapest(deadline_s=deadline_s, outcome="currencies", currencies=paid, sentence=sentence)
    priced.sort(key=lambda one: (one[0], one[1].time_s.value))
    (least, best), *others = priced
    found = Cheapest(
        deadline_s=deadline_s,
        label=best.label,
        outcome="found",
        best=best,
        equal=tuple(offer.label for cost, offer in others if math.isclose(cost, least, rel_tol=_EQUAL)),
        safe=next((offer for _, offer in priced if offer.time_s.high <= deadline_s), None),
        in_time=len(priced),
        unpriced=len(early) - len(priced),
    )
    return msgspec.structs.replace(found, sentence=" ".join(_found(found, best)))


def _found(found: Cheapest, best: Offer) -> Iterator[str]:
    takes = format_duration(best.time_s.value)
    if found.equal:
        also = f"{best.label} is the cheapest within the deadline, with {', '.join(found.equal)}"
        yield f"{also}: each costs {_amount(best)}; it is the fastest of them, {takes}."
    else:
        yield f"{best.label} is the cheapest within the deadline: the full run costs {_amount(best)} and takes {takes}."
    if best.time_s.high > found.deadline_s:
        late = f"By its 95% confidence interval it may take {format_duration(best.time_s.high)} and miss the deadline"
        if found.safe is not None:
            yield f"{late}; the cheapest cell that will not is {found.safe.label}, for {_amount(found.safe)}."
        else:
            yield f"{late}, like every other cell." if found.in_time > 1 else f"{late}."
    if found.unpriced:
        one = found.unpriced == 1
        count = "1 cell that finishes" if one else f"{found.unpriced} cells that finish"
        yield f"{count} in time {'has' if one else 'have'} no price."


def _amount(offer: Offer) -> str:
    cost = offer.cost or 0.0
    figure = f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"
    return figure if offer.currency is None else f"{figure} {offer.currency}"
