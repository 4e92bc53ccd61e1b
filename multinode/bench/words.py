"""The words of a bench: who is slow, what drops under full load or stays below its data sheet, how it was measured.

`bench.judge` finds the figures; `with_words` fills in the sentences before a report is stored or shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from multinode.bench.figures import Anomaly, BelowSheet, BenchReport, Drop, Slow
from multinode.bench.slow_devices import SLOW_BELOW
from multinode.bench.work import KINDS
from multinode.profile.words import cause_with_words, peers_words
from multinode.records.benchmark import DeviceTest
from multinode.units import format_count, format_list

A = TypeVar("A", bound=Anomaly)
_MOST_NAMED = 4
# Of more that is left, how many there are is said.
_MOST_LEFT = 3


def with_words(report: BenchReport, test: DeviceTest, write_hint: Callable[[str], str] = str) -> BenchReport:
    """The same with every sentence.

    Args:
        report: by codes and figures.
        test: what was asked for.
        write_hint: a hint as the nodes are reached.
    """
    worded = msgspec.structs.replace(
        report,
        slow=tuple(_with_text(_with_peers(one), write_hint) for one in report.slow),
        drops=tuple(_with_text(one, write_hint) for one in report.drops),
        below_sheet=tuple(_with_text(one, write_hint) for one in report.below_sheet),
        notes=tuple(_notes(report, test)),
    )
    anomalies = (one.text for one in worded.anomalies)
    outcome = describe_outcome(worded)
    return msgspec.structs.replace(worded, verdict=(*_failures(worded), *anomalies, *([outcome] if outcome else [])))


def with_progress(report: BenchReport, *, still_running: bool) -> BenchReport:
    """The report, and before its verdict what is left to be measured."""
    if not report.left:
        return report
    at, *then = report.left
    more = [f"{len(then) - _MOST_LEFT} more"] if len(then) > _MOST_LEFT else []
    rest = f"; not measured yet: {'; '.join([*then[:_MOST_LEFT], *more])}" if then else ""
    text = f"{'still measuring' if still_running else 'interrupted while measuring'} {at}{rest}"
    return msgspec.structs.replace(report, verdict=(text, *report.verdict))


def describe_anomaly(one: Anomaly) -> str:
    """What is wrong, without its cause."""
    match one:
        case Slow():
            who = one.node if one.rank is None else f"worker {one.rank} of {one.node}"
            return f"{who} is slow: {_ratios(one.ratios, one.peers)}"
        case Drop():
            verb = "drops" if len(one.nodes) == 1 else "drop"
            return f"{_names(one.nodes)} {verb} to {one.ratio:.0%} under full load"
        case BelowSheet():
            where = f"{one.device} of {_names(one.workers)}"
            return f"{where} reaches at most {one.of_peak:.0%} of its data sheet ({one.label})"
    return one.text


def describe_outcome(report: BenchReport) -> str:
    """How many devices are as fast as their peers; empty where one is slow."""
    speeds = [[speed for test in worker.tests for speed in test.speeds] for worker in report.workers]
    measured = [of_worker for of_worker in speeds if of_worker]
    if not measured:
        return "no device was measured"
    count = format_count(len(measured), "device")
    if all(speed.of_peers is None for of_worker in measured for speed in of_worker):
        return f"{count} measured, {'no peer' if len(measured) == 1 else 'none has a peer'} to compare with"
    return "" if report.slow else f"{count} OK: none below {SLOW_BELOW:.0%} of its peers"


def _with_peers(one: Slow) -> Slow:
    return msgspec.structs.replace(one, peers=peers_words(one.compared_with)) if one.compared_with is not None else one


def _with_text(one: A, write_hint: Callable[[str], str]) -> A:
    causes = tuple(cause_with_words(cause, write_hint) for cause in one.likely_causes)
    because = f"likely because {causes[0].sentence}" if causes else "nothing that was recorded explains it"
    return msgspec.structs.replace(one, likely_causes=causes, text=f"{describe_anomaly(one)}; {because}")


def _failures(report: BenchReport) -> Iterator[str]:
    for node in report.nodes:
        for phase, reason in node.failures.items():
            yield f"{node.node} could not be measured {phase}: {reason}"


def _ratios(ratios: dict[str, dict[str, float]], peers: str) -> str:
    """`31% of the speed of node0 in matrix products and 33% in memory (alone)`."""
    said = "; ".join(
        f"{format_list([f'{ratio:.0%} in {KINDS[kind]}' for kind, ratio in kinds.items()])} ({phase})"
        for phase, kinds in ratios.items()
    )
    return said.replace("%", f"% of the speed of {peers}", 1)


def _names(names: Iterable[str]) -> str:
    return format_list(list(dict.fromkeys(names)), _MOST_NAMED)


def _notes(report: BenchReport, test: DeviceTest) -> Iterator[str]:
    """How it was measured."""
    repeated = f", repeated {test.repeats} times" if test.repeats > 1 else ""
    yield (
        f"median of the timings over {test.seconds:g} s per test{repeated}; matrix products: 2 n^3 FLOP; memory: bytes "
        "read and written, copy 2 and triad 3 buffers"
    )
    workers = report.workers
    sizes = {one.size for worker in workers for one in worker.tests if one.kind == "layers"}
    if sizes:
        yield (
            f"layers: batch x sequence {format_list(sorted(sizes))}, width 1024; a backward pass counts as two forward "
            "passes, and a causal mask saves nothing"
        )
    threads = {worker.threads for worker in workers if worker.device == "cpu"}
    if threads:
        noun = "thread" if threads == {1} else "threads"
        yield f"CPUs: torch computes with {' or '.join(sorted(map(str, threads)))} {noun} per worker"
