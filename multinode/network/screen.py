"""The screen of `nccl-test`: a one-line verdict, causes with fixes, then the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from multinode.job.step_messages import NoteKind, StepMessages
from multinode.network.scan_tables import collective_table, pair_table
from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import LAUNCH_US
from multinode.render.sheet import UNKNOWN, Column, Sheet, format_sig, percent, plus_minus
from multinode.render.table import Part, footer, labelled, paragraph, sheet_table
from multinode.stats.estimate import Estimate
from multinode.traffic.algorithms import CollectiveRow
from multinode.traffic.pair_speeds import PairSpeed
from multinode.units import format_count, format_duration, format_rate, format_size

_BITS_PER_BYTE = 8
_US_PER_MS, _LONG_US = 1e3, 1e5
_RAW_TCP = "raw TCP: plain transfers between the same NICs, same run"


def scan_parts(report: ScanReport, *, details: bool = False) -> Iterator[Part]:
    """The screen; `details` adds every column, latency and curves."""
    yield paragraph(report.verdict.text, style="bold")
    for collective in dict.fromkeys(row.collective for row in report.rows):
        rows = [row for row in report.rows if row.collective == collective]
        title = f"{collective}, {report.title}"
        yield ""
        kind = f"{title}; {rows[0].dtype}, {rows[0].redop}"
        yield collective_table(rows, kind) if details else _small_table(rows, title)
    if report.tcp.pairs:
        yield ""
        yield pair_table(report.tcp.pairs, report.odd, nodes=report.nodes)
    yield ""
    yield labelled(
        [
            *_causes(report),
            *_path(report),
            *_like(report),
            *_changes(report),
            *_enough(report),
            *((*_network(report), *_curves(report), *_launches(report)) if details else ()),
        ]
    )
    if not details:
        yield footer("Details", f"multinode show {report.run_id} --details")


def next_step(report: ScanReport, given: str) -> str:
    """The next command; `given` are the options as typed."""
    if len(report.nodes) == 1:
        return footer("Next", "multinode nccl-test --hosts HOSTFILE (for the network between nodes)")
    if report.verdict.causes:
        return footer("Next", f"multinode check{given} --bandwidth")
    return footer("Next", f"multinode contrast{given}")


def scan_lines(report: ScanReport) -> list[str]:
    """Plain text: the verdict first, then everything known."""
    parts = (_causes, _network, _curves, _launches, _path, _odd, _like, _changes)
    said = [(label, text) for part in parts for label, text in part(report)]
    return [report.verdict.text, *(f"{label.lower()}: {text}" if label else f"  {text}" for label, text in said)]


def _small_table(rows: Sequence[CollectiveRow], title: str) -> Table:
    wrong = [row.num_wrong for row in rows]
    has_wrong = any(wrong)
    unit, units = ("ms", _US_PER_MS) if max(row.time_us for row in rows) >= _LONG_US else ("us", 1.0)
    has_tcp = any(row.share_of_tcp is not None for row in rows)
    cells = (
        (
            format_size(row.size_bytes),
            plus_minus(_time_us(row) * (1 / units)),
            f"{row.busbw_gb_per_s:#.3g}" if row.busbw_gb_per_s < 1 else format_sig(row.busbw_gb_per_s),
            percent(row.share_of_ceiling, ".0f"),
            percent(row.share_of_tcp, ".0f"),
            *((str(row.num_wrong),) if has_wrong else ()),
        )
        for row in rows
    )
    columns = (
        Column("size"),
        Column("time", unit),
        Column("busbw", "GB/s"),
        Column("of line rate", "TCP"),
        Column("of raw TCP"),
        *((Column("#wrong"),) if has_wrong else ()),
    )
    notes = (_RAW_TCP,) if has_tcp else ()
    return sheet_table(Sheet(title=title, columns=columns, rows=tuple(cells), notes=notes))


def _time_us(row: CollectiveRow) -> Estimate:
    low, high = row.interval_us or (row.time_us, row.time_us)
    return Estimate(value=row.time_us, low=low, high=high)


def _causes(report: ScanReport) -> Iterator[tuple[str, str]]:
    for number, cause in enumerate(report.verdict.causes):
        yield "Also" if number else "Cause", cause.text
        if cause.hint:
            yield "Fix", cause.hint


def _network(report: ScanReport) -> Iterator[tuple[str, str]]:
    tcp = report.tcp
    parts = []
    if report.link_gbit_per_s is not None and report.ceiling_gb_per_s is not None:
        parts.append(
            f"link {format_rate(report.link_gbit_per_s)}, TCP line rate {report.ceiling_gb_per_s:.3f} GB/s of payload "
            f"at MTU {report.mtu or 1500}"
        )
    if tcp.one:
        parts.append(f"raw TCP {_slowest(tcp.one)} over one connection, {_slowest(tcp.several)} over {tcp.connections}")
    medians = [one.median_us for one in tcp.latency if one.median_us is not None]
    if medians:
        parts.append(f"round trip {max(medians):.0f} us")
    if parts:
        yield "Network", "; ".join(parts)


def _curves(report: ScanReport) -> Iterator[tuple[str, str]]:
    for collective, curve in report.curves.items():
        beta = f" + size / {curve.bandwidth_gb_per_s:.4g} GB/s" if curve.bandwidth_gb_per_s is not None else ""
        off = max((abs(one) for one in curve.residuals), default=0.0)
        used = "used for predictions" if curve.method == "fit" else "too large: predictions interpolate"
        yield "Model", f"{collective}: time = {curve.alpha_us:.0f} us{beta}, error at most {off:.1%} ({used})"


def _launches(report: ScanReport) -> Iterator[tuple[str, str]]:
    short = [row.size_bytes for row in report.rows if report.timer == "cuda" and row.time_us < LAUNCH_US]
    if short:
        launch = f"launching it from Python does ({LAUNCH_US:.0f} us)"
        yield "Launches", f"up to {max(short)} B a call takes less time than {launch}: its time is an upper bound"


def _path(report: ScanReport) -> Iterator[tuple[str, str]]:
    if report.nccl is not None:
        yield "NCCL", report.nccl.sentence
    if report.rdma_gb_per_s is not None:
        yield "Raw RDMA", f"ib_write_bw {_slowest(report.rdma)}, around the ring of nodes over the RDMA ports in use"
    elif failed := [one for one in report.rdma if one.error]:
        yield "Raw RDMA", f"from {failed[0].source} to {failed[0].target}: {failed[0].error}"
    if report.path is not None and report.path.ok is not False:
        yield from (("Path", sentence) for sentence in report.path.sentences)


def _odd(report: ScanReport) -> Iterator[tuple[str, str]]:
    known = {cause.text for cause in report.verdict.causes}
    for one in report.odd:
        if one.text not in known:
            yield "Odd", one.text
            yield "Fix", one.hint


def _like(report: ScanReport) -> Iterator[tuple[str, str]]:
    like = report.like
    if like is None:
        return
    total = sum(message.size_bytes * message.times for message in like.messages)
    took = UNKNOWN if like.step_us is None else format_duration(like.step_us / 1e6)
    calls = format_count(sum(message.times for message in like.messages), "call")
    yield (
        "Training",
        f"{like.training}: {total / 1e6:.1f} MB in {calls} per optimizer step, {took} without overlap with compute",
    )
    yield from (("", note) for note in like.notes)


def _changes(report: ScanReport) -> Iterator[tuple[str, str]]:
    changes = report.changes
    if changes is None:
        return
    yield "Changes", f"since run {changes.before}: {changes.text}"
    yield from (("", sentence) for sentence in (*changes.environment, *(row.text for row in changes.rows)))
    for said, names in (("new", changes.came), ("gone", changes.gone)):
        if names:
            yield "", f"{said}: {', '.join(names)}"


def _enough(report: ScanReport) -> Iterator[tuple[str, str]]:
    if len(report.nodes) > 1 and report.verdict.status == "ok":
        yield "Training", "to see whether this is enough for your training, run multinode contrast"


def _slowest(pairs: Sequence[PairSpeed]) -> str:
    speeds = [one.gbit_per_s for one in pairs if one.gbit_per_s is not None]
    return f"{min(speeds) / _BITS_PER_BYTE:.3f} GB/s" if speeds else "failed"


_NOTES: dict[NoteKind, str] = {
    "reduced_to_owners": (
        "DeepSpeed reduces each bucket to the workers that own it (use_multi_rank_bucket_allreduce: false); "
        "nccl-test has no reduce, so it measures a broadcast of the bucket, which is the reverse of a reduce"
    ),
    "cut_at_owners": (
        "a gradient of more than reduce_bucket_size ({cap} elements) is sent alone; if two workers own it, "
        "DeepSpeed splits it, which is not counted"
    ),
    "filled": (
        "the parameters that ZeRO-3 gathers together depend on its trace of the model; they are approximated by "
        "filling stage3_prefetch_bucket_size in module order"
    ),
    "stay_whole": ("parameters that are reused soon stay gathered for the backward pass (stage3_max_reuse_distance)"),
    "wraps_layers": (
        "FSDP is assumed to wrap each decoder layer and to reduce gradients in the last micro-batch only, as with "
        "the Trainer"
    ),
    "inside_left_out": (
        "traffic inside a node is excluded; the all-reduce between nodes has one worker per node, but is measured "
        "with all workers"
    ),
    "small_left_out": (
        "calls of a few bytes (gradient norms, losses) are excluded: each takes about as long as the smallest message"
    ),
}


def step_notes(step: StepMessages) -> tuple[str, ...]:
    """One sentence per note, without the full stop."""
    return tuple(_NOTES[note.kind].format(cap=note.cap) for note in step.notes)
