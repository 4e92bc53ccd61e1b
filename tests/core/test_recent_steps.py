from __future__ import annotations

import pytest

from multinode.core.profile_samples import DdpSample, DeviceWaitSample
from multinode.core.recent_steps import RECENT_STEPS, RecentSteps
from multinode.core.samples import StepSample


def step(number: int, comm_us: float | None = None, us: float = 1000.0) -> StepSample:
    phases_us = {"comm": comm_us} if comm_us is not None else None
    return StepSample(rank=0, step=number, time_s=0, mono_ns=number, step_time_us=us, tokens=10, phases_us=phases_us)


def wait(number: int, wait_us: float, calls: int = 4) -> DeviceWaitSample:
    return DeviceWaitSample(rank=0, step=number, wait_us=wait_us, calls=calls, of_calls=4)


def test_only_the_last_steps_count_and_old_ones_are_forgotten() -> None:
    worker = RecentSteps()
    for number in range(1, 200):
        worker = worker.with_step(step(number, comm_us=900.0 if number < 190 else 100.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.1)
    assert len(worker.times_us) < 4 * RECENT_STEPS
    assert worker.tokens_and_time == (10 * RECENT_STEPS, 1000.0 * RECENT_STEPS)


def test_ddps_counters_come_before_waits_of_the_device_and_these_before_the_host() -> None:
    worker = RecentSteps().with_step(step(1, comm_us=500.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.5)
    worker = worker.with_device_wait(wait(1, 250.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.25)
    ddp = DdpSample(
        rank=0,
        step=1,
        iteration=1,
        bucket_sizes_bytes=(),
        forward_us=0,
        backward_us=0,
        comm_us=300.0,
        overlap_us=200.0,
    )
    assert worker.with_ddp(ddp).exposed_share(host_waits=True) == pytest.approx(0.1)


def test_a_step_of_which_not_every_call_was_timed_says_nothing() -> None:
    worker = RecentSteps().with_step(step(1)).with_device_wait(wait(1, 250.0, calls=3))
    assert worker.exposed_share(host_waits=False) is None
