"""The exported figures: their names, as in the JSON documents, their meaning, and those of each step as it is made.

A name is a path that ends in its unit. `*` stands for one of several, named by a label: `nodes.*.nics.*.share` belongs
to a node's NIC. Each table is for one kind of record: a run's summary, a step, or the current state of a node.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.figures.figure import Figure
from multinode.profile.exposure import expose_each
from multinode.profile.figures import LATE
from multinode.profile.in_training import step_bandwidths
from multinode.profile.machine_use import (
    CPU_BUSY,
    CPU_STEAL,
    GPU_FIGURES,
    JOB_CORES,
    MEMORY_AVAILABLE,
    RETRANSMITTED,
)
from multinode.profile.measured import EXPOSED, EXPOSED_SHARE
from multinode.profile.nics import NIC_IN, NIC_OUT, NIC_PEAKS, NIC_SHARE
from multinode.profile.observed import Observed, ObservedNode
from multinode.profile.step_bytes import BYTES_FIGURES
from multinode.profile.step_split import PARTS, transfers_us
from multinode.profile.summary import (
    COMM_FIGURES,
    MODEL_FIGURES,
    OTHER_RATES,
    STEP_COUNTS,
    STEP_TIME_FIGURES,
    Summary,
)
from multinode.profile.throughput import (
    EFFECTIVE_TOKENS_PER_S,
    HARDWARE_TFLOPS,
    HFU,
    MFU,
    MODEL_TFLOPS,
    SAMPLES_PER_S,
    TGS,
    TOKENS_PER_S,
)
from multinode.records import progress
from multinode.records.progress import NodeProgress
from multinode.records.samples import DdpSample, DeviceWaitSample, LossSample, ModelSample, Sample, StepSample
from multinode.units import GIB


def _below(place: str, *figures: Figure[Any]) -> dict[str, Figure[Any]]:
    """Figures by the path that leads to them in a document."""
    return {f"{place}.{figure.name}" if place else figure.name: figure for figure in figures}


SUMMARY_FIGURES: Mapping[str, Figure[Any]] = {
    **_below("", *STEP_COUNTS, SAMPLES_PER_S, TOKENS_PER_S, EFFECTIVE_TOKENS_PER_S, TGS, *OTHER_RATES),
    **_below("step_time_ms", *STEP_TIME_FIGURES),
    **_below("", *MODEL_FIGURES),
    **_below("comm.bytes_per_step", *BYTES_FIGURES),
    **_below("comm", EXPOSED, EXPOSED_SHARE, *COMM_FIGURES),
    # Exposed communication has its interval below `comm`.
    **_below("split.mean", *(part for part in PARTS if part.name != EXPOSED.name)),
    **_below("utilisation", MODEL_TFLOPS, HARDWARE_TFLOPS, MFU, HFU),
    **_below("stragglers.*", LATE),
    **_below("nodes.*", CPU_BUSY, CPU_STEAL, JOB_CORES, MEMORY_AVAILABLE, RETRANSMITTED),
    **_below("nodes.*.nics.*", NIC_IN, NIC_OUT, *NIC_PEAKS, NIC_SHARE),
    **_below("nodes.*.gpus.*", *(figure for figure in GPU_FIGURES if figure.is_measured)),
}
"""Of a run that has ended: the content of `summary` in `show --json`."""

_STEP_MEDIAN = Figure[float]("step_time_ms", about="median step time of the workers")
_LOSS = Figure[float]("loss", about="logged loss of this step")
_STEP_BUSBW = Figure[float]("in_training_gb_per_s", about="busbw of the step's all-reduces, from DDP's counters")
_PEAK_MEMORY = Figure[float]("peak_worker_memory_gib", about="highest peak memory of all workers")
_STEP_IN = Figure[float]("in_gbit_per_s", about="receive rate of the node's busiest NIC since the previous step")
_STEP_OUT = Figure[float]("out_gbit_per_s", about="send rate of the node's busiest NIC since the previous step")

STEP_FIGURES: Mapping[str, Figure[Any]] = {
    **_below("", _STEP_MEDIAN, SAMPLES_PER_S, TOKENS_PER_S, _LOSS),
    **_below("comm", EXPOSED, EXPOSED_SHARE, _STEP_BUSBW),
    **_below("", _PEAK_MEMORY),
    **_below("nodes.*", _STEP_IN, _STEP_OUT),
}
"""Of each step, during the run and afterwards."""

NODE_FIGURES: Mapping[str, Figure[Any]] = _below("nodes.*", *progress.NODE_FIGURES)
"""Current state of a node, during the run."""

# Label by the name of the list.
_NAMED_BY = {"nodes": "node", "stragglers": "node", "nics": "ifname", "gpus": "index"}
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


class Value(NamedTuple):
    """One figure of one record; `labels` replace the stars in its name, in order."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        """Its name with its labels in it, as a path: `nodes/box1/nics/ens1f0/share`."""
        words = iter(word for _, word in self.labels)
        parts = (next(words) if part == "*" else part for part in self.name.split("."))
        return "/".join(_STRANGE.sub("_", part) for part in parts)


def summary_values(summary: Summary) -> list[Value]:
    """Every figure in the summary; unknown and non-finite ones are omitted."""
    document = msgspec.to_builtins(summary)
    return [value for name in SUMMARY_FIGURES for value in _values(name, document)]


def node_values(nodes: Sequence[NodeProgress]) -> list[Value]:
    """Every figure of running nodes; unknown and non-finite ones are omitted."""
    samples = []
    for name in NODE_FIGURES:
        for node in nodes:
            value = getattr(node, name.rpartition(".")[2])
            if value is not None and math.isfinite(value):
                samples.append(Value(name, value, (("node", node.name),)))
    return samples


def _values(name: str, document: Mapping[str, Any]) -> Iterator[Value]:
    def walk(value: Any, parts: Sequence[str], labels: tuple[tuple[str, str], ...]) -> Iterator[Value]:
        if not parts:
            value = value.get("value") if isinstance(value, Mapping) else value
            if isinstance(value, (int, float)) and math.isfinite(value):
                yield Value(name, value, labels)
        elif isinstance(value, Mapping):
            inner = value.get(parts[0])
            if parts[1:2] == ["*"]:
                key = _NAMED_BY[parts[0]]
                for entry in inner or ():
                    yield from walk(entry, parts[2:], (*labels, (key, str(entry[key]))))
            else:
                yield from walk(inner, parts[1:], labels)

    yield from walk(document, name.split("."), ())


_OF_STEPS = (StepSample, LossSample, DdpSample, DeviceWaitSample)
# Counters and losses of a step may arrive some steps later, or never.
_LATER_STEPS = 5
_LATER_S = 10.0
# Steps that wait for a worker that does not record.
_MOST_PENDING = 10_000
# Bits per nanosecond are Gbit/s.
_GBIT_PER_BYTE = 8.0


class StepFigures(NamedTuple):
    """One step; `time_s` is when the lowest rank ended it, by its node's wall clock."""

    step: int
    time_s: float
    values: tuple[Value, ...]


class StepStream:
    """The steps of one run, in ascending order, each once.

    Args:
        nodes: of the run, without samples.
    """

    def __init__(self, nodes: Sequence[ObservedNode]) -> None:
        self._nodes = {node.node_rank: node for node in nodes}
        self._world_size = sum(len(node.ranks) for node in nodes)
        self._models: dict[int, ModelSample] = {}
        self._last: dict[int, int] = {}
        # By step and node, and the time at which all workers had recorded the step.
        self._pending: defaultdict[int, defaultdict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        self._recorded: defaultdict[int, set[int]] = defaultdict(set)
        self._complete_s: dict[int, float] = {}
        self._nics: dict[int, StepSample] = {}

    def add(self, node_rank: int, samples: Iterable[Sample], now_s: float) -> None:
        """Samples of a node, in the order of its files; `now_s` is any monotonic clock.

        A step number that does not grow means that the worker was restarted: pending steps belong to the training
        before.
        """
        ranks = self._nodes[node_rank].ranks
        for sample in samples:
            if not isinstance(sample, (*_OF_STEPS, ModelSample)) or sample.rank not in ranks:
                continue
            if isinstance(sample, ModelSample):
                self._models[sample.rank] = sample
                continue
            if isinstance(sample, StepSample):
                self._note(sample, now_s)
            self._pending[sample.step][node_rank].append(sample)

    def take(self, now_s: float, *, everything: bool = False) -> list[StepFigures]:
        """The steps that are ready; `everything` is for a run that has ended."""
        numbers = sorted(self._recorded)
        ready = max((number for number in numbers if everything or self._is_ready(number, now_s)), default=None)
        if len(numbers) > _MOST_PENDING:
            ready = max(ready or 0, numbers[-_MOST_PENDING])
        if ready is None:
            return []
        return list(self._figures([number for number in numbers if number <= ready]))

    def _note(self, sample: StepSample, now_s: float) -> None:
        if sample.step <= self._last.get(sample.rank, 0):
            for kept in (self._pending, self._recorded, self._complete_s, self._last, self._nics):
                kept.clear()
        self._last[sample.rank] = sample.step
        self._recorded[sample.step].add(sample.rank)
        if len(self._recorded[sample.step]) == self._world_size:
            self._complete_s[sample.step] = now_s

    def _is_ready(self, number: int, now_s: float) -> bool:
        if number not in self._complete_s:
            return False
        return min(self._last.values()) >= number + _LATER_STEPS or now_s >= self._complete_s[number] + _LATER_S

    def _figures(self, numbers: Sequence[int]) -> Iterator[StepFigures]:
        observed = self._observed(numbers)
        exposure = expose_each(observed)
        exposed_us = dict(
            zip((next(iter(step.values())).record.step for step in exposure.steps), transfers_us(exposure), strict=True)
        )
        busbw = step_bandwidths(observed)
        losses = {sample.step: sample.loss for sample in observed.of(LossSample)}
        for number, workers in observed.steps.items():
            records = [workers[rank] for rank in sorted(workers)]
            figures = {
                **_speed(records),
                "loss": losses.get(number),
                **_exposed(records, exposed_us.get(number)),
                "comm.in_training_gb_per_s": busbw.get(number),
                "peak_worker_memory_gib": _peak_gib(records),
            }
            values = [Value(name, value) for name, value in figures.items() if value is not None]
            for node in observed.nodes:
                values += self._rates(node, workers)
            yield StepFigures(step=number, time_s=records[0].time_s, values=tuple(values))

    def _observed(self, numbers: Sequence[int]) -> Observed:
        taken: defaultdict[int, list[Sample]] = defaultdict(list)
        for number in sorted(number for number in self._pending if number <= numbers[-1]):
            for node_rank, samples in self._pending.pop(number).items():
                taken[node_rank] += samples
            self._recorded.pop(number, None)
            self._complete_s.pop(number, None)
        nodes = tuple(
            msgspec.structs.replace(
                node,
                samples=(*(self._models[rank] for rank in node.ranks if rank in self._models), *taken[node.node_rank]),
            )
            for node in self._nodes.values()
        )
        steps: dict[int, dict[int, StepSample]] = {}
        for node in nodes:
            for sample in node.of(StepSample):
                steps.setdefault(sample.step, {})[sample.rank] = sample
        steps = {number: steps[number] for number in sorted(steps)}
        return Observed(
            run_id="",
            world_size=self._world_size,
            nodes=nodes,
            recorded=len(steps),
            steps=steps,
            counted=tuple(steps),
            rule="",
        )

    def _rates(self, node: ObservedNode, workers: dict[int, StepSample]) -> Iterator[Value]:
        now = next((workers[rank] for rank in node.ranks if rank in workers and workers[rank].nics), None)
        if now is None or now.nics is None:
            return
        before = self._nics.get(node.node_rank)
        self._nics[node.node_rank] = now
        if before is None or before.nics is None or now.mono_ns <= before.mono_ns:
            return
        grown = [
            (nic.rx_bytes - earlier.rx_bytes, nic.tx_bytes - earlier.tx_bytes)
            for name, nic in now.nics.items()
            if (earlier := before.nics.get(name)) is not None
        ]
        whole = [both for both in grown if min(both) >= 0]
        if whole:
            per_s = _GBIT_PER_BYTE / (now.mono_ns - before.mono_ns)
            labels = (("node", node.name),)
            received, sent = max(whole, key=max)
            yield Value("nodes.*.in_gbit_per_s", received * per_s, labels)
            yield Value("nodes.*.out_gbit_per_s", sent * per_s, labels)


def _speed(records: Sequence[StepSample]) -> dict[str, float | None]:
    times_us = [record.step_time_us for record in records if record.step_time_us is not None]
    return {
        "step_time_ms": statistics.median(times_us) / 1000 if times_us else None,
        "samples_per_s": _per_s(records, "samples"),
        "tokens_per_s": _per_s(records, "tokens"),
    }


def _per_s(records: Sequence[StepSample], field: str) -> float | None:
    rates = [
        getattr(record, field) / record.step_time_us * 1e6
        for record in records
        if record.step_time_us is not None and getattr(record, field) is not None
    ]
    return sum(rates) if len(rates) == len(records) else None


def _exposed(records: Sequence[StepSample], exposed_us: float | None) -> dict[str, float | None]:
    times_us = [record.step_time_us for record in records if record.step_time_us is not None]
    if exposed_us is None or not times_us:
        return {}
    return {
        "comm.exposed_ms": exposed_us / 1000,
        "comm.exposed_share": min(1.0, exposed_us / statistics.fmean(times_us)),
    }


def _peak_gib(records: Sequence[StepSample]) -> float | None:
    peaks = [record.peak_memory_bytes for record in records if record.peak_memory_bytes is not None]
    return max(peaks) / GIB if peaks else None
