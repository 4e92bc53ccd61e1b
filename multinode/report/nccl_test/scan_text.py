"""What `nccl-test` says below its tables, a line each: raw TCP, the path, the verdict and its causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.analyse.nccl_test.pair_speeds import PairSpeed
from multinode.analyse.nccl_test.size_scan import ScanReport
from multinode.core.measure.benchmark import LAUNCH_US
from multinode.units import format_duration, format_rate

__all__ = ["scan_lines"]

_BITS_PER_BYTE = 8


def scan_lines(report: ScanReport) -> list[str]:
    """Lines of plain text, the verdict last but for its causes."""
    return [
        *_network(report),
        *_curves(report),
        *_launches(report),
        *_path(report),
        *_odd(report),
        *_like(report),
        *_verdict(report),
        *_changes(report),
    ]


def _network(report: ScanReport) -> Iterator[str]:
    tcp = report.tcp
    parts = []
    if report.link_gbit_per_s is not None and report.ceiling_gb_per_s is not None:
        parts.append(
            f"link {format_rate(report.link_gbit_per_s)}, which carries {report.ceiling_gb_per_s:.3f} GB/s of TCP "
            f"payload at MTU {report.mtu or 1500}"
        )
    if tcp.one:
        parts.append(f"raw TCP {_slowest(tcp.one)} over one connection, {_slowest(tcp.several)} over {tcp.connections}")
    medians = [one.median_us for one in tcp.latency if one.median_us is not None]
    if medians:
        parts.append(f"round trip {max(medians):.0f} us")
    if parts:
        yield "; ".join(parts)


def _curves(report: ScanReport) -> Iterator[str]:
    for collective, curve in report.curves.items():
        beta = f" + size / {curve.bandwidth_gb_per_s:.4g} GB/s" if curve.bandwidth_gb_per_s is not None else ""
        off = max((abs(one) for one in curve.residuals), default=0.0)
        used = "used for predictions" if curve.method == "fit" else "too far off: predictions interpolate"
        yield f"{collective}: time = {curve.alpha_us:.0f} us{beta}, at most {off:.1%} off what was measured ({used})"


def _launches(report: ScanReport) -> Iterator[str]:
    short = [row.size_bytes for row in report.rows if report.timer == "cuda" and row.time_us < LAUNCH_US]
    if short:
        yield (
            f"up to {max(short)} B a call takes less than {LAUNCH_US:.0f} us, as launching it from Python does; "
            "those times are upper bounds of the network's"
        )


def _path(report: ScanReport) -> Iterator[str]:
    if report.nccl is not None:
        yield report.nccl.sentence
    if report.path is not None:
        yield from report.path.sentences


def _odd(report: ScanReport) -> Iterator[str]:
    for one in report.odd:
        yield f"odd: {one.text}"
        yield f"  hint: {one.hint}"


def _like(report: ScanReport) -> Iterator[str]:
    like = report.like
    if like is None:
        return
    total = sum(message.size_bytes * message.times for message in like.messages)
    took = "a time that could not be told" if like.step_us is None else format_duration(like.step_us / 1e6)
    calls = sum(message.times for message in like.messages)
    yield (
        f"{like.training}: an optimizer step sends {total / 1e6:.1f} MB in {calls} calls, which take {took} if nothing "
        "hides behind computation"
    )
    for note in like.notes:
        yield f"  note: {note}"


def _verdict(report: ScanReport) -> Iterator[str]:
    yield report.verdict.text
    for number, cause in enumerate(report.verdict.causes, 1):
        yield f"  {number}. {cause.text}"
        yield f"     hint: {cause.hint}"


def _changes(report: ScanReport) -> Iterator[str]:
    changes = report.changes
    if changes is None:
        return
    yield f"since run {changes.before}: {changes.text}"
    for sentence in (*changes.environment, *(row.text for row in changes.rows)):
        yield f"  {sentence}"
    for said, names in (("new", changes.came), ("gone", changes.gone)):
        if names:
            yield f"  {said}: {', '.join(names)}"


def _slowest(pairs: Sequence[PairSpeed]) -> str:
    speeds = [one.gbit_per_s for one in pairs if one.gbit_per_s is not None]
    return f"{min(speeds) / _BITS_PER_BYTE:.3f} GB/s" if speeds else "failed"
