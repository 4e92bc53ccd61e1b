"""Whether rows can be compared: in what their samples, their full runs and their currencies differ. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.profile.measured import PRICE_PER_HOUR
from multinode.stats.unknown import Unknown
from multinode.sweep.figures import BY_NAME, PRICE_PURCHASE, CellRow, value_of
from multinode.units import format_list

# Settings that change the work per sample.
_WORK = ("model", "dataset", "stage", "sequence_length")
# Published figures are inconsistent by some percent; another number of epochs differs more.
_SAME_AMOUNT = 1.1


def differing(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Settings for which two of the rows have different values."""
    return tuple(name for name in _WORK if len(_told(rows, name) - {None}) > 1)


def untold(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Settings that only some of the rows have, with equal values."""
    return tuple(name for name in _WORK if len(values := _told(rows, name)) > 1 and len(values - {None}) == 1)


def differing_labels(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Labels of imported rows that differ, and do not tell every row from every other as a date may do."""
    imported = [row for row in rows if row.source == "imported"]
    values = {name: [row.varied.get(name) for row in imported] for row in imported for name in row.varied}
    return tuple(name for name, found in values.items() if 1 < len(set(found)) < len(found))


def other_work(rows: Sequence[CellRow]) -> str:
    """How the samples of the rows differ: `differ in model and stage`; empty if they do not."""
    differ, unknown = ([BY_NAME[name].words for name in names] for names in (differing(rows), untold(rows)))
    parts = [f"differ in {format_list(differ)}"] if differ else []
    return " and ".join([*parts, f"do not all state {format_list(unknown)}"] if unknown else parts)


def other_job(rows: Sequence[CellRow]) -> str:
    """How the full runs of the rows differ in their samples or number of samples; empty if they do not.

    Args:
        rows: rows with a time of the full run.
    """
    work = other_work(rows)
    if work:
        return work
    by_packing: dict[bool | None, list[float]] = {}
    for row in rows:
        if not isinstance(row.whole_s, Unknown) and not isinstance(row.samples_per_s, Unknown):
            # Packing changes the number of samples, but not the data.
            by_packing.setdefault(row.settings.packing, []).append(row.whole_s.value * row.samples_per_s.value)
    alike = all(max(amounts) <= _SAME_AMOUNT * min(amounts) for amounts in by_packing.values())
    return "" if alike else "train different numbers of samples"


def currency_unit(paid: Sequence[str | None], *, one: bool = False) -> str:
    """What stands behind an amount: the one currency, else `units`, of `one` amount of 1 `unit`."""
    if len(paid) == 1 and paid[0] is not None:
        return paid[0]
    return "unit" if one else "units"


def list_currencies(paid: Sequence[str | None]) -> str:
    """Several currencies, in a sentence."""
    return format_list(sorted(currency or "an unknown currency" for currency in paid))


def currencies(rows: Sequence[CellRow]) -> tuple[str | None, ...]:
    """The distinct currencies of the rows' prices; None is an unknown one."""
    priced = (
        row for row in rows if value_of(row, PRICE_PER_HOUR) is not None or value_of(row, PRICE_PURCHASE) is not None
    )
    return tuple(dict.fromkeys(row.currency for row in priced))


def _told(rows: Sequence[CellRow], name: str) -> set[str | int | None]:
    return {getattr(row.settings, name) for row in rows}
