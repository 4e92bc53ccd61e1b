"""Averaging between nodes every H-th optimizer step (`--sync-every`, `--diloco`): local SGD, DiLoCo. Pure.

The mechanism is `worker/levers/sync.py`; ADR 0033 describes the semantics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.levers.lever import Exclusion, Lever, Need, Workers

SYNC_DTYPES = ("fp16", "bf16")
# Defaults of the outer optimizer (arXiv:2311.08105).
_OUTER_LR, _MOMENTUM = 0.7, 0.9
_MOST_STEPS = 1_000_000


class Averaging(Lever, frozen=True, kw_only=True):
    """What nodes average, and when."""

    title: ClassVar[str] = "averaging between nodes"
    heading: ClassVar[str] = "averaged"
    phrase: ClassVar[str] = "averaging between nodes"
    column: ClassVar[str] = "averaging"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("instrumentation"),
        Need("ddp"),
        Need("no_loss_scaling", "with fp16 loss scaling, a node whose gradients overflow would skip a step alone"),
        Need("optimizer_step", "{found} updates parameters individually, without an optimizer step"),
    )
    excludes: ClassVar[Mapping[str, Exclusion]] = {
        "compression": Exclusion(
            " keeps gradients on their node, where {other} would compress them",
            "use --sync-dtype fp16 for the data between nodes",
        )
    }
    why_no_fewer_nodes: ClassVar[str | None] = "nodes that average train with their own batches"
    idle_alone: ClassVar[str | None] = ": its workers average gradients at every step"

    every: Annotated[int, Meta(ge=1, le=_MOST_STEPS)]  # optimizer steps per round, H
    # `fp16` or `bf16`, in which changes are sent between nodes; None sends the parameters unchanged
    dtype: str | None = None
    outer_lr: float | None = None  # learning rate of DiLoCo's outer optimizer; None is local SGD
    momentum: float = 0.0  # of the outer optimizer (Nesterov)

    @property
    def given(self) -> Mapping[str, str | int]:
        """Its options."""
        if self.outer_lr is None:
            rounds: dict[str, str | int] = {"sync-every": self.every}
        else:
            rounds = {"diloco": f"{self.every}:{self.outer_lr:g}:{self.momentum:g}"}
        return rounds if self.dtype is None else {**rounds, "sync-dtype": self.dtype}

    @property
    def words(self) -> str:
        """In a few words: `every 16 steps (local SGD), in fp16`."""
        kind = "local SGD" if self.outer_lr is None else f"DiLoCo, outer lr {self.outer_lr:g}"
        every = "step" if self.every == 1 else f"{self.every} steps"
        return f"every {every} ({kind})" + (f", in {self.dtype}" if self.dtype else "")

    @property
    def algorithm(self) -> str | None:
        """Nodes train apart between two averages."""
        return f"its nodes average {self.words}"

    def check(self, workers: Workers) -> None:
        """Refuse rounds that cannot be.

        Raises:
            UsageError: one has no step, or too many.
        """
        del workers
        if not 1 <= self.every <= _MOST_STEPS:
            raise UsageError(f"{self.option} cannot be", hint=f"from 1 to {_MOST_STEPS} steps")

    def environment(self, workers: Workers) -> dict[str, str]:
        """Its fields, and the numbers of workers."""
        from multinode.worker.levers.sync import VARIABLE

        fields = msgspec.structs.asdict(self) | {"workers": list(workers.counts), "option": self.option}
        return {VARIABLE: json.dumps(fields)}


def read_averaging(sync_every: int | None, diloco: str | None, sync_dtype: str | None) -> Averaging | None:
    """What `--sync-every`, `--diloco` and `--sync-dtype` ask for; None without them.

    Raises:
        UsageError: they contradict each other, or one is invalid.
    """
    if sync_dtype is not None and sync_dtype not in SYNC_DTYPES:
        raise UsageError(f"--sync-dtype {sync_dtype}: one of {', '.join(SYNC_DTYPES)}")
    if sync_every is None and diloco is None:
        if sync_dtype is not None:
            raise UsageError(
                f"--sync-dtype {sync_dtype} applies to averages every H steps",
                hint=(
                    "add --sync-every H or --diloco H; to send the gradients of every step as fp16, use --grad-compress"
                ),
            )
        return None
    if sync_every is not None and diloco is not None:
        raise UsageError(
            ("--sync-every and --diloco are mutually exclusive"),
            hint="use only one; --diloco H also averages every H steps",
        )
    if diloco is None:
        return Averaging(every=sync_every or 0, dtype=sync_dtype)
    try:
        return _read_diloco(diloco, sync_dtype)
    except ValueError:
        raise UsageError(
            f"--diloco {diloco}: expected H, H:LR or H:LR:MOMENTUM", hint="such as --diloco 64:0.7:0.9"
        ) from None


def _read_diloco(text: str, dtype: str | None) -> Averaging:
    every, *rest = text.split(":")
    outer_lr, momentum = (float(word) for word in (*rest, *map(str, (_OUTER_LR, _MOMENTUM)[len(rest) :])))
    is_valid = math.isfinite(outer_lr) and outer_lr > 0 and 0 <= momentum < 1 and 1 <= int(every) <= _MOST_STEPS
    if not is_valid or not every.isascii():
        raise ValueError(text)
    return Averaging(every=int(every), dtype=dtype, outer_lr=outer_lr, momentum=momentum)
