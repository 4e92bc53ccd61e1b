"""Rows of a cell table from figures measured elsewhere, stored like those of a sweep.

Values are kept as given: contradictions are reported, not corrected. Figures that follow by arithmetic are added, and
nothing is assumed: without the accumulation there is no global batch.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from multinode.cluster.accelerators import short_device_name
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.model.workload import JobSettings
from multinode.predict.rounded import product
from multinode.records.files import read_text
from multinode.records.prices import load_prices
from multinode.records.run import Run, make_run_id
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import plausible_count
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown
from multinode.sweep.contradictions import OUT_OF_MEMORY_WITH_FIGURES, Contradiction, find_contradictions
from multinode.sweep.figures import MEASURED, NICS, CellRow, CellTable
from multinode.sweep.measure import TABLE_FILE
from multinode.sweep.notes import IGNORED_COLUMNS, LABEL_COLUMNS
from multinode.sweep.table import Look, look_at, relative_to
from multinode.tables.columns import COLUMNS
from multinode.tables.imported_columns import IMPORTED
from multinode.tables.imported_forms import FORMS, HINT
from multinode.tables.imported_table import Extras, ImportedRow, ImportedTable, parse_table
from multinode.tables.row_shortfall import with_shortfalls

_LACKING = RuleGroup("Rows without figures in an imported table")
_OUT_OF_MEMORY = _LACKING.rule(
    "out-of-memory",
    about="a row that reports running out of memory",
    message="the {memory_of} ran out of memory, according to the table",
)
_NO_FIGURES = _LACKING.rule(
    "no-figures", about="a row without any figure of a training run", message="the table has no figures for it"
)
_OUT_OF = {"gpu": "GPU", "node": "node"}
# Results of a training; a row without any of them has no training.
_MEASURED = {imported.column.name for imported in IMPORTED.values() if imported.is_measured}
# What only the judgement of the network needs: it says itself which of them is missing.
_OF_NETWORK = {"parameters", "trainable_parameters", "network_gbit_per_s", "rdma"}
# Optional fields of a row, except those that follow from others once prices are known.
_TOLD = {
    *(
        imported.column.name
        for imported in IMPORTED.values()
        if imported.column.kind != "price" and imported.column.name not in {"currency", *_OF_NETWORK}
    ),
    "step_spread",
}


def imported_rows(rows: Sequence[ImportedRow]) -> tuple[CellRow, ...]:
    """One row per training, marked as imported, with derived figures, contradictions and verdicts on the network."""
    return with_shortfalls([_row(row, label) for row, label in zip(rows, label_rows(rows), strict=True)])


def _row(row: ImportedRow, label: str) -> CellRow:
    figures = with_derived(row.figures)
    state, why = _state(row, figures)
    values = row.words | {name: _value(name, figure) for name, figure in figures.items()}
    rdma = row.words.get("rdma")
    if rdma is not None:
        values["rdma"] = rdma == "yes"
    fields = {name: values[name] for name in CellRow.__struct_fields__ if name in values} | {"label": label}
    if not {"price_per_hour", "price_purchase"} & fields.keys():
        fields.pop("currency", None)
    narrow = next((name for name in ("fp16", "bf16") if row.words.get(name) == "yes"), None)
    settings = {"precision": narrow} | {name: values[name] for name in JobSettings.__struct_fields__ if name in values}
    unknown = [name for name in CellRow.__struct_fields__ if name in _TOLD and fields.get(name) is None]
    return CellRow(
        **fields
        | {
            "source": "imported",
            "state": state,
            "out_of": row.out_of,
            "why": why,
            "settings": JobSettings(**settings),
            "varied": dict(row.labels),
            "contradictions": _contradictions(row),
            **(dict.fromkeys(unknown, Unknown("not in the table")) if state == MEASURED else {}),
        }
    )


def _state(row: ImportedRow, figures: Mapping[str, Estimate]) -> tuple[str, Finding | None]:
    if row.out_of is not None:
        return "out_of_memory", _OUT_OF_MEMORY.found(None, memory_of=_OUT_OF[row.out_of])
    return ("skipped", _NO_FIGURES.found(None)) if _MEASURED.isdisjoint(figures) else (MEASURED, None)


def _contradictions(row: ImportedRow) -> tuple[Contradiction, ...]:
    contradictions = find_contradictions(row.figures)
    speeds = ("samples_per_s", "tokens_per_s", "steps_per_s", "whole_s")
    published = [name for name in speeds if name in row.figures]
    if row.out_of is not None and published:
        figures = " and ".join(COLUMNS[name].figure.words for name in published)
        fields = OUT_OF_MEMORY_WITH_FIGURES.fields(None, {"figures": figures})
        return (Contradiction(**fields, sides=("out_of_memory", *published)), *contradictions)
    return contradictions


def _value(name: str, figure: Estimate) -> Any:
    if name == NICS.name or COLUMNS[name].kind == "count":
        return plausible_count(round(figure.value))
    return (
        Estimate(value=figure.value, low=figure.low, high=figure.high)
        if COLUMNS[name].figure.has_range
        else figure.value
    )


_NO_LABEL = re.compile(r"[^a-z0-9.]+")
_LONGEST = 80


def label_rows(rows: Sequence[ImportedRow]) -> list[str]:
    """The name of each row, or one made of its device and the fewest other settings that distinguish the rows.

    Equal names get the precision, or a number.
    """
    parts = _telling_apart(rows)
    given = [row.words.get("label") or _made(row, parts) for row in rows]
    counts = Counter(given)
    labels = [
        f"{label}-{detail}" if counts[label] > 1 and (detail := _precision(row)) else label
        for label, row in zip(given, rows, strict=True)
    ]
    return list(_numbered(labels))


_Part = Callable[[ImportedRow], str]


def _telling_apart(rows: Sequence[ImportedRow]) -> list[_Part]:
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
    devices = row.figures.get("world_size")
    return f"{name}-x{devices.value:.0f}" if name and devices is not None else name


def _precision(row: ImportedRow) -> str:
    precisions = (name for name in ("fp16", "bf16") if row.words.get(name) == "yes")
    return _slug(row.words.get("precision", "")) or next(precisions, "")


def _labels(row: ImportedRow) -> str:
    return _slug(" ".join(row.labels.values()))


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
    _labels,
)


_MS_PER_S = 1e3


class _Rule(NamedTuple):
    """A figure as the product of some over the product of others."""

    name: str
    over: tuple[str, ...] = ()  # Names of the factors.
    under: tuple[str, ...] = ()  # Names of the divisors.
    scale: float = 1.0  # A further, constant factor.


_RULES = (
    _Rule("world_size", ("nodes", "workers_per_node")),
    _Rule("workers_per_node", ("world_size",), ("nodes",)),
    _Rule("nodes", ("world_size",), ("workers_per_node",)),
    _Rule("per_device_batch", ("all_devices_batch",), ("world_size",)),
    _Rule("per_device_batch", ("global_batch",), ("world_size", "accumulation")),
    _Rule("accumulation", ("global_batch",), ("all_devices_batch",)),
    _Rule("accumulation", ("global_batch",), ("world_size", "per_device_batch")),
    _Rule("global_batch", ("world_size", "accumulation", "per_device_batch")),
    _Rule("global_batch", ("all_devices_batch", "accumulation")),
    _Rule("tokens_per_sample", ("tokens",), ("dataset_samples",)),
    _Rule("samples_per_s", ("dataset_samples", "epochs"), ("whole_s",)),
    _Rule("samples_per_s", ("steps_per_s", "global_batch")),
    _Rule("samples_per_s", ("global_batch",), ("step_time_ms",), _MS_PER_S),
    _Rule("samples_per_s", ("samples_per_s_per_gpu", "world_size")),
    _Rule("tokens_per_s", ("tgs", "world_size")),
    _Rule("samples_per_s", ("tokens_per_s",), ("tokens_per_sample",)),
    _Rule("tokens_per_s", ("samples_per_s", "tokens_per_sample")),
    _Rule("tgs", ("tokens_per_s",), ("world_size",)),
    _Rule("step_time_ms", (), ("steps_per_s",), _MS_PER_S),
    _Rule("step_time_ms", ("whole_s",), ("steps",), _MS_PER_S),
    _Rule("step_time_ms", ("global_batch",), ("samples_per_s",), _MS_PER_S),
    _Rule("whole_s", ("dataset_samples", "epochs"), ("samples_per_s",)),
    _Rule("whole_s", ("steps",), ("steps_per_s",)),
    _Rule("price_per_hour", ("price_gpu_per_hour", "world_size")),
    _Rule("price_purchase", ("price_purchase_gpu", "world_size")),
)


def with_derived(figures: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The figures with all that follow from them, with the bounds that rounding leaves.

    Args:
        figures: by the names of the figures.
    """
    all_figures = dict(figures)
    # Rules may depend on each other in any order.
    while derived := next(
        (derived_by for rule in _RULES if (derived_by := _apply(rule, all_figures)) is not None), None
    ):
        all_figures |= derived
    return all_figures


def _apply(rule: _Rule, figures: Mapping[str, Estimate]) -> dict[str, Estimate] | None:
    if rule.name in figures or not all(name in figures for name in (*rule.over, *rule.under)):
        return None
    value = product((figures[name] for name in rule.over), (figures[name] for name in rule.under), rule.scale)
    is_broken = COLUMNS[rule.name].kind == "count" and not value.value.is_integer()
    return None if is_broken else {rule.name: value}


def _notes(read: ImportedTable) -> Iterator[Finding]:
    if read.ignored:
        yield IGNORED_COLUMNS.found(None, names=", ".join(read.ignored))
    if read.labels:
        yield LABEL_COLUMNS.found(None, names=", ".join(read.labels))


_RULE = "Figures that are not in the imported table are calculated from its other columns, if possible."


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """The stored table and its run directory."""

    table: CellTable
    directory: Path


def import_table(
    root: Path, path: Path, extras: Extras | None = None, *, name: str | None = None, prices_path: Path | None = None
) -> Imported:
    """Import a table as a run that keeps the file, the prices file and the resulting table.

    Args:
        root: of all runs.
        path: of the table; its suffix sets the format.
        extras: values for all rows.
        name: of the table; None uses the file's.
        prices_path: of a prices file; None uses only the table's own prices.

    Raises:
        UsageError: a file cannot be read, or a line of it is wrong; the message has the place.
        MultinodeError: the run cannot be written.
    """
    started_s = time.time()
    if path.suffix.lower() not in FORMS:
        raise UsageError(f"{path} has an unknown file type: expected {', '.join(FORMS)}", hint=HINT)
    read = parse_table(read_text(path, "the table", HINT), str(path), extras or Extras())
    prices, prices_text = load_prices(prices_path) if prices_path is not None else (None, "")
    run_id = make_run_id()
    table = relative_to(
        CellTable(
            run_id=run_id,
            job=name or path.name,
            rule=_RULE,
            cells=imported_rows(read.rows),
            notes=tuple(_notes(read)),
        )
    )
    table = look_at(table, Look(prices=prices))
    directory = RunDirectory.create(root, run_id)
    directory.write_bytes(f"imported{path.suffix.lower()}", path.read_bytes())
    if prices is not None:
        directory.write_bytes("prices.yaml", prices_text.encode())
    directory.write(TABLE_FILE, table)
    run = Run(
        run_id=run_id,
        job=table.job,
        engine="import",
        status="succeeded",
        started_s=started_s,
        ended_s=time.time(),
        world_size=0,
        nodes=(),
        kind="import",
    )
    # This file makes the directory a run. It is written last, so that an incomplete import is never listed.
    directory.write("run.json", run)
    return Imported(table=table, directory=directory.path)
