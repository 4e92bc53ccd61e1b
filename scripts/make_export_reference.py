"""Writes docs/reference/figures.md from the figures that exports carry; with --check, says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from reference_pages import write_or_check

from multinode.export.figures import NODE_FIGURES, STEP_FIGURES, SUMMARY_FIGURES
from multinode.export.target import KINDS

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "figures.md"

_HEADER = """\
# What is exported

<!-- Written by scripts/make_export_reference.py. -->

`multinode launch --export`, `multinode attach --export` and `multinode export` take these targets
([how to](../how-to/export-to-other-tools.md)):

| target | writes | needs |
|---|---|---|
"""
_FOOTER = """
Figures have the names of the [JSON documents](json.md), with units at the end. `*` stands for the name of a node, the
interface of a NIC, or the index of a GPU. In TensorBoard, MLflow and Weights & Biases
`nodes.*.nics.*.share` of a summary is `multinode/summary/nodes/NODE/nics/NIC/share`; in Prometheus it is
`multinode_summary_nodes_nics_share{run="RUN",node="NODE",ifname="NIC"}`. What is unknown is left out.
"""
_TABLES = {
    "Of each step": (
        STEP_FIGURES,
        "`multinode/NAME` in TensorBoard, MLflow and Weights & Biases, live and afterwards.",
    ),
    "Of a node, now": (NODE_FIGURES, "`multinode_NAME` in Prometheus, while the run is running."),
    "Of a run that has ended": (
        SUMMARY_FIGURES,
        "`multinode/summary/NAME` and `multinode_summary_NAME`: what `multinode show --json` has below `summary`.",
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


def _table(figures: Mapping[str, str]) -> Iterator[str]:
    yield "| figure | meaning |\n|---|---|\n"
    for name, meaning in figures.items():
        yield f"| `{name}` | {meaning} |\n"


if __name__ == "__main__":
    sys.exit(main())
