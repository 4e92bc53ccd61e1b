"""Break-even: which link, how much accumulation, how many nodes it takes, and what they cost. Pure.

Asks `predict` and searches; has no model of its own. Each answer is a range: of what is not known the best, the middle
and the worst are asked for separately. The closed forms hold where a call is bytes over bandwidth alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import msgspec

from multinode.analyse.collectives.traffic import Layout
from multinode.analyse.job.step_calls import passing_bytes
from multinode.analyse.prediction.calibration import Calibration
from multinode.analyse.prediction.cost_model import Scenario
from multinode.analyse.prediction.gain import Gain, gain, own_error
from multinode.analyse.prediction.predict import Prediction, overlap_of, predict
from multinode.units import format_rate

__all__ = [
    "BreakEven",
    "Needed",
    "NodeGain",
    "accumulation_for",
    "beats",
    "beats_one",
    "break_even",
    "describe_link",
    "describe_needed",
    "efficiency",
    "link_for",
    "node_gain",
    "on_one_node",
]

_SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e4
_HALVINGS = 40
_MOST_ACCUMULATION = 1 << 16
# Rounding must not decide.
_ROUNDING = 1e-9
# A narrower range is one figure.
_ONE_FIGURE = 1.05

Enough = Callable[[Prediction], tuple[bool, bool, bool]]
"""Whether a prediction is enough at best, in the middle and at worst."""


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """The least of something that is enough.

    Attributes:
        value: Gbit/s of a link, or micro-batches a step; None where no amount is enough.
        low: the least that may be enough, of what is not known at best; None where none is even then.
        high: the least that is enough at worst; None where none is for certain. Releases before ranges stored neither.
        why: in a sentence: of None the reason.
        always: whether any amount is enough, so that `value` says nothing.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    always: bool = False


class NodeGain(msgspec.Struct, frozen=True, kw_only=True):
    """What one more node is worth.

    Attributes:
        nodes: with it.
        samples_per_s: more, or less, than without.
        tokens_per_s: likewise; None where samples have no known length.
        worth: of what one such node gives alone: 1 is a node that loses nothing.
        worth_range: low, high; None in what earlier releases stored.
        sentence: whether to add it.
    """

    nodes: int
    samples_per_s: float
    tokens_per_s: float | None
    worth: float
    worth_range: tuple[float, float] | None = None
    sentence: str


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario would take.

    Attributes:
        target: efficiency that is asked for.
        one_node_workers: of the one node that the nodes are held against.
        nothing_exposed: link from which on nothing of what can be hidden is exposed.
        efficient: link that reaches the target.
        beats_one: link from which on these nodes beat one.
        full_beats_one: link from which on they do with as many workers each as the one has; None where they have.
        accumulation: micro-batches that reach the target on the scenario's link.
        next_node: what one node more is worth on it.
    """

    target: float
    one_node_workers: int
    nothing_exposed: Needed
    efficient: Needed
    beats_one: Needed
    full_beats_one: Needed | None = None
    accumulation: Needed
    next_node: NodeGain


def break_even(calibration: Calibration, scenario: Scenario, *, target: float = 0.9) -> BreakEven:
    """All of it.

    Args:
        calibration: what was measured.
        scenario: on several nodes.
        target: efficiency, above 0 and below 1.
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
    """The same on one node with all the workers that a node is known to have: the measured one's, or the scenario's."""
    measured = calibration.layout
    workers = max(scenario.layout.workers_per_node, measured.workers_per_node if measured.nodes == 1 else 1)
    return msgspec.structs.replace(scenario, layout=Layout(nodes=1, workers_per_node=workers))


def efficiency(calibration: Calibration, scenario: Scenario) -> float:
    """Samples/s of a worker over those of a worker on one node: of weak scaling."""
    return _efficiency(predict(calibration, scenario), predict(calibration, on_one_node(calibration, scenario))).value


def beats(calibration: Calibration, scenario: Scenario, one: Prediction) -> Needed:
    """The slowest link on which the scenario is faster than one node."""
    needed = link_for(calibration, scenario, lambda found: gain(found, one).reaches(1 + _ROUNDING))
    if needed.value is None and scenario.layout.workers <= one.scenario.layout.workers:
        return Needed(why="no link is enough: one node has as many workers, and no network between them")
    return needed


def beats_one(calibration: Calibration, scenario: Scenario) -> tuple[Needed, Scenario]:
    """The slowest link on which several nodes beat one, and as what.

    That is the scenario; where it has no more workers than the one node, all of them full.
    """
    one = predict(calibration, on_one_node(calibration, scenario))
    asked = scenario if scenario.layout.workers > one.scenario.layout.workers else _full(scenario, one)
    return beats(calibration, asked, one), asked


def describe_link(needed: Needed) -> str:
    """A break-even link for people: `between 800 Mbit/s and 1.2 Gbit/s`, `at least 2 Gbit/s`."""
    return describe_needed(needed, "link", _told_link)


def describe_needed(needed: Needed, noun: str, told: Callable[[float, int], str]) -> str:
    """What is needed, no sharper than it is known.

    Args:
        needed: of a noun.
        noun: in the singular: `link`.
        told: an amount with its unit; -1 rounds it down, 1 up.
    """
    if needed.low is None:
        # An earlier release stored no range.
        return needed.why if needed.value is None or needed.always else f"from {told(needed.value, 0)} on"
    is_any, low = needed.low <= _SLOWEST_GBIT_PER_S, told(needed.low, -1)
    if needed.high is None:
        if is_any:
            return f"inconclusive: any {noun} may be enough, or none"
        return f"at least {low}; perhaps no {noun} is enough"
    if is_any:
        return needed.why if needed.high <= _SLOWEST_GBIT_PER_S else f"at most {told(needed.high, 1)}"
    if needed.high / needed.low <= _ONE_FIGURE:
        return f"about {told(needed.value or needed.high, 0)}"
    return f"between {low} and {told(needed.high, 1)}"


def _told_link(gbit_per_s: float, way: int) -> str:
    """Of a range two digits, outwards."""
    if not way:
        return format_rate(gbit_per_s)
    unit = 10.0 ** (math.floor(math.log10(gbit_per_s)) - 1)
    digits = gbit_per_s / unit
    return format_rate((math.ceil(digits - _ROUNDING) if way > 0 else math.floor(digits + _ROUNDING)) * unit)


def link_for(calibration: Calibration, scenario: Scenario, enough: Enough) -> Needed:
    """The slowest link that is enough, in Gbit/s.

    Args:
        calibration: what was measured.
        scenario: its own link's rate does not matter.
        enough: of a prediction; what is enough for one link must be so for each faster one.
    """

    @functools.cache
    def is_enough(gbit_per_s: float) -> tuple[bool, bool, bool]:
        link = msgspec.structs.replace(scenario.link, gbit_per_s=gbit_per_s)
        return enough(predict(calibration, msgspec.structs.replace(scenario, link=link)))

    low, value, high = (_slowest(lambda rate, end=end: is_enough(rate)[end]) for end in range(3))  # type: ignore[misc]
    return _needed(low, value, high, why=_why(calibration, scenario, enough, value))


def _slowest(is_enough: Callable[[float], bool]) -> float | None:
    slow, fast = _SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S
    if not is_enough(fast):
        return None
    if is_enough(slow):
        return slow
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if is_enough(middle) else (middle, fast)
    return fast


def _needed(low: float | None, value: float | None, high: float | None, *, why: str) -> Needed:
    """In order, whatever the search found."""
    if value is None:
        return Needed(low=low, why=why)
    return Needed(
        value=value,
        low=value if low is None else min(low, value),
        high=None if high is None else max(high, value),
        why=why,
        always=value <= _SLOWEST_GBIT_PER_S,
    )


def _why(calibration: Calibration, scenario: Scenario, enough: Enough, value: float | None) -> str:
    if value is not None:
        return "any link is enough" if value <= _SLOWEST_GBIT_PER_S else "from this link on"
    if not enough(_without_network(predict(calibration, scenario)))[1]:
        return "no link is enough: the nodes' own work, and their waiting for each other, is too slow"
    return "no link is enough: what every message costs, or what the nodes get through, remains"


def accumulation_for(calibration: Calibration, scenario: Scenario, *, target: float) -> Needed:
    """The fewest micro-batches a step that reach an efficiency."""

    @functools.cache
    def reaches(accumulation: int) -> tuple[bool, bool, bool]:
        asked = msgspec.structs.replace(scenario, accumulation=accumulation)
        one = predict(calibration, on_one_node(calibration, asked))
        return _efficiency(predict(calibration, asked), one).reaches(target)

    low, many, high = (_fewest(lambda count, end=end: reaches(count)[end]) for end in range(3))  # type: ignore[misc]
    if many is None:
        return _needed(low, None, None, why=_never_enough(calibration, scenario))
    if many == scenario.accumulation:
        return _needed(low, many, high, why="it has as many already")
    times = f"{many / scenario.accumulation:.3g} times as large"
    becomes = "becomes" if many > scenario.accumulation else "could be smaller,"
    return _needed(low, many, high, why=f"the global batch {becomes} {times}")


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
    """What one more node is worth, at the same batch a worker."""
    layout = scenario.layout
    more = msgspec.structs.replace(
        scenario, layout=Layout(nodes=layout.nodes + 1, workers_per_node=layout.workers_per_node)
    )
    # A node that is added has as many workers as the others.
    alike = msgspec.structs.replace(scenario, layout=Layout(nodes=1, workers_per_node=layout.workers_per_node))
    now, alone = predict(calibration, scenario).samples_per_s, predict(calibration, alike).samples_per_s
    faster = gain(predict(calibration, more), predict(calibration, scenario))
    gained = (faster.value - 1) * now
    low, worth, high = ((one - 1) * now / alone for one in (faster.low, faster.value, faster.high))
    length = calibration.tokens_per_sample
    told = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if high <= 0:
        sentence = f"do not add it: with {layout.nodes + 1} nodes the training is no faster than with {layout.nodes}"
    elif low > 0:
        sentence = f"it adds {told} of what such a node gives alone"
    else:
        sentence = f"inconclusive: {told} of what such a node gives alone"
    return NodeGain(
        nodes=layout.nodes + 1,
        samples_per_s=gained,
        tokens_per_s=gained * length if length is not None else None,
        worth=worth,
        worth_range=(low, high),
        sentence=sentence,
    )


def _full(scenario: Scenario, one: Prediction) -> Scenario:
    """With every node as full as the one."""
    layout = Layout(nodes=scenario.layout.nodes, workers_per_node=one.scenario.layout.workers)
    return msgspec.structs.replace(scenario, layout=layout)


def _but_rounding(target: float) -> float:
    return target * (1 - _ROUNDING)


def _efficiency(found: Prediction, one: Prediction) -> Gain:
    return gain(found, one).times(one.scenario.layout.workers / found.scenario.layout.workers)


def _all_hidden(calibration: Calibration, scenario: Scenario) -> Needed:
    """The link from which on nothing of what can be hidden is exposed."""
    if not scenario.overlap:
        return Needed(why="no link is enough: nothing is ever hidden, as overlap is off")
    if overlap_of(calibration, scenario) <= 0:
        known = calibration.costs.overlap is not None and scenario.strategy is calibration.work.strategy
        why = "the run that was measured hid nothing" if known else "all is sent at once, when the last of it is there"
        return Needed(why=f"no link is enough: nothing is ever hidden, as {why}")
    return link_for(calibration, scenario, _nothing_exposed)


def _without_network(found: Prediction) -> Prediction:
    """The same if all communication took no time."""
    parts, *ends = (
        msgspec.structs.replace(one, comm_ms=0.0, beyond_ms=0.0, exposed_ms=0.0) for one in (found.parts, *found.ends)
    )
    rate = found.samples_per_s * found.step_time_ms / parts.step_ms
    return msgspec.structs.replace(
        found, parts=parts, ends=(ends[0], ends[1]), step_time_ms=parts.step_ms, samples_per_s=rate
    )


def _nothing_exposed(found: Prediction) -> tuple[bool, bool, bool]:
    """What is less than a step is known to is none at best."""
    slow, fast = found.ends
    unseen_ms = own_error(found) * found.step_time_ms
    return fast.beyond_ms <= unseen_ms, found.parts.beyond_ms <= 0, slow.beyond_ms <= 0


def _never_enough(calibration: Calibration, scenario: Scenario) -> str:
    """Where micro-batches communicate, with what accumulation leaves of the traffic of a sample."""
    calls = calibration.work.calls_of(scenario.strategy, scenario.layout)
    once, twice = (passing_bytes(calls, accumulation, scenario.layout.workers) for accumulation in (1, 2))
    if not any(call.per_micro_batch for call in calls) or not once:
        return "no accumulation is enough"
    return (
        f"{scenario.strategy} communicates in every micro-batch: "
        f"no accumulation leaves less than {(twice - once) / once:.0%} of the bytes of a sample"
    )
