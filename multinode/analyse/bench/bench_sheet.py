"""Bench sheet: which GPUs stay far below their data sheet, and what may be behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.analyse.bench.bench_clues import throttled
from multinode.analyse.bench.bench_figures import BelowSheet, BenchNode, BenchTest, BenchWorker, Speed
from multinode.analyse.bench.bench_slow import name_nodes
from multinode.analyse.steps.stragglers import Clue
from multinode.analyse.telemetry.gpus import GpuUse
from multinode.core.measure.benchmark import PHASES

__all__ = ["find_below_sheet"]

# Large products of half precision reach from two thirds to nine tenths on sound GPUs (A100, H100, RTX 4090, A6000),
# a copy in memory from eight to nine tenths.
_LEAST_SHARE = {"matmul": 0.6, "memory": 0.7}
# In smaller matrices, starting and ending weigh as much as the product.
_LARGE_ROWS = 4096
_SLOWER_CLOCK = 0.9
_THROTTLED = 0.2
_USUAL = {
    "matmul": Clue(
        cause="usual",
        sentence="usual reasons are a power limit below the card's own, heat, clocks that were set by hand, a GPU that "
        "others use, and a torch that was built without kernels for it",
        hint="nvidia-smi -q -d CLOCK,POWER,PERFORMANCE on the node while bench runs",
    ),
    "memory": Clue(
        cause="usual",
        sentence="usual reasons are memory clocks that were set by hand, error correction of cards that have it as an "
        "option, and a GPU that others use",
        hint="nvidia-smi -q -d CLOCK,ECC on the node while bench runs",
    ),
}


def find_below_sheet(nodes: Sequence[BenchNode]) -> tuple[BelowSheet, ...]:
    """GPUs whose best test of a kind is too little of the data sheet's figure; like ones are named together."""
    found: dict[tuple[str, str], list[tuple[str, BenchWorker, BenchTest, float]]] = {}
    for node in nodes:
        for worker in node.workers:
            for kind, least in _LEAST_SHARE.items():
                best = max(_shares(worker, kind), key=lambda one: one[1], default=None)
                if best is not None and best[1] < least:
                    where = f"{node.node}/{worker.rank}"
                    found.setdefault((worker.name or "", kind), []).append((where, worker, *best))
    return tuple(_below(device, kind, members) for (device, kind), members in found.items())


def _shares(worker: BenchWorker, kind: str) -> Iterator[tuple[BenchTest, float]]:
    """Its tests of a kind that say how it stands to the data sheet, each with its best share."""
    for test in worker.tests:
        speeds = [speed for speed in map(test.speed, PHASES) if speed is not None]
        if test.kind == kind and (kind != "matmul" or int(test.size) >= _LARGE_ROWS):
            yield from ((test, speed.of_peak) for speed in speeds if speed.of_peak is not None)


def _below(device: str, kind: str, members: Sequence[tuple[str, BenchWorker, BenchTest, float]]) -> BelowSheet:
    _, worker, test, share = max(members, key=lambda one: one[3])
    names = tuple(where for where, *_ in members)
    clues = (*_seen(worker), _USUAL[kind])
    fastest = max((speed.value for speed in map(test.speed, PHASES) if isinstance(speed, Speed)), default=0.0)
    return BelowSheet(
        device=device,
        label=test.label,
        of_peak=share,
        workers=names,
        clues=clues,
        text=f"{device} of {name_nodes(names)} reaches at most {share:.0%} of its data sheet: {test.label} "
        f"{fastest:.4g} of {test.peak:.4g} {test.unit}; {clues[0].sentence}",
    )


def _seen(worker: BenchWorker) -> Iterator[Clue]:
    """What its own sensors say."""
    gpu = next((use.gpu for use in worker.use.values() if use.gpu is not None), None)
    if worker.gpu_holders:
        yield Clue(
            cause="other_load",
            sentence=f"before the measurement it was held by {', '.join(worker.gpu_holders)}",
            hint="see whose it is, and whether it may go: nvidia-smi",
        )
    if gpu is not None:
        yield from _throttles(gpu)


def _throttles(gpu: GpuUse) -> Iterator[Clue]:
    for cause, word, what in (("gpu_heat", "thermal", "heat"), ("gpu_power", "power", "a power limit")):
        if throttled(gpu, word) >= _THROTTLED:
            yield Clue(
                cause=cause,
                sentence=f"{what} held its clocks down for {throttled(gpu, word):.0%} of the time",
                hint="nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
            )
    clock, most = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    if clock is not None and most is not None and clock < _SLOWER_CLOCK * most:
        yield Clue(
            cause="gpu_clocks",
            sentence=f"it ran at {clock:.0f} of {most:.0f} MHz",
            hint="nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc resets clocks that were set by hand",
        )
