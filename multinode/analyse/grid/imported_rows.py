"""imported_rows: figures measured elsewhere -> rows of a cell table. Pure; prices of devices are cell_prices'.

What a row gives stands as it was given: where figures contradict each other, the row says so, and nothing is mended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from multinode.analyse.grid.cells import MEASURED, CellRow
from multinode.analyse.grid.contradictions import find_contradictions
from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.spread import Ranged
from multinode.core.cluster.device_name import short_device_name
from multinode.core.grid.imported_table import ImportedRow
from multinode.core.text.plausible import plausible_count
from multinode.core.text.rounded import Rounded, exactly

__all__ = ["imported_rows", "label_rows", "with_derived"]

_OUT_OF = {"gpu": "the GPU's memory did not suffice, says the table", "node": "the node's did not, says the table"}
# What tells how a training went; a row without any of them tells of none.
_SPEEDS = (
    *("samples_per_s", "tokens_per_s", "step_time_ms", "runtime", "memory_gib", "model_tflops", "hardware_tflops"),
    *("mfu", "hfu", "network_share", "energy_j_per_sample"),
)
# Figures of a row, by our names, that may be None, but for those that follow from others once there are prices.
_FIGURES = (
    *("device", "nodes", "workers_per_node", "world_size", "global_batch", "dataset_samples", "samples_per_s"),
    *("tokens_per_s", "tgs", "tokens_per_sample", "model_tflops", "hardware_tflops", "mfu", "hfu", "step_time_ms"),
    *("step_spread", "network_share", "peak_memory_gib", "whole_s", "energy_j_per_sample"),
)


def imported_rows(rows: Sequence[ImportedRow]) -> tuple[CellRow, ...]:
    """A row of a cell table each, marked as imported, with what follows from its figures and what contradicts it."""
    return tuple(_row(row, label) for row, label in zip(rows, label_rows(rows), strict=True))


def _row(row: ImportedRow, label: str) -> CellRow:
    figures = with_derived(row.figures)
    state, reason = _state(row, figures)
    found = CellRow(
        label=label,
        source="imported",
        state=state,
        out_of=row.out_of,
        reason=reason,
        device=row.words.get("device"),
        nodes=_count(figures, "nodes"),
        workers_per_node=_count(figures, "workers_per_node"),
        world_size=_count(figures, "devices"),
        settings=_settings(row, figures),
        global_batch=_count(figures, "global_batch"),
        dataset_samples=_count(figures, "samples"),
        samples_per_s=_ranged(figures, "samples_per_s"),
        tokens_per_s=_ranged(figures, "tokens_per_s"),
        tgs=_ranged(figures, "tgs"),
        tokens_per_sample=_value(figures, "tokens_per_sample"),
        model_tflops=_value(figures, "model_tflops"),
        hardware_tflops=_value(figures, "hardware_tflops"),
        mfu=_value(figures, "mfu"),
        hfu=_value(figures, "hfu"),
        step_time_ms=_ranged(figures, "step_time_ms"),
        network_share=_value(figures, "network_share"),
        peak_memory_gib=_value(figures, "memory_gib"),
        whole_s=_ranged(figures, "runtime"),
        energy_j_per_sample=_value(figures, "energy_j_per_sample"),
        price_per_hour=_value(figures, "price_per_hour"),
        price_purchase=_value(figures, "price_purchase"),
        currency=row.words.get("currency") if {"price_per_hour", "price_purchase"} & figures.keys() else None,
        contradictions=_contradictions(row),
    )
    return found if state != MEASURED else _with_reasons(found)


def _state(row: ImportedRow, figures: Mapping[str, Rounded]) -> tuple[str, str]:
    """The state, and why it has no figures."""
    if row.out_of is not None:
        return "out_of_memory", _OUT_OF[row.out_of]
    if any(name in figures for name in _SPEEDS):
        return MEASURED, ""
    return "skipped", "the table has no figures of it"


def _settings(row: ImportedRow, figures: Mapping[str, Rounded]) -> Settings:
    narrow = next((name for name in ("fp16", "bf16") if row.words.get(name) == "yes"), None)
    return Settings(
        model=row.words.get("model"),
        method=row.words.get("method"),
        lora_rank=_count(figures, "lora_rank"),
        stage=row.words.get("stage"),
        dataset=row.words.get("dataset"),
        strategy=row.words.get("strategy"),
        per_device_batch=_count(figures, "per_device_batch"),
        accumulation=_count(figures, "accumulation"),
        sequence_length=_count(figures, "sequence_length"),
        precision=row.words.get("precision") or narrow,
    )


def _contradictions(row: ImportedRow) -> tuple[str, ...]:
    found = find_contradictions(row.figures)
    told = [name for name in ("samples_per_s", "tokens_per_s", "steps_per_s", "runtime") if name in row.figures]
    if row.out_of is not None and told:
        return (f"it ran out of memory, and has {' and '.join(told)} all the same", *found)
    return found


def _with_reasons(row: CellRow) -> CellRow:
    unknown = {name: "the table does not tell it" for name in _FIGURES if getattr(row, name) is None}
    return msgspec.structs.replace(row, missing=unknown)


def _value(figures: Mapping[str, Rounded], name: str) -> float | None:
    return figures[name].value if name in figures else None


def _count(figures: Mapping[str, Rounded], name: str) -> int | None:
    return plausible_count(round(figures[name].value)) if name in figures else None


def _ranged(figures: Mapping[str, Rounded], name: str) -> Ranged | None:
    """A figure with the bounds that the rounding of its digits leaves."""
    if name not in figures:
        return None
    figure = figures[name]
    return Ranged(value=figure.value, low=figure.low, high=figure.high)


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


def _counted(name: str, prefix: str) -> _Part:
    return lambda row: f"{prefix}{row.figures[name].value:.0f}" if name in row.figures else ""


def _slug(text: str) -> str:
    return _NO_LABEL.sub("-", text.lower()).strip("-")


# What a reader looks for first stands first.
_PARTS: tuple[_Part, ...] = (
    _word("method"),
    _word("strategy"),
    _precision,
    _counted("nodes", "nodes"),
    _counted("per_device_batch", "batch"),
    _counted("all_devices_batch", "batch"),
    _counted("accumulation", "accumulation"),
    _counted("global_batch", "global"),
    _counted("sequence_length", "length"),
    _word("model"),
    _word("dataset"),
)


_MS_PER_S = 1e3


class _Rule(NamedTuple):
    """One figure as the product of some over the product of others."""

    name: str
    over: tuple[str, ...] = ()  # Names of the factors.
    under: tuple[str, ...] = ()  # Names of the divisors.
    scale: float = 1.0  # A further, constant factor.
    counts: bool = False  # Whether it is a number of things, and so nothing where it comes out broken.


_RULES = (
    _Rule("devices", ("nodes", "workers_per_node")),
    _Rule("workers_per_node", ("devices",), ("nodes",), counts=True),
    _Rule("nodes", ("devices",), ("workers_per_node",), counts=True),
    _Rule("per_device_batch", ("all_devices_batch",), ("devices",), counts=True),
    _Rule("per_device_batch", ("global_batch",), ("devices", "accumulation"), counts=True),
    _Rule("accumulation", ("global_batch",), ("all_devices_batch",), counts=True),
    _Rule("accumulation", ("global_batch",), ("devices", "per_device_batch"), counts=True),
    _Rule("global_batch", ("devices", "accumulation", "per_device_batch")),
    _Rule("global_batch", ("all_devices_batch", "accumulation")),
    _Rule("tokens_per_sample", ("tokens",), ("samples",)),
    _Rule("samples_per_s", ("samples", "epochs"), ("runtime",)),
    _Rule("samples_per_s", ("steps_per_s", "global_batch")),
    _Rule("samples_per_s", ("global_batch",), ("step_time_ms",), _MS_PER_S),
    _Rule("tokens_per_s", ("tgs", "devices")),
    _Rule("samples_per_s", ("tokens_per_s",), ("tokens_per_sample",)),
    _Rule("tokens_per_s", ("samples_per_s", "tokens_per_sample")),
    _Rule("tgs", ("tokens_per_s",), ("devices",)),
    _Rule("step_time_ms", (), ("steps_per_s",), _MS_PER_S),
    _Rule("step_time_ms", ("runtime",), ("steps",), _MS_PER_S),
    _Rule("step_time_ms", ("global_batch",), ("samples_per_s",), _MS_PER_S),
    _Rule("runtime", ("samples", "epochs"), ("samples_per_s",)),
    _Rule("runtime", ("steps",), ("steps_per_s",)),
    _Rule("price_per_hour", ("price_gpu_per_hour", "devices")),
    _Rule("price_purchase", ("price_purchase_gpu", "devices")),
)


def with_derived(figures: Mapping[str, Rounded]) -> dict[str, Rounded]:
    """The figures with all that follows from them, each with the bounds that the rounding of its parts leaves.

    Args:
        figures: by the names of `core.grid.cell_columns`.
    """
    known = dict(figures)
    # What one rule gives another may need, whichever stands first.
    while found := next((found for rule in _RULES if (found := _apply(rule, known)) is not None), None):
        known |= found
    return known


def _apply(rule: _Rule, known: Mapping[str, Rounded]) -> dict[str, Rounded] | None:
    if rule.name in known or not all(name in known for name in (*rule.over, *rule.under)):
        return None
    value = exactly(rule.scale)
    for name in rule.over:
        value *= known[name]
    for name in rule.under:
        value /= known[name]
    return None if rule.counts and not value.value.is_integer() else {rule.name: value}
