"""A node that was lost: when it comes before what its peers raised, and when it does not."""

from __future__ import annotations

import itertools

import pytest

from multinode.core.run.run import Failure, NodeRun
from multinode.errors import ContactLost
from multinode.launch.failure import Evidence, first_failure

from .test_failure import GLOO, NCCL, ended, raised

VANISHED_S = 5.0
LOST = Evidence(
    run=NodeRun(name="node1", node_rank=1, state="lost", lost_s=VANISHED_S),
    error=ContactLost("no answer in time"),
    log="step 7\n",
)


def find(*nodes: Evidence) -> Failure:
    """The failure, which must not depend on the order in which the nodes are listed."""
    found = {first_failure(order) for order in itertools.permutations(nodes)}
    assert len(found) == 1
    (failure,) = found
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("survivor", "consequence"),
    [
        (Evidence(run=ended(0, exit_code=1), exceptions=[GLOO]), "rank 0 raised RuntimeError: [../gloo"),
        (Evidence(run=ended(0, exit_code=1), exceptions=[NCCL]), "rank 0 raised DistBackendError: NCCL error"),
        (
            Evidence(run=ended(0, exit_code=1, ended_s=9.0), log="Watchdog caught collective operation timeout"),
            "the job ended with exit code 1",
        ),
        (
            Evidence(run=ended(0, exit_code=None, signal="SIGABRT", ended_s=9.0), log="ProcessGroupNCCL\nAborted"),
            "the job was ended by SIGABRT",
        ),
        (Evidence(run=ended(0, exit_code=1)), "the job ended with exit code 1"),
        # By a clock that is a minute slow, and of a moment before the last word as far as clocks can tell.
        (
            Evidence(run=ended(0, exit_code=1), exceptions=[raised(0, -56.0, message="gloo")], clock_offset_s=-60.5),
            "rank 0 raised ValueError: gloo",
        ),
    ],
)
def test_what_peers_of_a_lost_node_raise_is_a_consequence(survivor: Evidence, consequence: str) -> None:
    failure = find(survivor, LOST)
    assert (failure.node, failure.kind, failure.time_s) == ("node1", "node_lost", VANISHED_S)
    assert failure.message == "contact was lost and not regained: no answer in time"
    assert len(failure.consequences) == 1
    assert failure.consequences[0].startswith(f"node0: {consequence}")


@pytest.mark.parametrize(
    "other",
    [
        Evidence(run=ended(0, exit_code=1), exceptions=[raised(0, 9.0)]),
        Evidence(run=ended(0, exit_code=1), exceptions=[raised(0, 9.0), raised(1, 9.5, message="gloo")]),
        Evidence(run=ended(0, exit_code=1), exceptions=[raised(0, 2.0, "RuntimeError", "gloo: Connection reset")]),
        Evidence(run=ended(0, exit_code=None, signal="SIGKILL", ended_s=9.0)),
        Evidence(run=ended(0, exit_code=None, signal="SIGABRT", ended_s=9.0), log="free(): invalid pointer"),
        Evidence(run=ended(0, exit_code=1, ended_s=9.0), log="OSError: No space left on device"),
        Evidence(run=ended(0, cause="not_started", exit_code=None)),
    ],
    ids=["exception", "exception-first", "before", "killed", "crashed", "disk", "not-started"],
)
def test_what_has_a_cause_of_its_own_or_came_before_is_no_consequence(other: Evidence) -> None:
    failure = find(other, LOST)
    assert (failure.node, failure.consequences) == ("node0", ())


def test_of_several_lost_nodes_the_first_to_fall_silent_is_told() -> None:
    later = Evidence(run=NodeRun(name="node2", node_rank=2, state="lost", lost_s=8.0))
    unheard = Evidence(run=NodeRun(name="node3", node_rank=3, state="lost"))
    assert find(later, unheard, LOST).node == "node1"
