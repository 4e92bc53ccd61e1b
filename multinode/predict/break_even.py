"""Break-even: the link, the accumulation and the number of nodes that a target needs. Pure.

Searches with `predict`, without a model of its own. Each answer is a range: the best, middle and worst case are
searched separately.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import Scenario
from multinode.predict.network_model import widest
from multinode.predict.predict import Prediction, overlap_of, predict
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import passing_bytes

# No two runs of the same training agree more closely.
_LEAST_DOUBT = 0.02


class Gain(NamedTuple):
    """A ratio of speeds, and its range."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Gain:
        """The gain multiplied by a factor."""
        return Gain(self.value * factor, self.low * factor, self.high * factor)

    def reaches(self, least: float) -> tuple[bool, bool, bool]:
        """Whether it reaches this value: in the best, middle and worst case."""
        return self.high >= least, self.value >= least, self.low >= least


def gain(then: Prediction, now: Prediction, *, doubt: float = 0.0) -> Gain:
    """Samples/s of one prediction over those of another.

    If the back-test has an interval for predictions on several nodes, it applies to the ratio too, as each of its
    residuals is one of several nodes over one. Otherwise both are taken at the same end of their common unknowns (a
    rate, a hidden share), and unknowns of only one of them are added.

    Args:
        then: the numerator.
        now: the denominator.
        doubt: additional relative error of the ratio in either direction: 0.1 is 10%.
    """
    value = then.samples_per_s / now.samples_per_s
    tested = [one for one in (then, now) if one.basis == "back-test"]
    if tested and not any(one.basis == "assumed" and one.scenario.layout.nodes > 1 for one in (then, now)):
        factor = (1 + doubt) * max(one.interval[1] / one.samples_per_s for one in tested)
        return Gain(value, value / factor, value * factor)
    samples = then.scenario.samples / now.scenario.samples
    ratios = [value, *(samples * end.step_ms / start.step_ms for end, start in zip(now.ends, then.ends, strict=True))]
    stretch = (1 + max(doubt, own_error(then), own_error(now))) * _own_doubts(then, now)
    return Gain(value, min(ratios) / stretch, max(ratios) * stretch)


def gain_over_measured(then: Prediction, now: Prediction, measured_samples_per_s: float, *, doubt: float = 0.0) -> Gain:
    """`gain` if `now` was measured: its range is at most the interval of `then` over that measurement."""
    found, (low, high) = gain(then, now, doubt=doubt), then.interval
    low, high = low / measured_samples_per_s / (1 + doubt), high / measured_samples_per_s * (1 + doubt)
    return Gain(found.value, min(found.value, max(found.low, low)), max(found.value, min(found.high, high)))


def own_error(found: Prediction) -> float:
    """Relative error of the whole step that the model always has, whatever is known of the parts."""
    return max((one.relative for one in found.doubts if one.part == "step"), default=_LEAST_DOUBT)


def _own_doubts(then: Prediction, now: Prediction) -> float:
    factors = []
    for part in ("network", "compute"):
        wide, narrow = sorted((then, now), key=lambda one: -widest(one.doubts, part))
        parts = wide.ends[0]
        share = parts.exposed_ms / parts.step_ms if part == "network" else 1 - parts.exposed_ms / parts.step_ms
        factors.append(1 + (widest(wide.doubts, part) / widest(narrow.doubts, part) - 1) * share)
    return math.prod(factors)


SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e4
"""The search range: any link is at least as fast as its lower end."""
_HALVINGS = 40
_MOST_ACCUMULATION = 1 << 16
# Rounding must not decide.
_ROUNDING = 1e-9

Reason = Literal[
    "", "from", "any", "same_workers", "slow_nodes", "overhead", "overlap_off", "hid_nothing", "sent_at_once",
    "uncut", "as_now", "global_batch", "no_accumulation", "micro_batches",
]  # fmt: skip
"""Why an amount is needed, or none is enough."""
Enough = Callable[[Prediction], tuple[bool, bool, bool]]
"""Whether a prediction is enough in the best, middle and worst case."""


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """The least amount that is enough."""

    value: float | None = None  # Gbit/s of a link, or micro-batches per step; None if no amount is enough
    low: float | None = None  # the least amount in the best case; None if none is enough even then
    high: float | None = None  # the least amount in the worst case; None if none is certain
    reason: Reason = ""  # of the value, or of None, as a code of `Reason`
    # the figure of the reason: global batch over the current one, or the share of bytes that remains
    ratio: float | None = None
    strategy: str = ""  # that communicates in every micro-batch, if that is the reason
    why: str = ""  # the reason in words
    always: bool = False  # whether any amount is enough, so that `value` is meaningless


class NodeGain(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one more node."""

    nodes: int  # including it
    samples_per_s: float  # difference to the current rate
    tokens_per_s: float | None  # likewise; None if samples have no known length
    worth: float  # relative to the speed of one such node alone: 1 is a node without loss
    worth_range: tuple[float, float] | None = None  # low, high
    sentence: str = ""  # whether to add it


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a scenario."""

    target: float  # target efficiency
    one_node_workers: int  # workers of the one node in the comparison
    nothing_exposed: Needed  # link rate from which all communication that overlap can hide is hidden
    efficient: Needed  # link rate that reaches the target
    beats_one: Needed  # link rate from which these nodes are faster than one
    # likewise with as many workers each as the one node has; None if they already have
    full_beats_one: Needed | None = None
    accumulation: Needed  # micro-batches that reach the target on the scenario's link
    next_node: NodeGain  # effect of one more node on this link


def break_even(calibration: Calibration, scenario: Scenario, *, target: float = 0.9) -> BreakEven:
    """All requirements of a scenario.

    Args:
        calibration: the measurements.
        scenario: on several nodes.
        target: efficiency between 0 and 1.
    """
    one = predict(calibration, on_one_node(calibration, scenario))
    full = _full(scenario, one)
    return BreakEven(
        target=target,
        one_node_workers=one.scenario.layout.workers,
        nothing_exposed=_all_hidden(calibration, scenario),
        efficient=link_for(calibration, scenario, lambda found: _efficiency(found, one).reaches(_but_rounding(target))),
        beats_one=beats(calibration, scenario, one),
        full_beats_one=None if full == scenario else beats(calibration, full, one),
        accumulation=accumulation_for(calibration, scenario, target=target),
        next_node=node_gain(calibration, scenario),
    )


def on_one_node(calibration: Calibration, scenario: Scenario) -> Scenario:
    """The same on one node with all the workers that it is known to have: the measured one's, or the first node's."""
    measured = calibration.layout
    workers = max(scenario.layout.on(1).workers, measured.workers if measured.nodes == 1 else 1)
    alone = Layout(nodes=1, workers_per_node=workers)
    return msgspec.structs.replace(scenario, layout=alone, averaging=None, low_rank=None)


def efficiency(calibration: Calibration, scenario: Scenario) -> float:
    """Weak-scaling efficiency: samples/s per worker over those per worker on one node."""
    return _efficiency(predict(calibration, scenario), predict(calibration, on_one_node(calibration, scenario))).value


def beats(calibration: Calibration, scenario: Scenario, one: Prediction) -> Needed:
    """The slowest link on which the scenario is faster than one node."""
    needed = link_for(calibration, scenario, lambda found: gain(found, one).reaches(1 + _ROUNDING))
    if needed.value is None and scenario.layout.workers <= one.scenario.layout.workers:
        why = "never: one node has the same workers and no network between them"
        return Needed(reason="same_workers", why=why)
    return needed


def beats_one(calibration: Calibration, scenario: Scenario) -> tuple[Needed, Scenario]:
    """The slowest link on which several nodes are faster than one, with the layout.

    The layout is that of the scenario, or with all nodes full if it has no more workers than the one node.
    """
    one = predict(calibration, on_one_node(calibration, scenario))
    asked = scenario if scenario.layout.workers > one.scenario.layout.workers else _full(scenario, one)
    return beats(calibration, asked, one), asked


def link_for(calibration: Calibration, scenario: Scenario, enough: Enough) -> Needed:
    """The slowest link that is enough, in Gbit/s.

    Args:
        calibration: the measurements.
        scenario: its own link rate is ignored.
        enough: a predicate of a prediction, monotonic in the link rate.
    """

    @functools.cache
    def is_enough(gbit_per_s: float) -> tuple[bool, bool, bool]:
        link = msgspec.structs.replace(scenario.link, gbit_per_s=gbit_per_s)
        return enough(predict(calibration, msgspec.structs.replace(scenario, link=link)))

    low, value, high = (_slowest(lambda rate, end=end: is_enough(rate)[end]) for end in range(3))  # type: ignore[misc]
    found = low, value, high
    if value is not None and value <= SLOWEST_GBIT_PER_S:
        return _needed(found, "any", "at any bandwidth")
    if value is not None:
        return _needed(found, "from", "from this link rate up")
    if enough(_without_network(predict(calibration, scenario)))[1]:
        remains = "the overhead per message or the throughput of the nodes remains"
        return _needed(found, "overhead", f"never, at any bandwidth: {remains}")
    slow = "the nodes' own work and their waits for each other are too slow"
    return _needed(found, "slow_nodes", f"never, at any bandwidth: {slow}")


def _slowest(is_enough: Callable[[float], bool]) -> float | None:
    slow, fast = SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S
    if not is_enough(fast):
        return None
    if is_enough(slow):
        return slow
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if is_enough(middle) else (middle, fast)
    return fast


def _needed(
    found: tuple[float | None, float | None, float | None], reason: Reason, why: str, ratio: float | None = None
) -> Needed:
    low, value, high = found
    if value is None:
        return Needed(low=low, reason=reason, why=why)
    return Needed(
        value=value,
        low=value if low is None else min(low, value),
        high=None if high is None else max(high, value),
        reason=reason,
        ratio=ratio,
        why=why,
        always=value <= SLOWEST_GBIT_PER_S,
    )


def accumulation_for(calibration: Calibration, scenario: Scenario, *, target: float) -> Needed:
    """The fewest micro-batches per step that reach an efficiency."""

    @functools.cache
    def reaches(accumulation: int) -> tuple[bool, bool, bool]:
        asked = msgspec.structs.replace(scenario, accumulation=accumulation)
        one = predict(calibration, on_one_node(calibration, asked))
        return _efficiency(predict(calibration, asked), one).reaches(target)

    low, many, high = (_fewest(lambda count, end=end: reaches(count)[end]) for end in range(3))  # type: ignore[misc]
    if many is None:
        return msgspec.structs.replace(_never_enough(calibration, scenario), low=low)
    if many == scenario.accumulation:
        return _needed((low, many, high), "as_now", "as now")
    ratio = many / scenario.accumulation
    why = f"the global batch {'becomes' if ratio > 1 else 'could be'} {ratio:.3g} times as large"
    return _needed((low, many, high), "global_batch", why, ratio)


def _fewest(is_enough: Callable[[int], bool]) -> int | None:
    few, many = 0, 1
    while not is_enough(many):
        few, many = many, 2 * many
        if many > _MOST_ACCUMULATION:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if is_enough(middle) else (middle, many)
    return many


def node_gain(calibration: Calibration, scenario: Scenario) -> NodeGain:
    """The effect of one more node, at the same batch per worker."""
    layout = scenario.layout
    more = msgspec.structs.replace(scenario, layout=layout.on(layout.nodes + 1))
    # A node that is added has as many workers as the others, or the fullest of them.
    alike = msgspec.structs.replace(scenario, layout=Layout(nodes=1, workers_per_node=layout.workers_per_node))
    now, alone = predict(calibration, scenario).samples_per_s, predict(calibration, alike).samples_per_s
    faster = gain(predict(calibration, more), predict(calibration, scenario))
    gained = (faster.value - 1) * now
    low, worth, high = ((one - 1) * now / alone for one in (faster.low, faster.value, faster.high))
    length = calibration.tokens_per_sample
    told = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return NodeGain(
        nodes=layout.nodes + 1,
        samples_per_s=gained,
        tokens_per_s=gained * length if length is not None else None,
        worth=worth,
        worth_range=(low, high),
        sentence=f"do not add it: {layout.nodes + 1} nodes are no faster than {layout.nodes}"
        if high <= 0
        else f"{'it adds' if low > 0 else 'inconclusive:'} {told} of the speed of one such node alone",
    )


def _full(scenario: Scenario, one: Prediction) -> Scenario:
    """With every node as full as the one; unequal nodes are full as they are."""
    if scenario.layout.unequal:
        return scenario
    layout = Layout(nodes=scenario.layout.nodes, workers_per_node=one.scenario.layout.workers)
    return msgspec.structs.replace(scenario, layout=layout)


def _but_rounding(target: float) -> float:
    return target * (1 - _ROUNDING)


def _efficiency(found: Prediction, one: Prediction) -> Gain:
    return gain(found, one).times(one.scenario.layout.workers / found.scenario.layout.workers)


def _all_hidden(calibration: Calibration, scenario: Scenario) -> Needed:
    if not scenario.overlap:
        return Needed(reason="overlap_off", why="never: overlap is off, so no communication is hidden")
    if overlap_of(calibration, scenario) <= 0:
        known = calibration.costs.overlap is not None and scenario.strategy is calibration.work.strategy
        if known or calibration.work.is_cut(scenario.strategy) or scenario.bucket_bytes is not None:
            cause = "the measured run hid none" if known else "all of it is sent after the last gradient is ready"
            why = f"never: no communication is hidden, because {cause}"
            return Needed(reason="hid_nothing" if known else "sent_at_once", why=why)
        return Needed(
            reason="uncut",
            why=(
                "unknown: the hidden part depends on the unknown gradient buckets (--bucket-mib 25 is torch's "
                "default); the prediction assumes that nothing is hidden, the end of its range that everything "
                "possible is"
            ),
        )
    return link_for(calibration, scenario, _nothing_exposed)


def _without_network(found: Prediction) -> Prediction:
    parts, *ends = (
        msgspec.structs.replace(one, comm_ms=0.0, beyond_ms=0.0, exposed_ms=0.0) for one in (found.parts, *found.ends)
    )
    rate = found.samples_per_s * found.step_time_ms / parts.step_ms
    return msgspec.structs.replace(
        found, parts=parts, ends=(ends[0], ends[1]), step_time_ms=parts.step_ms, samples_per_s=rate
    )


def _nothing_exposed(found: Prediction) -> tuple[bool, bool, bool]:
    slow, fast = found.ends
    unseen_ms = own_error(found) * found.step_time_ms
    return fast.beyond_ms <= unseen_ms, found.parts.beyond_ms <= 0, slow.beyond_ms <= 0


def _never_enough(calibration: Calibration, scenario: Scenario) -> Needed:
    calls = calibration.work.calls_of(scenario.strategy, scenario.layout)
    once = passing_bytes(calls, 1, scenario.layout)
    often = passing_bytes([call for call in calls if call.per_micro_batch], 1, scenario.layout)
    if not often:
        return Needed(reason="no_accumulation", why="no accumulation is enough")
    ratio, strategy = often / once, str(scenario.strategy)
    left = f"accumulation cannot reduce the bytes per sample below {ratio:.0%}"
    why = f"{strategy} communicates in every micro-batch: {left}"
    return Needed(reason="micro_batches", ratio=ratio, strategy=strategy, why=why)
