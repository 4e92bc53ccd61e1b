"""What `copy` shows: its progress in one line, and what came of it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from multinode.launch.copy_chain import CopyProgress
from multinode.launch.copy_paths import CopyReport
from multinode.render.sheet import UNKNOWN, Column, Sheet
from multinode.render.table import Part, labelled, sheet_table
from multinode.units import format_count, format_duration, format_size

_BYTES_PER_GB = 1e9
_STATES = {"source": "source", "copied": "copied, verified", "equal": "already equal", "failed": "FAILED"}


def progress_text(progress: CopyProgress) -> str:
    """How far the slowest node is, at which rate, and how long it will take."""
    if not progress.receive_bytes:
        hashed = max(progress.hashed_bytes.values(), default=0)
        return f"comparing existing files: {format_size(hashed)}" if hashed else "comparing existing files"
    shares = {
        name: (progress.moved_bytes.get(name, 0) / total if total else 1.0)
        for name, total in progress.receive_bytes.items()
    }
    slowest = min(shares, key=lambda name: shares[name])
    moved, total = progress.moved_bytes.get(slowest, 0), progress.receive_bytes[slowest]
    if moved >= total:
        return "writing to the disks"
    text = f"copying: {slowest} has {100 * shares[slowest]:.0f}% of {format_size(total)}"
    if not moved or not progress.time_s:
        return text
    left_s = progress.time_s * (total - moved) / moved
    return f"{text}, {moved / progress.time_s / _BYTES_PER_GB:.3f} GB/s, {format_duration(left_s)} left"


def copy_parts(report: CopyReport) -> Iterator[Part]:
    """The nodes, and whether they are equal now."""
    rows = tuple(
        (
            node.name,
            _STATES[node.state],
            format_size(node.received_bytes) if node.state == "copied" else UNKNOWN,
            UNKNOWN if node.state in {"source", "failed"} else str(node.extra_files),
        )
        for node in report.nodes
    )
    title = f"{format_count(report.files, 'file')}, {format_size(report.size_bytes)}, from {report.source}"
    extra = "deleted" if report.deleted else "extra files"
    columns = (Column("node", words=True), Column("state", words=True), Column("received"), Column(extra))
    yield sheet_table(Sheet(title=title, columns=columns, rows=rows))
    yield ""
    for node in report.nodes:
        if node.message is not None:
            yield labelled([(node.name, node.message), *([("", node.hint)] if node.hint else [])])
    names = " ".join(map(shlex.quote, report.paths))
    count, every = sum(node.state != "failed" for node in report.nodes), len(report.nodes)
    nodes = format_count(count, "node") if count == every else f"{count} of {every} nodes"
    rate = ""
    received = max((node.received_bytes for node in report.nodes), default=0)
    if report.transfer_s and received:
        rate = f", {received / report.transfer_s / _BYTES_PER_GB:.3f} GB/s to each"
    yield f"{names}: equal on {nodes} in {format_duration(report.time_s)}{rate}"
    if not report.deleted and any(node.extra_files for node in report.nodes):
        yield f"{report.source} does not have the extra files; --delete removes them"
