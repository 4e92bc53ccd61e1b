"""StepStream: the figures of each step, from samples as they arrive or all at once; a step waits for its counters."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from multinode.export.figures import Value
from multinode.profile.exposure import expose_each
from multinode.profile.in_training import step_bandwidths
from multinode.profile.observed import Observed, ObservedNode
from multinode.profile.step_split import transfers_us
from multinode.records.samples import DdpSample, DeviceWaitSample, LossSample, ModelSample, Sample, StepSample
from multinode.units import GIB

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

        A step number that does not grow means that the worker was restarted: pending steps belong to the
            training
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
            for known in (self._pending, self._recorded, self._complete_s, self._last, self._nics):
                known.clear()
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
        losses = {one.step: one.loss for one in observed.of(LossSample)}
        for number, workers in observed.steps.items():
            records = [workers[rank] for rank in sorted(workers)]
            found = {
                **_speed(records),
                "loss": losses.get(number),
                **_exposed(records, exposed_us.get(number)),
                "comm.in_training_gb_per_s": busbw.get(number),
                "peak_worker_memory_gib": _peak_gib(records),
            }
            values = [Value(name, value) for name, value in found.items() if value is not None]
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
    times_us = [one.step_time_us for one in records if one.step_time_us is not None]
    return {
        "step_time_ms": statistics.median(times_us) / 1000 if times_us else None,
        "samples_per_s": _per_s(records, "samples"),
        "tokens_per_s": _per_s(records, "tokens"),
    }


def _per_s(records: Sequence[StepSample], field: str) -> float | None:
    rates = [
        getattr(one, field) / one.step_time_us * 1e6
        for one in records
        if one.step_time_us is not None and getattr(one, field) is not None
    ]
    return sum(rates) if len(rates) == len(records) else None


def _exposed(records: Sequence[StepSample], exposed_us: float | None) -> dict[str, float | None]:
    times_us = [one.step_time_us for one in records if one.step_time_us is not None]
    if exposed_us is None or not times_us:
        return {}
    return {
        "comm.exposed_ms": exposed_us / 1000,
        "comm.exposed_share": min(1.0, exposed_us / statistics.fmean(times_us)),
    }


def _peak_gib(records: Sequence[StepSample]) -> float | None:
    peaks = [one.peak_memory_bytes for one in records if one.peak_memory_bytes is not None]
    return max(peaks) / GIB if peaks else None
