"""Writes docs/reference/figures.md from the figures that exports carry; with --check, says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reference_pages import write_or_check

from multinode.export.figures import NODE_FIGURES, STEP_FIGURES, SUMMARY_FIGURES
from multinode.export.target import KINDS
from multinode.figures.figure import Figure
from multinode.profile.export import SAMPLE_TABLES, figures_of

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "figures.md"

_HEADER = """\
# Exported figures

<!-- Written by scripts/make_export_reference.py. -->

`multinode launch --export`, `multinode attach --export` and `multinode export` accept these targets
([how to](../how-to/export-to-other-tools.md)):

| target | writes | needs |
|---|---|---|
"""
_FOOTER = """
Figures have the same names as in the [JSON documents](json.md), with units at the end. `*` stands for the name of a
node, the interface of a NIC, or the index of a GPU. For example, `nodes.*.nics.*.share` of a summary is named
`multinode/summary/nodes/NODE/nics/NIC/share` in TensorBoard, MLflow and Weights & Biases, and
`multinode_summary_nodes_nics_share{run="RUN",node="NODE",ifname="NIC"}` in Prometheus. multinode does not export
unknown figures.
"""
_SAMPLES = (
    "These are the columns of the files that `csv:DIR`, `parquet:DIR` and `multinode report --format csv -o DIR` write."
)
_TABLES = {
    "Per step": (
        STEP_FIGURES,
        (
            "In TensorBoard, MLflow and Weights & Biases, these figures are named `multinode/NAME`. They are available "
            "during and after the run."
        ),
    ),
    "Per node, during the run": (NODE_FIGURES, "In Prometheus, these figures are named `multinode_NAME`."),
    "Summary of a finished run": (
        SUMMARY_FIGURES,
        (
            "These figures are the fields of `summary` in `multinode show --json`. Their names are "
            "`multinode/summary/NAME`, or `multinode_summary_NAME` in Prometheus."
        ),
    ),
}


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({REFERENCE: "".join(_render())}, __doc__)


def _render() -> Iterator[str]:
    yield _HEADER
    for name, kind in KINDS.items():
        needs = f"`{kind.package}`" if kind.package is not None else "-"
        yield f"| `{name}:{kind.where}` | {kind.meaning} | {needs} |\n".replace("DIR|URI", "DIR\\|URI")
    yield _FOOTER
    for title, (figures, about) in _TABLES.items():
        yield f"\n## {title}\n\n{about}\n\n"
        yield from _table(figures)
    yield f"\n## Samples\n\n{_SAMPLES}\n"
    for table in SAMPLE_TABLES:
        yield f"\n### {table.name}\n\nEach row describes {table.about}.\n\n"
        yield from _table({figure.name: figure for figure in figures_of(table)})


def _table(figures: Mapping[str, Figure[Any]]) -> Iterator[str]:
    yield "| figure | meaning |\n|---|---|\n"
    for name, figure in figures.items():
        yield f"| `{name}` | {figure.about} |\n"


if __name__ == "__main__":
    sys.exit(main())
