"""Break-even: which link, how much accumulation, how many nodes it takes, and what they cost. Pure.

Asks `predict` and searches; has no model of its own. The closed forms hold where a call is bytes over bandwidth alone.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.step_calls import passing_bytes
from multinode.analyse.prediction.calibration import Calibration
from multinode.analyse.prediction.cost_model import Scenario
from multinode.analyse.prediction.predict import Prediction, overlap_of, predict

__all__ = [
    "BreakEven",
    "Needed",
    "NodeGain",
    "accumulation_for",
    "beats",
    "break_even",
    "efficiency",
    "link_for",
    "node_gain",
    "on_one_node",
]

_SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e4
_HALVINGS = 60
_MOST_ACCUMULATION = 1 << 16
_REDUCED_ONCE = frozenset({Strategy.DDP, Strategy.ZERO1})
# Rounding must not decide.
_ROUNDING = 1e-9


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """The least of something that is enough.

    Attributes:
        value: Gbit/s of a link, or micro-batches a step; None where no amount is enough.
        why: in a sentence: of None the reason.
        always: whether any amount is enough, so that `value` says nothing.
    """

    value: float | None = None
    why: str = ""
    always: bool = False


class NodeGain(msgspec.Struct, frozen=True, kw_only=True):
    """What one more node is worth.

    Attributes:
        nodes: with it.
        samples_per_s: more, or less, than without.
        tokens_per_s: likewise; None where samples have no known length.
        worth: of what one such node gives alone: 1 is a node that loses nothing.
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
    workers = one.scenario.layout.workers
    full = msgspec.structs.replace(scenario, layout=Layout(nodes=scenario.layout.nodes, workers_per_node=workers))
    return BreakEven(
        target=target,
        one_node_workers=workers,
        nothing_exposed=_all_hidden(calibration, scenario),
        efficient=link_for(calibration, scenario, lambda found: _efficiency(found, one) >= target * (1 - _ROUNDING)),
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
    return _efficiency(predict(calibration, scenario), predict(calibration, on_one_node(calibration, scenario)))


def beats(calibration: Calibration, scenario: Scenario, one: Prediction) -> Needed:
    """The slowest link on which the scenario is faster than one node."""
    needed = link_for(calibration, scenario, lambda found: found.samples_per_s > one.samples_per_s * (1 + _ROUNDING))
    if needed.value is None and scenario.layout.workers <= one.scenario.layout.workers:
        return Needed(why="no link is enough: one node has as many workers, and no network between them")
    return needed


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
        if not enough(_without_network(predict(calibration, scenario))):
            return Needed(why="no link is enough: the nodes' own work, and their waiting for each other, is too slow")
        return Needed(why="no link is enough: what every message costs, or what the nodes get through, remains")
    if is_enough(slow):
        return Needed(value=slow, why="any link is enough", always=True)
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
    if many == scenario.accumulation:
        return Needed(value=many, why="it has as many already")
    times = f"{many / scenario.accumulation:.3g} times as large"
    becomes = "becomes" if many > scenario.accumulation else "could be smaller,"
    return Needed(value=many, why=f"the global batch {becomes} {times}")


def node_gain(calibration: Calibration, scenario: Scenario) -> NodeGain:
    """What one more node is worth, at the same batch a worker."""
    layout = scenario.layout
    more = msgspec.structs.replace(
        scenario, layout=Layout(nodes=layout.nodes + 1, workers_per_node=layout.workers_per_node)
    )
    # A node that is added has as many workers as the others.
    alike = msgspec.structs.replace(scenario, layout=Layout(nodes=1, workers_per_node=layout.workers_per_node))
    alone = predict(calibration, alike).samples_per_s
    gained = predict(calibration, more).samples_per_s - predict(calibration, scenario).samples_per_s
    length = calibration.tokens_per_sample
    worth = gained / alone
    if gained <= 0:
        sentence = f"do not add it: with {layout.nodes + 1} nodes the training is no faster than with {layout.nodes}"
    else:
        sentence = f"it adds {worth:.0%} of what such a node gives alone"
    return NodeGain(
        nodes=layout.nodes + 1,
        samples_per_s=gained,
        tokens_per_s=gained * length if length is not None else None,
        worth=worth,
        sentence=sentence,
    )


def _efficiency(found: Prediction, one: Prediction) -> float:
    workers = found.scenario.layout.workers / one.scenario.layout.workers
    return found.samples_per_s / (workers * one.samples_per_s)


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
    parts = msgspec.structs.replace(found.parts, comm_ms=0.0, beyond_ms=0.0, exposed_ms=0.0)
    rate = found.samples_per_s * found.step_time_ms / parts.step_ms
    return msgspec.structs.replace(found, parts=parts, step_time_ms=parts.step_ms, samples_per_s=rate)


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
