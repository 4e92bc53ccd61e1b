"""label_rows: a label for each row of a foreign table, unique in it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from multinode.core.cluster.device_name import short_device_name
from multinode.core.grid.imported_table import ImportedRow

__all__ = ["label_rows"]

_NO_LABEL = re.compile(r"[^a-z0-9.]+")
_LONGEST = 80


def label_rows(rows: Sequence[ImportedRow]) -> list[str]:
    """The name that a row has, else one made of its device and of as little else as tells the rows apart.

    Names that several rows have get their precision, or a number.
    """
    parts = _telling_apart(rows)
    given = [row.words.get("name") or _made(row, parts) for row in rows]
    counts = Counter(given)
    told = [
        f"{label}-{detail}" if counts[label] > 1 and (detail := _precision(row)) else label
        for label, row in zip(given, rows, strict=True)
    ]
    return list(_numbered(told))


_Part = Callable[[ImportedRow], str]


def _telling_apart(rows: Sequence[ImportedRow]) -> list[_Part]:
    """The device, and of the other parts those without which two more rows would have the same name."""
    parts: list[_Part] = [_device]
    made = [_device(row) for row in rows]
    for part in _PARTS:
        longer = [f"{name}-{part(row)}" for name, row in zip(made, rows, strict=True)]
        if len(set(longer)) > len(set(made)):
            parts.append(part)
            made = longer
    return parts


def _made(row: ImportedRow, parts: Sequence[_Part]) -> str:
    return "-".join(word for part in parts if (word := part(row)))[:_LONGEST] or f"line-{row.line}"


def _numbered(labels: Sequence[str]) -> Iterator[str]:
    taken: set[str] = set(labels)
    seen: Counter[str] = Counter()
    for label in labels:
        seen[label] += 1
        if seen[label] == 1:
            yield label
            continue
        number = seen[label]
        while f"{label}-{number}" in taken:
            number += 1
        taken.add(f"{label}-{number}")
        yield f"{label}-{number}"


def _device(row: ImportedRow) -> str:
    name = _slug(short_device_name(row.words.get("device", "")))
    devices = row.figures.get("devices")
    return f"{name}-x{devices.value:.0f}" if name and devices is not None else name


def _precision(row: ImportedRow) -> str:
    told = (name for name in ("fp16", "bf16") if row.words.get(name) == "yes")
    return _slug(row.words.get("precision", "")) or next(told, "")


def _word(name: str) -> _Part:
    return lambda row: _slug(row.words.get(name, ""))


def _count(name: str, prefix: str) -> _Part:
    return lambda row: f"{prefix}{row.figures[name].value:.0f}" if name in row.figures else ""


def _slug(text: str) -> str:
    return _NO_LABEL.sub("-", text.lower()).strip("-")


# What a reader looks for first stands first.
_PARTS: tuple[_Part, ...] = (
    _word("method"),
    _word("strategy"),
    _precision,
    _count("nodes", "nodes"),
    _count("per_device_batch", "batch"),
    _count("all_devices_batch", "batch"),
    _count("accumulation", "accumulation"),
    _count("global_batch", "global"),
    _count("sequence_length", "length"),
    _word("model"),
    _word("dataset"),
)
