from __future__ import annotations

import pytest

from multinode.errors import ContactLost
from multinode.launch.hang_watch import StallClock
from multinode.launch.session import Chunk, Ended, Event, Hello, Message, Status

RUNS = Status(state="running")


def clock(*said: tuple[float, int, Message]) -> StallClock:
    """A clock of two nodes that heard these: when, which node, what."""
    found = StallClock(2)
    for now, node_rank, message in said:
        found.take(Event(node_rank=node_rank, message=message), now)
    return found


def chunk(name: str) -> Chunk:
    return Chunk(file=name, offset=0, data=b"x")


def test_it_begins_when_the_job_runs_on_every_node() -> None:
    assert clock((0, 0, RUNS)).silent_s(100) == 0
    assert clock((0, 0, RUNS), (5, 1, RUNS)).silent_s(100) == 95


def test_it_begins_with_the_first_log_where_that_is_earlier() -> None:
    assert clock((0, 0, RUNS), (10, 0, chunk("log"))).silent_s(100) == 90


@pytest.mark.parametrize("name", ["log", "samples/rank-3.jsonl"])
def test_any_nodes_log_or_step_starts_it_anew(name: str) -> None:
    assert clock((0, 0, RUNS), (0, 1, RUNS), (40, 1, chunk(name))).silent_s(100) == 60


@pytest.mark.parametrize("name", ["samples/node.jsonl", "samples/gpu.jsonl"])
def test_what_the_sampler_writes_is_no_progress(name: str) -> None:
    assert clock((0, 0, RUNS), (0, 1, RUNS), (40, 1, chunk(name))).silent_s(100) == 100


def test_a_status_is_no_progress() -> None:
    assert clock((0, 0, RUNS), (0, 1, RUNS), (40, 1, Ended(state="ended"))).silent_s(100) == 100


def test_it_stands_while_a_node_is_out_of_contact_and_begins_anew_after_that() -> None:
    found = clock((0, 0, RUNS), (0, 1, RUNS))
    found.take(Event(node_rank=1, error=ContactLost("gone")), 30)
    assert found.silent_s(100) == 0
    found.take(Event(node_rank=1, message=Hello(time_s=0)), 100)
    assert found.silent_s(130) == 30
