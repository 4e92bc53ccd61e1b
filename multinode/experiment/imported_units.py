"""Units of foreign tables: the quantity of `tokens/s/GPU`, `s/it`, `MiB` or `hours`, and its factor. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from multinode.experiment.columns import CellColumn
from multinode.predict.published import WORDS, any_of

OF_DEVICE = {"tokens_per_s": "tgs", "samples_per_s": "samples_per_s_per_gpu"}
"""Speeds of all workers, with the name of the speed per worker."""


class Unit(NamedTuple):
    """A quantity (the name of a column, or one that several have), and the factor to our unit or SI."""

    measures: str
    scale: float = 1.0


_SECONDS = {
    name: float(period.seconds) for period in WORDS.periods for name in period.names if name != "m"
} | WORDS.seconds
_THINGS = {name: thing for thing, names in WORDS.things.items() for name in names}
_COUNTED = {name: column for column, names in WORDS.counted.items() for name in names}
_MEASURED_IN = {
    "step_time_ms": ("time", 1e3),
    "whole_s": ("time", 1.0),
    "peak_memory_gib": ("memory", 1 / (1 << 30)),
    "mfu": ("share", 1.0),
    "hfu": ("share", 1.0),
    "network_share": ("share", 1.0),
}
_NOUNS = {
    "sequence_length": "tokens",
    "tokens": "tokens",
    "tokens_per_sample": "tokens",
    "dataset_samples": "samples",
    "per_device_batch": "samples",
    "all_devices_batch": "samples",
    "global_batch": "samples",
    "steps": "steps",
    "accumulation": "steps",
    "world_size": "world_size",
    "workers_per_node": "world_size",
    "nodes": "nodes",
    "epochs": "epochs",
}
_PER = re.compile(r"\s*/\s*|\s+per\s+|_per_")
_EACH = any_of(WORDS.rates.each_device)
_EACH_DEVICE = re.compile(rf"^(?:{_EACH})\s*(?P<rest>.+)$|^(?P<first>.+?)\s*\(?(?:{_EACH})\)?$")


def parse_unit(text: str) -> Unit | None:
    """The quantity of a unit, or of a title that is only a unit; None if unknown.

    Times are in seconds, memory in bytes, shares as fractions, rates per second; `s/it` is in milliseconds, as
    step_time_ms.
    """
    text = " ".join(text.lower().split()).strip(" .")
    if (each := _EACH_DEVICE.match(text)) is not None:
        unit = parse_unit(each["rest"] or each["first"])
        return unit_of_device(unit) if unit is not None else None
    second = WORDS.rates.each_second
    if text.startswith(second) or text.endswith(second):
        thing = text.removeprefix(second).removesuffix(second).strip()
        text = f"{re.sub(any_of(WORDS.rates.handled), '', thing)}/s"
    if text == "%":
        return Unit("share", 0.01)
    first, slash, rest = text.partition("/")
    text = WORDS.rates.words.get(first.strip(), first) + slash + rest
    parts = [part.strip() for part in _PER.split(text)]
    if len(parts) == 1:
        return _single(text)
    if parts[0] in _SECONDS:
        is_step = len(parts) == 2 and _THINGS.get(parts[1]) == "steps"  # noqa: PLR2004 - a time a step
        return Unit("step_time_ms", _SECONDS[parts[0]] * 1e3) if is_step else None
    return _rate(parts)


def _single(text: str) -> Unit | None:
    if text in _SECONDS:
        return Unit("time", _SECONDS[text])
    if text in WORDS.bytes:
        return Unit("memory", WORDS.bytes[text])
    noun = _COUNTED.get(text) or _THINGS.get(text)
    return Unit(noun) if noun else None


def _rate(parts: list[str]) -> Unit | None:
    thing, scale = _thing(parts[0])
    rest = parts[1:]
    times = [part for part in rest if part in _SECONDS]
    devices = [part for part in rest if part in WORDS.rates.of_device]
    if thing is None or len(times) != 1 or len(devices) > 1 or len(times) + len(devices) != len(rest):
        return None
    unit = Unit(f"{thing}_per_s", scale / _SECONDS[times[0]])
    return unit_of_device(unit) if devices else unit


def _thing(text: str) -> tuple[str | None, float]:
    if text in _THINGS:
        return _THINGS[text], 1.0
    prefix, rest = text[:1], text[1:].strip()
    return (_THINGS[rest], WORDS.thousands[prefix]) if prefix in WORDS.thousands and rest in _THINGS else (None, 1.0)


def unit_of_device(unit: Unit) -> Unit | None:
    """The same per worker, if we have such a column."""
    return Unit(OF_DEVICE[unit.measures], unit.scale) if unit.measures in OF_DEVICE else None


def find_unit(text: str, column: CellColumn) -> Unit | None:
    """A unit of a column, with the factor to the column's unit; None if it measures something else."""
    unit = parse_unit(text)
    if unit is None:
        return None
    quantity, scale = _MEASURED_IN.get(column.name, ("", 1.0))
    if unit.measures == quantity:
        return Unit(column.name, unit.scale * scale)
    if _NOUNS.get(column.name) == unit.measures:
        return Unit(column.name)
    if column.name in OF_DEVICE.values() and unit.measures in OF_DEVICE:
        # An explicit column name already says whose speed it is.
        unit = unit_of_device(unit) or unit
    return unit if unit.measures == column.name else None


def fits(unit: Unit, column: CellColumn) -> bool:
    """Whether the column uses this unit."""
    return _NOUNS.get(column.name) == unit.measures


def is_rate(unit: Unit) -> bool:
    """Whether it defines the column alone, as `tokens/s` does and `GB` does not."""
    return unit.measures.endswith("_per_s") or unit.measures in {*OF_DEVICE.values(), "step_time_ms"}
