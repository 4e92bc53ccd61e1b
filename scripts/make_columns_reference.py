"""Writes docs/reference/imported-columns.md from the columns of an import; with --check, says if it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from reference_pages import write_or_check

from multinode.tables.columns import COLUMNS
from multinode.tables.imported_columns import DERIVED, IMPORTED, SPEEDS
from multinode.tables.imported_titles import read_title

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "imported-columns.md"

_HEADER = """\
# Columns of imported tables

<!-- Written by scripts/make_columns_reference.py. -->

This page lists the column titles that `multinode import` reads, and the figure that each title stands for. Case,
spaces, dashes, underscores and brackets in a title make no difference. Titles of the same figure may have different
units: `step_time_ms` is in milliseconds, and `step_time_s` is in seconds. If a title has no unit, each cell needs one.
A column title can be just the unit of a rate, such as `tokens/s`, `img/sec/GPU` or `s/it`. A unit or a scale (`k`, `M`,
`B`) may follow a title: `memory (MiB)`, `tokens (M)`. In `--column 'TITLE=COLUMN'`, COLUMN can be any title on this
page. See also [how to import a table](../how-to/compare-gpus-by-price.md).

| titles | column | meaning |
|---|---|---|
"""


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({REFERENCE: render_reference()}, __doc__)


def render_reference() -> str:
    """The whole page."""
    titles: dict[str, list[str]] = {}
    for title, one in IMPORTED.items():
        titles.setdefault(one.column.name, []).append(f"`{title}`")
    rows = (f"| {', '.join(found)} | {name} | {COLUMNS[name].meaning} |\n" for name, found in titles.items())
    speeds = ", ".join(f"`{name}`" for name in SPEEDS)
    left_out = ", ".join(f"`{name}`" for name in dict.fromkeys(DERIVED) if read_title(name) is None)
    return (
        f"{_HEADER}{''.join(rows)}"
        f"| {speeds} | depends on the unit | throughput; the unit is in the title or in each cell |\n"
        f"\nmultinode calculates the following figures itself, so it ignores columns with these titles and prints a "
        f"note: {left_out}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
