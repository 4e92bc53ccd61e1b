"""Writes docs/reference/table-figures.md from the figures that modules below `multinode` declare.

With --check, says whether the page is current. A figure that does not say what it means is an error.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reference_pages import write_or_check

import multinode
from multinode.export.figures import NODE_FIGURES, STEP_FIGURES, SUMMARY_FIGURES
from multinode.figures.figure import MONEY, Figure
from multinode.profile.export import SAMPLE_TABLES, figures_of

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "table-figures.md"

_HEADER = """\
# Figures

<!-- Written by scripts/make_figure_reference.py. -->

This page lists the figures that tables show. The title is the header of the column. Use the name in `--where`
and `--sort`; CSV files also use it. A figure without a title appears only in files and in `--where`. See also the
[columns of imported tables](imported-columns.md) and the [exported figures](figures.md).

| title | unit | name | meaning |
|---|---|---|---|
"""


def main() -> int:
    """Write the page if it is not current, or name it."""
    figures = declared_figures()
    silent = [*undescribed(figures)]
    for words in silent:
        print(words)
    return 1 if silent else write_or_check({REFERENCE: render_reference(figures)}, __doc__)


def declared_figures() -> Mapping[str, list[Figure[Any]]]:
    """All figures of tables that modules of the package hold, by name; those that only exports have, have a page."""
    exported = {(figure.name, figure.about) for figure in exported_figures()}
    found: dict[str, dict[tuple[str, str], Figure[Any]]] = {}
    for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
        if module.name.startswith(("multinode.node", "multinode.worker")) or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            for figure in value if isinstance(value, tuple) else (value,):
                # An interval beside its figure has the figure's name.
                if not isinstance(figure, Figure) or figure.title == "range":
                    continue
                if figure.title or (figure.name, figure.about) not in exported:
                    found.setdefault(figure.name, {}).setdefault((figure.title, figure.about), figure)
    return {name: list(figures.values()) for name, figures in sorted(found.items())}


def exported_figures() -> Iterator[Figure[Any]]:
    """The figures of the page of exports."""
    for figures in (SUMMARY_FIGURES, STEP_FIGURES, NODE_FIGURES):
        yield from figures.values()
    for table in SAMPLE_TABLES:
        yield from figures_of(table)


def undescribed(figures: Mapping[str, Iterable[Figure[Any]]]) -> Iterator[str]:
    """Figures that say nothing of what they mean."""
    for name, declared in figures.items():
        for figure in declared:
            if not figure.about:
                yield f"the figure {name} ({figure.title}) does not say what it means"


def render_reference(figures: Mapping[str, Iterable[Figure[Any]]]) -> str:
    """The whole document."""
    rows = (_row(figure) for declared in figures.values() for figure in declared)
    return f"{_HEADER}{''.join(rows)}"


def _row(figure: Figure[Any]) -> str:
    unit = figure.unit.replace(MONEY, "money")
    name = figure.name if figure.csv in {"", figure.name} else f"{figure.name}`, in CSV `{figure.csv}"
    return f"| {figure.title} | {unit} | `{name}` | {figure.about} |\n"


if __name__ == "__main__":
    sys.exit(main())
