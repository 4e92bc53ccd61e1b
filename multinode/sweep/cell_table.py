"""CellTable made of rows, of several tables, relative to a baseline; sorted and filtered; prices of a file. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from multinode.cluster.accelerators import short_device_name
from multinode.cluster.prices import Price, Prices
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.model.workload import FullRun
from multinode.profile.measured import WHOLE_COST, with_costs
from multinode.profile.summary import Summary
from multinode.profile.throughput import SAMPLES_PER_S
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, or_none, unknown_fields
from multinode.sweep.cell_rows import MeasuredCell, fill_rows, make_row, with_full_run
from multinode.sweep.cells import (
    MEASURED,
    RELATIVE,
    CellRow,
    CellTable,
    Cheapest,
    Offer,
    cell_frame,
    currency_unit,
    differing,
    has_speed,
    list_currencies,
    other_job,
    untold,
)
from multinode.sweep.table_notes import NO_ROW
from multinode.units import format_duration

# What each price of a row is called in a prices file, and in the hostfile (read by `profile.measured.hostfile_price`).
_PRICES = {"price_per_hour": ("hourly", "price="), "price_purchase": ("purchase", "price_purchase=")}
_EQUAL = 1e-6


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


def unpriced_devices(rows: Sequence[CellRow], prices: Prices | None) -> tuple[str, ...]:
    """Devices of measured cells that the file, or one that gave the rows their prices before, does not have."""
    lacking = [row for row in rows if row.state == MEASURED and not _known_prices(row)]
    devices = (device for row in lacking for device in _devices(row) if not (prices and prices.of_device(device)))
    return tuple(dict.fromkeys(short_device_name(device) for device in devices))


def lack_currency(rows: Sequence[CellRow]) -> bool:
    """Whether one has a price without a currency; it is taken to be in that of the file that it gets."""
    return any(row.currency is None and _known_prices(row) for row in rows)


CHEAPEST = RuleGroup("The cheapest cell of a table by a deadline")
_FOUND = CHEAPEST.rule(
    "found", about="the cheapest cell, its duration and its cost", message="{label} is the cheapest {offer}"
)
_OTHER_JOBS = CHEAPEST.rule(
    "other_jobs",
    about="none, because the full runs of the cells differ",
    message="Cells {other}, so their full runs differ and their costs cannot be compared. To select one value: "
    "--where {column}=...",
    figures=("other", "column"),
)
_UNTIMED = CHEAPEST.rule(
    "untimed",
    about="none, because the duration of the full run is unknown",
    message="The duration of the full run is unknown for every cell: {reason}.",
    figures=("reason",),
)
_TOO_LATE = CHEAPEST.rule(
    "too_late",
    about="none, because no cell finishes in time",
    message="No cell finishes within {within}. The fastest, {label}, takes {takes}.",
)
_NO_PRICE = CHEAPEST.rule(
    "no_price",
    about="none, because no cell that finishes in time has a price",
    message="No cell that finishes in time has a price. Set price= in the hostfile, or use a prices file.",
)
_CURRENCIES = CHEAPEST.rule(
    "currencies",
    about="none, because prices are in several currencies",
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
    offers = _Offers(
        deadline_s=deadline_s,
        best=best,
        equal=tuple(offer.label for cost, offer in others if math.isclose(cost, least, rel_tol=_EQUAL)),
        safe=next((offer for _, offer in priced if offer.time_s.high <= deadline_s), None),
        in_time=len(priced),
        unpriced=len(early) - len(priced),
    )
    words = {"label": best.label, "offer": " ".join(_offer_words(offers))}
    return Cheapest(**_FOUND.fields(None, words), label=best.label, **msgspec.structs.asdict(offers))


class _Offers(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as in Cheapest."""

    deadline_s: float
    best: Offer
    equal: tuple[str, ...]
    safe: Offer | None
    in_time: int
    unpriced: int


def _offer_words(offers: _Offers) -> Iterator[str]:
    best, takes, limit = offers.best, format_duration(offers.best.time_s.value), format_duration(offers.deadline_s)
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


class SweptCells(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep has measured so far."""

    run_id: str
    job: str
    cells: tuple[MeasuredCell, ...]  # in the order of its grid
    worker_batch: int | None = None  # as GridRecord has it
    most_workers: int | None = None  # of its largest cell, whether that is measured or not; None is not known


def table_of_sweep(sweep: SweptCells) -> CellTable:
    """The table of a sweep: a row a cell, whatever became of it; what its full run trains is a note."""
    rows = fill_rows([make_row(cell) for cell in sweep.cells])
    whole = FullRun.first_of(cell.whole for cell in sweep.cells)
    rows, trains = with_full_run(rows, whole, sweep.worker_batch, sweep.most_workers)
    table = CellTable(
        run_id=sweep.run_id,
        job=sweep.job,
        rule=_rule([run.summary for cell in sweep.cells for run in cell.runs if run.summary is not None]),
        cells=rows,
        notes=trains,
    )
    return relative_to(table)


def combine(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one; a label that two of them have gets its run's id."""
    if len(tables) == 1:
        return tables[0]
    labels = Counter(row.label for table in tables for row in table.cells)
    rows = [
        row if labels[row.label] == 1 else msgspec.structs.replace(row, label=f"{row.label} ({table.run_id})")
        for table in tables
        for row in table.cells
    ]
    return relative_to(
        CellTable(
            run_id=",".join(table.run_id for table in tables),
            job=", ".join(dict.fromkeys(table.job for table in tables)),
            rule="; ".join(dict.fromkeys(table.rule for table in tables if table.rule)),
            cells=tuple(rows),
            notes=tuple(note for table in tables for note in _own_notes(table, tables)),
        )
    )


def relative_to(table: CellTable, label: str | None = None) -> CellTable:
    """The table with every row's speed over that of the baseline.

    Args:
        table: the table.
        label: of the baseline; None takes the first row that has a speed.
    """
    baseline = _find(table.cells, label) if label is not None else next(filter(has_speed, table.cells), None)
    frame = cell_frame([row for row in table.cells if has_speed(row)])
    base = next((row for row in frame.rows if row.item is baseline), None)
    relative = {id(row.item): or_none(row[RELATIVE]) for row in frame.over(base, SAMPLES_PER_S, RELATIVE).rows}
    rows = tuple(msgspec.structs.replace(row, relative=relative.get(id(row))) for row in table.cells)
    return msgspec.structs.replace(table, baseline=baseline.label if baseline is not None else None, cells=rows)


def _find(rows: Sequence[CellRow], label: str) -> CellRow:
    row = next((row for row in rows if row.label == label), None)
    if row is None:
        raise UsageError(
            f"the table has no row {label!r}", hint=f"its rows are: {', '.join(row.label for row in rows)}"
        )
    if not has_speed(row):
        fast = ", ".join(row.label for row in rows if has_speed(row)) or "none of its rows"
        raise UsageError(
            f"row {label!r} has no samples/s for comparison (state: {row.state})", hint=f"these have: {fast}"
        )
    return row


def _own_notes(table: CellTable, tables: Sequence[CellTable]) -> Iterator[Finding]:
    for note in table.notes:
        is_shared = all(note in other.notes for other in tables)
        yield note if is_shared else msgspec.structs.replace(note, message=f"{table.run_id}: {note.message}")


def _rule(summaries: Sequence[Summary]) -> str:
    rules = dict.fromkeys(summary.rule for summary in summaries if summary.rule)
    if len(rules) <= 1:
        return next(iter(rules), "")
    dropped, made = (
        _span(summary.steps - summary.steady_steps for summary in summaries),
        _span(summary.steps for summary in summaries),
    )
    return f"the first steps of each run are excluded as warm-up: {dropped} of {made}"


def _span(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    least, most = ordered[0], ordered[-1]
    return str(least) if least == most else f"{least} to {most}"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How a table is asked for."""

    # label of the row that the others are relative to; None takes the first that is shown and has a speed
    baseline: str | None = None
    sort: str | None = None  # name of a value to sort by, the least first; with `-` before it the greatest
    where: tuple[str, ...] = ()  # conditions such as `method=lora` and `nodes>=2`; rows that meet all of them are shown
    prices: Prices | None = None  # of devices and nodes; None takes those that the rows have
    deadline_s: float | None = None  # by when the full run has to end, for the cheapest cell; None does not ask


def look_at(table: CellTable, look: Look) -> CellTable:
    """The table as it was asked for."""
    # Once for what is sorted and chosen by price, and once more for notes on prices of the rows that are left.
    shown = with_prices(_chosen(with_prices(table, look.prices), look), look.prices)
    if look.deadline_s is None or not shown.cells:
        return shown
    return msgspec.structs.replace(shown, cheapest=cheapest(shown, look.deadline_s))


def _chosen(table: CellTable, look: Look) -> CellTable:
    if look.baseline is not None:
        table = relative_to(table, look.baseline)
    frame = cell_frame(table.cells).where(*look.where)
    if look.sort is not None:
        frame = frame.sort(look.sort)
    rows = [row.item for row in frame.rows]
    if not rows and table.cells and look.where:
        none = NO_ROW.found(None, rows=len(table.cells), conditions=" and ".join(look.where))
        return msgspec.structs.replace(table, cells=(), baseline=None, rule="", notes=(none,))
    shown = msgspec.structs.replace(table, cells=tuple(rows))
    if look.baseline is not None or any(row.label == table.baseline for row in rows):
        return shown
    return relative_to(shown)
