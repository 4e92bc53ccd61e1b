"""What `nccl-test` shows: a one-line verdict, the measurements, causes with fixes; or as nccl-tests prints."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from multinode.figures.compared import ComparedFigure, compared_frame
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.network.read_scan import ReadReport, ReadScan
from multinode.network.scan_evidence import (
    ALGBW,
    BUSBW,
    MESSAGE,
    OF_LINE,
    OF_RDMA,
    OF_TCP,
    P95,
    SIZE,
    TIME,
    TIME_MS,
    WRONG,
    CollectiveRow,
    collective_row,
)
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import LAUNCH_US, CollectiveTest
from multinode.render.sheet import (
    Block,
    Chart,
    Charts,
    Detail,
    Labels,
    NextCommand,
    Prose,
    Sheet,
    Tiles,
    Tone,
    page_blocks,
)
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import or_none
from multinode.traffic.pair_speeds import PAIR_RATE, SENDER, NetworkFinding, PairSpeed
from multinode.units import (
    BITS_PER_BYTE,
    UNKNOWN,
    format_count,
    format_duration,
    format_figure,
    format_rate,
)

# torch.distributed has these in one buffer; the others have two. Columns of the missing variant are N/A.
_IN_PLACE = frozenset({"all_reduce", "broadcast"})
_NOT_RUN = ("N/A", "N/A", "N/A", "N/A")
_WHOLE_US = 10_000
_MIDDLE_US = 100
# Sixteen columns with a name fit 120 characters.
_CELL_WIDTH = 5
_NAMES_WIDTH = 80


_FULL = (
    *(SIZE, TIME.as_form("hundredths"), ALGBW.as_form("thousandths"), BUSBW.as_form("thousandths")),
    *(WRONG, P95, OF_LINE.as_form("share"), OF_TCP.as_form("share")),
)
_SIZE_IN_WORDS = replace(SIZE, unit="", form="size")


def _sheet(rows: Iterable[Row], figures: Sequence[Figure[Any]], title: str = "") -> Sheet:
    """One row per message."""
    return Frame(rows=tuple(rows), figures=tuple(figures), title=title).sheet()


def _wrong(rows: Iterable[CollectiveRow]) -> tuple[Figure[int], ...]:
    """The column of wrong values, where there are any."""
    return (WRONG,) if any(row.num_wrong for row in rows) else ()


def _time_of(rows: Iterable[CollectiveRow]) -> Figure[Estimate]:
    """The time in the unit that fits the longest."""
    return TIME_MS if max(row.time_us.value for row in rows) >= _LONG_US else TIME


def nccl_tests_text(rows: Sequence[CollectiveRow], test: CollectiveTest, devices: Sequence[str]) -> str:
    """The rows of the scan, one block per collective, with the header and footer of nccl-tests."""
    names = dict.fromkeys(row.collective for row in rows)
    blocks = [_block([row for row in rows if row.collective == name], test, devices) for name in names]
    return "\n".join(blocks)


def _block(rows: Sequence[CollectiveRow], test: CollectiveTest, devices: Sequence[str]) -> str:
    sizes = [row.size_bytes for row in rows]
    # The rows' sizes are rounded to what divides among the workers.
    all_sizes = [message.size_bytes for message in test.messages if message.collective == rows[0].collective]
    counts = f"warmup iters: {test.warmup_iters} iters: {test.iters} agg iters: 1 validation: {int(test.check > 0)}"
    lines = [
        f"# Collective test: {rows[0].collective}",
        f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} step: {_step(all_sizes)} {counts} graph: 0",
        "#",
        "# Using devices",
        *(f"#  {device}" for device in devices),
        "#",
        f"#{'':62}out-of-place{'':23}in-place{'':10}",
        _head("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2),
        _head("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2),
        *(_row(row) for row in rows),
    ]
    wrong = sum(row.num_wrong or 0 for row in rows)
    average = statistics.fmean(row.busbw_gb_per_s for row in rows)
    return "\n".join(
        [
            *lines,
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            # Programs parse this line; an average over sizes has no meaning for people.
            f"# Avg bus bandwidth    : {average:g} ",
            "#",
        ]
    )


def _head(*words: str) -> str:
    size, count, dtype, redop, root, *measured = words
    sides = [measured[:4], measured[4:]]
    text = "".join(f"  {time:>7}  {algbw:>6}  {busbw:>6} {wrong:>6}" for time, algbw, busbw, wrong in sides)
    return f"# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}{text}"


def _row(row: CollectiveRow) -> str:
    root = "0" if row.collective == "broadcast" else "-1"
    measured = (
        _time(row.time_us.value),
        f"{row.algbw_gb_per_s:.2f}",
        f"{row.busbw_gb_per_s:.2f}",
        "N/A" if row.num_wrong is None else str(row.num_wrong),
    )
    sides = (_NOT_RUN, measured) if row.collective in _IN_PLACE else (measured, _NOT_RUN)
    text = "".join(f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>5}" for time, algbw, busbw, wrong in sides)
    return f"{row.size_bytes:>12}  {row.count:>12}  {row.dtype:>8}  {row.redop:>6}  {root:>6}{text}"


def _time(time_us: float) -> str:
    if time_us >= _WHOLE_US:
        return f"{time_us:.0f}"
    return f"{time_us:.1f}" if time_us >= _MIDDLE_US else f"{time_us:.2f}"


def _step(sizes: Sequence[int]) -> str:
    """The rule between consecutive sizes; 0 without one, as for the sizes of a training."""
    pairs = list(itertools.pairwise(sizes))
    factors = {after / before for before, after in pairs}
    steps = {after - before for before, after in pairs}
    if len(factors) == 1 and (factor := factors.pop()).is_integer():
        return f"{factor:.0f}(factor)"
    return f"{steps.pop() if len(steps) == 1 else 0}(bytes)"


def pair_sheet(pairs: Sequence[PairSpeed], odd: Sequence[NetworkFinding] = (), *, nodes: Sequence[str] = ()) -> Sheet:
    """Payload in Gbit/s; outliers are marked with `!`, unmeasured pairs with a dash.

    `nodes` is the display order; others follow.
    """
    names = tuple(dict.fromkeys([*nodes, *(name for pair in pairs for name in (pair.source, pair.target))]))
    speeds = {(pair.source, pair.target): pair for pair in pairs}
    heads = _heads(names)
    columns = [_column(peer, head, odd) for peer, head in zip(names, heads, strict=True)]
    rows = (
        Row(
            name,
            {SENDER.name: name if head == name else f"{head} {name}"}
            | {column.name: speeds.get((name, peer)) for column, peer in zip(columns, names, strict=True)},
        )
        for name, head in zip(names, heads, strict=True)
    )
    unit = f"{PAIR_RATE.unit}; ! is an outlier" if odd else PAIR_RATE.unit
    return replace(Frame(rows=tuple(rows), figures=(SENDER, *columns)).sheet(notes=(unit,)), dense=True)


def _column(peer: str, head: str, odd: Sequence[NetworkFinding]) -> Figure[PairSpeed]:
    """The speeds to a node."""
    own = replace(PAIR_RATE, name=f"to {peer}", title=head, unit="")
    return replace(own, cell=lambda row: _cell(or_none(row[own]), odd) if row.item != peer else "")


def _heads(names: Sequence[str]) -> tuple[str, ...]:
    width = sum(max(len(name), _CELL_WIDTH) + 1 for name in (*names, max(names, key=len, default="")))
    fits = width <= _NAMES_WIDTH or all(len(name) <= _CELL_WIDTH for name in names)
    return tuple(names) if fits else tuple(str(rank) for rank in range(len(names)))


def _cell(pair: PairSpeed | None, odd: Sequence[NetworkFinding]) -> str:
    if pair is None:
        return UNKNOWN
    figure = "fail" if pair.gbit_per_s is None else _figure(pair.gbit_per_s)
    if any(each.covers(pair.source, pair.target) for each in odd):
        return f"{figure}!"
    # Figures stay below each other, with and without a mark.
    return f"{figure} " if odd else figure


def _figure(gbit_per_s: float) -> str:
    if 0 < gbit_per_s < 0.005:  # noqa: PLR2004 - what would round to nothing
        return "<.01"
    for digits, below in ((2, 9.995), (1, 99.95)):
        if gbit_per_s < below:
            return f"{gbit_per_s:.{digits}f}"
    return f"{gbit_per_s:.0f}"


_LONG_US = 1e5
_TONES: dict[str, Tone] = {"ok": "good", "inconclusive": "doubtful", "one_node": ""}
_RAW_TCP = "raw TCP: plain transfers between the same NICs in the same run"


def show(report: ScanReport) -> Iterator[Block]:
    """The verdict, the measurements, their causes; in detail with every column, latency and curves."""
    yield Prose(report.verdict.message, "lead", tone=_TONES.get(report.verdict.code, "bad"))
    yield Tiles(tuple(_key_figures(map(collective_row, report.rows), (OF_LINE, OF_TCP))))
    yield Charts(lambda: _charts(report))
    for collective in dict.fromkeys(row.collective for row in report.rows):
        rows = [row for row in report.rows if row.collective == collective]
        title = f"{collective}, {report.title}"
        yield replace(_small_sheet(rows, title), detail="brief")
        kind = f"{title}; {rows[0].dtype}, {rows[0].redop}"
        yield replace(_sheet(map(collective_row, rows), _FULL, kind), detail="full")
    if report.tcp.pairs:
        yield pair_sheet(report.tcp.pairs, report.odd, nodes=report.nodes)
    yield Labels((*_causes(report), *_path(report)))
    yield Labels(tuple(_odd(report)), detail="full")
    yield Labels((*_like(report), *_changes(report)))
    yield from change_sheets(report)
    yield Labels(tuple(_enough(report)))
    yield Labels((*_network(report), *_curves(report), *_launches(report)), detail="full")
    yield NextCommand("Details", f"multinode show {report.run_id} --details", detail="brief")


def _charts(scan: ScanReport | ReadScan, name: str = "sweep") -> Iterable[Chart]:
    from multinode.network.charts import scan_chart  # noqa: PLC0415 - plotly is an extra

    return (scan_chart(scan, name),)


def _key_figures(rows: Iterable[Row], shares: Iterable[Figure[float]]) -> Iterator[tuple[str, str]]:
    """Of the largest size of each collective, its speed and its share of what the network carries."""
    largest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.item.size_bytes):
        largest[row.item.collective] = row
    for collective, row in largest.items():
        figures = (
            (f"{BUSBW.title} of {collective}, {_SIZE_IN_WORDS.tell(row)} ({BUSBW.unit})", BUSBW),
            *((f"{share.words}, {collective}", share) for share in shares),
        )
        yield from ((name, value) for name, figure in figures if (value := figure.tell(row)) != UNKNOWN)


def show_read(report: ReadReport) -> Iterator[Block]:
    """What `nccl-test --read` found in each output that the texts have."""
    for number, scan in enumerate(report.scans, 1):
        yield Prose(scan.verdict.message, "lead", tone=_TONES.get(scan.verdict.code, "bad"))
        if scan.rows and scan.verdict.code != "alone":
            yield from _read_rows(scan, f"sweep-{number}")
        yield Labels((*_fixes(scan.verdict), *_raw(scan), *(("Assumed", text) for text in scan.assumed)))


def _raw(scan: ReadScan) -> Iterator[tuple[str, str]]:
    """Raw streams beside the rows."""
    tcp = scan.tcp
    over = [
        f"{_slowest(pairs)} over {format_count(connections, 'connection')}"
        for pairs, connections in ((tcp.one, 1), (tcp.several, tcp.connections))
        if pairs
    ]
    if over:
        yield "Raw TCP", "; ".join(over)
    if scan.rdma:
        yield "Raw RDMA", _slowest(scan.rdma)
    if scan.nccl is not None:
        yield "NCCL", scan.nccl.sentence


def _read_rows(scan: ReadScan, chart: str) -> Iterator[Block]:
    large = {share.size_bytes: share for share in scan.verdict.shares}
    rows = [collective_row(row, large.get(row.size_bytes)) for row in scan.rows]
    # The line rate may be that of InfiniBand.
    line_rate = replace(OF_LINE, unit="", phrase="")
    shares = [figure for figure in (line_rate, OF_TCP, OF_RDMA) if any(or_none(row[figure]) for row in rows)]
    yield Tiles(tuple(_key_figures(rows, shares)))
    yield Charts(lambda: _charts(scan, chart))
    time = _time_of(scan.rows).as_form("figure")
    figures = (_SIZE_IN_WORDS, time, ALGBW, BUSBW, *shares, *_wrong(scan.rows))
    yield _sheet(rows, figures, f"{scan.title} ({', '.join(scan.programs)})")


def next_step(report: ScanReport, given: str, contrast: str) -> NextCommand:
    """The next command.

    Args:
        report: what was measured.
        given: the options as typed.
        contrast: the command that trains on the measured nodes and on one.
    """
    if len(report.nodes) == 1:
        return NextCommand("Next", "multinode nccl-test --hosts HOSTFILE (for the network between nodes)")
    return NextCommand("Next", f"multinode check{given} --bandwidth" if report.verdict.causes else contrast)


def scan_lines(report: ScanReport) -> list[str]:
    """Plain text: the verdict first, then every labelled row."""
    rows = [row for block in page_blocks(show(report)) if isinstance(block, Labels) for row in block.rows]
    return [report.verdict.message, *(f"{label.lower()}: {text}" if label else f"  {text}" for label, text in rows)]


def _small_sheet(rows: Sequence[CollectiveRow], title: str) -> Sheet:
    figures = (_SIZE_IN_WORDS, _time_of(rows), BUSBW, OF_LINE, OF_TCP, *_wrong(rows))
    sheet = _sheet(map(collective_row, rows), figures, title)
    legend = (_RAW_TCP,) if any(row.share_of_tcp is not None for row in rows) else ()
    return replace(sheet, legend=legend)


def _causes(report: ScanReport) -> Iterator[tuple[str, str]]:
    return _fixes(report.verdict)


def _fixes(verdict: Verdict) -> Iterator[tuple[str, str]]:
    for number, cause in enumerate(verdict.causes):
        yield "Also" if number else "Cause", cause.message
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
    medians = [trip.median_us for trip in tcp.latency if trip.median_us is not None]
    if medians:
        parts.append(f"round trip {max(medians):.0f} us")
    if parts:
        yield "Network", "; ".join(parts)


def _curves(report: ScanReport) -> Iterator[tuple[str, str]]:
    grows = set()
    for collective, curve in report.curves.items():
        if curve.bandwidth_gb_per_s is None:
            continue
        grows.add(collective)
        fit = f"{curve.alpha_us:.0f} us + size / {format_figure(curve.bandwidth_gb_per_s, digits=4)} GB/s"
        off = max((abs(residual) for residual in curve.residuals), default=0.0)
        used = "used for predictions" if curve.method == "fit" else "too large: predictions interpolate"
        yield "Model", f"{collective}: time = {fit}, error at most {off:.1%} ({used})"
    sizes = Counter(row.collective for row in report.rows)
    flat = [name for name, count in sizes.items() if count > 1 and name not in grows]
    if flat:
        larger = "to get a bandwidth, measure larger messages: --end 256M"
        yield "Model", f"{', '.join(flat)}: the time does not grow with the size; {larger}"


def _launches(report: ScanReport) -> Iterator[tuple[str, str]]:
    short = [row.size_bytes for row in report.rows if report.timer == "cuda" and row.time_us.value < LAUNCH_US]
    if short:
        launch = f"launching them from Python ({LAUNCH_US:.0f} us)"
        yield "Launches", f"calls of up to {max(short)} B take less time than {launch}: their times are upper bounds"


def _path(report: ScanReport) -> Iterator[tuple[str, str]]:
    if report.nccl is not None:
        yield "NCCL", report.nccl.sentence
    if report.rdma_gb_per_s is not None:
        yield "Raw RDMA", f"ib_write_bw reaches {_slowest(report.rdma)} in the ring of nodes, over the used RDMA ports"
    elif failed := [pair for pair in report.rdma if pair.error]:
        yield "Raw RDMA", f"from {failed[0].source} to {failed[0].target}: {failed[0].error}"
    if report.path is not None and report.path.ok is not False:
        yield from (("Path", finding.message) for finding in report.path.findings)


def _odd(report: ScanReport) -> Iterator[tuple[str, str]]:
    causes = {cause.message for cause in report.verdict.causes}
    for finding in report.odd:
        if finding.message not in causes:
            yield "Odd", finding.message
            yield "Fix", finding.hint or ""


def _like(report: ScanReport) -> Iterator[tuple[str, str]]:
    like = report.like
    if like is None:
        return
    total = sum(message.size_bytes * message.times for message in like.messages)
    took = UNKNOWN if like.step_us is None else format_duration(like.step_us / 1e6)
    calls = format_count(round(sum(message.times for message in like.messages)), "call")
    yield (
        "Training",
        f"{like.training}: {total / 1e6:.1f} MB in {calls} per optimizer step, {took} without overlap with compute",
    )
    yield from (("", note.message) for note in like.notes)


def _changes(report: ScanReport) -> Iterator[tuple[str, str]]:
    changes = report.changes
    if changes is None:
        return
    yield "Changes", f"since run {changes.before}: {changes.verdict.message}"
    yield from (("", finding.message) for finding in (*changes.environment, *changes.wrong))
    for title, names in (
        *(("new", changes.came), ("gone", changes.gone)),
        *((f"only in run {changes.before}", changes.only_before), (f"only in run {changes.now}", changes.only_now)),
    ):
        if names:
            yield "", f"{title}: {', '.join(names)}"


def change_sheets(report: ScanReport) -> Iterator[Sheet]:
    """The common messages of two scans: those whose speed changed or was not judged, and in detail all."""
    changes = report.changes
    if changes is None:
        return
    told = [row for row in changes.rows if row.changed is not False]
    details: tuple[tuple[Sequence[ComparedFigure], Detail], ...] = ((told, "brief"), (changes.rows, "full"))
    for rows, detail in details:
        if rows:
            run_ids, title = (changes.before, changes.now), f"{BUSBW.title} of both runs"
            yield compared_frame(rows, MESSAGE, run_ids, unit=BUSBW.unit, title=title).sheet(detail=detail)


def _enough(report: ScanReport) -> Iterator[tuple[str, str]]:
    if len(report.nodes) > 1 and report.verdict.code == "ok":
        yield "Training", "to see whether this is enough for your training, run multinode contrast"


def _slowest(pairs: Sequence[PairSpeed]) -> str:
    speeds = [pair.gbit_per_s for pair in pairs if pair.gbit_per_s is not None]
    return f"{min(speeds) / BITS_PER_BYTE:.3f} GB/s" if speeds else "failed"
