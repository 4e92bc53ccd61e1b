"""What `copy` prints: whether the nodes are equal now, what each received, and what failed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from multinode.copy.paths import CopyReport
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.profile.machine_use import NODE_NAME
from multinode.render.sheet import Block, Labels, Prose
from multinode.units import UNKNOWN, format_count, format_duration, format_size

_BYTES_PER_GB = 1e9
_STATES = {"source": "source", "copied": "copied, verified", "equal": "already identical", "failed": "FAILED"}

STATE = Figure[str]("state", "state", about="result of a copy on a node", cell=lambda row: _STATES[row.item.state])
RECEIVED = Figure[int](
    "received_bytes",
    "received",
    form="whole",
    about="bytes that a node received",
    cell=lambda row: format_size(row.item.received_bytes) if row.item.state == "copied" else UNKNOWN,
)
EXTRA_FILES = Figure[int](
    "extra_files",
    "extra files",
    form="whole",
    about="files on a node that the source does not have",
    cell=lambda row: UNKNOWN if row.item.state in {"source", "failed"} else str(row.item.extra_files),
)


def show(report: CopyReport) -> Iterator[Block]:
    """Whether the nodes are equal now, what each received, and why a node failed."""
    extra = msgspec.structs.replace(EXTRA_FILES, title="deleted") if report.deleted else EXTRA_FILES
    yield Prose(_verdict(report), "lead", tone="good" if report.ok else "bad")
    yield Frame(
        title=f"{format_count(report.files, 'file')}, {format_size(report.size_bytes)}, from {report.source}",
        rows=tuple(Row(node, msgspec.structs.asdict(node) | {NODE_NAME.name: node.name}) for node in report.nodes),
        figures=(NODE_NAME, STATE, RECEIVED, extra),
    ).sheet()
    for node in report.nodes:
        if (failure := node.failure) is not None:
            yield Labels(((node.name, failure.message), *([("", failure.hint)] if failure.hint else [])))
    if not report.deleted and any(node.extra_files for node in report.nodes):
        yield Prose(f"{report.source} does not have the extra files; to remove them from the nodes, use --delete")


def _verdict(report: CopyReport) -> str:
    names = " ".join(map(shlex.quote, report.paths))
    count, every = sum(node.state != "failed" for node in report.nodes), len(report.nodes)
    nodes = format_count(count, "node") if count == every else f"{count} of {every} nodes"
    received = max((node.received_bytes for node in report.nodes), default=0)
    rate = ""
    if report.transfer_s and received:
        rate = f", {received / report.transfer_s / _BYTES_PER_GB:.3f} GB/s to each"
    return f"{names}: identical on {nodes} after {format_duration(report.time_s)}{rate}"
