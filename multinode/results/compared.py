"""compare_records: two stored records of one kind -> what they have in common, side by side. Reads disk.

Trainings are compared as a contrast's sides are, nccl-tests size by size, tables in one table, others by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from multinode.contrast.figures import Contrast
from multinode.contrast.side import compare_runs
from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.network.measure import load_scan
from multinode.network.size_scan import ScanReport, compare_scans
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Block, Prose
from multinode.stats.estimate import Estimate, exactly, ratio
from multinode.stats.unknown import Unknown
from multinode.sweep.cells import CellTable
from multinode.sweep.sweep import load_table, load_tables
from multinode.units import UNKNOWN, format_count, format_figure

# Results that are compared figure by figure, and what names an element of a list in them.
_RESULTS = ("bench.json", "contrast.json", "tuning.json", "tune.json", "summary.json")
_NAMES = ("node", "name", "label", "role", "rank", "size_bytes", "nodes")
# How sure a figure is, and not a figure itself.
_ASIDE = frozenset({"interval", "cv", "timings", "forecast", "steps", "time_s"})
_NOTICEABLE = 0.02


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that both records have; its unit is part of its name."""

    name: str
    first: Estimate  # without an interval where the record has none; likewise `second`
    second: Estimate
    ratio: Estimate | Unknown  # the second over the first
    # whether it changed: the ratio's interval excludes 1; of figures without an interval, by more than 2%
    changed: bool = False


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


NAME = Figure[str]("name", "figure", about="keys that lead to it in the document", cell=lambda row: row.item.name)
RATIO = Figure[Estimate](
    "ratio", "ratio", form="times", about="second record over the first", cell=lambda row: _ratio(row.item)
)


def show(compared: ComparedRecords) -> Iterator[Block]:
    """The figures that changed; in detail all."""
    changed = [figure for figure in compared.figures if figure.changed]
    left_out = len(compared.figures) - len(changed)
    within = f"{format_count(left_out, 'figure')} within their intervals, or within 2%: --details" if left_out else ""
    if not changed:
        yield Prose(f"{_title(compared)}: no figure changed", "lead", detail="brief")
        yield Prose(within, "note", detail="brief")
    yield _frame(compared, changed).sheet(notes=[within] if within else (), detail="brief")
    yield _frame(compared, compared.figures).sheet(detail="full")


def _title(compared: ComparedRecords) -> str:
    return f"{compared.kind}: {compared.run_ids[1]} against {compared.run_ids[0]}"


def _frame(compared: ComparedRecords, shown: Iterable[ComparedFigure]) -> Frame:
    return Frame(
        title=_title(compared),
        rows=tuple(Row(figure, msgspec.structs.asdict(figure)) for figure in shown),
        figures=(
            NAME,
            *(
                Figure[Estimate](name, run_id, form="interval", about="figure of the record", cell=_told(name))
                for name, run_id in zip(("first", "second"), compared.run_ids, strict=True)
            ),
            RATIO,
        ),
    )


def _told(name: str) -> Callable[[Row], str]:
    def tell(row: Row) -> str:
        figure: Estimate = getattr(row.item, name)
        return format_figure(figure.value, digits=4) if figure.is_exact else figure.text()

    return tell


def _ratio(figure: ComparedFigure) -> str:
    if isinstance(figure.ratio, Unknown):
        return UNKNOWN
    return f"{format_figure(figure.ratio.value)}x" if figure.ratio.is_exact else figure.ratio.text("times")


def _common(first: dict[str, Any], second: dict[str, Any]) -> tuple[ComparedFigure, ...]:
    others = dict(_figures("", second))
    return tuple(_compared(name, value, others[name]) for name, value in _figures("", first) if name in others)


def _compared(name: str, first: Estimate, second: Estimate) -> ComparedFigure:
    is_positive = min(first.low, second.low) > 0
    over: Estimate | Unknown = ratio(second, first) if is_positive else Unknown("one of them is not positive")
    if isinstance(over, Unknown) or over.is_exact:
        changed = abs(second.value - first.value) > _NOTICEABLE * abs(first.value)
    else:
        changed = not over.low <= 1 <= over.high
    return ComparedFigure(name=name, first=first, second=second, ratio=over, changed=changed)


def _figures(name: str, value: object) -> Iterator[tuple[str, Estimate]]:
    """Every number in a document with its interval, by the keys that lead to it."""
    if isinstance(value, dict) and value.get("is") == "estimate":
        yield name, convert(value, Estimate)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _ASIDE and not (key in _NAMES and not isinstance(inner, dict | list)):
                yield from _figures(name if key == "value" else f"{name} {key}".strip(), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _figures(f"{name} {_label(inner, index)}".strip(), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, exactly(float(value))


def _label(value: object, index: int) -> str:
    names = [str(value[key]) for key in _NAMES if value.get(key) is not None] if isinstance(value, dict) else []
    return names[0] if names else str(index)
