"""Prices of rows, of the hostfile or of a prices file, what follows from them, and notes on them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from multinode.cluster.accelerators import short_device_name
from multinode.cluster.prices import Price, Prices
from multinode.findings.finding import distinct
from multinode.profile.measured import with_costs
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, or_none
from multinode.sweep.figures import MEASURED, CellRow, CellTable
from multinode.sweep.notes import ASSUMED_CURRENCY, FILED_PRICES, UNPRICED

# What each price of a row is called in a prices file, and in the hostfile (read by `profile.measured.hostfile_price`).
_PRICES = {"price_per_hour": ("hourly", "price="), "price_purchase": ("purchase", "price_purchase=")}


def with_prices(table: CellTable, prices: Prices | None) -> CellTable:
    """The table with its rows' prices, and what follows from them: cost, samples for money, speed for money.

    Args:
        table: with the figures of its rows; prices of an earlier file in it give way to those of this one.
        prices: of devices and nodes; None leaves it at what the rows have.
    """
    rows = tuple(_with_row_costs(_priced(row, prices)) for row in table.cells)
    return msgspec.structs.replace(table, cells=rows)


def _priced(row: CellRow, prices: Prices | None) -> CellRow:
    if prices is None:
        return row
    own = {name: price for name, price in _known_prices(row).items() if name not in row.filed_prices}
    if own and row.currency not in {None, prices.currency}:
        return row
    filed = {name: found(partial(_of_file, row, prices, name)) for name in _PRICES if name not in own}
    priced = msgspec.structs.replace(row, **filed)
    return msgspec.structs.replace(
        priced,
        # A hostfile and a table that have no word for their currency are in the file's.
        currency=prices.currency if _known_prices(priced) else None,
        filed_prices=tuple(name for name in filed if name in _known_prices(priced)),
    )


def _known_prices(row: CellRow) -> dict[str, float]:
    return {name: price for name in _PRICES if (price := or_none(getattr(row, name))) is not None}


def _of_file(row: CellRow, prices: Prices, name: str) -> float:
    """What the row's nodes, or its GPUs, cost by the file."""
    nodes = [prices.nodes.get(node) for node in row.node_names]
    if not any(nodes):
        total = _of_devices(_devices(row), prices, name)
    else:
        own = (_kind_of(node, name) for node in nodes)
        total = sum(
            price if price is not None else _of_devices(_devices(row, rank), prices, name)
            for rank, price in enumerate(own)
        )
    return total


def _devices(row: CellRow, rank: int | None = None) -> Mapping[str, int | None]:
    if not row.node_devices:
        count = or_none(row.world_size if rank is None else row.workers_per_node)
        return {} if isinstance(row.device, Unknown) else {row.device: count}
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
    amount: float | None = getattr(price, _PRICES[name][0], None)
    return amount


def _with_row_costs(row: CellRow) -> CellRow:
    if row.state != MEASURED:
        return row
    unpriced = {
        name: Unknown(f"it has no price; set {key} in the hostfile, or use a prices file")
        for name, (_, key) in _PRICES.items()
        if getattr(row, name) == UNMEASURED
    }
    return with_costs(msgspec.structs.replace(row, **unpriced))


def with_price_notes(shown: CellTable, before: CellTable, prices: Prices | None) -> CellTable:
    """The table with what is to be noted of its prices; notes of an earlier file give way to those of this one.

    Args:
        shown: with the prices, and the rows that are left of it.
        before: all of its rows as they were before they got this file's prices.
        prices: the file; None leaves the prices at what the rows have.
    """
    notes = [note for note in shown.notes if note.code != UNPRICED.code]
    if prices is not None:
        notes = [note for note in notes if note.code != FILED_PRICES.code]
        if any(row.filed_prices for row in shown.cells):
            about = ", ".join(part for part in (prices.date, prices.source) if part)
            origin = f" ({about})" if about else ""
            notes.append(FILED_PRICES.found(None, currency=prices.currency, origin=origin))
        if shown.cells and _lack_currency(before.cells):
            notes.append(ASSUMED_CURRENCY.found(None, currency=prices.currency))
    unpriced = _unpriced_devices(shown.cells, prices) if prices is not None or len(notes) < len(shown.notes) else ()
    if unpriced:
        notes.append(UNPRICED.found(None, devices=", ".join(unpriced)))
    return msgspec.structs.replace(shown, notes=distinct(notes))


def _unpriced_devices(rows: Sequence[CellRow], prices: Prices | None) -> tuple[str, ...]:
    """Devices of measured cells that the file, or one that gave the rows their prices before, does not have."""
    lacking = [row for row in rows if row.state == MEASURED and not _known_prices(row)]
    devices = (device for row in lacking for device in _devices(row) if not (prices and prices.of_device(device)))
    return tuple(dict.fromkeys(short_device_name(device) for device in devices))


def _lack_currency(rows: Sequence[CellRow]) -> bool:
    """Whether one has a price without a currency; it is taken to be in that of the file that it gets."""
    return any(row.currency is None and _known_prices(row) for row in rows)
