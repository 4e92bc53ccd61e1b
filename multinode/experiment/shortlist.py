"""Shortlist: the changes ranked by `advise` that are worth a short run. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from multinode.experiment.grid import GridRecord
from multinode.experiment.grid_plan import Turn
from multinode.experiment.grid_state import due_turns
from multinode.job.job_files import Change
from multinode.predict.advice import RankedOption, pays
from multinode.records.averaging import Averaging

# Only settings: no purchase, no other model, no other nodes.
_KINDS = frozenset(
    {"gradients", "averaging", "outer", "accumulation", "overlap", "buckets", "batch", "strategy", "pair"}
)
# One round is warm-up, and two are measured.
_ROUNDS = 3
_FEWEST_STEPS = 8
# PowerSGD does not compress the first ten iterations, and at most a third of a run is warm-up.
_LOW_RANK_STEPS = 32

Reason = Literal["memory", "little", "short", "slower", "more"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A change to try."""

    label: str  # its name in run names; `baseline` and `one-node` are the unchanged training, and that on one node
    name: str  # for people
    kind: str = ""  # as in Advice
    change: Change = Change()  # how `launch` makes it
    nodes: int  # that it trains on; `workers_per_node` on each of them, None where they have unequal numbers
    workers_per_node: int | None
    # None where nothing was predicted; likewise its interval, and the speed over that of one node alone
    predicted_samples_per_s: float | None = None
    predicted_interval: tuple[float, float] | None = None
    against_one_node: float | None = None
    against_one_node_interval: tuple[float, float] | None = None
    expected_s: float | None = None  # wall time of one run with all that goes around it; None where nothing is known
    meaning: str = ""  # what else it changes, as Advice has it


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is not tried."""

    name: str
    # `memory`: it does not fit the GPUs; `little`: it gains too little; `short`: it needs more steps than a run has;
    # `slower`: certainly slower than one node; `more`: others are predicted to be better
    reason: Reason
    needs_steps: int | None = None  # of a run, for `short`


class Shortlist(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates, best first, and the changes left out."""

    chosen: tuple[RankedOption, ...]
    left_out: tuple[LeftOut, ...]


def make_shortlist(ranked: Sequence[RankedOption], *, steps: int, most: int) -> Shortlist:
    """The best change of each kind, then the second best of each, until there are enough.

    Args:
        ranked: as from `rank_options`, best first.
        steps: optimizer steps of the unchanged training; changes train on the same number of samples.
        most: maximum number of candidates.
    """
    able: dict[str, list[RankedOption]] = {}
    left_out: list[LeftOut] = []
    for one in ranked:
        if one.option.kind not in _KINDS or one.advice.change is None:
            continue
        reason, needed = _why_not(one, steps), steps_needed(one)
        if reason is None:
            able.setdefault(one.option.kind, []).append(one)
        else:
            left_out.append(
                LeftOut(name=one.advice.name, reason=reason, needs_steps=needed if reason == "short" else None)
            )
    in_turn = list(_in_turn(able))
    chosen = sorted(in_turn[:most], key=lambda one: -one.advice.gain)
    left_out += (LeftOut(name=one.advice.name, reason="more") for one in in_turn[most:])
    return Shortlist(chosen=tuple(chosen), left_out=tuple(left_out))


def steps_needed(one: RankedOption) -> int:
    """Steps that a run of the unchanged training needs for this change to have its effect."""
    before, after = one.option.before.scenario, one.option.after.scenario
    averaging: Averaging | None = after.averaging
    least = _ROUNDS * averaging.every if averaging is not None else _FEWEST_STEPS
    if (one.option.after.settings.grad_compress or "").startswith("powersgd"):
        least = _LOW_RANK_STEPS
    return math.ceil(least * after.samples / before.samples)


def candidate_of(one: RankedOption, label: str) -> Candidate:
    """A ranked change as a candidate."""
    advice = one.advice
    return Candidate(
        label=label,
        name=advice.name,
        kind=one.option.kind,
        change=advice.change or Change(),
        nodes=advice.outlook.nodes,
        workers_per_node=None if advice.outlook.unequal else advice.outlook.workers_per_node,
        predicted_samples_per_s=advice.outlook.samples_per_s,
        predicted_interval=advice.outlook.interval,
        against_one_node=advice.against_one_node,
        against_one_node_interval=advice.against_one_node_interval,
        meaning=advice.meaning,
    )


def _why_not(one: RankedOption, steps: int) -> Reason | None:
    beside = one.advice.against_one_node_interval
    if one.advice.fits is False:
        return "memory"
    if not pays(one.advice):
        return "little"
    if beside is not None and beside[1] < 1:
        return "slower"
    return "short" if steps_needed(one) > steps else None


def _in_turn(able: dict[str, list[RankedOption]]) -> Iterator[RankedOption]:
    for row in itertools.zip_longest(*able.values()):
        yield from sorted((one for one in row if one is not None), key=lambda one: -one.advice.gain)


def spent_s(record: GridRecord) -> float:
    """Wall time of all finished runs."""
    return math.fsum(took for cell in record.cells for took in cell.took_s)


def time_needed_s(record: GridRecord, turns: Sequence[Turn], expected_s: Sequence[float | None]) -> float:
    """Estimated time of these runs: as earlier runs of the same cell, otherwise as expected; 0 if unknown.

    Args:
        record: the grid.
        turns: runs of it.
        expected_s: of a run of each cell.
    """
    took = [cell.took_s for cell in record.cells]
    one_s = [statistics.fmean(done) if done else expected for done, expected in zip(took, expected_s, strict=True)]
    return math.fsum(one_s[turn.cell] or 0.0 for turn in turns)


def fits(record: GridRecord, turn: Turn, expected_s: Sequence[float | None], budget_s: float) -> bool:
    """Whether a run fits the budget with all that come before it: earlier rounds, and better cells of its own.

    The last round may thus lack the candidates predicted worst, but never those that all are compared with.
    """
    before = [one for one in due_turns(record) if (one.number, one.cell) <= (turn.number, turn.cell)]
    return spent_s(record) + time_needed_s(record, before, expected_s) <= budget_s
