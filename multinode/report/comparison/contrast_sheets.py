"""contrast_sheets: verdict, settings, nodes and gaps of a Contrast as tables of text.

What terminal, page and Markdown all show; the sides' figures are `contrast_sides`'. No figure is made here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.report.comparison.contrast_sides import (
    DIFFERS,
    is_marked,
    marked_cells,
    measured_sides,
    range_text,
    side_name,
    tells,
)
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, format_sig, percent

__all__ = [
    "contrast_verdict_sheet",
    "differing_settings_sheet",
    "each_node_sheet",
    "missing_sheet",
    "settings_sheet",
]

# Settings that the table of figures has already.
_SHOWN = frozenset({"per_device_batch", "accumulation", "sequence_length"})


def contrast_verdict_sheet(contrast: Contrast) -> Sheet:
    """The verdict, why, what differs, and what disturbed the runs."""
    return Sheet(title="verdict", rows=tuple(_verdict(contrast)))


def settings_sheet(contrast: Contrast) -> Sheet:
    """Runs, nodes, settings and versions of the sides, the differing ones marked."""
    sides = measured_sides(contrast)
    settings = [msgspec.structs.asdict(side.settings) if side.settings is not None else {} for side in sides]
    names = dict.fromkeys(name for one in settings for name in one if name not in _SHOWN)
    packages = dict.fromkeys(package for side in sides for package in side.versions)
    compared = [(name.replace("_", " "), tuple(_setting(one.get(name)) for one in settings)) for name in names]
    compared += [(package, tuple(side.versions.get(package, UNKNOWN) for side in sides)) for package in packages]
    rows = [marked_cells(name, cells) for name, cells in compared if tells(cells)]
    own = [
        ("nodes", *(", ".join(side.node_names) for side in sides)),
        ("runs", *(", ".join(side.run_ids) for side in sides)),
    ]
    return Sheet(
        title="settings and versions",
        columns=(Column("", words=True), *(Column(side_name(side), words=True) for side in sides)),
        rows=(*rows, *own),
        notes=(DIFFERS,) if is_marked(rows) else (),
    )


def differing_settings_sheet(contrast: Contrast) -> Sheet:
    """Of the settings and versions those that differ between the sides."""
    sheet = settings_sheet(contrast)
    rows = tuple(row for row in sheet.rows if is_marked([row]))
    return msgspec.structs.replace(sheet, title="settings that differ", rows=rows, notes=())


def each_node_sheet(contrast: Contrast) -> Sheet:
    """Every node alone: a slow node is no slow network."""
    return Sheet(
        title="each node alone",
        columns=(
            Column("node", words=True),
            Column("samples/s"),
            Column("from, to"),
            Column("step time", "ms"),
            Column("of the fastest"),
        ),
        rows=tuple(
            (
                one.node,
                format_sig(one.samples_per_s.value),
                range_text(one.samples_per_s),
                format_sig(one.step_time_ms.value),
                percent(one.relative, ".0f"),
            )
            for one in contrast.each_node
        ),
    )


def missing_sheet(contrast: Contrast) -> Sheet:
    """What could not be told, by the reason; what only some sides lack has their names."""
    sides = measured_sides(contrast)
    lacking: dict[tuple[str, str], list[str]] = {}
    for side in sides:
        for told in side.missing.items():
            lacking.setdefault(told, []).append(side_name(side))
    figures: dict[str, list[str]] = {}
    for (name, reason), named in lacking.items():
        figures.setdefault(reason, []).append(name if len(named) == len(sides) else f"{name} ({', '.join(named)})")
    if contrast.forecast is None and contrast.forecast_reason:
        figures.setdefault(contrast.forecast_reason, []).append("forecast")
    return Sheet(
        title="missing",
        columns=(Column("figure", words=True), Column("why", words=True)),
        rows=tuple((", ".join(names), reason) for reason, names in figures.items()),
    )


def _verdict(contrast: Contrast) -> Iterator[tuple[str, ...]]:
    yield "verdict", contrast.verdict
    for number, reason in enumerate(contrast.reasons):
        yield "" if number else "why", reason
    told = {_bare(reason) for reason in contrast.reasons}
    if contrast.loss.sentence and _bare(contrast.loss.sentence) not in told:
        yield "cause", contrast.loss.sentence
    for number, difference in enumerate(contrast.differences):
        yield "" if number else "differs", difference
    for side in (*measured_sides(contrast), *(one for one in contrast.others if one.role == "each-node")):
        for disturbance in side.disturbances:
            where = f"{', '.join(side.node_names)} alone" if side.role == "each-node" else side_name(side)
            yield "disturbed", f"{where}: {disturbance}"


def _bare(sentence: str) -> str:
    """A sentence as it is compared with another: each may stand alone or within a line."""
    return sentence.rstrip(".").casefold()


def _setting(value: object) -> str:
    if value is None:
        return UNKNOWN
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
