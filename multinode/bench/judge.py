"""The report of a bench from its records: figures, slow devices with causes, method. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from multinode.bench.figures import BenchReport
from multinode.bench.nodes import BenchPart, bench_nodes
from multinode.bench.slow_devices import SLOW_BELOW, find_below_sheet, find_drops, find_slow, with_peers
from multinode.records.benchmark import PHASES, DeviceTest
from multinode.units import format_count, format_list

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
    anomalies = (one.text for one in report.anomalies)
    outcome = describe_outcome(report)
    verdict = (*_failures(report), *anomalies, *([outcome] if outcome else []))
    return msgspec.structs.replace(report, verdict=verdict, notes=tuple(_notes(report, test)))


def with_progress(report: BenchReport, *, still_running: bool) -> BenchReport:
    """The report, with its verdict preceded by the unmeasured parts."""
    if not report.left:
        return report
    at, *then = report.left
    more = [f"{len(then) - _MOST_LEFT} more"] if len(then) > _MOST_LEFT else []
    rest = f"; not yet measured: {'; '.join([*then[:_MOST_LEFT], *more])}" if then else ""
    text = f"{'still measuring' if still_running else 'interrupted while measuring'} {at}{rest}"
    return msgspec.structs.replace(report, verdict=(text, *report.verdict))


def describe_outcome(report: BenchReport) -> str:
    """Number of devices at normal speed; empty if one is slow."""
    speeds = [[speed for test in worker.tests for speed in test.speeds] for worker in report.workers]
    measured = [of_worker for of_worker in speeds if of_worker]
    if not measured:
        return "no device was measured"
    count = format_count(len(measured), "device")
    if all(speed.of_peers is None for of_worker in measured for speed in of_worker):
        return f"{count} measured, {'no peer' if len(measured) == 1 else 'none has a peer'} to compare with"
    return "" if report.slow else f"{count} OK: none below {SLOW_BELOW:.0%} of its peers"


def _failures(report: BenchReport) -> Iterator[str]:
    for node in report.nodes:
        for phase, reason in node.failures.items():
            yield f"{node.node} could not be measured {phase}: {reason}"


def _notes(report: BenchReport, test: DeviceTest) -> Iterator[str]:
    repeated = f", repeated {test.repeats} times" if test.repeats > 1 else ""
    yield (
        f"median of the timings over {test.seconds:g} s per test{repeated}; matrix products: 2 n^3 FLOP; memory: bytes "
        "read and written, copy 2 and triad 3 buffers"
    )
    workers = report.workers
    sizes = {one.size for worker in workers for one in worker.tests if one.kind == "layers"}
    if sizes:
        yield (
            f"layers: batch x sequence {format_list(sorted(sizes))}, width 1024; a backward pass counts as two "
            "forward passes; the causal mask is ignored"
        )
    threads = {worker.threads for worker in workers if worker.device == "cpu"}
    if threads:
        noun = "thread" if threads == {1} else "threads"
        yield f"CPUs: torch computes with {' or '.join(sorted(map(str, threads)))} {noun} per worker"
