"""Options of the cluster: a faster link, a node more or fewer, one node alone. Pure.

Most of them take a person: a switch, a card, a node. What settings do is `options`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.advice.training_state import Change, TrainingState, TuningOption, batch_edits, options_of
from multinode.analyse.collectives.traffic import Layout
from multinode.analyse.prediction.break_even import beats, on_one_node
from multinode.analyse.prediction.predict import predict
from multinode.units import format_rate

__all__ = ["cluster_options"]

# What cards and switches are sold with, Gbit/s.
_STANDARD_GBIT_PER_S = (1, 2.5, 5, 10, 25, 40, 100)
_MOST_LINKS = 4
_CLEARLY_FASTER = 1.2
_OWN_CORES = "each worker is taken to have a device, or cores, of its own"
_replace = msgspec.structs.replace


def cluster_options(state: TrainingState) -> Iterator[TuningOption]:
    """Those that apply."""
    nodes = state.scenario.layout.nodes
    if nodes > 1:
        yield from _faster_links(state)
        yield _on_nodes(state, 1)
        yield from _full(state)
    if nodes > 2:  # noqa: PLR2004 - one fewer than two is one node, which is there already
        yield _on_nodes(state, nodes - 1)
    # Without a network that was measured or stated, nothing is known of a second node.
    if nodes > 1 or len(state.slots) > 1:
        yield _on_nodes(state, nodes + 1)


def _faster_links(state: TrainingState) -> Iterator[TuningOption]:
    link = state.scenario.link
    faster = [rate for rate in _STANDARD_GBIT_PER_S if rate > link.gbit_per_s * _CLEARLY_FASTER]
    worth = _worth(state)
    for rate in faster[:_MOST_LINKS]:
        scenario = _replace(state.scenario, link=_replace(link, gbit_per_s=float(rate)))
        told = format_rate(rate)
        yield TuningOption(
            name=f"a link of {told}",
            kind="link",
            after=_replace(state, scenario=scenario, measured_samples_per_s=None),
            by_hand=f"cards and a switch of {told} instead of {format_rate(link.gbit_per_s)}",
            meaning="nothing; the price of cards, a switch and cables",
            remark=worth,
        )


def _worth(state: TrainingState) -> str:
    """From which link on the nodes are worth it."""
    one = predict(state.calibration, on_one_node(state.calibration, state.scenario))
    nodes, workers = state.scenario.layout.nodes, one.scenario.layout.workers
    needed = beats(state.calibration, state.scenario, one)
    told = f"one with {workers} workers" if workers > state.scenario.layout.workers_per_node else "one"
    if needed.value is None:
        return f"{nodes} nodes beat {told} on no link"
    if needed.value >= state.scenario.link.gbit_per_s:
        return f"{nodes} nodes beat {told} from {format_rate(needed.value)} on"
    return f"{nodes} nodes beat {told} from {format_rate(needed.value)} on, which this link is above"


def _full(state: TrainingState) -> Iterator[TuningOption]:
    """Every node with as many workers as one node is known to have."""
    layout = state.scenario.layout
    workers = on_one_node(state.calibration, state.scenario).layout.workers
    if workers > layout.workers_per_node:
        placed = Layout(nodes=layout.nodes, workers_per_node=workers)
        yield _placed(state, placed, f"{workers} workers on each node", remark=_OWN_CORES)


def _on_nodes(state: TrainingState, nodes: int) -> TuningOption:
    """More nodes or fewer as they are; one alone has all the workers that it is known to have."""
    layout = state.scenario.layout
    if nodes == 1:
        return _placed(state, on_one_node(state.calibration, state.scenario).layout, "one node alone", remark="")
    placed = Layout(nodes=nodes, workers_per_node=layout.workers_per_node)
    return _placed(state, placed, f"{nodes} nodes", remark="")


def _placed(state: TrainingState, placed: Layout, name: str, *, remark: str) -> TuningOption:
    layout = state.scenario.layout
    before, after = (layout.workers * _samples_a_worker(state), placed.workers * _samples_a_worker(state))
    meaning = "nothing" if before == after else f"global batch {after:g} instead of {before:g}"
    compressed = state.settings.grad_compress
    then = _replace(
        state,
        scenario=_replace(state.scenario, layout=placed),
        # A single worker has nobody to send gradients to, and on one node they pass no network.
        settings=_replace(state.settings, grad_compress=compressed if placed.nodes > 1 else None),
        measured_samples_per_s=None,
    )
    changed = Change(
        deepspeed=batch_edits(then),
        nodes=placed.nodes if placed.nodes != layout.nodes else None,
        workers_per_node=placed.workers_per_node if placed.workers_per_node != layout.workers_per_node else None,
    )
    by_hand = _in_the_hostfile(state, placed, changed)
    return TuningOption(
        name=name,
        kind="nodes",
        after=then,
        change=None if by_hand else changed,
        by_hand=by_hand,
        meaning=meaning + ("; the other nodes are free for other work" if placed.nodes < layout.nodes else ""),
        remark=remark,
    )


def _in_the_hostfile(state: TrainingState, placed: Layout, change: Change) -> str:
    """What has to be written there before the options can be followed; empty where nothing has to."""
    if placed.nodes > max(state.scenario.layout.nodes, len(state.slots)):
        return f"a node more in the hostfile, as the others: {placed.nodes} in all"
    workers, slots = placed.workers_per_node, state.slots[: placed.nodes]
    short = [rank for rank, count in enumerate(slots) if count is not None and count < workers]
    if not short:
        return ""
    which = f"node {short[0]}" if len(short) == 1 else f"nodes {', '.join(map(str, short))}"
    return f"in the hostfile {workers} ids in gpus=, or slots={workers}, for {which}; then {options_of(change)}"


def _samples_a_worker(state: TrainingState) -> float:
    return state.scenario.per_device_batch * state.scenario.accumulation
