"""OtherRuns: what the runs stored beside a run measured: its nodes' nccl-test, and the benches of GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from multinode.errors import MultinodeError
from multinode.records.benchmark import BenchedPeak
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.stats.estimate import Estimate
from multinode.traffic.step_calls import ScanCurves

# The parts of bench.json that matter here; `bench.figures` has all of it.


class _Speed(msgspec.Struct, frozen=True, kw_only=True):
    value: Estimate


class _Test(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    dtype: str
    alone: _Speed | None = None
    together: _Speed | None = None


class _OtherWorker(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    name: str | None = None
    tests: tuple[_Test, ...] = ()


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    workers: tuple[_OtherWorker, ...] = ()


class _Bench(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    nodes: tuple[_Node, ...] = ()


class OtherRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What runs stored beside a run measured."""

    scan: ScanCurves | None = None  # the latest nccl-test of the same nodes and workers
    benched: tuple[BenchedPeak, ...] = ()  # of several benches of one GPU and precision, the latest


def read_other_runs(directory: RunDirectory, plan: LaunchPlan) -> OtherRuns:
    """Read them.

    Args:
        directory: of the run.
        plan: of the run.
    """
    names = [place.node for place in plan.places]
    links = [place.endpoint.link_gbit_per_s for place in plan.places if place.endpoint.link_gbit_per_s is not None]
    # A size scan on one node uses no link.
    alike = (names, plan.world_size, min(links) if len(links) == len(names) > 1 else None)
    scan: ScanCurves | None = None
    peaks: dict[tuple[str, str], BenchedPeak] = {}
    for other in map(RunDirectory, reversed(list_runs(directory.path.parent))):
        found = _read(other, "nccl-test.json", ScanCurves) if scan is None else None
        if found is not None and (list(found.nodes), found.world_size, found.link_gbit_per_s) == alike:
            scan = found
        bench = _read(other, "bench.json", _Bench)
        for peak in _peaks(bench) if bench is not None else ():
            peaks.setdefault((peak.gpu, peak.dtype), peak)
    return OtherRuns(scan=scan, benched=tuple(peaks.values()))


_T = TypeVar("_T")


def _read(directory: RunDirectory, name: str, kind: type[_T]) -> _T | None:
    try:
        return directory.read(name, kind)
    except MultinodeError:
        # A damaged file is not worth failing a run that went well.
        return None


def _peaks(bench: _Bench) -> Iterable[BenchedPeak]:
    """Of each GPU's fastest product, the median over GPUs of one name."""
    best: dict[tuple[str, str], list[float]] = {}
    for worker in (worker for node in bench.nodes for worker in node.workers):
        mine: dict[str, float] = {}
        for test in worker.tests if worker.device == "cuda" else ():
            for speed in (test.alone, test.together) if test.kind == "matmul" else ():
                if speed is not None and speed.value.value > 0:
                    mine[test.dtype] = max(mine.get(test.dtype, 0.0), speed.value.value)
        for dtype, value in mine.items() if worker.name is not None else ():
            best.setdefault((worker.name or "", dtype), []).append(value)
    for (name, dtype), values in best.items():
        yield BenchedPeak(gpu=name, dtype=dtype, tflops=statistics.median(values), run_id=bench.run_id)
