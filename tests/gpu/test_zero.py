"""ZeRO of DeepSpeed with overlap_comm, two NCCL ranks on one GPU: it starts, and its communication is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multinode.launch.context import Launched

from .one_gpu import TRACED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_exposed_communication_of_overlapped_zero_is_what_a_trace_shows(
    train: Callable[..., Launched], strategy: str
) -> None:
    arguments = ("--strategy", strategy, "--steps", "40", "--width", "2048")
    plain = train(*arguments)
    assert plain.run.status == "succeeded", plain.run.first_failure
    trace = train(*arguments, observation=TRACED).summary.trace
    assert trace is not None
    assert trace.exposed_ms is not None, trace.notes
    counted = plain.summary.comm
    assert counted.exposed_share is not None, counted.exposed_ms
    shown = trace.exposed_ms / trace.workers[0].step_ms
    assert counted.exposed_share == pytest.approx(shown, abs=0.1), trace.findings
