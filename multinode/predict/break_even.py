"""Speed-ups with their intervals (`gain`), and break-even: the link, accumulation and nodes for a target. Pure.

Searches with `Prediction`, without a model of its own. Each answer is a range: the middle is that of the prediction,
the ends are those of the draws.
"""

from __future__ import annotations

import bisect
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import Scenario
from multinode.predict.draws import HIGH, LOW, MIDDLE, interval, quantile
from multinode.predict.prediction import Prediction
from multinode.stats.estimate import Estimate
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import passing_bytes
from multinode.units import format_figure


def gain(then: Prediction, now: Prediction, *, measured: float | None = None, doubt: float = 0.0) -> Estimate:
    """Samples/s of one prediction over those of another, in each draw.

    If the back-test has an interval for predictions on several nodes, it applies to the ratio too, as each of its
    residuals is one of several nodes over one.

    Args:
        then: the numerator.
        now: the denominator.
        measured: samples/s of `now`, if measured: the range is at most the interval of `then` over it.
        doubt: additional relative error of the ratio in either direction: 0.1 is 10%.
    """
    value = then.samples_per_s / now.samples_per_s
    tested = [prediction.error for prediction in (then, now) if prediction.basis == "back-test"]
    if tested and not any(
        prediction.basis == "assumed" and prediction.scenario.layout.nodes > 1 for prediction in (then, now)
    ):
        factor = (1 + doubt) * (1 + max(tested))
        low, high = value / factor, value * factor
    else:
        samples = then.scenario.samples / now.scenario.samples
        drawn = [samples * old.step_ms / new.step_ms for old, new in zip(now.draws, then.draws, strict=True)]
        low, high = interval(value, drawn, max(doubt, then.error, now.error))
    if measured is not None:
        least, most = then.interval
        low = min(value, max(low, least / measured / (1 + doubt)))
        high = max(value, min(high, most / measured * (1 + doubt)))
    return Estimate(value=value, low=low, high=high)


SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e4
"""The search range: any link is at least as fast as its lower end."""
# Steps of the search for the middle, and for the ends, which draws know to 2 digits.
_FINE, _ROUGH = 1 << 30, 1 << 11
_MOST_ACCUMULATION = 1 << 16
# Rounding must not decide.
_ROUNDING = 1e-9

Enough = Callable[[Prediction, float], bool]
"""Whether a prediction is enough at a level of its draws: LOW, MIDDLE or HIGH speed."""


class _Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as in Needed."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    always: bool = False


class Needed(Finding, frozen=True, kw_only=True):
    """The least amount that is enough, and why so much, or why none."""

    value: float | None = None  # Gbit/s of a link, or micro-batches per step; None if no amount is enough
    low: float | None = None  # the least amount in the best case; None if none is enough even then
    high: float | None = None  # the least amount in the worst case; None if none is certain
    always: bool = False  # whether any amount is enough, so that `value` is meaningless


class NeededRule(Rule, frozen=True, kw_only=True):
    """One reason for an amount. `amount` is a value of all."""

    def found(self, on: str | None, /, **values: object) -> Needed:
        """As of any rule, with the amount."""
        amount: Any = values.get("amount", _Amount())
        return Needed(**self.fields(on, values), **msgspec.structs.asdict(amount))


NEEDED = RuleGroup("What a training job needs to be faster")


def _reason(code: str, *, about: str, message: str, figures: tuple[str, ...] = ()) -> NeededRule:
    return NEEDED.add(NeededRule(code=code, about=about, message=message, figures=figures))


_FROM = _reason("from", about="the required link rate", message="at this link rate or higher")
_ANY = _reason("any", about="every link rate is enough", message="at any bandwidth")
_SAME_WORKERS = _reason(
    "same_workers",
    about="no link rate is enough: one node has as many workers as all nodes together, or more",
    message="never: one node has at least as many workers, and they need no network",
)
_OVERHEAD = _reason(
    "overhead",
    about="no link rate is enough: something other than the link limits the network",
    message="never, at any bandwidth: the limit is the overhead per message or the throughput of the nodes",
)
_SLOW_NODES = _reason(
    "slow_nodes",
    about="no link rate is enough: the nodes themselves are too slow",
    message="never, at any bandwidth: the nodes' own work and their waits for each other take too long",
)
_OVERLAP_OFF = _reason(
    "overlap_off",
    about="no link rate hides communication: overlap is off",
    message="never: overlap is off, so no communication is hidden",
)
_HID_NOTHING = _reason(
    "hid_nothing",
    about="no link rate hides communication: the measured run hid none",
    message="never: no communication is hidden, because the measured run hid none",
)
_SENT_AT_ONCE = _reason(
    "sent_at_once",
    about="no link rate hides communication: all of it is sent at the end of a step",
    message="never: no communication is hidden, because all of it is sent after the last gradient is ready",
)
_UNCUT = _reason(
    "uncut",
    about="it is unknown how much communication can be hidden",
    message="unknown: it depends on the size of the gradient buckets, which is unknown (torch's default: --bucket-mib "
    "25). The prediction assumes that no communication is hidden; the upper end of its range assumes that as much as "
    "possible is hidden",
)
_AS_NOW = _reason("as_now", about="the current accumulation is enough", message="the current setting")
_GLOBAL_BATCH = _reason(
    "global_batch",
    about="another accumulation is needed, which changes the global batch",
    message="the global batch {becomes} {times} times as large",
    figures=("ratio",),
)
_NO_ACCUMULATION = _reason(
    "no_accumulation",
    about="no number of accumulation steps is enough",
    message="no number of accumulation steps is enough",
)
_MICRO_BATCHES = _reason(
    "micro_batches",
    about="more accumulation does not help: the strategy communicates in every micro-batch",
    message="{strategy} communicates in every micro-batch. Compared with no accumulation, more micro-batches cannot "
    "reduce the bytes per sample below {ratio:.0%}",
    figures=("ratio", "strategy"),
)


class NodeGain(Finding, frozen=True, kw_only=True):
    """The effect of one more node, and whether to add it."""

    nodes: int  # including it
    samples_per_s: float  # difference to the current rate
    tokens_per_s: float | None  # difference to the current rate; None if samples have no known length
    worth: Estimate  # relative to the speed of one such node alone: 1 is a node without loss


class NodeGainRule(Rule, frozen=True, kw_only=True):
    """One verdict on one more node. `gain` has the fields of `NodeGain` beside those of a finding."""

    def found(self, on: str | None, /, **values: object) -> NodeGain:
        """As of any rule, with the effect."""
        gained: Any = values.get("gain")
        return NodeGain(**self.fields(on, values), **gained)


ONE_MORE = RuleGroup("Whether one more node is worth it")
_NO_FASTER = ONE_MORE.add(
    NodeGainRule(
        code="no_faster",
        about="one more node does not make the training faster",
        message="do not add it: {nodes} nodes are not faster than {now}",
    )
)
_ADDS = ONE_MORE.add(
    NodeGainRule(
        code="adds",
        about="one more node makes the training faster",
        message="it adds {share} of the speed that it would reach alone",
    )
)
_MAY_ADD = ONE_MORE.add(
    NodeGainRule(
        code="may_add",
        about="one more node may make the training faster",
        message="inconclusive: it adds {share} of the speed that it would reach alone",
    )
)


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a scenario."""

    target: float  # target efficiency
    one_node_workers: int  # workers of the one node in the comparison
    nothing_exposed: Needed  # link rate from which all communication that overlap can hide is hidden
    efficient: Needed  # link rate that reaches the target
    beats_one: Needed  # link rate from which these nodes are faster than one
    # link rate from which they beat one node with as many workers each as the one node has; None if they already have
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
    alone = Prediction(calibration, on_one_node(calibration, scenario))
    full = _full(scenario, alone)
    return BreakEven(
        target=target,
        one_node_workers=alone.scenario.layout.workers,
        nothing_exposed=_all_hidden(calibration, scenario),
        efficient=link_for(
            calibration, scenario, _faster_than(alone, target * (1 - _ROUNDING) * _workers_ratio(scenario, alone))
        ),
        beats_one=beats(calibration, scenario, alone),
        full_beats_one=None if full == scenario else beats(calibration, full, alone),
        accumulation=accumulation_for(calibration, scenario, target=target),
        next_node=node_gain(calibration, scenario),
    )


def on_one_node(calibration: Calibration, scenario: Scenario) -> Scenario:
    """The scenario on one node with all the workers known of it: the measured one's, or the first node's."""
    measured = calibration.layout
    workers = max(scenario.layout.on(1).workers, measured.workers if measured.nodes == 1 else 1)
    alone = Layout(nodes=1, workers_per_node=workers)
    return msgspec.structs.replace(scenario, layout=alone, levers=scenario.levers.exact, low_rank=None)


def beats(calibration: Calibration, scenario: Scenario, alone: Prediction) -> Needed:
    """The slowest link on which the scenario is faster than one node."""
    needed = link_for(calibration, scenario, _faster_than(alone, 1 + _ROUNDING))
    if needed.value is None and scenario.layout.workers <= alone.scenario.layout.workers:
        return _SAME_WORKERS.found(None)
    return needed


def beats_one(calibration: Calibration, scenario: Scenario) -> tuple[Needed, Scenario]:
    """The slowest link on which several nodes are faster than one, with the layout.

    The layout is that of the scenario, or with all nodes full if it has no more workers than the one node.
    """
    alone = Prediction(calibration, on_one_node(calibration, scenario))
    full = scenario if scenario.layout.workers > alone.scenario.layout.workers else _full(scenario, alone)
    return beats(calibration, full, alone), full


def link_for(calibration: Calibration, scenario: Scenario, enough: Enough) -> Needed:
    """The slowest link that is enough, in Gbit/s.

    Args:
        calibration: the measurements.
        scenario: its own link rate is ignored.
        enough: a predicate of a prediction, monotonic in the link rate.
    """

    @functools.cache
    def at(gbit_per_s: float) -> Prediction:
        link = msgspec.structs.replace(scenario.link, gbit_per_s=gbit_per_s)
        return Prediction(calibration, msgspec.structs.replace(scenario, link=link))

    def slowest(level: float, steps: int) -> float | None:
        def rate(step: int) -> float:
            return SLOWEST_GBIT_PER_S * math.pow(_FASTEST_GBIT_PER_S / SLOWEST_GBIT_PER_S, step / steps)

        step = _first(steps + 1, lambda step: enough(at(rate(step)), level))
        return None if step is None else rate(step)

    needed = _amount(slowest(HIGH, _ROUGH), slowest(MIDDLE, _FINE), slowest(LOW, _ROUGH))
    if needed.value is not None:
        return (_ANY if needed.always else _FROM).found(None, amount=needed)
    is_enough = enough(_without_network(Prediction(calibration, scenario)), MIDDLE)
    return (_OVERHEAD if is_enough else _SLOW_NODES).found(None, amount=needed)


def _first(count: int, is_enough: Callable[[int], bool]) -> int | None:
    """The first of so many places at which a monotonic predicate holds."""
    place = bisect.bisect_left(range(count), x=True, key=is_enough)
    return place if place < count else None


def _faster_than(alone: Prediction, times: float) -> Enough:
    def is_enough(several: Prediction, level: float) -> bool:
        if level == MIDDLE:
            return several.samples_per_s / alone.samples_per_s >= times
        ratio = gain(several, alone)
        return (ratio.low if level == LOW else ratio.high) >= times

    return is_enough


def _amount(low: float | None, value: float | None, high: float | None) -> _Amount:
    if value is None:
        return _Amount(low=low)
    return _Amount(
        value=value,
        low=value if low is None else min(low, value),
        high=None if high is None else max(high, value),
        always=value <= SLOWEST_GBIT_PER_S,
    )


def accumulation_for(calibration: Calibration, scenario: Scenario, *, target: float) -> Needed:
    """The fewest micro-batches per step that reach an efficiency."""

    @functools.cache
    def at(accumulation: int) -> tuple[Prediction, Prediction]:
        accumulated = msgspec.structs.replace(scenario, accumulation=accumulation)
        return Prediction(calibration, accumulated), Prediction(calibration, on_one_node(calibration, accumulated))

    def fewest(level: float) -> float | None:
        def is_enough(more: int) -> bool:
            several, alone = at(1 + more)
            return _faster_than(alone, target * _workers_ratio(scenario, alone))(several, level)

        more = _first(_MOST_ACCUMULATION, is_enough)
        return None if more is None else 1 + more

    low, many, high = fewest(HIGH), fewest(MIDDLE), fewest(LOW)
    if many is None:
        return _never_enough(calibration, scenario, low)
    needed = _amount(low, many, high)
    if many == scenario.accumulation:
        return _AS_NOW.found(None, amount=needed)
    ratio = many / scenario.accumulation
    becomes = "becomes" if ratio > 1 else "could be"
    return _GLOBAL_BATCH.found(None, amount=needed, becomes=becomes, times=format_figure(ratio), ratio=ratio)


def node_gain(calibration: Calibration, scenario: Scenario) -> NodeGain:
    """The effect of one more node, at the same batch per worker."""
    layout = scenario.layout
    more = msgspec.structs.replace(scenario, layout=layout.on(layout.nodes + 1))
    # A node that is added has as many workers as the others, or the fullest of them.
    alike = msgspec.structs.replace(scenario, layout=Layout(nodes=1, workers_per_node=layout.workers_per_node))
    now = Prediction(calibration, scenario)
    faster, alone = gain(Prediction(calibration, more), now), Prediction(calibration, alike).samples_per_s
    gained = (faster.value - 1) * now.samples_per_s
    worth, low, high = ((end - 1) * now.samples_per_s / alone for end in (faster.value, *faster.bounds))
    length = calibration.tokens_per_sample
    share = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    effect = {
        "nodes": layout.nodes + 1,
        "samples_per_s": gained,
        "tokens_per_s": gained * length if length is not None else None,
        "worth": Estimate(value=worth, low=low, high=high),
    }
    rule = _NO_FASTER if high <= 0 else _ADDS if low > 0 else _MAY_ADD
    return rule.found(None, gain=effect, nodes=layout.nodes + 1, now=layout.nodes, share=share)


def _full(scenario: Scenario, alone: Prediction) -> Scenario:
    """With every node as full as the one; unequal nodes are full as they are."""
    if scenario.layout.unequal:
        return scenario
    layout = Layout(nodes=scenario.layout.nodes, workers_per_node=alone.scenario.layout.workers)
    return msgspec.structs.replace(scenario, layout=layout)


def _workers_ratio(scenario: Scenario, alone: Prediction) -> float:
    return scenario.layout.workers / alone.scenario.layout.workers


def _all_hidden(calibration: Calibration, scenario: Scenario) -> Needed:
    if not scenario.overlap:
        return _OVERLAP_OFF.found(None)
    if Prediction(calibration, scenario).hidden_ms <= 0:
        if calibration.costs.overlap is not None and scenario.strategy is calibration.work.strategy:
            return _HID_NOTHING.found(None)
        is_cut = calibration.work.is_cut(scenario.strategy) or scenario.bucket_bytes is not None
        return (_SENT_AT_ONCE if is_cut else _UNCUT).found(None)
    return link_for(calibration, scenario, _nothing_exposed)


def _without_network(prediction: Prediction) -> Prediction:
    free = copy.copy(prediction)
    free.parts = msgspec.structs.replace(prediction.parts, comm_ms=0.0, beyond_ms=0.0, exposed_ms=0.0)
    free.samples_per_s = prediction.samples_per_s * prediction.step_time_ms / free.parts.step_ms
    return free


def _nothing_exposed(prediction: Prediction, level: float) -> bool:
    if level == MIDDLE:
        return prediction.parts.beyond_ms <= 0
    beyond_ms = quantile(sorted(parts.beyond_ms for parts in prediction.draws), 1 - level)
    # What is within the error of the step cannot be told from nothing.
    return beyond_ms <= (prediction.error * prediction.step_time_ms if level == HIGH else 0.0)


def _never_enough(calibration: Calibration, scenario: Scenario, low: float | None) -> Needed:
    calls = calibration.work.calls_of(scenario.strategy, scenario.layout)
    once = passing_bytes(calls, 1, scenario.layout)
    often = passing_bytes([call for call in calls if call.per_micro_batch], 1, scenario.layout)
    amount = _Amount(low=low)
    if not often:
        return _NO_ACCUMULATION.found(None, amount=amount)
    return _MICRO_BATCHES.found(None, amount=amount, strategy=str(scenario.strategy), ratio=often / once)
