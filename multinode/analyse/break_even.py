"""Break-even: which link, how much accumulation, how many nodes it takes, and what they cost. Pure.

Asks `predict` and searches; has no model of its own. The closed forms hold where a call is bytes over bandwidth alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from multinode.analyse.calibration import Calibration
from multinode.analyse.cost_model import passing_bytes
from multinode.analyse.predict import Prediction, Scenario, predict
from multinode.analyse.traffic import Layout, Strategy

__all__ = [
    "BreakEven",
    "Needed",
    "NodeGain",
    "accumulation_for",
    "break_even",
    "cost_per_million_tokens",
    "efficiency",
    "link_for",
    "node_gain",
    "on_one_node",
]

_SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e4
_HALVINGS = 60
_MOST_ACCUMULATION = 1 << 16
_S_PER_HOUR = 3600
_MILLION = 1e6
_REDUCED_ONCE = frozenset({Strategy.DDP, Strategy.ZERO1})
# Rounding must not decide.
_ROUNDING = 1e-9


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """The least of something that is enough.

    Attributes:
        value: Gbit/s of a link, or micro-batches a step; None where no amount is enough.
        why: in a sentence: of None the reason.
    """

    value: float | None = None
    why: str = ""


class NodeGain(msgspec.Struct, frozen=True, kw_only=True):
    """What one more node is worth.

    Attributes:
        nodes: with it.
        samples_per_s: more, or less, than without.
        tokens_per_s: likewise; None where samples have no known length.
        worth: of what one node gives alone: 1 is a node that loses nothing.
        sentence: whether to add it.
    """

    nodes: int
    samples_per_s: float
    tokens_per_s: float | None
    worth: float
    sentence: str


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario would take.

    Attributes:
        target: efficiency that is asked for.
        nothing_exposed: link from which on nothing of what can be hidden is exposed.
        efficient: link that reaches the target.
        beats_one: link from which on these nodes beat one.
        accumulation: micro-batches that reach the target on the scenario's link.
        next_node: what one node more is worth on it.
    """

    target: float
    nothing_exposed: Needed
    efficient: Needed
    beats_one: Needed
    accumulation: Needed
    next_node: NodeGain


def break_even(calibration: Calibration, scenario: Scenario, *, target: float = 0.9) -> BreakEven:
    """All of it.

    Args:
        calibration: what was measured.
        scenario: on several nodes.
        target: efficiency, above 0 and below 1.
    """
    one = predict(calibration, on_one_node(scenario)).samples_per_s
    return BreakEven(
        target=target,
        nothing_exposed=link_for(calibration, scenario, _nothing_exposed),
        efficient=link_for(calibration, scenario, lambda found: _efficiency(found, one) >= target * (1 - _ROUNDING)),
        beats_one=link_for(calibration, scenario, lambda found: found.samples_per_s > one * (1 + _ROUNDING)),
        accumulation=accumulation_for(calibration, scenario, target=target),
        next_node=node_gain(calibration, scenario),
    )


def on_one_node(scenario: Scenario) -> Scenario:
    """The same on one node."""
    layout = Layout(nodes=1, workers_per_node=scenario.layout.workers_per_node)
    return msgspec.structs.replace(scenario, layout=layout)


def efficiency(calibration: Calibration, scenario: Scenario) -> float:
    """Weak scaling efficiency: samples/s over those of as many single nodes."""
    return _efficiency(predict(calibration, scenario), predict(calibration, on_one_node(scenario)).samples_per_s)


def link_for(calibration: Calibration, scenario: Scenario, enough: Callable[[Prediction], bool]) -> Needed:
    """The slowest link that is enough, in Gbit/s.

    Args:
        calibration: what was measured.
        scenario: its own link's rate does not matter.
        enough: of a prediction; what is enough for one link must be so for each faster one.
    """

    def is_enough(gbit_per_s: float) -> bool:
        link = msgspec.structs.replace(scenario.link, gbit_per_s=gbit_per_s)
        return enough(predict(calibration, msgspec.structs.replace(scenario, link=link)))

    slow, fast = _SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S
    if not is_enough(fast):
        return Needed(why="no link is enough: what every message costs, or what the nodes get through, remains")
    if is_enough(slow):
        return Needed(value=slow, why="any link is enough")
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (slow, middle) if is_enough(middle) else (middle, fast)
    return Needed(value=fast, why="from this link on")


def accumulation_for(calibration: Calibration, scenario: Scenario, *, target: float) -> Needed:
    """The fewest micro-batches a step that reach an efficiency."""

    def at(accumulation: int) -> float:
        return efficiency(calibration, msgspec.structs.replace(scenario, accumulation=accumulation))

    if scenario.strategy not in _REDUCED_ONCE:
        return Needed(why=_no_use(calibration, scenario))
    few, many = 0, 1
    while at(many) < target:
        few, many = many, 2 * many
        if many > _MOST_ACCUMULATION:
            return Needed(why="no accumulation is enough")
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if at(middle) >= target else (middle, many)
    return Needed(value=many, why=f"the global batch becomes {many / scenario.accumulation:.3g} times as large")


def node_gain(calibration: Calibration, scenario: Scenario) -> NodeGain:
    """What one more node is worth, at the same batch a worker."""
    layout = scenario.layout
    more = msgspec.structs.replace(
        scenario, layout=Layout(nodes=layout.nodes + 1, workers_per_node=layout.workers_per_node)
    )
    alone = predict(calibration, on_one_node(scenario)).samples_per_s
    gained = predict(calibration, more).samples_per_s - predict(calibration, scenario).samples_per_s
    length = calibration.tokens_per_sample
    worth = gained / alone
    if gained <= 0:
        sentence = f"do not add it: with {layout.nodes + 1} nodes the training is no faster than with {layout.nodes}"
    else:
        sentence = f"it adds {worth:.0%} of what one node gives alone"
    return NodeGain(
        nodes=layout.nodes + 1,
        samples_per_s=gained,
        tokens_per_s=gained * length if length is not None else None,
        worth=worth,
        sentence=sentence,
    )


def cost_per_million_tokens(prices_per_hour: Sequence[float], tokens_per_s: float) -> float:
    """Price of a million tokens, in the currency of the nodes' prices an hour."""
    return sum(prices_per_hour) / (tokens_per_s * _S_PER_HOUR) * _MILLION


def _efficiency(found: Prediction, one_samples_per_s: float) -> float:
    return found.samples_per_s / (found.scenario.layout.nodes * one_samples_per_s)


def _nothing_exposed(found: Prediction) -> bool:
    return found.parts.beyond_ms <= 0


def _no_use(calibration: Calibration, scenario: Scenario) -> str:
    """In the strategy's own bytes: what accumulation leaves of the traffic of a sample."""
    calls = calibration.work.calls_of(scenario.strategy, scenario.layout)
    once, twice = (passing_bytes(calls, accumulation, scenario.layout.workers) for accumulation in (1, 2))
    least = (twice - once) / once if once else 1.0
    return (
        f"{scenario.strategy} communicates in every micro-batch: accumulation does not cut that traffic; "
        f"no accumulation leaves less than {least:.0%} of the bytes of a sample"
    )
