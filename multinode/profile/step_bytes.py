"""Step bytes: what a step asked its collectives to carry, what the backend makes of that, and what the cards counted.

Three figures of the same step; where they differ, a sentence says why, or "unexplained" where the records show nothing.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from multinode.profile.calls import WorkerCalls, asked_factor, busiest_worker
from multinode.profile.card_bytes import LEAST_BYTES_A_WORKER, NodeCards, find_carrier, read_node_cards
from multinode.profile.card_flows import CardFlows, Manner, Share, expect_flows
from multinode.profile.cards import is_rdma
from multinode.profile.observed import Observed
from multinode.stats.estimate import UnknownError, attempt
from multinode.traffic.algorithms import algorithms_of, protocols_of
from multinode.units import format_list

_MOST_ROWS = 64
_NO_STEPS = "no step counts"
_MOST_REASONS = 4
_ASKED_GAP = 0.03
_CARD_GAP = 0.05
# Another algorithm has to fit better than the usual one has to fail.
_FITS = 0.03
_IDLE_IS_MUCH = 0.01
# Of what is beyond the expected.
_MOST = 0.5
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class SeenCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind, group size and message size in a step, of one worker.

    Attributes:
        op: as CallCount has it.
        ranks: workers in the group.
        nodes: nodes that they are on.
        backend: of the group, `nccl` or `gloo`; None is unknown.
        size_bytes: S of one call.
        count: calls per step, on average over the measured steps.
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
    """Bytes of one optimizer step, one way; medians or means over the measured steps.

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


def see_traffic(observed: Observed, every: Mapping[int, WorkerCalls]) -> SeenTraffic:
    """What the measured steps communicate, a step.

    Calls of less than 1 KiB and barriers are listed, but no figure waits for an algorithm that is not known for them.
    The card's figure is raw: what passes it when nothing trains is not subtracted, but told where it is over 1 %.

    Args:
        observed: the run.
        every: of it, as `read_calls` has them.
    """
    # A worker with calls that cannot be read would pull down what its groups are taken to call.
    calls = {rank: worker for rank, worker in every.items() if not worker.odd}
    flows, cards = expect_flows(calls, observed), read_node_cards(observed)
    busiest = busiest_worker(calls.values())
    alone = len(observed.nodes) == 1
    missing: dict[str, str] = {}
    figures = BytesPerStep(
        calls=attempt(missing, "calls", lambda: _asked(busiest, observed, every)),
        expected=0.0 if alone else attempt(missing, "expected", lambda: _expected(busiest, observed, every, flows)),
        card=attempt(missing, "card", lambda: _counted(observed, flows, cards)),
    )
    explained = _why_card_differs(observed, calls, cards, flows if figures.expected is not None else None)
    if busiest is not None and figures.expected is not None and not alone:
        explained = [*_why_expected_differs(busiest, flows), *explained]
    return SeenTraffic(
        bytes_per_step=figures,
        calls=_rows(busiest, observed) if busiest else (),
        explained=tuple(explained),
        missing=missing,
    )


def _asked(busiest: WorkerCalls | None, observed: Observed, every: Mapping[int, WorkerCalls]) -> float:
    """By the busiest worker; nothing by a worker alone, which has nobody to call."""
    if busiest is not None:
        return busiest.asked_bytes
    if not observed.counted:
        raise UnknownError(_NO_STEPS)
    if every:
        raise UnknownError(next(worker.odd for worker in every.values()))
    if observed.world_size == 1:
        return 0.0
    raise UnknownError("no worker recorded what its steps called")


def _expected(
    busiest: WorkerCalls | None, observed: Observed, every: Mapping[int, WorkerCalls], flows: CardFlows
) -> float:
    _asked(busiest, observed, every)
    if flows.unknown:
        raise UnknownError("; ".join(f"{op}: {reason}" for op, reason in flows.unknown.items()))
    return flows.most


def _counted(observed: Observed, flows: CardFlows, cards: Sequence[NodeCards]) -> float:
    """Of the busiest card, in the direction in which most is expected; in the busier one where nothing is."""
    if not observed.counted:
        raise UnknownError(_NO_STEPS)
    read = [node.carried for node in cards if node.carried is not None]
    if not read:
        reasons = "; ".join(f"{node.node}: {node.reason}" for node in cards[:_MOST_REASONS])
        raise UnknownError(reasons or "no node recorded anything")
    if flows.most and not flows.unknown:
        return max(one.one_way(sends=flows.busiest[1]) for one in read)
    return max(one.busier for one in read)


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


def _why_expected_differs(worker: WorkerCalls, flows: CardFlows) -> list[str]:
    """Why the busiest card is expected to carry more, or less, than the busiest worker asks for.

    Args:
        worker: the busiest.
        flows: what all workers' calls put on the cards.
    """
    asked_all = worker.asked_bytes
    if abs(flows.most - asked_all) <= _ASKED_GAP * max(flows.most, asked_all):
        return []
    node, sends = flows.busiest
    sentences = []
    for share in flows.shares:
        asked = sum(
            kind.asked_bytes
            for kind in worker.kinds
            if (kind.op, kind.group.backend, len(kind.group.ranks)) == (share.op, share.backend, share.ranks)
        )
        carried = share.carried[node].one_way(sends=sends)
        if abs(carried - asked) > _ASKED_GAP / 2 * max(flows.most, asked_all):
            reason = "; ".join(_why_share(share, node, carried, asked))
            sentences.append(f"{share.op}: {_size(asked)} asked for, {_size(carried)} expected at a NIC: {reason}.")
    return sentences


def _why_share(share: Share, node: int, carried: float, asked: float) -> Iterator[str]:
    workers = f"{share.ranks} workers"
    if share.spans == 1:
        yield f"its {workers} are on one node, and it stays there"
        return
    if share.groups[node] > 1:
        yield f"{share.groups[node]} groups of {workers} share the NIC"
    if share.backend == "gloo" and share.op == "reduce_scatter":
        yield "gloo makes a reduce_scatter as an all-reduce, and sends twice as much"
    elif share.backend == "gloo" and share.op == "broadcast":
        yield "gloo broadcasts by a tree, whose root sends to several workers, and others send nothing"
    elif share.op == "all_to_all":
        yield "every worker of a node sends its parts to the other nodes, and those for its own node stay there"
    elif share.groups[node] <= 1:
        more = "more than once" if carried > asked else "less often than a worker sends"
        yield f"{share.backend}'s way through {workers} on {share.spans} nodes passes a NIC {more}"


class _Gap(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's card counted, and what was expected of it, in the direction in which they differ most."""

    cards: NodeCards
    sends: bool
    seen: float
    expected: float

    @property
    def beyond(self) -> float:
        """What was counted beyond what was expected."""
        return self.seen - self.expected


def _why_card_differs(
    observed: Observed, calls: Mapping[int, WorkerCalls], cards: Sequence[NodeCards], flows: CardFlows | None
) -> list[str]:
    """Why cards counted other than what is expected of them, and what is to be known of the counters.

    Args:
        observed: what was recorded.
        calls: of the workers that recorded any.
        cards: what each node's cards counted.
        flows: what is expected of them; None where that is not known.
    """
    read = [node for node in cards if node.carried is not None]
    notes = [*_about_counters(read), *_about_idle(read)]
    if len(observed.nodes) == 1:
        return [
            *notes,
            "All workers are on one node: their calls stay there, and its NIC counts other traffic.",
        ]
    if flows is None or not read:
        return notes
    gaps = _gaps(flows, cards)
    if not flows.most:
        return [*notes, _explain_silence(observed, gaps)]
    if any(abs(gap.beyond) > _CARD_GAP * flows.most for gap in gaps):
        if flows.most < LEAST_BYTES_A_WORKER * observed.world_size:
            return [*notes, f"{_size(flows.most)} per step are too few to distinguish from headers and other traffic."]
        other = _other_manner(observed, calls, cards, flows.most)
        notes.extend([other] if other else _by_node(gaps, flows.most))
    return notes


def _explain_silence(observed: Observed, gaps: Sequence[_Gap]) -> str:
    """Of calls of which none crosses from node to node."""
    most = max(gaps, key=lambda gap: gap.seen)
    if most.seen < LEAST_BYTES_A_WORKER * observed.world_size:
        return "No call crosses from node to node: what the NICs counted is other traffic."
    return (
        f"unexplained: no call that crosses from node to node was seen, and {most.cards.ifname} of {most.cards.node} "
        f"{_verb(most)} {_size(most.seen)} per step: other traffic, or collectives of compiled code, not recorded."
    )


def _about_counters(cards: Sequence[NodeCards]) -> Iterator[str]:
    if interpolated := [node.node for node in cards if node.interpolated]:
        names = format_list(interpolated, 2, "more nodes")
        yield f"The counters of {names} were read beside the training, and are interpolated to its steps."
    rdma = [node for node in cards if node.rdma]
    if rdma:
        names = format_list([node.node for node in rdma], 2, "more nodes")
        yield f"RDMA ({', '.join(rdma[0].rdma)}) carried most of {names}: its ports are counted with the NIC."


def _about_idle(cards: Sequence[NodeCards]) -> Iterator[str]:
    """Where what passes a NIC without the training is more than a trifle."""
    for node in cards:
        if node.idle is not None and node.carried is not None:
            idle = node.idle.busier
            if idle > _IDLE_IS_MUCH * node.carried.busier:
                yield (
                    f"Before the training began, {_size(idle)} passed {node.ifname} of {node.node} in the time of a "
                    "step: not subtracted."
                )
                return


def _gaps(flows: CardFlows, cards: Sequence[NodeCards]) -> list[_Gap]:
    """Of each node whose card was read, the greater gap of the two directions."""
    gaps = []
    for expected, node in zip(flows.nodes, cards, strict=True):
        if node.carried is not None:
            both = [
                _Gap(cards=node, sends=way, seen=node.carried.one_way(sends=way), expected=expected.one_way(sends=way))
                for way in (True, False)
            ]
            gaps.append(max(both, key=lambda gap: abs(gap.beyond)))
    return gaps


def _other_manner(
    observed: Observed, calls: Mapping[int, WorkerCalls], cards: Sequence[NodeCards], most: float
) -> str | None:
    """The algorithm and protocol of NCCL by which all cards counted what is expected; None where none fits."""
    if all(kind.group.backend != "nccl" for worker in calls.values() for kind in worker.kinds):
        return None
    tried: list[tuple[float, str]] = []
    for protocol, factor in protocols_of("nccl").items():
        for algorithm in algorithms_of("nccl", "all_reduce"):
            flows = expect_flows(calls, observed, Manner(all_reduce=algorithm.name, wire_factor=factor))
            misfit = max(abs(gap.beyond) for gap in _gaps(flows, cards)) / most
            tried.append((misfit, f"all-reduces as a {algorithm.name} and the protocol {protocol}"))
    misfit, words = min(tried)
    return f"NIC counters match NCCL with {words}, within {100 * misfit:.2g} %." if misfit <= _FITS else None


def _by_node(gaps: Sequence[_Gap], most: float) -> Iterator[str]:
    """A sentence on the greatest lack, and one on the greatest excess."""
    for sign, explain in ((-1, _explain_lack), (1, _explain_excess)):
        mine = [gap for gap in gaps if sign * gap.beyond > _CARD_GAP * most]
        if mine:
            worst = max(mine, key=lambda gap: abs(gap.beyond))
            likewise = f" {len(mine) - 1} more nodes differ likewise." if len(mine) > 1 else ""
            yield explain(worst) + likewise


def _explain_lack(gap: _Gap) -> str:
    node, verb = gap.cards, _verb(gap)
    other = find_carrier(node.others, -gap.beyond, sends=gap.sends)
    if other is not None:
        carried = node.others[other].one_way(sends=gap.sends)
        text = f"{node.node} {verb} {_size(carried)} per step over {other}, and {_size(gap.seen)}"
        if is_rdma(other):
            return f"{text} over {node.ifname}, which does not count RDMA."
        return (
            f"{text} of the {_size(gap.expected)} expected over {node.ifname}: the kernel's routes to the other nodes "
            f"lead to {other}, or the backend is set to use it."
        )
    return (
        f"unexplained: {node.ifname} of {node.node} {verb} {_size(gap.seen)} of the {_size(gap.expected)} expected a "
        "step, and no other NIC the rest; neither RDMA without counters nor the memory that nodes of one machine "
        "share would be seen."
    )


def _explain_excess(gap: _Gap) -> str:
    node = gap.cards
    text = f"{node.ifname} of {node.node} {_verb(gap)} {_size(gap.seen)} per step for {_size(gap.expected)} expected"
    if node.idle is not None and node.idle.one_way(sends=gap.sends) >= _MOST * gap.beyond:
        return f"{text}: so much passes it before the training begins, too."
    if node.typical is not None:
        usual = node.typical.one_way(sends=gap.sends) - gap.expected
        if abs(usual) <= _CARD_GAP * gap.seen:
            return (
                f"{text}, but no more than that in the median step: a few steps carried the rest, as a checkpoint or "
                "an evaluation does."
            )
    return f"unexplained: {text}: data or checkpoints on a network file system, or another job, may pass it as well."


def _verb(gap: _Gap) -> str:
    return "sent" if gap.sends else "received"


def _size(size_bytes: float) -> str:
    for unit_bytes, unit in _UNITS:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.3g} {unit}"
    return f"{size_bytes:.0f} B"
