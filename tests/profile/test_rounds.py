"""Figures of a training whose nodes average every few steps: they cover whole rounds."""

from __future__ import annotations

import pytest

from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.summary import see_rounds, summarise
from multinode.records.samples import (
    AveragingSample,
    CallCount,
    GroupSample,
    ModelSample,
    NicBytes,
    Sample,
    StepSample,
    SyncSample,
    TrafficSample,
)
from multinode.stats.estimate import value_of
from multinode.stats.unknown import Unknown, known

STEP_MS, SYNC_MS, SIZE = 100.0, 900.0, 8_000_000
NIC = "ens1f0"


def node(rank: int, steps: int, every: int, early: tuple[int, ...] = ()) -> ObservedNode:
    """Steps of 100 ms; each `every`-th, and each in `early`, has 900 ms of averaging too."""
    samples: list[Sample] = [
        AveragingSample(rank=rank, nodes=2, every=every),
        ModelSample(rank=rank, wrapper="ddp", parameters=10, trainable=10, device="cpu"),
        GroupSample(rank=rank, group="1", ranks=(0, 1), backend="gloo"),
        TrafficSample(rank=rank, traffic=0, calls=()),
        TrafficSample(rank=rank, traffic=1, calls=(CallCount(op="all_reduce", group="1", size_bytes=SIZE, count=1),)),
    ]
    position, sent, now_ms = 0, 0, 0.0
    for step in range(1, steps + 1):
        position += 1
        ends = position == every or step in early
        now_ms += STEP_MS + (SYNC_MS if ends else 0.0)
        sent += SIZE if ends else 0
        if ends:
            reason = "round" if position == every else "checkpoint"
            samples.append(
                SyncSample(
                    rank=rank,
                    step=step,
                    steps=position,
                    reason=reason,
                    size_bytes=SIZE,
                    sync_us=SYNC_MS * 1000,
                    drift=0.5 + rank,
                )
            )
            position = 0
        samples.append(
            StepSample(
                rank=rank,
                step=step,
                time_s=0,
                mono_ns=int(now_ms * 1e6),
                step_time_us=(STEP_MS + (SYNC_MS if ends else 0.0)) * 1000,
                samples=4,
                traffic=int(ends),
                phases_us={"forward": 40_000, "backward": 50_000, "comm": SYNC_MS * 1000 if ends else 0.0},
                nics={NIC: NicBytes(tx_bytes=sent, rx_bytes=sent)},
            )
        )
    return ObservedNode(name="ab"[rank], node_rank=rank, ranks=(rank,), ifname=NIC, samples=tuple(samples))


def seen(steps: int, every: int, early: tuple[int, ...] = ()) -> Observed:
    return observe("r", [node(rank, steps, every, early) for rank in (0, 1)])


@pytest.mark.parametrize(
    ("steps", "every", "counted"),
    [(40, 8, (9, 40)), (39, 8, (9, 32)), (20, 1, (6, 20)), (20, 5, (6, 20)), (64, 16, (17, 64))],
)
def test_the_measured_steps_are_whole_rounds(steps: int, every: int, counted: tuple[int, int]) -> None:
    found = seen(steps, every)
    assert (found.counted[0], found.counted[-1]) == counted
    assert len(found.syncs) * every == len(found.counted)
    assert f"{len(found.syncs)} complete rounds" in found.rule


def test_a_training_without_a_whole_round_has_no_figures() -> None:
    found = summarise(seen(20, 16))
    assert isinstance(found.samples_per_s, Unknown)
    assert "no complete round was measured" in found.rule
    assert found.strategy == "local SGD: DDP inside each node, 2 nodes averaged every 16 steps"
    assert found.rounds is not None
    assert (found.rounds.every, found.rounds.rounds, found.rounds.sync_ms) == (16, 0, None)


def test_speed_and_bytes_are_those_of_rounds() -> None:
    every = 8
    found = summarise(seen(80, every))
    step_ms = STEP_MS + SYNC_MS / every
    assert value_of(found.samples_per_s) == pytest.approx(2 * 4 / step_ms * 1000)
    assert known(found.step_time_ms).median.value == pytest.approx(step_ms)
    low, high = known(found.samples_per_s).bounds
    assert low == pytest.approx(high)
    sent = found.comm.bytes_per_step
    assert (sent.calls, sent.expected, sent.nic) == pytest.approx((SIZE / every,) * 3)
    assert found.comm.findings == ()
    assert not isinstance(found.split.mean, Unknown)
    assert found.bottleneck is None or found.bottleneck.kind != "no_communication"


def test_rounds_are_counted_with_those_that_a_checkpoint_closed() -> None:
    rounds = see_rounds(seen(80, 8, early=(36,)))
    assert rounds is not None
    assert (rounds.rounds, rounds.early) == (9, 1)
    assert rounds.steps == pytest.approx(68 / 9)
    assert (rounds.sync_ms, rounds.size_bytes) == (SYNC_MS, SIZE)
    assert (rounds.drift, rounds.last_drift) == (1.5, 1.5)
    assert see_rounds(observe("r", [])) is None
