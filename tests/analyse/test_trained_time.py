from __future__ import annotations

from collections.abc import Sequence

import pytest

from multinode.analyse.steps.throughput import trained_s
from multinode.core.run.samples import CpuSample, Sample, StepSample


def ends(ends_s: Sequence[float], rank: int = 0) -> list[Sample]:
    """Steps of a worker whose node has been up for an hour, and whose wall clock stands still."""
    return [
        StepSample(rank=rank, step=number, time_s=0.0, mono_ns=int((3600 + end_s) * 1e9))
        for number, end_s in enumerate(ends_s, 1)
    ]


def test_the_time_begins_at_the_end_of_the_first_step_and_has_the_step_that_was_cut_off() -> None:
    assert trained_s(ends([100, 102, 104, 106])) == pytest.approx(8)


def test_one_slow_step_does_not_make_the_last_one_slow() -> None:
    assert trained_s(ends([0, 1, 2, 30, 31])) == pytest.approx(32)


def test_the_worker_that_trained_least_decides() -> None:
    assert trained_s([*ends([0, 1, 2]), *ends([0, 1], rank=1)]) == pytest.approx(2)


@pytest.mark.parametrize("samples", [[], ends([5]), [*ends([0, 1, 2]), *ends([0], rank=1)]])
def test_too_few_steps_tell_nothing(samples: list[Sample]) -> None:
    assert trained_s([*samples, CpuSample(time_s=0.0, mono_ns=int(1e15))]) is None
