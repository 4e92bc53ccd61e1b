from __future__ import annotations

import msgspec
import pytest

from multinode.core.grid.grid_state import judge_run
from multinode.core.run.run import Failure, NodeRun, Run


def run_of(status: str, kind: str | None = None, message: str = "it broke", oom_kills: int | None = None) -> Run:
    failed = status in {"failed", "lost"}
    return Run(
        run_id="r",
        job="j",
        engine="torchrun",
        status=status,
        started_s=1.0,
        world_size=2,
        nodes=(NodeRun(name="a", node_rank=0), NodeRun(name="b", node_rank=1, oom_kills=oom_kills)),
        first_failure=Failure(node="b", node_rank=1, message=message, kind=kind) if failed else None,
    )


def test_a_run_that_went_well_and_has_figures_is_measured() -> None:
    assert judge_run(run_of("succeeded"), in_time=False, lacks=None).state == "measured"
    without = judge_run(run_of("succeeded"), in_time=False, lacks="it recorded no step")
    assert (without.state, without.reason) == ("failed", "it recorded no step")


def test_a_run_that_was_stopped_at_its_time_is_measured_and_any_other_says_nothing() -> None:
    assert judge_run(run_of("stopped"), in_time=True, lacks=None).state == "measured"
    too_short = judge_run(run_of("stopped"), in_time=True, lacks="it recorded no step that counts")
    assert too_short.reason == "it recorded no step that counts: it needs more --minutes"
    assert judge_run(run_of("stopped"), in_time=False, lacks=None).state == "stopped"


@pytest.mark.parametrize(("kind", "out_of"), [("out_of_gpu_memory", "gpu"), ("out_of_memory", "node")])
def test_running_out_of_memory_is_a_result_that_says_whose(kind: str, out_of: str) -> None:
    outcome = judge_run(run_of("failed", kind, "out of memory\nand more"), in_time=False, lacks="no step")
    assert (outcome.state, outcome.out_of, outcome.reason) == ("out_of_memory", out_of, "b: out of memory")
    assert outcome.failure is not None


def test_what_the_kernel_killed_is_out_of_memory_whatever_its_peers_say() -> None:
    outcome = judge_run(run_of("failed", "connection", "Connection reset", oom_kills=2), in_time=False, lacks=None)
    assert (outcome.state, outcome.out_of) == ("out_of_memory", "node")
    assert outcome.reason == "b: the kernel killed 2 processes for lack of memory"


@pytest.mark.parametrize("kind", ["missing_file", None])
def test_an_exception_has_its_own_cause_whatever_the_kernel_killed_meanwhile(kind: str | None) -> None:
    run = run_of("failed", kind, "rank 0 raised ValueError: no such template", oom_kills=1)
    assert judge_run(run, in_time=False, lacks=None).state == "failed"
    by_signal = msgspec.structs.replace(
        run, first_failure=Failure(node="b", node_rank=1, message="?", signal="SIGXCPU")
    )
    assert judge_run(by_signal, in_time=False, lacks=None).state == "out_of_memory"


def test_a_worker_that_the_kernel_killed_is_told_in_those_words() -> None:
    failure = Failure(node="b", node_rank=1, message="ended by SIGKILL", kind="out_of_memory", signal="SIGKILL")
    run = msgspec.structs.replace(run_of("failed", oom_kills=1), first_failure=failure)
    outcome = judge_run(run, in_time=False, lacks=None)
    assert (outcome.out_of, outcome.reason) == ("node", "b: the kernel killed a process for lack of memory")
    # What ran out on the GPU did so whatever the kernel killed beside it.
    both = judge_run(run_of("failed", "out_of_gpu_memory", oom_kills=1), in_time=False, lacks=None)
    assert both.out_of == "gpu"


def test_any_other_failure_fails_the_cell_with_its_first_line() -> None:
    outcome = judge_run(run_of("failed", None, "boom\ntraceback"), in_time=False, lacks=None)
    assert (outcome.state, outcome.reason, outcome.unreachable) == ("failed", "b: boom", False)
    lost = judge_run(run_of("lost", None, "no answer"), in_time=False, lacks=None)
    assert (lost.state, lost.unreachable) == ("failed", True)
