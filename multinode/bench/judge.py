"""The report of a bench from its records: figures, slow devices with causes, method. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.bench.causes import USUAL, SlowDevice, find_causes, sensor_causes, shared_processors
from multinode.bench.figures import (
    KINDS,
    SLOW_BELOW,
    BelowSheet,
    BenchNode,
    BenchReport,
    BenchTest,
    BenchWorker,
    DeviceSpeed,
    Drop,
    Slow,
    WorkerUse,
)
from multinode.bench.nodes import FINDINGS, BenchPart, bench_nodes
from multinode.findings.finding import Finding
from multinode.profile.figures import LikelyCause, Peers
from multinode.profile.likely_causes import POWER_LIMIT
from multinode.records.benchmark import PHASES, DeviceTest
from multinode.stats.estimate import Estimate, ratio
from multinode.units import format_count, format_list

# Sound GPUs (A100, H100, RTX 4090, A6000) reach two thirds to nine tenths in large half-precision products, and eight
# to nine tenths in a memory copy.
_LEAST_SHARE = {"matmul": 0.6, "memory": 0.7}
# For smaller matrices, start-up takes as long as the product.
_LARGE_ROWS = 4096
_MOST_NAMED = 4
# Share of the time from which on a power limit is told.
_LIMITED = 0.05
# Median share of the peers' speed, by phase and kind of test.
_Ratios = dict[str, dict[str, float]]

_SLOW = FINDINGS.rule("slow", about="a node or worker slower than its peers", message="{who} is slow: {shares}")
_DROP = FINDINGS.rule(
    "drop",
    about="workers that are slower when all workers run at the same time",
    message="{names} {verb} to {ratio:.0%} of the single-worker speed when all workers run at once",
)
_BELOW_SHEET = FINDINGS.rule(
    "below-sheet",
    about="devices that are far slower than their data sheet states",
    message="{devices} reaches at most {of_peak:.0%} of the rate in its data sheet ({label})",
)
_STILL_MEASURING = FINDINGS.rule(
    "still-measuring", about="parts that a running bench has not measured yet", message="still measuring {at}{rest}"
)
_INTERRUPTED = FINDINGS.rule(
    "interrupted",
    about="parts that an interrupted bench did not measure",
    message="interrupted while measuring {at}{rest}",
)
_NO_DEVICE = FINDINGS.rule("no-device", about="nothing was measured", message="no device was measured")
_NO_PEER = FINDINGS.rule(
    "no-peer",
    about="devices without a peer",
    message="{devices} measured, {lacks}",
    figures=("measured",),
)
_AS_FAST = FINDINGS.rule(
    "as-fast-as-peers",
    about="no device is slower than its peers",
    message="{devices} OK: none is slower than {least:.0%} of its peers' speed",
    figures=("measured",),
)
_METHOD = FINDINGS.rule(
    "method",
    about="how the devices were measured",
    message="each figure is the median of the timings over {seconds:g} s per test{repeated}. A matrix product counts "
    "as 2 n^3 FLOP. Memory tests count the bytes read and written (2 buffers for copy, 3 for triad)",
    figures=("seconds", "repeats"),
)
_POWER_LIMITED = FINDINGS.rule(
    "power-limited",
    about="a healthy GPU slowed by its own power limit, as is usual for data center GPUs in long matrix products",
    message="{node}/{rank} ({phase}): the power limit{limit} reduced the clock for {limited_share:.0%} of the time",
    figures=("rank", "phase", "limited_share", "power_limit_w"),
)
_LAYERS = FINDINGS.rule(
    "layers",
    about="how the FLOPs of layers are counted",
    message="layers are tested with batch x sequence {sizes} and width 1024. A backward pass counts as two forward "
    "passes; the causal mask is ignored",
    figures=("sizes",),
)
_CPU_THREADS = FINDINGS.rule(
    "cpu-threads",
    about="the number of threads that torch uses on CPUs",
    message="on CPUs, torch computes with {threads} {noun} per worker",
    figures=("threads",),
)


class _Placed(msgspec.Struct, frozen=True):
    """A worker and where it is."""

    node: BenchNode
    worker: BenchWorker

    @property
    def name(self) -> str:
        return f"{self.node.node}/{self.worker.rank}"


def with_peers(nodes: Sequence[BenchNode]) -> tuple[BenchNode, ...]:
    """The nodes with each speed as a share of the peers', marked if slow."""
    placed = _placed(nodes)
    marked = {
        each.name: msgspec.structs.replace(each.worker, tests=_compared(each.worker.tests, _peers(each, placed)))
        for each in placed
    }
    return tuple(
        msgspec.structs.replace(node, workers=tuple(marked[f"{node.node}/{worker.rank}"] for worker in node.workers))
        for node in nodes
    )


def find_slow(nodes: Sequence[BenchNode], write_hint: Callable[[str], str]) -> tuple[Slow, ...]:
    """Nodes and workers slower than their peers, the slowest first; a node with only slow workers is named as a whole.

    Args:
        nodes: from `with_peers`.
        write_hint: adapts a hint to the way its node is reached.
    """
    placed = _placed(nodes)
    anomalies = []
    for node in nodes:
        slow = [(each, ratios) for each in placed if each.node is node and (ratios := _slow_ratios(each.worker))]
        whole = len(slow) == len(node.workers)
        groups = [slow] if whole else [[cause] for cause in slow]
        anomalies += [_slow(members, placed, write_hint, whole=whole) for members in groups if members]
    return tuple(
        sorted(anomalies, key=lambda cause: min(ratio for kinds in cause.ratios.values() for ratio in kinds.values()))
    )


def find_drops(nodes: Sequence[BenchNode], write_hint: Callable[[str], str]) -> tuple[Drop, ...]:
    """Nodes slower when all workers measure than alone, grouped by cause."""
    placed = _placed(nodes)
    by_cause: dict[str, list[tuple[_Placed, float, tuple[LikelyCause, ...]]]] = {}
    for each in placed:
        pairs = [(test.together, test.alone) for test in each.worker.tests]
        ratios = [ratio(late.value, early.value) for late, early in pairs if late and early]
        if ratios and _is_slow(ratios):
            causes = _drop_causes(each, write_hint, alone=len(placed) == 1)
            share = statistics.median(ratio.value for ratio in ratios)
            by_cause.setdefault(causes[0].cause if causes else "", []).append((each, share, causes))
    return tuple(map(_drop, by_cause.values()))


def find_below_sheet(nodes: Sequence[BenchNode]) -> tuple[BelowSheet, ...]:
    """GPUs whose best test of a kind is too far below the data sheet, grouped by model."""
    placed_speeds: dict[tuple[str, str], list[tuple[_Placed, BenchTest, float]]] = {}
    for each in _placed(nodes):
        for kind, least in _LEAST_SHARE.items():
            best = max(_shares(each.worker, kind), key=lambda entry: entry[1], default=None)
            if best is not None and best[1] < least:
                placed_speeds.setdefault((each.worker.name or "", kind), []).append((each, *best))
    return tuple(_below(device, kind, members) for (device, kind), members in placed_speeds.items())


def _placed(nodes: Iterable[BenchNode]) -> list[_Placed]:
    return [_Placed(node, worker) for node in nodes for worker in node.workers]


def _peers(mine: _Placed, placed: Sequence[_Placed]) -> list[_Placed]:
    alike = [each for each in placed if each.worker.device == mine.worker.device and each.worker is not mine.worker]
    same = [each for each in alike if each.worker.name == mine.worker.name]
    elsewhere, here = ([each for each in same if (each.node is mine.node) is own] for own in (False, True))
    return elsewhere or here or [each for each in alike if each.node is not mine.node]


def _compared(tests: Iterable[BenchTest], peers: Sequence[_Placed]) -> tuple[BenchTest, ...]:
    compared = []
    for test in tests:
        like = [other for peer in peers for other in peer.worker.tests if other.key == test.key]
        speeds = {phase: _against(test.speed(phase), [other.speed(phase) for other in like]) for phase in PHASES}
        compared.append(msgspec.structs.replace(test, **speeds))
    return tuple(compared)


def _against(mine: DeviceSpeed | None, others: Iterable[DeviceSpeed | None]) -> DeviceSpeed | None:
    theirs = [other for other in others if other is not None]
    if mine is None or not theirs:
        return mine
    peers = [other.value for other in theirs]
    middle = {name: statistics.median(getattr(peer, name) for peer in peers) for name in ("value", "low", "high")}
    compared = ratio(mine.value, Estimate(**middle))
    return msgspec.structs.replace(mine, of_peers=compared.value, slow=_is_slow([compared]))


def _is_slow(ratios: Sequence[Estimate]) -> bool:
    certain = sum(ratio.high < 1 for ratio in ratios)
    return statistics.median(ratio.value for ratio in ratios) < SLOW_BELOW and 2 * certain >= len(ratios)


def _slow_ratios(worker: BenchWorker) -> _Ratios:
    ratios: _Ratios = {}
    for phase in PHASES:
        for kind in KINDS:
            speeds = [test.speed(phase) for test in worker.tests if test.kind == kind]
            judged = [
                (speed.of_peers, speed.slow) for speed in speeds if speed is not None and speed.of_peers is not None
            ]
            ratio = statistics.median(each for each, _ in judged) if judged else 1.0
            if ratio < SLOW_BELOW and 2 * sum(slow for _, slow in judged) >= len(judged):
                ratios.setdefault(phase, {})[kind] = ratio
    return ratios


def _slow(
    members: Sequence[tuple[_Placed, _Ratios]],
    placed: Sequence[_Placed],
    write_hint: Callable[[str], str],
    *,
    whole: bool,
) -> Slow:
    worst: _Ratios = {}
    for _, ratios in members:
        for phase, kinds in ratios.items():
            mine = worst.setdefault(phase, {})
            mine |= {kind: min(ratio, mine.get(kind, ratio)) for kind, ratio in kinds.items()}
    first = members[0][0]
    peers = _peers(first, placed)
    elsewhere = tuple(dict.fromkeys(each.node.node for each in peers if each.node is not first.node))
    they = Peers(names=elsewhere) if elsewhere else Peers(kind="workers")
    phase = next(phase for phase in PHASES if phase in worst)
    # One of each cause over all members.
    causes: dict[str, LikelyCause] = {}
    for each, _ in members:
        case = SlowDevice(
            node=each.node.node,
            me=each.worker,
            phase=phase,
            they=they,
            peers=tuple(peer.worker for peer in peers),
            write_hint=write_hint,
        )
        for cause in find_causes(case):
            causes.setdefault(cause.cause, cause)
    merged = tuple(causes.values())
    node, rank = first.node.node, None if whole else first.worker.rank
    who = node if rank is None else f"worker {rank} of {node}"
    return Slow(
        **_SLOW.fields(node, {"who": who, "shares": _ratios_text(worst, they)}) | _fix(merged),
        rank=rank,
        ratios=worst,
        peers=they,
    )


def _drop_causes(each: _Placed, write_hint: Callable[[str], str], *, alone: bool) -> tuple[LikelyCause, ...]:
    worker, name = each.worker, each.node.node
    case = SlowDevice(
        node=name,
        me=worker,
        phase="together",
        they=Peers(kind="alone"),
        peers=(worker,),
        peer_phase="alone",
        write_hint=write_hint,
    )
    shared = None if alone else shared_processors(case)
    causes = find_causes(case)
    # On one machine, workers of the other nodes are the other processes.
    return causes if shared is None else (shared, *(cause for cause in causes if cause.cause != "other_load"))


def _drop(members: Sequence[tuple[_Placed, float, tuple[LikelyCause, ...]]]) -> Drop:
    names = tuple(dict.fromkeys(each.node.node for each, _, _ in members))
    ratio = statistics.median(ratio for _, ratio, _ in members)
    verb = "drops" if len(names) == 1 else "drop"
    values = {"names": format_list(names, _MOST_NAMED), "verb": verb, "ratio": ratio}
    return Drop(**_DROP.fields(None, values) | _fix(members[0][2]), nodes=names, ratio=ratio)


def _shares(worker: BenchWorker, kind: str) -> Iterator[tuple[BenchTest, float]]:
    for test in worker.tests:
        if test.kind == kind and (kind != "matmul" or int(test.size) >= _LARGE_ROWS):
            yield from ((test, speed.of_peak) for speed in test.speeds if speed.of_peak is not None)


def _below(device: str, kind: str, members: Sequence[tuple[_Placed, BenchTest, float]]) -> BelowSheet:
    best, test, share = max(members, key=lambda entry: entry[2])
    causes = (*sensor_causes(best.worker), USUAL[kind].found(None))
    workers = tuple(each.name for each, _, _ in members)
    devices = f"{device} on {format_list(list(dict.fromkeys(workers)), _MOST_NAMED)}"
    values = {"devices": devices, "of_peak": share, "label": test.label}
    return BelowSheet(
        **_BELOW_SHEET.fields(None, values) | _fix(causes),
        device=device,
        label=test.label,
        of_peak=share,
        workers=workers,
    )


def _ratios_text(ratios: _Ratios, peers: Peers) -> str:
    """`31% of the speed of node0 in matrix products and 33% in memory bandwidth (alone)`."""
    ratios_text = "; ".join(
        f"{format_list([f'{ratio:.0%} in {KINDS[kind]}' for kind, ratio in kinds.items()])} ({phase})"
        for phase, kinds in ratios.items()
    )
    return ratios_text.replace("%", f"% of the speed of {peers}", 1)


def _fix(causes: tuple[LikelyCause, ...]) -> dict[str, Any]:
    """The causes of an anomaly, and the fix of the likeliest."""
    return {"causes": causes, "hint": causes[0].hint if causes else None}


# Above this number, only the count is given.
_MOST_LEFT = 3


def summarise_bench(
    run_id: str, parts: Sequence[BenchPart], test: DeviceTest, write_hint: Callable[[str], str] = str
) -> BenchReport:
    """The report of a bench.

    Args:
        run_id: its run.
        parts: one per node and phase.
        test: what to measure.
        write_hint: adapts a hint to the way the nodes are reached.
    """
    nodes = with_peers(bench_nodes(parts))
    made = {part.phase for part in parts}
    report = BenchReport(
        run_id=run_id,
        phases=tuple(phase for phase in PHASES if phase in made),
        nodes=nodes,
        slow=find_slow(nodes, write_hint),
        drops=find_drops(nodes, write_hint),
        below_sheet=find_below_sheet(nodes),
    )
    return msgspec.structs.replace(
        report,
        unmeasured=tuple(failure for node in nodes for failure in node.failures),
        outcome=_outcome(report),
        notes=tuple(_notes(report, test)),
    )


def with_progress(report: BenchReport, *, still_running: bool) -> BenchReport:
    """The report, with the parts that are left."""
    if not report.left:
        return report
    at, *then = report.left
    more = [f"{len(then) - _MOST_LEFT} more"] if len(then) > _MOST_LEFT else []
    rest = f"; not yet measured: {'; '.join([*then[:_MOST_LEFT], *more])}" if then else ""
    ahead = (_STILL_MEASURING if still_running else _INTERRUPTED).found(None, at=at, rest=rest)
    return msgspec.structs.replace(report, unmeasured=(ahead, *report.unmeasured))


def _outcome(report: BenchReport) -> Finding | None:
    speeds = [[speed for test in worker.tests for speed in test.speeds] for worker in report.workers]
    measured = [of_worker for of_worker in speeds if of_worker]
    if not measured:
        return _NO_DEVICE.found(None)
    count, devices = len(measured), format_count(len(measured), "device")
    if all(speed.of_peers is None for of_worker in measured for speed in of_worker):
        lacks = "but there is no peer to compare with" if count == 1 else "but none has a peer to compare with"
        return _NO_PEER.found(None, devices=devices, measured=count, lacks=lacks)
    return None if report.slow else _AS_FAST.found(None, devices=devices, measured=count, least=SLOW_BELOW)


def _power_limited(node: str, rank: int, phase: str, use: WorkerUse) -> Iterator[Finding]:
    share = POWER_LIMIT.share(use.gpu) if use.gpu is not None else 0.0
    if use.gpu is not None and share >= _LIMITED:
        limit_w = use.gpu.power_limit_w
        limit = f" of {limit_w:.0f} W" if limit_w is not None else ""
        yield _POWER_LIMITED.found(
            node, rank=rank, phase=phase, limited_share=share, power_limit_w=limit_w, limit=limit
        )


def _notes(report: BenchReport, test: DeviceTest) -> Iterator[Finding]:
    repeated = f", repeated {test.repeats} times" if test.repeats > 1 else ""
    yield _METHOD.found(None, seconds=test.seconds, repeats=test.repeats, repeated=repeated)
    for node in report.nodes:
        for worker in node.workers:
            for phase, use in worker.use.items():
                yield from _power_limited(node.node, worker.rank, phase, use)
    workers = report.workers
    sizes = {test.size for worker in workers for test in worker.tests if test.kind == "layers"}
    if sizes:
        yield _LAYERS.found(None, sizes=format_list(sorted(sizes)))
    threads = {worker.threads for worker in workers if worker.device == "cpu"}
    if threads:
        noun = "thread" if threads == {1} else "threads"
        yield _CPU_THREADS.found(None, threads=" or ".join(sorted(map(str, threads))), noun=noun)
