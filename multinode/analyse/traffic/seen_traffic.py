"""Seen traffic: what a step asked its collectives to carry, what the backend makes of that, and what the cards counted.

Three figures of the same step; where they differ, `seen_gaps` says why. What a strategy should send by theory is
`seen_strategy`'s. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from multinode.analyse.run.observed import Observed
from multinode.analyse.traffic.seen_calls import WorkerCalls, asked_factor, busiest_worker, read_calls
from multinode.analyse.traffic.seen_cards import NodeCards, read_node_cards
from multinode.analyse.traffic.seen_flows import CardFlows, expect_flows
from multinode.analyse.traffic.seen_gaps import why_card_differs, why_expected_differs

__all__ = ["BytesPerStep", "SeenCall", "SeenTraffic", "see_traffic"]

_MOST_ROWS = 64
_NO_STEPS = "no step counts"
_NO_CALLS = "no worker recorded what its steps called"
_MOST_REASONS = 4
_NO_NODES = "no node recorded anything"


class SeenCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind, group size and message size in a step, of one worker.

    Attributes:
        op: as CallCount has it.
        ranks: workers in the group.
        nodes: nodes that they are on.
        backend: of the group, `nccl` or `gloo`; None is unknown.
        size_bytes: S of one call.
        count: calls a step, in the mean over the steps that count.
        source: as CallCount has it.
    """

    op: str
    ranks: int
    nodes: int
    backend: str | None
    size_bytes: float
    count: float
    source: str = "call"


class BytesPerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one optimizer step, one way; medians or means over the steps that count.

    Attributes:
        calls: what the busiest worker asked to be sent: factor(op, ranks) x S, busbw's factors.
        expected: what the busiest node's card sends or receives for it, by the backend's own algorithms.
        card: payload that the busiest node's card counted in that direction, headers subtracted.
    """

    calls: float | None = None
    expected: float | None = None
    card: float | None = None


class SeenTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a step communicates.

    Attributes:
        bytes_per_step: three figures for the same step.
        calls: what the busiest worker called, most bytes first.
        explained: a sentence each: why the three differ, where they do by more than 3 % (calls and expected) or 5 %
            (expected and card); one that says that nothing explains it begins with "unexplained".
        missing: reason by name of every figure of `bytes_per_step` that is None.
    """

    bytes_per_step: BytesPerStep = BytesPerStep()
    calls: tuple[SeenCall, ...] = ()
    explained: tuple[str, ...] = ()
    missing: dict[str, str] = {}


def see_traffic(observed: Observed) -> SeenTraffic:
    """What the steps that count communicate, a step.

    Calls of less than 1 KiB and barriers are listed, but no figure waits for an algorithm that is not known for them.
    The card's figure is raw: what passes it when nothing trains is not subtracted, but told where it is over 1 %.
    """
    every = read_calls(observed)
    # A worker with calls that cannot be read would pull down what its groups are taken to call.
    calls = {rank: worker for rank, worker in every.items() if not worker.odd}
    flows, cards = expect_flows(calls, observed), read_node_cards(observed)
    busiest = busiest_worker(calls.values())
    why_no_calls = "" if busiest else _why_no_calls(observed, every)
    told: dict[str, float | str] = {
        "calls": why_no_calls or (busiest.asked_bytes if busiest else 0.0),
        "expected": 0.0 if len(observed.nodes) == 1 else why_no_calls or _expected(flows),
        "card": _counted(flows, cards) if observed.counted else _NO_STEPS,
    }
    known = {name: figure for name, figure in told.items() if not isinstance(figure, str)}
    explained = why_card_differs(observed, calls, cards, flows if "expected" in known else None)
    if busiest is not None and "expected" in known and len(observed.nodes) > 1:
        explained = [*why_expected_differs(busiest, flows), *explained]
    return SeenTraffic(
        bytes_per_step=BytesPerStep(**known),
        calls=_rows(busiest, observed) if busiest else (),
        explained=tuple(explained),
        missing={name: reason for name, reason in told.items() if isinstance(reason, str)},
    )


def _why_no_calls(observed: Observed, every: Mapping[int, WorkerCalls]) -> str:
    """Why no worker's calls are known; empty for a worker alone, which has nobody to call."""
    if not observed.counted:
        return _NO_STEPS
    if every:
        return next(worker.odd for worker in every.values())
    return "" if observed.world_size == 1 else _NO_CALLS


def _expected(flows: CardFlows) -> float | str:
    if flows.unknown:
        return "; ".join(f"{op}: {reason}" for op, reason in flows.unknown.items())
    return flows.most


def _counted(flows: CardFlows, cards: Sequence[NodeCards]) -> float | str:
    """Of the busiest card, in the direction in which most is expected; in the busier one where nothing is."""
    read = [node.carried for node in cards if node.carried is not None]
    if not read:
        return "; ".join(f"{node.node}: {node.reason}" for node in cards[:_MOST_REASONS]) or _NO_NODES
    if flows.most and not flows.unknown:
        return max(one.one_way(sends=flows.busiest[1]) for one in read)
    return max(max(one.sent, one.received) for one in read)


def _rows(worker: WorkerCalls, observed: Observed) -> tuple[SeenCall, ...]:
    """Its calls, most bytes first; groups of one size and spread together."""
    node_of = {rank: index for index, node in enumerate(observed.nodes) for rank in node.ranks}
    counts: dict[SeenCall, float] = defaultdict(float)
    for kind in worker.kinds:
        ranks = kind.group.ranks
        row = SeenCall(
            op=kind.op,
            ranks=len(ranks),
            nodes=len({node_of[rank] for rank in ranks}),
            backend=kind.group.backend,
            size_bytes=kind.size_bytes,
            count=0.0,
            source=kind.source,
        )
        counts[row] += kind.count
    rows = [msgspec.structs.replace(row, count=count) for row, count in counts.items()]
    rows.sort(key=lambda row: (-asked_factor(row.op, row.ranks) * row.size_bytes * row.count, -row.size_bytes))
    return tuple(rows[:_MOST_ROWS])
