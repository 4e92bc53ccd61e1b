"""A collective that timed out: told as what it is, with the causes that the run's own figures tell of."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.core.run.progress import NodeProgress
from multinode.core.run.run import Failure
from multinode.core.run.samples import NicSample, StepSample
from multinode.launch.failure import Evidence, first_failure
from multinode.launch.failure_kinds import explain_timeout, link_share

from .scripted import HELLO, RUNNING, Execution, Talk
from .test_failure import ended

NODE = NodeProgress(name="node0", node_rank=0, ranks=(0, 1), ifname="eth0", link_gbit_per_s=1.0)
STEPPED = msgspec.structs.replace(NODE, step=3)
TIMEOUT = Failure(node="node0", node_rank=0, message="timed out", kind="timeout", hint="multinode check")
WATCHDOG = (
    "[rank3]:[E1122 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(Seq=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
REPORT = (
    "Root Cause (first observed failure):\n[0]:\n  rank : 3 (local_rank: 1)\n  exitcode : -6 (pid: 7)\n"
    "  traceback : Signal 6 (SIGABRT) received by PID 7\n"
)


def nic(second: float, sent_gbit: float, *, ifname: str = "eth0") -> NicSample:
    """A reading of a card that has sent so much by then."""
    return NicSample(
        time_s=second, mono_ns=int(second * 1e9), ifname=ifname, rx_bytes=0, tx_bytes=int(sent_gbit * 1e9 / 8)
    )


def test_a_worker_that_nccls_watchdog_aborted_is_a_timeout_and_says_of_what() -> None:
    log = WATCHDOG + "frame\n" * 60 + REPORT
    failure = first_failure([Evidence(run=ended(0, exit_code=1), log=log)])
    assert failure is not None
    assert (failure.kind, failure.rank) == ("timeout", 3)
    assert failure.message == "rank 3 was ended by SIGABRT: the collective timed out: allreduce took longer than 600 s"


@pytest.mark.parametrize(
    ("nodes", "share", "told", "untold"),
    [
        ((STEPPED,), 0.3, ("multinode check",), ("ddp_timeout",)),
        ((NODE, NODE), None, ("no worker had finished a step:", "tokenized_path", "multinode check"), ("link",)),
        ((NODE, STEPPED), None, ("multinode check",), ("tokenized_path",)),
        ((STEPPED,), 0.97, ("the link of node0 was 97% in use", "multinode check"), ("tokenized_path",)),
        ((NODE,), 1.3, ("tokenized_path", "was 100% in use"), ()),
        ((msgspec.structs.replace(NODE, stage="tokenisation 45%"),), None, ("(node0: tokenisation 45%)",), ()),
    ],
)
def test_the_hint_names_what_the_figures_tell_of(
    nodes: tuple[NodeProgress, ...], share: float | None, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    hint = str(explain_timeout(TIMEOUT, nodes, {"node0": share, "node1": None}).hint)
    assert all(words in hint for words in told)
    assert not any(words in hint for words in untold)


def test_any_other_failure_keeps_its_hint() -> None:
    other = msgspec.structs.replace(TIMEOUT, kind="disk_full")
    assert explain_timeout(other, (NODE,), {"node0": 1.0}) == other


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([nic(100 + s, 0.9 * s) for s in range(11)], 0.9),
        # Before the minute, after the failure, of another card, of a kind of its own: none of it counts.
        ([nic(10, 0), *(nic(100 + s, 50 + 0.5 * s) for s in range(11)), nic(111, 500), nic(105, 900, ifname="x")], 0.5),
        ([StepSample(rank=0, step=1, time_s=105, mono_ns=1)], None),
        ([nic(108, 0), nic(109, 1)], None),
        ([nic(100, 9), nic(110, 1)], None),
        ([], None),
    ],
)
def test_the_share_is_of_the_minute_before(samples: list[NicSample | StepSample], share: float | None) -> None:
    found = link_share(samples, NODE, 110.0)
    assert found == (pytest.approx(share) if share is not None else None)
    assert link_share(samples, msgspec.structs.replace(NODE, link_gbit_per_s=None), 110.0) is None


def test_a_run_whose_collective_times_out_before_its_first_step_says_so(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            talk.chunk("log", 0, b"Running tokenizer on dataset:  45%|##\n" + (WATCHDOG + REPORT).encode())
            talk.end(exit_code=1)
        else:
            talk.order("stop")
            talk.end(exit_code=None, signal="SIGTERM", cause="stopped")

    failure = Execution(tmp_path, "a", "b").run(play).first_failure
    assert failure is not None
    assert failure.kind == "timeout"
    assert "(a: tokenisation 45%)" in str(failure.hint)
