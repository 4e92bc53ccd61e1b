"""summarise_bench: what the nodes recorded in all phases -> figures, who is slow and why, and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.analyse.bench.bench_figures import BenchNode, BenchReport
from multinode.analyse.bench.bench_nodes import BenchPart, bench_nodes
from multinode.analyse.bench.slow_devices import SLOW_BELOW, find_below_sheet, find_drops, find_slow, with_peers
from multinode.core.measure.benchmark import PHASES, DeviceTest

__all__ = ["BenchPart", "summarise_bench", "tell_left"]

# Of more that is left, how many there are is said.
_MOST_LEFT = 3


def summarise_bench(run_id: str, test: DeviceTest, parts: Sequence[BenchPart]) -> BenchReport:
    """The report of a bench.

    Args:
        run_id: its run.
        test: what was asked for.
        parts: a node in a phase each.
    """
    nodes = with_peers(bench_nodes(parts))
    made = {part.phase for part in parts}
    report = BenchReport(
        run_id=run_id,
        phases=tuple(phase for phase in PHASES if phase in made),
        nodes=nodes,
        slow=find_slow(nodes),
        drops=find_drops(nodes),
        below_sheet=find_below_sheet(nodes),
        notes=tuple(_notes(nodes, test)),
    )
    return msgspec.structs.replace(report, verdict=tuple(_verdict(report)))


def tell_left(report: BenchReport, *, goes_on: bool) -> BenchReport:
    """The report, and before its verdict what is left to be measured; `goes_on` tells a bench under way."""
    if not report.left:
        return report
    at, *then = report.left
    more = [f"{len(then) - _MOST_LEFT} more"] if len(then) > _MOST_LEFT else []
    rest = f"; left to measure: {'; '.join([*then[:_MOST_LEFT], *more])}" if then else ""
    told = f"the bench {'goes on with' if goes_on else 'was broken off at'} {at}{rest}"
    return msgspec.structs.replace(report, verdict=(told, *report.verdict))


def _verdict(report: BenchReport) -> Iterator[str]:
    for node in report.nodes:
        for phase, reason in node.failures.items():
            yield f"{node.node} could not be measured {phase}: {reason}"
    yield from (one.text for one in report.anomalies)
    speeds = [[speed for test in worker.tests for speed in test.speeds] for worker in report.workers]
    measured = [of_worker for of_worker in speeds if of_worker]
    if not measured:
        yield "no device was measured"
    elif all(speed.of_peers is None for of_worker in measured for speed in of_worker):
        yield (
            "one device was measured, and there is none to compare it with"
            if len(measured) == 1
            else f"{len(measured)} devices were measured, none of which has its like"
        )
    elif not report.slow:
        yield f"no device is slow: none stays below {SLOW_BELOW:.0%} of its like"


def _notes(nodes: Sequence[BenchNode], test: DeviceTest) -> Iterator[str]:
    """How it was measured."""
    yield (
        f"medians of timings over {test.seconds:g} s a test"
        + (f", gone through {test.repeats} times" if test.repeats > 1 else "")
        + "; matrix products: 2 n^3 FLOP; memory: bytes read and written, copy 2 and triad 3 buffers"
    )
    workers = [worker for node in nodes for worker in node.workers]
    sizes = {one.size for worker in workers for one in worker.tests if one.kind == "layers"}
    if sizes:
        yield (
            f"layers: batch x sequence {' and '.join(sorted(sizes))}, width 1024; backward counts as two forward "
            "passes, and a causal mask saves nothing"
        )
    threads = {worker.threads for worker in workers if worker.device == "cpu"}
    if threads:
        noun = "thread" if threads == {1} else "threads"
        yield f"processors: torch computes with {' or '.join(sorted(map(str, threads)))} {noun} a worker"
