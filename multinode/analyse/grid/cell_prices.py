"""What the cells of a table cost, by the hour and to buy, and which is the cheapest that ends in time. Pure.

A price that a row has already, from the hostfile or from an imported table, comes before the prices file's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.analyse.grid.cells import MEASURED, CellRow, CellTable, Cheapest, differing, other_job, untold
from multinode.analyse.stats.spread import Ranged
from multinode.core.cluster.device_name import short_device_name
from multinode.core.cluster.prices import Price, Prices
from multinode.units import format_duration

__all__ = ["cheapest", "with_prices"]

# What each price of a row is called in a prices file, and in the hostfile.
_PRICES = {"price_per_hour": ("hourly", "price="), "price_purchase": ("purchase", "price_purchase=")}
_MOST_PRICE = 1e12
_S_PER_HOUR = 3600
_MILLION = 1e6
_NOTE, _UNPRICED_NOTE = "Prices of the file are in ", "The prices file has no price of "
_TAKEN_NOTE = "Prices that came without a currency, of a hostfile or an imported table, are taken to be in "


def with_prices(table: CellTable, prices: Prices | None) -> CellTable:
    """The table with its rows' prices, and what follows from them: cost, samples for money, speed for money.

    Args:
        table: with the figures of its rows; prices of an earlier file in it give way to those of this one.
        prices: of devices and nodes; None leaves it at what the rows have.
    """
    rows = tuple(_with_costs(_priced(row, prices)) for row in table.cells)
    notes = [note for note in table.notes if _UNPRICED_NOTE not in note]
    if prices is not None:
        notes = [note for note in notes if _NOTE not in note]
        notes += (*_notes(rows, prices), *_taken(table.cells, prices))
    if prices is not None or len(notes) < len(table.notes):
        notes += _unpriced(rows, prices)
    return msgspec.structs.replace(table, cells=rows, notes=tuple(dict.fromkeys(notes)))


def _priced(row: CellRow, prices: Prices | None) -> CellRow:
    """With the prices that it lacks, of the file."""
    if prices is None:
        return row
    known = {name: None if name in row.filed_prices else getattr(row, name) for name in _PRICES}
    own = row.currency if any(price is not None for price in known.values()) else None
    if own not in {None, prices.currency}:
        return row
    found = {name: _of_file(row, prices, name) for name, price in known.items() if price is None}
    filed = {name: price for name, price in found.items() if not isinstance(price, str)}
    return msgspec.structs.replace(
        row,
        **(known | filed),
        # A hostfile and a table that have no word for their currency are in the file's.
        currency=prices.currency if any(price is not None for price in (known | filed).values()) else None,
        filed_prices=tuple(filed),
        missing=row.missing | {name: reason for name, reason in found.items() if isinstance(reason, str)},
    )


def _of_file(row: CellRow, prices: Prices, name: str) -> float | str:
    """What the row's nodes, or its GPUs, cost by the file; or why that is not known."""
    nodes = [prices.nodes.get(node) for node in row.node_names]
    told = _of_nodes(row, nodes, prices, name) if any(nodes) else _of_devices(_devices(row), prices, name)
    if isinstance(told, float) and not told <= _MOST_PRICE:
        return f"a price of {told:g} cannot be true"
    return told


def _of_nodes(row: CellRow, nodes: Sequence[Price | None], prices: Prices, name: str) -> float | str:
    """Node by node: its own price, else that of its GPUs."""
    total = 0.0
    for rank, node in enumerate(nodes):
        own = _kind_of(node, name)
        price = own if own is not None else _of_devices(_devices(row, rank), prices, name)
        if isinstance(price, str):
            return price
        total += price
    return total


def _devices(row: CellRow, rank: int | None = None) -> Mapping[str, int | None]:
    """How many of which device all workers compute on, or those of one node; None is unknown, as is an empty one."""
    if not row.node_devices:
        count = row.world_size if rank is None else row.workers_per_node
        return {row.device: count} if row.device is not None else {}
    if rank is not None:
        return row.node_devices[rank] if rank < len(row.node_devices) else {}
    counts: Counter[str] = Counter()
    for devices in row.node_devices:
        counts.update(devices)
    return counts


def _of_devices(devices: Mapping[str, int | None], prices: Prices, name: str) -> float | str:
    if not devices:
        return "the device is not known, nor so its price"
    total = 0.0
    for device, count in devices.items():
        each = _kind_of(prices.of_device(device), name)
        if each is None:
            kind, key = _PRICES[name]
            return f"the prices file has no {kind} price of {short_device_name(device)}, nor has the hostfile {key}"
        if count is None:
            return "how many GPUs there are is not known, nor so their price"
        total += each * count
    return total


def _kind_of(price: Price | None, name: str) -> float | None:
    found: float | None = getattr(price, _PRICES[name][0], None)
    return found


def _with_costs(row: CellRow) -> CellRow:
    """What follows from the row's speed and its prices, anew."""
    if row.state != MEASURED:
        return row
    missing = dict(row.missing)
    for name, (_, key) in _PRICES.items():
        if getattr(row, name) is not None:
            missing.pop(name, None)
        else:
            missing.setdefault(name, f"it has no price: {key} in the hostfile, or a prices file")
    costs: dict[str, float | None] = {}
    for name, cost in _costs(row, missing):
        if isinstance(cost, str):
            costs[name], missing[name] = None, cost
        else:
            costs[name] = cost
            missing.pop(name, None)
    return msgspec.structs.replace(row, **costs, missing=missing)


def _costs(row: CellRow, missing: dict[str, str]) -> Iterator[tuple[str, float | str]]:
    """Each figure, or why it is not known."""
    hourly = row.price_per_hour if row.price_per_hour is not None else missing["price_per_hour"]
    purchase = row.price_purchase if row.price_purchase is not None else missing["price_purchase"]
    speed = _value(row, "samples_per_s", row.samples_per_s)
    whole_s = _value(row, "whole_s", row.whole_s)
    tokens = _value(row, "tokens_per_s", row.tokens_per_s)
    yield "whole_cost", _over(_times(hourly, whole_s), _S_PER_HOUR)
    yield "samples_per_money", _over(_times(speed, _S_PER_HOUR), hourly)
    yield "samples_per_s_per_purchase", _over(speed, purchase)
    yield "cost_per_million_tokens", _over(_times(hourly, _MILLION / _S_PER_HOUR), tokens)


def _value(row: CellRow, name: str, figure: Ranged | None) -> float | str:
    return figure.value if figure is not None else row.missing.get(name, "its speed is not known")


def _times(one: float | str, other: float | str) -> float | str:
    if isinstance(one, str):
        return one
    return other if isinstance(other, str) else one * other


def _over(one: float | str, under: float | str) -> float | str:
    if isinstance(one, str):
        return one
    if isinstance(under, str):
        return under
    found = one / under if under else math.inf
    return found if math.isfinite(found) else "it costs nothing"


def _notes(rows: Sequence[CellRow], prices: Prices) -> Iterator[str]:
    if any(row.filed_prices for row in rows):
        about = ", ".join(part for part in (prices.date, prices.source) if part)
        yield f"{_NOTE}{prices.currency}{f' ({about})' if about else ''}."


def _unpriced(rows: Sequence[CellRow], prices: Prices | None) -> Iterator[str]:
    """Devices of measured cells that the file, or one that gave the rows their prices before, does not have."""
    lacking = [
        row for row in rows if row.state == MEASURED and row.price_per_hour is None and row.price_purchase is None
    ]
    devices = (device for row in lacking for device in _devices(row) if not (prices and prices.of_device(device)))
    names = dict.fromkeys(short_device_name(device) for device in devices)
    if names:
        yield f"{_UNPRICED_NOTE}{', '.join(names)}: their cells have none."


def _taken(rows: Sequence[CellRow], prices: Prices) -> Iterator[str]:
    """Of the rows as they were before they got this file's prices."""
    if any(row.currency is None and any(getattr(row, name) is not None for name in _PRICES) for row in rows):
        yield f"{_TAKEN_NOTE}{prices.currency}."


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
    said = [_best(offers), _spread(offers, deadline_s), _without_price(len(early) - len(offers))]
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


def _without_price(count: int) -> str:
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
