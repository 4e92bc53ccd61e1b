"""Balance: more samples of each step for the workers of faster nodes (`--balance`), and how they are dealt out. Pure.

The mechanism is the workers' (worker/levers/balance.py); ADR 0041 has its semantics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from multinode.errors import UsageError
from multinode.levers.lever import Exclusion, Lever, Need, Workers

_FORM = "use the id of a run, or NODE=SPEED,... such as node0=1.6,node1=1"


class Balance(Lever, frozen=True, kw_only=True):
    """The speeds of nodes."""

    title: ClassVar[str] = "distribution of samples by node speed"
    heading: ClassVar[str] = "samples by speed"
    phrase: ClassVar[str] = "speeds according to which samples are distributed"
    column: ClassVar[str] = "balance"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("instrumentation"),
        Need("ddp", ", which may communicate in every micro-batch"),
        Need("map_dataset", "{found} reads an IterableDataset, whose samples cannot be distributed by index"),
        Need("mean_loss", "{found} has its own loss, and it is unknown whether that is a mean over samples"),
    )
    excludes: ClassVar[Mapping[str, Exclusion]] = {
        "averaging": Exclusion(": with {other}, nodes do not wait for each other in every step")
    }
    idle_alone: ClassVar[str | None] = ""

    # of a worker of each node, by its name: samples that it gets where one of speed 1 gets one
    speeds: dict[str, float]
    run_id: str | None = None  # that they were measured in; None where they were stated

    @property
    def given(self) -> Mapping[str, str | int]:
        """Its option, whichever way the speeds were found."""
        return {"balance": self.words}

    @property
    def words(self) -> str:
        """In a few words: `node0=1.6,node1=1`."""
        return ",".join(f"{node}={speed:.3g}" for node, speed in self.speeds.items())

    def of_workers(self, workers: Workers) -> tuple[float, ...]:
        """The speed of each rank.

        Raises:
            UsageError: the speed of a node is unknown.
        """
        unknown = next((node for node in workers.nodes if node not in self.speeds), None)
        if unknown is not None:
            source = f" (measured in run {self.run_id})" if self.run_id is not None else ""
            raise UsageError(
                f"{self.option}{source} has no speed for this node",
                node=unknown,
                hint="name every node: --balance NODE=SPEED,...",
            )
        counts = zip(workers.nodes, workers.counts, strict=True)
        return tuple(self.speeds[node] for node, count in counts for _ in range(count))

    def shares(self, workers: Workers) -> tuple[int, ...] | None:
        """Samples of each rank in a step; None where the batch is unknown."""
        speeds = self.of_workers(workers)
        if not workers.batch or not workers.accumulation:
            return None
        return deal_step(workers.batch * len(speeds), speeds, workers.accumulation)

    def check(self, workers: Workers) -> None:
        """Refuse a node whose speed is unknown, and micro-batches that are too small to be dealt out otherwise.

        Raises:
            UsageError: one is.
        """
        shares = self.shares(workers)
        if shares is not None and len(set(shares)) == 1:
            raise UsageError(
                f"{self.option}: micro-batches of {workers.batch} cannot be split further: each worker gets the same "
                f"number of samples",
                hint="use larger micro-batches and fewer accumulation steps",
            )

    def environment(self, workers: Workers) -> dict[str, str]:
        """The speed of each rank, and the micro-batches of a step as far as they are known."""
        from multinode.worker.levers.balance import VARIABLE

        fields = {
            "speeds": list(self.of_workers(workers)),
            "accumulation": workers.accumulation or 1,
            "option": self.option,
        }
        return {VARIABLE: json.dumps(fields)}


def parse_balance(text: str) -> Balance:
    """`NODE=SPEED,...` as speeds.

    Raises:
        UsageError: it is something else, or a speed is not above zero.
    """
    speeds: dict[str, float] = {}
    for part in text.split(","):
        node, _, written = part.strip().rpartition("=")
        try:
            speed = float(written)
        except ValueError:
            speed = math.nan
        if not node or node in speeds or not (math.isfinite(speed) and speed > 0):
            raise UsageError(
                f"--balance {text}: {part.strip()!r} is not NODE=SPEED (speed above 0, each node once)", hint=_FORM
            )
        speeds[node] = speed
    return Balance(speeds=speeds)


def deal_step(samples: int, speeds: Sequence[float], micro_batches: int = 1) -> tuple[int, ...]:
    """Samples of each worker in a step, of whose micro-batches each has so many of all workers."""
    from multinode.worker.levers.balance import deal

    dealt = [0] * len(speeds)
    for _ in range(micro_batches):
        dealt = [before + more for before, more in zip(dealt, deal(samples, speeds, dealt), strict=True)]
    return tuple(dealt)
