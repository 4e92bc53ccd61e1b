"""Balance: more samples of each step for the workers of faster nodes (`--balance`), and how they are dealt out. Pure.

The mechanism is the workers' (worker/levers/balance.py); ADR 0041 has its semantics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec

from multinode.errors import UsageError

_FORM = "the id of a run, or NODE=SPEED,... such as node0=1.6,node1=1"


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How fast nodes are."""

    # of a worker of each node, by its name: samples that it gets where one of speed 1 gets one
    speeds: dict[str, float]
    run_id: str | None = None  # that they were measured in; None where they were stated

    @property
    def option(self) -> str:
        """As it is typed, whichever way the speeds were found."""
        return f"--balance {self.words}"

    @property
    def words(self) -> str:
        """In a few words: `node0=1.6,node1=1`."""
        return ",".join(f"{node}={speed:.3g}" for node, speed in self.speeds.items())

    def of_workers(self, nodes: Sequence[str], workers: Sequence[int]) -> tuple[float, ...]:
        """The speed of each rank.

        Raises:
            UsageError: the speed of a node is unknown.
        """
        unknown = next((node for node in nodes if node not in self.speeds), None)
        if unknown is not None:
            source = f"run {self.run_id} did not measure it" if self.run_id is not None else "it names no speed of it"
            raise UsageError(f"{self.option}: {source}", node=unknown, hint="name every node: --balance NODE=SPEED,...")
        return tuple(self.speeds[node] for node, count in zip(nodes, workers, strict=True) for _ in range(count))


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
            raise UsageError(f"--balance {text}: {part.strip()!r} is not NODE=SPEED, each node once", hint=_FORM)
        speeds[node] = speed
    return Balance(speeds=speeds)


def deal_step(samples: int, speeds: Sequence[float], micro_batches: int = 1) -> tuple[int, ...]:
    """Samples of each worker in a step, of whose micro-batches each has so many of all workers."""
    from multinode.worker.levers.balance import deal

    dealt = [0] * len(speeds)
    for _ in range(micro_batches):
        dealt = [before + more for before, more in zip(dealt, deal(samples, speeds, dealt), strict=True)]
    return tuple(dealt)


def balance_environment(balance: Balance, speeds: Sequence[float], accumulation: int) -> dict[str, str]:
    """Variables that tell the workers; `accumulation` micro-batches make a step, as far as that is known."""
    from multinode.worker.levers.balance import VARIABLE

    fields = {"speeds": list(speeds), "accumulation": accumulation, "option": balance.option}
    return {VARIABLE: json.dumps(fields)}
