from __future__ import annotations

import pytest

from multinode.profile.step_split import WorkerSplit
from multinode.profile.trace_view import Agreement, Outcome, WorkerTrace
from multinode.profile.words import agreement_words

WORKER = WorkerTrace(rank=0, steps=2, step_ms=2.0, comm_ms=0.5, exposed_ms=0.3, overlap=0.4, compute_ms=0.5)
COUNTED = WorkerSplit(rank=-1, step_ms=1.0, exposed_ms=0.1)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("agrees", "by the counters: they agree, 20.0% of the step apart."),
        ("few_steps", "20% of the step apart, and the window has too few steps (2) to tell."),
        ("slowed", "as the profiler made a step 100% longer."),
        ("host_bound", "as the GPU computed 25% of the time and waited for the host in the rest."),
        ("unexplained", "and nothing recorded says why."),
    ],
)
def test_the_window_and_the_counters_are_said_side_by_side(outcome: Outcome, said: str) -> None:
    sentence = agreement_words(Agreement(outcome=outcome, worker=WORKER, counted=COUNTED, apart=0.2))
    assert sentence.startswith("Exposed communication per step: 0.3 ms of 2.0 ms in the window, 0.1 ms of 1.0 ms")
    assert sentence.endswith(said)


def test_what_is_unknown_outside_of_the_window_is_said() -> None:
    sentence = agreement_words(Agreement(outcome="unknown", worker=WORKER))
    assert sentence == "Exposed communication: 0.3 ms of 2.0 ms per step in the window; it is unknown outside of it."
    assert agreement_words(None) == ""
