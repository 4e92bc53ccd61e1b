from __future__ import annotations

import pytest

from multinode.core.run.progress import RECENT_STEPS, RecentSteps
from multinode.core.run.samples import DdpSample, DeviceWaitSample, StepSample


def one_step(number: int, comm_us: float | None = None, us: float = 1000.0) -> StepSample:
    phases_us = {"comm": comm_us} if comm_us is not None else None
    return StepSample(rank=0, step=number, time_s=0, mono_ns=number, step_time_us=us, tokens=10, phases_us=phases_us)


def ddp(number: int, exposed_us: float) -> DdpSample:
    return DdpSample(
        rank=0,
        step=number,
        iteration=number,
        bucket_sizes_bytes=(),
        forward_us=0,
        backward_us=0,
        comm_us=exposed_us + 200.0,
        overlap_us=200.0,
    )


def wait(number: int, wait_us: float, calls: int = 4) -> DeviceWaitSample:
    return DeviceWaitSample(rank=0, step=number, wait_us=wait_us, calls=calls, of_calls=4)


def test_only_the_last_steps_count_and_old_ones_are_forgotten() -> None:
    worker = RecentSteps()
    for number in range(1, 200):
        worker = worker.with_sample(one_step(number, comm_us=900.0 if number < 190 else 100.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.1)
    assert len(worker.steps) < 4 * RECENT_STEPS
    assert worker.tokens_and_time == (10 * RECENT_STEPS, 1000.0 * RECENT_STEPS)


def test_ddps_counters_come_before_waits_of_the_device_and_these_before_the_host() -> None:
    worker = RecentSteps().with_sample(one_step(1, comm_us=500.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.5)
    worker = worker.with_sample(wait(1, 250.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.25)
    reduced = RecentSteps().with_sample(one_step(1)).with_sample(wait(2, 250.0)).with_sample(ddp(1, 100.0))
    assert reduced.exposed_share(host_waits=True) == pytest.approx(0.1)


def test_several_reductions_of_a_step_add_up() -> None:
    worker = RecentSteps().with_sample(one_step(1))
    for _ in range(4):
        worker = worker.with_sample(ddp(1, 100.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.4)


def test_calls_beside_ddp_are_exposed_too() -> None:
    worker = RecentSteps().with_sample(one_step(1, comm_us=400.0)).with_sample(ddp(1, 100.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.5)
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.1)
    worker = worker.with_sample(wait(1, 250.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.35)


def test_a_step_of_which_not_every_call_was_timed_says_nothing() -> None:
    worker = RecentSteps().with_sample(one_step(1)).with_sample(wait(1, 250.0, calls=3))
    assert worker.exposed_share(host_waits=False) is None
    assert worker.with_sample(ddp(1, 100.0)).exposed_share(host_waits=False) is None


def test_a_worker_that_was_started_again_begins_anew() -> None:
    worker = RecentSteps()
    for number in range(1, 101):
        worker = worker.with_sample(one_step(number)).with_sample(ddp(number, 100.0))
    # From the last checkpoint, twice as slow as before.
    for number in range(51, 54):
        worker = worker.with_sample(one_step(number, us=2000.0)).with_sample(ddp(number, 1000.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.5)
    assert worker.tokens_and_time == (30, 6000.0)
    assert worker.with_sample(one_step(53, us=4000.0)).tokens_and_time == (10, 4000.0)
