"""compare_records: two stored records of one kind -> what they have in common, side by side. Reads disk.

Trainings are compared as a contrast's sides are, nccl-tests size by size, tables in one table, others by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from multinode.contrast.figures import Contrast
from multinode.contrast.side import compare_runs
from multinode.errors import UsageError
from multinode.network.measure import load_scan
from multinode.network.size_scan import ScanReport, compare_scans
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Column, Sheet
from multinode.sweep.cells import CellTable
from multinode.sweep.sweep import load_table, load_tables
from multinode.units import format_count, format_figure

# Results that are compared figure by figure, and what names an element of a list in them.
_RESULTS = ("bench.json", "contrast.json", "tuning.json", "tune.json", "summary.json")
_NAMES = ("node", "name", "label", "role", "rank", "size_bytes", "nodes")
# How sure a figure is, and not a figure itself.
_ASIDE = frozenset({"interval", "cv", "timings", "forecast", "steps", "time_s"})
_NOTICEABLE = 0.02


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that both records have; its unit is part of its name."""

    name: str
    first: float
    second: float

    @property
    def ratio(self) -> float | None:
        """The second as a multiple of the first."""
        return self.second / self.first if self.first else None


class ComparedRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Two records figure by figure, in the order of the first."""

    schema: str = "multinode.comparison/2"
    kind: str
    run_ids: tuple[str, str]
    figures: tuple[ComparedFigure, ...]


def compare_records(
    root: Path, first: str, second: str, *, anyway: bool = False
) -> Contrast | ScanReport | CellTable | ComparedRecords:
    """What two stored records have in common.

    Args:
        root: directory of all runs.
        first: an id, the beginning of one, or `last`.
        second: likewise; it is held against the first.
        anyway: whether trainings that were not the same are compared all the same, and marked.

    Raises:
        UsageError: there is no such run, both are one, or they have nothing in common.
        MultinodeError: a file cannot be read.
    """
    directories = [RunDirectory.open(root, name) for name in (first, second)]
    names = (directories[0].run_id, directories[1].run_id)
    if names[0] == names[1]:
        raise UsageError(f"both are run {names[0]}", hint="name two runs; list them: multinode runs")
    scans = [load_scan(directory) for directory in directories]
    if scans[0] is not None and scans[1] is not None:
        return msgspec.structs.replace(scans[1], changes=compare_scans(scans[0], scans[1]))
    kinds = [run.kind if (run := directory.read_run()) is not None else "unknown" for directory in directories]
    file = next(
        (file for file in _RESULTS if all((directory.path / file).is_file() for directory in directories)), None
    )
    if "tuning" not in kinds and all(load_table(directory) is not None for directory in directories):
        return load_tables(root, names)
    if file is None:
        raise UsageError(
            f"run {names[0]} is of kind {kinds[0]}, and {names[1]} of kind {kinds[1]}: they have no figures in common",
            hint="name two runs of one kind; list them: multinode runs; for one run: multinode show RUN",
        )
    if file == "summary.json":
        return compare_runs(root, first, second, anyway=anyway)
    documents = [directory.read(file, dict[str, Any]) or {} for directory in directories]
    return ComparedRecords(kind=kinds[1], run_ids=names, figures=_common(*documents))


def compared_sheet(compared: ComparedRecords, *, details: bool = False) -> Sheet:
    """A row a figure; without `details`, those that differ by more than 2%."""
    shown = [figure for figure in compared.figures if details or _differs(figure)]
    left_out = len(compared.figures) - len(shown)
    notes = (f"{format_count(left_out, 'figure')} within 2%: --details",) if left_out else ()
    return Sheet(
        title=f"{compared.kind}: {compared.run_ids[1]} against {compared.run_ids[0]}",
        columns=(Column("figure", words=True), *map(Column, compared.run_ids), Column("ratio")),
        rows=tuple(
            (
                figure.name,
                format_figure(figure.first, digits=4),
                format_figure(figure.second, digits=4),
                f"{format_figure(figure.ratio)}x" if figure.ratio is not None else "-",
            )
            for figure in shown
        ),
        notes=notes,
    )


def _common(first: dict[str, Any], second: dict[str, Any]) -> tuple[ComparedFigure, ...]:
    others = dict(_figures("", second))
    return tuple(
        ComparedFigure(name=name, first=value, second=others[name])
        for name, value in _figures("", first)
        if name in others
    )


def _figures(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Every number in a document, by the keys that lead to it; an estimate by its value."""
    if isinstance(value, dict) and value.get("is") == "estimate":
        yield from _figures(name, value["value"])
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _ASIDE and not (key in _NAMES and not isinstance(inner, dict | list)):
                yield from _figures(name if key == "value" else f"{name} {key}".strip(), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _figures(f"{name} {_label(inner, index)}".strip(), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _label(value: object, index: int) -> str:
    names = [str(value[key]) for key in _NAMES if value.get(key) is not None] if isinstance(value, dict) else []
    return names[0] if names else str(index)


def _differs(figure: ComparedFigure) -> bool:
    return abs(figure.second - figure.first) > _NOTICEABLE * abs(figure.first)
