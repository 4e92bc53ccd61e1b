from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import first_failure
from multinode.errors import ConnectError, ContactLost, MultinodeError, NodeFailed
from multinode.records.run import Failure, NodeRun
from multinode.records.samples import ExceptionSample
from multinode.records.status import Status
from tests.golden import Golden

from .told import told_of


def ended(rank: int, **fields: object) -> NodeRun:
    whole = {"state": "ended", "cause": "exited", "exit_code": 0, **fields}
    status = Status(**whole)  # type: ignore[arg-type]  # fields of Status by name
    return NodeRun(name=f"node{rank}", node_rank=rank, state="ended", status=status)


def raised(rank: int, time_s: float, kind: str = "ValueError", message: str = "bad data") -> ExceptionSample:
    return ExceptionSample(rank=rank, time_s=time_s, type=kind, message=message, traceback=f"traceback of {rank}")


def find(*nodes: NodeEvidence) -> Failure:
    """The failure, which must not depend on the order in which the nodes are listed."""
    found = {first_failure(order) for order in itertools.permutations(nodes)}
    assert len(found) == 1
    (failure,) = found
    assert failure is not None
    return failure


GLOO = raised(0, 5.0, "RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234")
NCCL = raised(0, 5.0, "DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited")


def test_where_nothing_went_wrong_there_is_no_failure() -> None:
    assert first_failure([NodeEvidence(run=ended(0)), NodeEvidence(run=ended(1))]) is None
    assert first_failure([]) is None


def test_nodes_that_were_stopped_are_no_failure() -> None:
    stopped = ended(0, cause="stopped", exit_code=None, signal="SIGTERM")
    assert first_failure([NodeEvidence(run=ended(1)), NodeEvidence(run=stopped)]) is None


def test_the_earliest_exception_is_to_blame_and_brings_its_own_traceback() -> None:
    failure = find(
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 20.0), raised(1, 11.0, "MemoryError", "")]),
        NodeEvidence(run=ended(1, exit_code=1), exceptions=[raised(2, 12.0)], log="much"),
    )
    assert (failure.node, failure.rank, failure.message) == ("node0", 1, "rank 1 raised MemoryError")
    assert failure.log_tail == "traceback of 1"


def test_a_worker_that_raised_is_not_blamed_on_the_signal_that_ended_its_launcher_afterwards() -> None:
    stopped = ended(1, exit_code=None, signal="SIGTERM")
    failure = find(NodeEvidence(run=ended(0)), NodeEvidence(run=stopped, exceptions=[raised(2, 12.0)]))
    assert (failure.message, failure.signal) == ("rank 2 raised ValueError: bad data", None)
    assert (failure.kind, failure.cause) == (None, None)


def test_an_exception_that_torch_brings_from_another_process_is_named_itself() -> None:
    """Raised by a DataLoader of torch 2.13 in a container with docker's /dev/shm; paths shortened."""
    original = (
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_25_3_0>: No space left on device (28)"
    )
    trace = (
        "Traceback (most recent call last):\n"
        '  File "loading.py", line 14, in <module>\n'
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "torch/utils/data/_utils/worker.py", line 374, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        "           ^^^^^^^^^^^^^^^^^^^^\n"
        f"{original}\n\n"
    )
    message = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File"
    sample = ExceptionSample(rank=2, time_s=12.0, type="RuntimeError", message=message, traceback=trace)
    failure = find(NodeEvidence(run=ended(0)), NodeEvidence(run=ended(1, exit_code=1), exceptions=[sample]))
    assert (failure.message, failure.error_id) == (f"rank 2 raised {original}", "shared-memory-full")


def test_clocks_that_differ_are_brought_together_first() -> None:
    failure = find(
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 1000.0)], clock_offset_s=-60.0),
        NodeEvidence(run=ended(1, exit_code=1), exceptions=[raised(2, 1050.0)], clock_offset_s=0.0),
    )
    assert failure.rank == 2


@pytest.mark.parametrize("connection", [GLOO, NCCL])
def test_a_broken_connection_is_a_consequence_while_anything_else_explains_it(connection: ExceptionSample) -> None:
    victim = NodeEvidence(run=ended(0, exit_code=1, ended_s=5.0), exceptions=[connection])
    by_exception = NodeEvidence(run=ended(1, exit_code=1), exceptions=[raised(2, 9.0)])
    assert find(victim, by_exception).rank == 2
    by_signal = NodeEvidence(run=ended(1, exit_code=None, signal="SIGKILL", ended_s=6.0))
    assert find(victim, by_signal).message == "the job was killed by SIGKILL"
    in_silence = NodeEvidence(run=ended(1, exit_code=137, ended_s=6.0), log="Killed\n")
    failure = find(victim, in_silence)
    assert (failure.node, failure.message, failure.log_tail) == ("node1", "the job exited with code 137", "Killed")


def test_where_only_connections_broke_the_first_of_them_is_told() -> None:
    later = raised(2, 8.0, "RuntimeError", "gloo: Connection reset by peer")
    failure = find(
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[GLOO]),
        NodeEvidence(run=ended(1, exit_code=1), exceptions=[later]),
    )
    assert (failure.node, failure.rank) == ("node0", 0)


def test_a_node_that_never_started_comes_first_with_its_reason_and_hint() -> None:
    failure = find(
        NodeEvidence(
            run=ended(1, cause="not_started", exit_code=None),
            error=NodeFailed("/work does not exist", hint="mkdir /work"),
        ),
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[GLOO]),
    )
    assert (failure.node, failure.message, failure.hint) == ("node1", "/work does not exist", "mkdir /work")


def test_what_ended_the_job_from_outside_is_told_in_words(golden: Golden) -> None:
    golden.check_findings(
        "ended_from_outside",
        {
            cause: told_of(
                find(
                    NodeEvidence(run=ended(0, cause=cause, exit_code=None, signal="SIGTERM")),
                    NodeEvidence(run=ended(1)),
                )
            )
            for cause in ("supervisor_lost", "lease_expired")
        },
    )


def test_the_first_job_to_end_is_to_blame_and_the_end_of_its_log_is_shown() -> None:
    log = "".join(f"line {n}\n" for n in range(100)) + "\x1b[31m 50%\r100%\n\n"
    failure = find(
        NodeEvidence(run=ended(0, exit_code=1, ended_s=30.0)),
        NodeEvidence(run=ended(1, exit_code=3, ended_s=20.0), log=log),
    )
    assert (failure.node, failure.node_rank, failure.exit_code) == ("node1", 1, 3)
    assert failure.log_tail.splitlines()[-2:] == ["line 99", "100%"]
    assert len(failure.log_tail.splitlines()) == 20


@pytest.mark.parametrize(
    ("error", "reason"), [(ContactLost("no answer in time"), "no answer in time"), (None, "no answer")]
)
def test_a_lost_node_is_the_failure_only_where_nothing_else_failed(error: MultinodeError | None, reason: str) -> None:
    lost = NodeEvidence(run=NodeRun(name="node1", node_rank=1, state="lost"), error=error, log="step 7\n")
    failure = find(lost, NodeEvidence(run=ended(0)))
    assert (failure.node, failure.message) == ("node1", f"contact was lost and not restored: {reason}")
    assert failure.log_tail == "step 7"
    assert find(lost, NodeEvidence(run=ended(0, exit_code=1))).node == "node0"


def test_a_node_that_could_not_be_reached_at_the_start_is_told_as_ssh_told_it() -> None:
    error = ConnectError("no SSH connection to b port 22: refused", hint="start sshd")
    failure = find(NodeEvidence(run=ended(0, cause="not_started", exit_code=None), error=error))
    assert (failure.message, failure.hint) == (error.message, "start sshd")


def test_a_recorded_exception_without_a_message_is_told_with_its_source() -> None:
    sample = replace(
        raised(0, 10.0, kind="AssertionError", message=""),
        traceback='Traceback (most recent call last):\n  File "/srv/train.py", line 7, in build\n    assert n > 0\n',
    )
    failure = find(NodeEvidence(run=ended(0), exceptions=[sample]))
    assert failure.message == "rank 0 raised AssertionError: assert n > 0 (in build, train.py:7)"
