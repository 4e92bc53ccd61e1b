from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.profile.observed import observe_run
from multinode.profile.summary import Summary, summarise
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import (
    AveragingSample,
    LossSample,
    ModelSample,
    NicSample,
    Sample,
    StepSample,
    SyncSample,
    TrainEndSample,
)
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import known
from tests import make

PLAN = make.plan("a", "b", link_gbit_per_s=10.0)
FAST_MS, SLOW_MS, WARM_UP_MS = 100.0, 260.0, 30_000.0


def lines(samples: list[Sample]) -> bytes:
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)


def slow_in_the_middle(tmp_path: Path, steps: int) -> RunDirectory:
    """Most steps take long, by what the network takes, and none of those at either end."""
    directory = RunDirectory.create(tmp_path, "r")
    chance = random.Random(1)  # noqa: S311 - no secret is made of it
    slow = range(steps * 2 // 10, steps * 8 // 10)
    took_ms = [(SLOW_MS if n in slow else FAST_MS) * chance.gauss(1, 0.05) for n in range(steps)]
    took_ms[0] = WARM_UP_MS
    for rank in (0, 1):
        samples: list[Sample] = [
            ModelSample(rank=rank, wrapper="none", parameters=1, trainable=1, device="cpu"),
            LossSample(rank=rank, step=1, loss=2.0),
        ]
        nic: list[Sample] = []
        now_ms, sent = 0.0, 0
        for number, step_ms in enumerate(took_ms, 1):
            now_ms += step_ms
            sent += 1_000_000
            samples.append(
                StepSample(
                    rank=rank,
                    step=number,
                    time_s=now_ms / 1000,
                    mono_ns=int(now_ms * 1e6),
                    step_time_us=step_ms * 1000,
                    samples=16,
                    tokens=8192,
                    micro_steps=1,
                    phases_us={"backward": 80_000.0, "comm": max(0.0, step_ms - 90) * 1000},
                )
            )
            if number % 10 == 0:
                now_s = now_ms / 1000
                nic.append(
                    NicSample(ifname="ens1f0", tx_bytes=sent, rx_bytes=sent, time_s=now_s, mono_ns=int(now_s * 1e9))
                )
        samples += [LossSample(rank=rank, step=steps, loss=1.0), TrainEndSample(rank=rank, time_s=now_ms / 1000)]
        directory.append_samples(rank, f"rank-{rank}.jsonl", lines(samples))
        directory.append_samples(rank, "sampler.jsonl", lines(nic))
    return directory


def figures(summary: Summary) -> dict[str, Estimate]:
    """Those that have an interval."""
    rates = {name: getattr(summary, name) for name in ("samples_per_s", "tgs", "tokens_per_s")}
    times = {"step_time_ms": known(summary.step_time_ms).median, "exposed_ms": known(summary.comm.exposed_ms)}
    return {name: known(figure) for name, figure in (rates | times).items()}


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_what_is_read_of_a_long_run_is_as_slow_as_the_whole(tmp_path: Path, steps: int) -> None:
    """Each figure lies within the interval that the whole run has for it, and the whole run's within its own."""
    directory = slow_in_the_middle(tmp_path, steps)
    size = sum(path.stat().st_size for rank in (0, 1) for path in directory.sample_files(rank))
    said: list[str] = []
    whole = summarise(observe_run(directory, PLAN, said.append))
    assert said == []
    part = summarise(observe_run(directory, PLAN, said.append, most_bytes=size // 5))
    assert [text.rpartition(": ")[2] for text in said] == ["0%", "50%"]
    assert part.steps == whole.steps == steps
    assert part.steady_steps < steps / 3
    assert f"{part.steady_steps + 5} of {steps} steps are read" in part.rule
    of_whole = figures(whole)
    for name, figure in figures(part).items():
        # Heads and tails alone would say twice as much, or less than half.
        assert figure.value == pytest.approx(of_whole[name].value, rel=0.05), name
        for low, high in (figure.bounds, of_whole[name].bounds):
            assert low <= figure.value <= high, name
    assert part.all_steps_samples_per_s == pytest.approx(whole.all_steps_samples_per_s, rel=0.05)
    assert (part.first_loss, part.last_loss) == (2.0, 1.0)
    rates = [summary.nodes[0].nics[0].out_gbit_per_s for summary in (part, whole)]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)


def test_whole_rounds_of_averaging_are_read(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    every, steps = 60, 12_000
    for rank in (0, 1):
        samples: list[Sample] = [AveragingSample(rank=rank, nodes=2, every=every)]
        for step in range(1, steps + 1):
            took_us = 2e5 if step % every == 0 else 1e5
            if step % every == 0:
                sync = SyncSample(rank=rank, step=step, steps=every, reason="round", size_bytes=1, sync_us=1e5, drift=1)
                samples.append(sync)
            samples.append(StepSample(rank=rank, step=step, time_s=step, mono_ns=step * 10**8, step_time_us=took_us))
        directory.append_samples(rank, f"rank-{rank}.jsonl", lines(samples))
    plan = msgspec.structs.replace(PLAN, levers=Levers(averaging=Averaging(every=every)))
    found = observe_run(directory, plan, most_bytes=600_000)
    assert len(found.steps) < steps / 3
    assert len(found.counted) == every * len(found.syncs) > 0
    times = known(summarise(found).step_time_ms)
    assert times.median.value == pytest.approx(100 * (every + 1) / every)
