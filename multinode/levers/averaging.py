"""Averaging between nodes every H-th optimizer step (`--average`): local SGD, DiLoCo. Pure.

The mechanism is `worker/levers/sync.py`; ADR 0033 describes the semantics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.levers.lever import Exclusion, Lever, Need, Workers

# Defaults of the outer optimizer (arXiv:2311.08105).
_OUTER_LR, _MOMENTUM = 0.7, 0.9
_MOST_STEPS = 1_000_000
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,2})?"
_FORM = re.compile(
    rf"(?:local:(?P<local>\d{{1,9}})|diloco:(?P<diloco>\d{{1,9}})(?::(?P<lr>{_NUMBER})(?::(?P<momentum>{_NUMBER}))?)?)"
    r"(?::(?P<dtype>fp16|bf16))?",
    re.ASCII,
)
ROUNDS = 3
"""Rounds that a run needs: one is warm-up, and two are measured."""
# Over 6 rounds an outer optimizer is behind local SGD, over 15 ahead of it (benchmarks/averaging-long.json).
_OUTER_ROUNDS = 15
_EXPECTED = "expected local:H[:DTYPE] or diloco:H[:LR[:MOMENTUM]][:DTYPE]"
_EXAMPLES = "for example local:16:fp16 or diloco:64:0.7:0.9; DTYPE is fp16 or bf16"


class Averaging(Lever, frozen=True, kw_only=True):
    """What nodes average, and when."""

    title: ClassVar[str] = "averaging between nodes"
    heading: ClassVar[str] = "averaged"
    phrase: ClassVar[str] = "averaging between nodes"
    column: ClassVar[str] = "averaging"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("instrumentation"),
        Need("ddp"),
        Need("no_loss_scaling", "with fp16 loss scaling, a node whose gradients overflow would skip a step on its own"),
        Need("optimizer_step", "{found} updates parameters individually, without an optimizer step"),
    )
    excludes: ClassVar[Mapping[str, Exclusion]] = {
        "compression": Exclusion(
            " sends no gradients between nodes, so {other} has nothing to compress",
            "use --average local:H:fp16 for the data between nodes",
        )
    }
    why_no_fewer_nodes: ClassVar[str | None] = "with --average, each node trains on its own batches"
    idle_alone: ClassVar[str | None] = ": its workers average gradients at every step"

    every: Annotated[int, Meta(ge=1, le=_MOST_STEPS)]  # optimizer steps per round, H
    # `fp16` or `bf16`, in which changes are sent between nodes; None sends the parameters unchanged
    dtype: str | None = None
    outer_lr: float | None = None  # learning rate of DiLoCo's outer optimizer; None is local SGD
    momentum: float = 0.0  # of the outer optimizer (Nesterov)

    @property
    def given(self) -> Mapping[str, str | int]:
        """Its option."""
        kind = "local" if self.outer_lr is None else "diloco"
        outer = [f"{self.outer_lr:.10g}", f"{self.momentum:.10g}"] if self.outer_lr is not None else []
        return {"average": ":".join([kind, str(self.every), *outer, *([self.dtype] if self.dtype else [])])}

    @property
    def words(self) -> str:
        """In a few words: `every 16 steps (local SGD), in fp16`."""
        kind = "local SGD" if self.outer_lr is None else f"DiLoCo, outer lr {self.outer_lr:g}"
        every = "step" if self.every == 1 else f"{self.every} steps"
        return f"every {every} ({kind})" + (f", in {self.dtype}" if self.dtype else "")

    @property
    def judged_steps(self) -> int:
        """Steps after which a loss shows its effect, of an outer optimizer also the time constant of its momentum."""
        return self.every * max(ROUNDS if self.outer_lr is None else _OUTER_ROUNDS, round(1 / (1 - self.momentum)))

    @property
    def algorithm(self) -> str | None:
        """Nodes train apart between two averages."""
        return f"its nodes average {self.words}"

    def check(self, workers: Workers) -> None:
        """Refuse rounds and outer optimizers that cannot be.

        Raises:
            UsageError: a round has no step or too many, or the outer optimizer does not converge.
        """
        del workers
        if not 1 <= self.every <= _MOST_STEPS:
            raise UsageError(f"{self.option}: a round has 1 to {_MOST_STEPS:,} steps", hint=_EXAMPLES)
        if self.outer_lr is not None and not (0 < self.outer_lr < math.inf and 0 <= self.momentum < 1):
            raise UsageError(f"{self.option}: LR must be above 0, MOMENTUM at least 0 and below 1", hint=_EXAMPLES)

    def environment(self, workers: Workers) -> dict[str, str]:
        """Its fields, and the numbers of workers."""
        from multinode.worker.levers.averaging import VARIABLE

        fields = msgspec.structs.asdict(self) | {"workers": list(workers.counts), "option": self.option}
        return {VARIABLE: json.dumps(fields)}


def parse_average(text: str) -> Averaging:
    """What `--average` asks for.

    Raises:
        UsageError: it is not of the form, or out of range.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"--average {text}: {_EXPECTED}", hint=_EXAMPLES)
    is_outer = found["diloco"] is not None
    averaging = Averaging(
        every=int(found["diloco"] or found["local"]),
        dtype=found["dtype"],
        outer_lr=float(found["lr"] or _OUTER_LR) if is_outer else None,
        momentum=float(found["momentum"] or _MOMENTUM) if is_outer else 0.0,
    )
    averaging.check(Workers())
    return averaging
