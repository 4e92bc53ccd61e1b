"""Copies of shards while an attempt runs: what is said of them, and what is copied."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec.structs import replace

from multinode.errors import ConnectError, NodeFailed
from multinode.launch.checkpoints import Checkpoint, CheckpointCopy
from multinode.launch.shard_copies import Over, Seen, ShardCopies, announce
from tests.launch.test_checkpoint import NODES, ZERO2, views, with_copies

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("copies", "about", "text"),
    [
        (
            1,
            {"trained": 8_000_000_000, "largest_part": 0.5, "link_gbit_per_s": 10.0},
            (
                "after each save, a node copies its shards to the next node: 44.7 GiB, about 2 min 33 s at 25% of "
                "10 Gbit/s"
            ),
        ),
        (
            2,
            {"trained": 8_000_000_000, "largest_part": 0.25, "link_gbit_per_s": None},
            "after each save, a node copies its shards to the next 2 nodes: 44.7 GiB; the speed of its link is unknown",
        ),
        (
            1,
            {"trained": None, "largest_part": 0.5, "link_gbit_per_s": 10.0},
            "after each save, a node copies its shards to the next node; their size is unknown before the first save",
        ),
        (
            0,
            {"trained": 1, "largest_part": 0.5, "link_gbit_per_s": 10.0},
            "--shard-copies 0: each shard is on one node only, so losing a node's disk loses every checkpoint",
        ),
    ],
)
def test_what_copies_cost_is_said_before_the_start(copies: int, about: dict[str, Any], text: str) -> None:
    assert announce(copies, **about) == text


class Disks:
    """Two nodes that save checkpoints of ZeRO-2, and whatever a test lets go wrong."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Checkpoint]] = {}  # by checkpoint and node
        self.made: list[tuple[str, str, str]] = []
        self.said: list[str] = []
        self.errors: list[Exception] = []
        self.looked = threading.Semaphore(0)
        self.copies = ShardCopies(
            self.look, self.copy, ranks=NODES, layout=ZERO2, copies=1, say=self.said.append, look_s=0.01
        )

    def save(self, step: int) -> None:
        name = f"checkpoint-{step}"
        self.seen[name] = {node: replace(view, name=name, step=step) for node, view in views(ZERO2).items()}

    def look(self) -> Seen:
        self.looked.release()
        if self.errors and isinstance(self.errors[0], ConnectError):
            raise self.errors[0]
        return {node: tuple(saved[node] for saved in self.seen.values()) for node in NODES}

    def copy(self, checkpoint: str, copied: CheckpointCopy, _: threading.Event) -> None:
        if self.errors:
            raise self.errors[0]
        self.made.append((checkpoint, copied.source, copied.target))
        self.seen[checkpoint] = with_copies(self.seen[checkpoint], (copied,))

    def wait_looks(self, count: int) -> None:
        for _ in range(count):
            assert self.looked.acquire(timeout=DEADLINE_S)


def test_the_newest_checkpoint_is_copied_once() -> None:
    disks = Disks()
    disks.save(20)
    with disks.copies.running():
        disks.wait_looks(3)
        disks.save(40)
        disks.wait_looks(3)
    pairs = [("a", "b"), ("b", "a")]
    assert disks.made == [(f"checkpoint-{step}", *pair) for step in (20, 40) for pair in pairs]
    # The first one tells what it took.
    (line,) = disks.said
    assert line.startswith("checkpoint-20 would survive the loss of a disk: ")


def test_a_copy_that_fails_is_told_once_and_tried_again() -> None:
    disks = Disks()
    disks.save(20)
    disks.errors = [NodeFailed("48 GB would be written, and 1 GB are free there", node="b")]
    with disks.copies.running():
        disks.wait_looks(5)
        assert disks.said == ["shards were not copied: b: 48 GB would be written, and 1 GB are free there"]
        disks.errors = []
        disks.wait_looks(3)
    assert len(disks.made) == 2


def test_a_node_that_is_gone_is_told_by_the_attempt() -> None:
    disks = Disks()
    disks.save(20)
    disks.errors = [ConnectError("no SSH connection", node="b")]
    with disks.copies.running():
        disks.wait_looks(5)
    assert (disks.said, disks.made) == ([], [])


def test_the_end_of_an_attempt_ends_the_copy_that_is_under_way() -> None:
    began = threading.Event()
    ended = threading.Event()

    def copy(_checkpoint: str, _copied: CheckpointCopy, over: threading.Event) -> None:
        began.set()
        assert over.wait(DEADLINE_S)
        ended.set()
        raise Over

    disks = Disks()
    disks.save(20)
    copies = ShardCopies(disks.look, copy, ranks=NODES, layout=ZERO2, copies=1, say=disks.said.append, look_s=0.01)
    with copies.running():
        assert began.wait(DEADLINE_S)
    assert ended.is_set()
    assert disks.said == []
