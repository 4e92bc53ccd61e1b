"""Other work: in what rows differ so that a sample, the whole job or the money of one is not that of another. Pure.

What one row tells and another does not is taken for a difference: nobody knows that it is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from multinode.analyse.grid.cells import CellRow

__all__ = ["currencies", "differing", "listed", "other_job", "other_work", "untold"]

# What makes a sample other work, by the names of Settings, in the words of a reader.
_WORK = {"model": "model", "dataset": "data set", "stage": "stage", "sequence_length": "sequence length"}
# Published figures contradict themselves by some percent; another number of epochs is more than that.
_SAME_AMOUNT = 1.1


def differing(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Names of Settings that two of the rows tell otherwise."""
    return tuple(name for name in _WORK if len(_told(rows, name) - {None}) > 1)


def untold(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Names of Settings that some of the rows tell, all alike, and others do not."""
    return tuple(name for name in _WORK if len(told := _told(rows, name)) > 1 and len(told - {None}) == 1)


def other_work(rows: Sequence[CellRow]) -> str:
    """In what the rows' samples are other work: `differ in model and stage`; empty where they are alike."""
    known, unknown = ([_WORK[name] for name in names] for names in (differing(rows), untold(rows)))
    parts = [f"differ in {listed(known)}"] if known else []
    return " and ".join([*parts, f"do not all tell their {listed(unknown)}"] if unknown else parts)


def other_job(rows: Sequence[CellRow]) -> str:
    """In what the rows' whole jobs are other jobs: their samples, or how many there are; empty where they are alike.

    Args:
        rows: whose whole job is timed.
    """
    work = other_work(rows)
    if work:
        return work
    by_packing: dict[bool | None, list[float]] = {}
    for row in rows:
        if row.whole_s is not None and row.samples_per_s is not None:
            # Packed samples are another number, and the same data.
            by_packing.setdefault(row.settings.packing, []).append(row.whole_s.value * row.samples_per_s.value)
    alike = all(max(amounts) <= _SAME_AMOUNT * min(amounts) for amounts in by_packing.values())
    return "" if alike else "train different numbers of samples"


def currencies(rows: Sequence[CellRow]) -> tuple[str | None, ...]:
    """What the prices of the rows are paid in, each once; None is that of a price whose currency nobody told."""
    priced = (row for row in rows if row.price_per_hour is not None or row.price_purchase is not None)
    return tuple(dict.fromkeys(row.currency for row in priced))


def listed(words: Sequence[str]) -> str:
    """Words with commas, and `and` before the last."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _told(rows: Sequence[CellRow], name: str) -> set[str | int | None]:
    return {getattr(row.settings, name) for row in rows}
