from __future__ import annotations

import msgspec
import pytest

from multinode.export.figures import StepFigures, StepStream
from multinode.profile.observed import ObservedNode
from multinode.records.samples import LossSample, NicBytes, Sample, StepSample
from tests.profile.observing import STEPS, observed

SECOND_NS = 10**9
NODES = [ObservedNode(name=name, node_rank=rank, ranks=(rank,), ifname="eth0") for rank, name in enumerate("ab")]


def step(rank: int, number: int, sent: int | None = None) -> StepSample:
    nics = {
        "eth0": NicBytes(tx_bytes=sent or 0, rx_bytes=2 * (sent or 0)),
        "eth1": NicBytes(tx_bytes=7, rx_bytes=0),
    }
    return StepSample(
        rank=rank,
        step=number,
        time_s=100.0 + number,
        mono_ns=number * SECOND_NS,
        step_time_us=(1 + rank) * 1e6,
        samples=4,
        peak_memory_bytes=(rank + 1) << 30,
        nics=nics if sent is not None else None,
    )


def values(found: StepFigures) -> dict[str, float]:
    return {value.path: value.value for value in found.values}


def test_a_step_is_ready_when_later_ones_or_time_have_come_and_is_given_once() -> None:
    stream = StepStream(NODES)
    stream.add(0, [step(0, number) for number in range(1, 8)], 0.0)
    assert stream.take(100.0) == []
    stream.add(1, [step(1, number) for number in range(1, 8)], 100.0)
    assert [one.step for one in stream.take(100.0)] == [1, 2]
    assert stream.take(100.0) == []
    assert [one.step for one in stream.take(110.0)] == [3, 4, 5, 6, 7]
    stream.add(0, [step(0, 8)], 111.0)
    assert [one.step for one in stream.take(111.0, everything=True)] == [8]


def test_figures_are_of_all_workers_and_rates_since_the_step_before() -> None:
    stream = StepStream(NODES)
    samples: list[Sample] = [step(0, 1, 0), step(0, 2, 125_000_000), step(0, 3, 5)]
    stream.add(0, [*samples, LossSample(rank=0, step=2, loss=0.5), LossSample(rank=0, step=3, loss=None)], 0.0)
    stream.add(1, [step(1, number) for number in (1, 2, 3)], 0.0)
    first, second, third = stream.take(0.0, everything=True)
    assert values(first) == {"step_time_ms": 1500.0, "samples_per_s": 6.0, "peak_worker_memory_gib": 2.0}
    assert (second.time_s, values(second)["loss"]) == (102.0, 0.5)
    assert values(second)["nodes/a/out_gbit_per_s"] == pytest.approx(1.0)
    assert values(second)["nodes/a/in_gbit_per_s"] == pytest.approx(2.0)
    # Its counters began anew, and what diverged is no figure.
    assert values(third).keys() == values(first).keys() | {"nodes/a/in_gbit_per_s", "nodes/a/out_gbit_per_s"}
    assert values(third)["nodes/a/out_gbit_per_s"] == 0.0


def test_a_worker_that_begins_anew_counts_from_there() -> None:
    stream = StepStream(NODES)
    for rank in (0, 1):
        stream.add(rank, [step(rank, number) for number in (1, 2, 3)], 0.0)
    for rank in (0, 1):
        stream.add(rank, [step(rank, number) for number in (1, 2)], 0.0)
    assert [one.step for one in stream.take(0.0, everything=True)] == [1, 2]


def test_pieces_give_what_the_whole_gives() -> None:
    whole = observed()
    nodes = [msgspec.structs.replace(node, samples=()) for node in whole.nodes]
    at_once, piecewise = StepStream(nodes), StepStream(nodes)
    found: list[StepFigures] = []
    for number in range(1, STEPS + 1):
        for node in whole.nodes:
            of_step = [one for one in node.samples if getattr(one, "step", None) == number]
            piecewise.add(node.node_rank, of_step, float(number))
        found += piecewise.take(float(number))
    for node in whole.nodes:
        at_once.add(node.node_rank, node.samples, 0.0)
    found += piecewise.take(100.0, everything=True)
    assert found == at_once.take(0.0, everything=True)
    assert values(found[-1])["comm/exposed_ms"] == 120.5
    assert values(found[-1])["comm/in_training_gb_per_s"] == pytest.approx(1.5 * 75e6 / 204e3 * 1e-3)
