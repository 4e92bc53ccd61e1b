"""ShardCopies: while an attempt runs, each node's shards are copied to the next nodes after every save."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from multinode.errors import MultinodeError, NodeError
from multinode.launch.checkpoints import Checkpoint, CheckpointCopy, Layout, spread, views_of
from multinode.units import format_duration, format_size

SHARE = 0.25
"""The part of the time in which a node sends copies of its shards while it trains."""

_LOOK_S = 5.0
# How many times as long once a checkpoint is safe: each look starts an interpreter on each node.
_LATER = 3
# Adam's two states and the parameters themselves, which DeepSpeed keeps in fp32 (multinode/model/training.py).
_BYTES_PER_TRAINED = 12
_GBIT_BYTES = 1e9 / 8
# A copy looks twice a second whether it is to end; its agents then end with their stdin.
_END_S = 15.0

Seen = Mapping[str, tuple[Checkpoint, ...]]


def announce(
    copies: int, *, trained: int | None, largest_part: float, link_gbit_per_s: float | None, share: float = SHARE
) -> str:
    """What copying shards will cost, or that nothing is copied.

    Args:
        copies: how many nodes get a copy.
        trained: number of trained parameters; None if unknown.
        largest_part: of all workers, those of the node that has most, from 0 to 1.
        link_gbit_per_s: speed of the slowest link; None if unknown.
        share: of the time in which a node sends.
    """
    if not copies:
        return "--shard-copies 0: each shard is on one node only, so losing a node's disk loses every checkpoint"
    nodes = "the next node" if copies == 1 else f"the next {copies} nodes"
    if trained is None:
        return f"after each save, a node copies its shards to {nodes}; their size is unknown before the first save"
    size_bytes = round(_BYTES_PER_TRAINED * trained * largest_part) * copies
    text = f"after each save, a node copies its shards to {nodes}: {format_size(size_bytes)}"
    if link_gbit_per_s is None:
        return f"{text}; the speed of its link is unknown"
    took_s = size_bytes / (link_gbit_per_s * _GBIT_BYTES * share)
    return f"{text}, about {format_duration(took_s)} at {share:.0%} of {link_gbit_per_s:g} Gbit/s"


class Over(Exception):
    """The attempt is over, and so is the copy that is under way."""


class ShardCopies:
    """Looks for saved checkpoints, and has their shards copied.

    Args:
        look: lists the checkpoints of every node.
        copy: makes one copy; raises `Over` if `over` is set meanwhile.
        ranks: the workers of each node, in the order of the nodes.
        layout: what a checkpoint consists of.
        copies: how many nodes get a copy.
        say: is told of the first checkpoint that is safe, and of copies that fail.
        look_s: time between two looks, until the first checkpoint is safe.
    """

    def __init__(  # noqa: PLR0913 - what is copied, how, and who is told
        self,
        look: Callable[[], Seen],
        copy: Callable[[str, CheckpointCopy, threading.Event], None],
        *,
        ranks: Mapping[str, tuple[int, ...]],
        layout: Layout,
        copies: int,
        say: Callable[[str], None],
        look_s: float = _LOOK_S,
    ) -> None:
        self._look = look
        self._copy = copy
        self._ranks = ranks
        self._layout = layout
        self._copies = copies
        self._say = say
        self._look_s = look_s
        self._over = threading.Event()
        self._copying = threading.Lock()
        self._has_said_safe = False
        self._failed: set[str] = set()  # texts that have been said

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In a thread, which copies nothing after the block."""
        threading.Thread(target=self._run, name="shard-copies", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()
            # A node that is lost may be asked for a minute still: that harms nobody, and is not waited for.
            self._copying.acquire(timeout=_END_S)

    def _run(self) -> None:
        while not self._over.wait(self._look_s * (_LATER if self._has_said_safe else 1)):
            try:
                seen = self._look()
                with self._copying:
                    if self._over.is_set():
                        return
                    self.copy_newest(seen)
            except Over:
                return
            except MultinodeError as error:
                # The attempt itself tells of a node that is gone.
                if not isinstance(error, NodeError):
                    self._say_once(f"shards were not copied: {error}")

    def copy_newest(self, seen: Seen) -> None:
        """Copy what the newest checkpoint needs to be safe.

        Raises:
            Over: the attempt has ended.
            MultinodeError: a copy failed.
        """
        numbers = {one.name: one.number for checkpoints in seen.values() for one in checkpoints}
        if not numbers:
            return
        newest = max(numbers, key=lambda name: numbers[name])
        wanted = spread(views_of(newest, seen, self._ranks), self._ranks, self._layout, self._copies)
        began = time.monotonic()
        for copied in wanted:
            self._copy(newest, copied, self._over)
        if wanted and not self._has_said_safe:
            self._has_said_safe = True
            self._say(_safe(newest, wanted, time.monotonic() - began))

    def _say_once(self, text: str) -> None:
        if text not in self._failed:
            self._failed.add(text)
            self._say(text)


def _safe(name: str, copies: Sequence[CheckpointCopy], took_s: float) -> str:
    size = format_size(sum(copied.size_bytes for copied in copies))
    return f"{name} would survive the loss of a disk: {size} copied between nodes in {format_duration(took_s)}"
