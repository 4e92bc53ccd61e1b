"""compare_records: two stored records of one kind -> what they have in common, side by side. Reads disk.

Trainings are compared as a contrast's sides are, nccl-tests size by size, tables in one table, others by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.contrast.figures import Contrast
from multinode.contrast.side import compare_runs
from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.figures.compared import ComparedFigure, compare_frames, compared_frame
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.network.measure import load_scan
from multinode.network.scan_changes import compare_scans
from multinode.network.size_scan import ScanReport
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Block, Detail, Prose, Sheet
from multinode.results.result_files import RESULT_FILES
from multinode.stats.estimate import Estimate, exactly
from multinode.sweep.figures import CellTable
from multinode.sweep.measure import load_table, load_tables
from multinode.units import format_count, format_figure

# What names an element of a list in a document.
_NAMES = ("node", "name", "label", "role", "rank", "size_bytes", "nodes")
# How sure a figure is, and what a finding repeats of the figures.
_ASIDE = frozenset({"interval", "cv", "timings", "forecast", "steps", "time_s", "figures"})


class ComparedRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Two records figure by figure, in the order of the first.

    Units are part of the figures' names. A figure without an interval is not judged.
    """

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
        second: an id, the beginning of one, or `last`; it is held against the first.
        anyway: whether trainings that were not the same are compared all the same, and marked.

    Raises:
        UsageError: there is no such run, both are one, or they have nothing in common.
        MultinodeError: a file cannot be read.
    """
    directories = [RunDirectory.open(root, name) for name in (first, second)]
    names = (directories[0].run_id, directories[1].run_id)
    if names[0] == names[1]:
        raise UsageError(f"both names refer to run {names[0]}", hint="name two runs; list them: multinode runs")
    scans = [load_scan(directory) for directory in directories]
    if scans[0] is not None and scans[1] is not None:
        return msgspec.structs.replace(scans[1], changes=compare_scans(scans[0], scans[1]))
    kinds = [run.kind if (run := directory.read_run()) is not None else "unknown" for directory in directories]
    files = (*(result.name for result in RESULT_FILES if result.is_whole), "summary.json")
    file = next((file for file in files if all((directory.path / file).is_file() for directory in directories)), None)
    if "tuning" not in kinds and all(load_table(directory) is not None for directory in directories):
        return load_tables(root, names)
    if file is None:
        raise UsageError(
            f"runs {names[0]} ({kinds[0]}) and {names[1]} ({kinds[1]}) have no figures in common",
            hint="name two runs of the same kind; list them: multinode runs; show one: multinode show RUN",
        )
    if file == "summary.json":
        return compare_runs(root, first, second, anyway=anyway)
    before, now = (_frame(directory.read(file, dict[str, Any]) or {}) for directory in directories)
    figures = compare_frames(before, now, VALUE, NAME.tell)
    return ComparedRecords(kind=kinds[1], run_ids=names, figures=figures)


NAME = Figure[str]("name", "figure", about="path of the figure in the JSON document")
VALUE = Figure[Estimate]("value", "value", form="interval", about="value of the figure in a stored record")


def show(compared: ComparedRecords) -> Iterator[Block]:
    """The figures that changed, and those that differ and have no interval; in detail all."""
    told = [figure for figure in compared.figures if figure.changed or _is_unjudged(figure)]
    unjudged, left_out = sum(map(_is_unjudged, told)), len(compared.figures) - len(told)
    notes = [
        *([f"without an interval, so the change may be noise: {format_count(unjudged, 'figure')}"] if unjudged else ()),
        *(
            [f"no change beyond the intervals: {format_count(left_out, 'figure')} (--details lists them)"]
            if left_out
            else ()
        ),
    ]
    if not told:
        yield Prose(f"{_title(compared)}: no figure changed", "lead", detail="brief")
        yield from (Prose(note, "note", detail="brief") for note in notes)
    yield _sheet(compared, told, notes, "brief")
    yield _sheet(compared, compared.figures, (), "full")


def _title(compared: ComparedRecords) -> str:
    return f"{compared.kind}: {compared.run_ids[1]} against {compared.run_ids[0]}"


def _sheet(compared: ComparedRecords, shown: Iterable[ComparedFigure], notes: Sequence[str], detail: Detail) -> Sheet:
    frame = compared_frame(shown, NAME, compared.run_ids, title=_title(compared))
    return frame.sheet(notes=notes, detail=detail)


def _is_unjudged(figure: ComparedFigure) -> bool:
    # Figures that are written alike are equal to their reader.
    first, second = (format_figure(each.value, digits=4) for each in (figure.first, figure.second))
    return figure.changed is None and first != second


def _frame(document: dict[str, Any]) -> Frame:
    rows = (Row(name, {NAME.name: name, VALUE.name: value}) for name, value in _figures("", document))
    return Frame(rows=tuple(rows), figures=(NAME, VALUE))


def _figures(name: str, value: object) -> Iterator[tuple[str, Estimate]]:
    """Every number in a document with its interval, by the keys that lead to it."""
    if isinstance(value, dict) and value.get("is") == "estimate":
        yield name, convert(value, Estimate)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _ASIDE and not (key in _NAMES and not isinstance(inner, dict | list)):
                yield from _figures(name if key == "value" else f"{name} {key}".strip(), inner)
    elif isinstance(value, list):
        for label, inner in zip(_labels(value), value, strict=True):
            yield from _figures(f"{name} {label}".strip(), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, exactly(float(value))


def _labels(values: list[Any]) -> Iterator[str]:
    """What names each element; of several alike the first has the short name, as where it is the only one."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        names = [str(value[key]) for key in _NAMES if value.get(key) is not None] if isinstance(value, dict) else []
        full = " ".join(names)
        label = next(each for each in (*names[:1], full, f"{full} {index}".strip()) if each and each not in seen)
        seen.add(label)
        yield label
