"""Lever: what all levers have in common. `job/restrictions.py` refuses by what a lever needs.

A lever has a file of its own here, a field in `levers.py`, its mechanism in `worker/levers`, and its step in
`predict/cost_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import msgspec

Quality = Literal["instrumentation", "ddp", "no_loss_scaling", "optimizer_step", "map_dataset", "mean_loss"]
"""What a job has or lacks: workers that are instrumented; gradients that DDP sends; gradients in whose scaling no step
is skipped; an optimizer that makes steps; a data set with an index; a loss that is a mean over samples or tokens."""


class Need(NamedTuple):
    """A quality that a job must have for a lever to work."""

    quality: Quality
    why: str = ""  # why, for the message; `{found}` is the job's setting
    hint: str = ""  # comes before the general one


class Exclusion(NamedTuple):
    """Why a lever cannot be combined with another."""

    why: str  # follows the lever's option; `{other}` is that of the other
    hint: str | None = None


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that a lever is for."""

    nodes: tuple[str, ...] = ()  # names, in node-rank order
    counts: tuple[int, ...] = ()  # workers of each
    batch: int | None = None  # samples of a worker's micro-batch; None is unknown, as is `accumulation`
    accumulation: int | None = None  # micro-batches per step


class Lever(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the training itself.

    Attributes:
        title: what it is, for a list of settings; `heading` and `phrase` are those of a table's column.
        column: name of that column.
        needs: of the job.
        excludes: levers that it cannot be combined with, by field of Levers.
        why_no_fewer_nodes: why a run cannot go on with fewer nodes; None if it can.
        idle_alone: why it has no effect on one node, to follow these words; None if it has one.
    """

    title: ClassVar[str] = ""
    heading: ClassVar[str] = ""
    phrase: ClassVar[str] = ""
    column: ClassVar[str] = ""
    needs: ClassVar[tuple[Need, ...]] = ()
    excludes: ClassVar[Mapping[str, Exclusion]] = {}
    why_no_fewer_nodes: ClassVar[str | None] = None
    idle_alone: ClassVar[str | None] = None

    @property
    def given(self) -> Mapping[str, str | int]:
        """Its options of `launch`, by name without dashes; the first one names it."""
        return {}

    @property
    def option(self) -> str:
        """The first option, as typed."""
        return next((f"--{name} {value}" for name, value in self.given.items()), "")

    @property
    def words(self) -> str:
        """In a few words, for tables."""
        return ""

    @property
    def algorithm(self) -> str | None:
        """What the workers do in place of averaging all gradients in each step; None if they average them."""
        return None

    def check(self, workers: Workers) -> None:
        """Refuse workers that it cannot work with.

        Raises:
            UsageError: it cannot.
        """

    def environment(self, workers: Workers) -> dict[str, str]:
        """Variables of each worker."""
        del workers
        return {}
