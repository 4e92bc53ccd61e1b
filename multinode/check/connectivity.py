"""Test the network: every node opens ports, the others connect and stream to them, and all are closed again."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from multinode.cluster.cluster import Node
from multinode.errors import ContactLost, MultinodeError, NodeFailed, UsageError
from multinode.records.samples import StreamResult
from multinode.traffic.pair_speeds import Pair, PairSpeed, least_of_pairs, stream_speed
from multinode.transport.agent import AgentStream, AgentTransport, Record, require_kind
from multinode.transport.base import Outcomes, gather, time_left

ALL_PAIRS_NODES = 16
_RANDOM_PEERS = 2


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Ports that a node's listeners could bind."""

    node: str
    ports: tuple[int, ...] = ()  # bound: those asked for, then ephemeral ones
    failed: dict[int, str] = {}  # the reason, for ports asked for that could not be bound


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of `node` to connect to `peer`."""

    node: str
    peer: str
    addr: str  # the peer's address
    port: int
    # None is success; `refused`, `timed out`, `no route`, `wrong answer`, `large packets lost`, or the system's message
    error: str | None = None
    ms: float | None = None  # time to the connection or to the failure
    path_mtu: int | None = None  # the kernel's path MTU, in bytes


class ConnectivityResult(msgspec.Struct, frozen=True, kw_only=True):
    """All results."""

    listening: tuple[Listening, ...] = ()  # by node, in node-rank order
    attempts: tuple[Attempted, ...] = ()  # in the planned order
    streams: tuple[PairSpeed, ...] = ()  # in the planned order; empty without streams


def choose_pairs(names: Sequence[str], rng: random.Random) -> tuple[Pair, ...]:
    """Ordered pairs of caller and peer for a check: all of them up to 16 nodes.

    With more nodes, each connects to the next one (as in a ring all-reduce), to node 0 (the rendezvous) and to two
    others.
    """
    if len(names) <= ALL_PAIRS_NODES:
        return tuple((caller, peer) for caller in names for peer in names if peer != caller)
    pairs = list(launch_pairs(names))
    for caller in names:
        pairs += [(caller, peer) for peer in rng.sample([name for name in names if name != caller], _RANDOM_PEERS)]
    return tuple(dict.fromkeys(pairs))


def launch_pairs(names: Sequence[str]) -> tuple[Pair, ...]:
    """Pairs before a launch: every node connects to node 0, and to its neighbors in the ring."""
    count = len(names)
    pairs = [(caller, names[0]) for caller in names[1:]]
    for index, caller in enumerate(names):
        pairs += [(caller, names[(index + step) % count]) for step in (1, -1)]
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def round_robin(names: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs that cover all pairs once (the circle method), each one way."""
    players: list[str | None] = [*names]
    if len(players) % 2:
        players.append(None)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(tuple((a, b) for a, b in facing if a is not None and b is not None))
        players = [players[0], players[-1], *players[1:-1]]
    return tuple(pairs for pairs in rounds if pairs)


def stream_pairs(
    names: Sequence[str],
    stream: Callable[[Sequence[Pair]], Iterable[PairSpeed]],
    least_of: Callable[[Sequence[PairSpeed]], Mapping[Pair, float]],
    say: Callable[[str], None],
) -> tuple[PairSpeed, ...]:
    """The speed of every pair, each way; the better of two tries for pairs below the minimum.

    A node may stall for a moment; a bad cable is always slow. The slow pairs of the first try run together again: a
    link that they share, as between two switches, is then slow for both again.

    `stream` runs disjoint pairs at once, and may leave some out of the second try; `least_of` has Gbit/s by pair.
    """
    speeds: dict[Pair, PairSpeed] = {}
    rounds = round_robin(names)
    both_ways = [(pairs, [(peer, caller) for caller, peer in pairs]) for pairs in rounds]
    for number, ways in enumerate(both_ways, 1):
        say(f"measuring a stream between each pair of nodes, round {number} of {len(rounds)}")
        for way in ways:
            speeds |= {(speed.source, speed.target): speed for speed in stream(way)}
    least = least_of(tuple(speeds.values()))
    slow = {
        pair
        for pair, speed in speeds.items()
        if speed.gbit_per_s is not None and speed.gbit_per_s < least.get(pair, 0.0)
    }
    if slow:
        say("measuring a slow stream again" if len(slow) == 1 else f"measuring {len(slow)} slow streams again")
    for way in (way for ways in both_ways for way in ways):
        again = [pair for pair in way if pair in slow]
        for speed in stream(again) if again else ():
            first = speeds[speed.source, speed.target]
            if speed.gbit_per_s is not None:
                worse, better = sorted((first.gbit_per_s or 0.0, speed.gbit_per_s))
                first = msgspec.structs.replace(first, gbit_per_s=better, worse_gbit_per_s=worse)
            speeds[speed.source, speed.target] = first
    return tuple(speeds.values())


_ANSWER_S = 15.0
_CONNECT_S = 3.0
# Many nodes share the controller, and in a lab one machine: slowness of either is not the network's.
_CONNECT_S_PER_NODE = 0.15
_STREAM_ANSWER_S = 10.0


class _Opened(msgspec.Struct, frozen=True, tag_field="kind", tag="listening"):
    ports: tuple[int, ...] = ()
    failed: dict[int, str] = {}


class _Reached(msgspec.Struct, frozen=True):
    """As in `Attempted`."""

    addr: str
    port: int
    error: str | None = None
    ms: float | None = None
    path_mtu: int | None = None


class _ConnectResults(msgspec.Struct, frozen=True, tag_field="kind", tag="attempts"):
    results: tuple[_Reached, ...]


class _StreamResults(msgspec.Struct, frozen=True, tag_field="kind", tag="streams"):
    results: tuple[StreamResult, ...]


class _Closed(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """All ports are closed."""


_Answer = _Opened | _ConnectResults | _StreamResults | _Closed
_Kind = TypeVar("_Kind")


class ConnectivityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is tested."""

    pairs: tuple[Pair, ...] = ()  # caller and peer
    master_port: int | None  # opened on every node beside the ephemeral ones, if free; None opens only those
    ephemeral: int = 4  # number of ephemeral ports per node
    stream_s: float | None = None  # duration of a stream between each pair, both ways; None makes none
    least_gbit_per_s: dict[Pair, float] = {}  # by pair, the minimum of a healthy stream; slower ones are repeated
    deadline_s: float = 600.0  # total time; streams that would end later are left out


def run_connectivity_test(
    agent: AgentTransport,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    plan: ConnectivityPlan,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ConnectivityResult, tuple[MultinodeError, ...]]:
    """The result, and the errors of nodes that could not be asked; the others continue without them."""
    with ConnectivityTest(agent, nodes, addresses, plan) as test:
        attempts = test.connect(plan.pairs)
        streams: tuple[PairSpeed, ...] = ()
        if (seconds := plan.stream_s) is not None:
            streams = stream_pairs(
                [node.name for node in test.present],
                lambda pairs: test.stream(pairs, seconds) if test.has_time_for(seconds) else (),
                lambda _: plan.least_gbit_per_s,
                say,
            )
    return ConnectivityResult(listening=test.listening, attempts=attempts, streams=streams), tuple(test.errors)


class ConnectivityTest:
    """The nodes with open ports, inside a `with` block."""

    def __init__(
        self, agent: AgentTransport, nodes: Sequence[Node], addresses: Mapping[str, str], plan: ConnectivityPlan
    ) -> None:
        self.errors: list[MultinodeError] = []  # of nodes that could not be asked, or no longer
        self.listening: tuple[Listening, ...] = ()  # what was opened, by node
        self._agent = agent
        self._addresses = addresses
        self._nodes = tuple(nodes)
        self._ends = time.monotonic() + plan.deadline_s
        self._master_port = plan.master_port
        self._request = {
            "schema": 1,
            "ports": [] if plan.master_port is None else [plan.master_port],
            "ephemeral": plan.ephemeral,
            "token": secrets.token_hex(16),
            "deadline_s": plan.deadline_s,
            "then": True,
        }
        self._streams: dict[str, AgentStream[_Answer]] = {}

    def __enter__(self) -> Self:
        opened = gather(self._nodes, self._open, deadline_s=_ANSWER_S)
        self.listening = self._note(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Wait for their end: the job must be able to bind the ports.
        gather(self.present, self._end, deadline_s=_ANSWER_S)
        for stream in self._streams.values():
            stream.close()

    @property
    def present(self) -> tuple[Node, ...]:
        """The nodes that take part."""
        return tuple(node for node in self._nodes if node.name in self._streams)

    def has_time_for(self, seconds: float) -> bool:
        """Whether a stream of this duration would end before the nodes close their ports."""
        return time.monotonic() + seconds + _STREAM_ANSWER_S < self._ends

    def connect(self, pairs: Sequence[Pair]) -> tuple[Attempted, ...]:
        """Each caller connects to every port of its peers, with full-size packets on one of them."""
        timeout_s = _CONNECT_S + _CONNECT_S_PER_NODE * len(self._nodes)
        ports = {opened.node: opened.ports for opened in self.listening}
        targets: dict[str, list[tuple[str, Record]]] = {}
        for caller, peer in pairs:
            for port in ports.get(peer, ()):
                target = {"addr": self._addresses[peer], "port": port, "whole": port == ports[peer][-1]}
                targets.setdefault(caller, []).append((peer, target))

        def ask(node: Node) -> list[Attempted]:
            mine = targets[node.name]
            self._order(node, {"attempts": [target for _, target in mine], "timeout_s": timeout_s})
            results = self._hear(node, _ConnectResults, timeout_s).results
            if len(results) != len(mine):
                raise NodeFailed(f"it returned {len(results)} results for {len(mine)} requests", node=node.name)
            answers = zip(mine, results, strict=True)
            return [
                Attempted(node=node.name, peer=peer, **msgspec.structs.asdict(result)) for (peer, _), result in answers
            ]

        callers = [node for node in self.present if node.name in targets]
        answers = self._note(gather(callers, ask, deadline_s=timeout_s + _ANSWER_S))
        return tuple(reached for answer in answers for reached in answer)

    def stream(self, pairs: Sequence[Pair], seconds: float) -> tuple[PairSpeed, ...]:
        """Each caller sends to its peer over one connection; the pairs should be disjoint."""
        timeout_s = seconds + _STREAM_ANSWER_S
        peers = dict(pairs)
        ports = {opened.node: opened.ports[-1] for opened in self.listening if opened.ports}

        def order(node: Node) -> None:
            peer = peers[node.name]
            target = {"addr": self._addresses[peer], "port": ports[peer], "seconds": seconds}
            self._order(node, {"streams": [target], "timeout_s": timeout_s})

        def hear(node: Node) -> PairSpeed:
            return stream_speed(node.name, peers[node.name], self._hear(node, _StreamResults, timeout_s).results)

        callers = [node for node in self.present if peers.get(node.name) in ports]
        # All start before any result is read: only some nodes are read at a time, and the streams must overlap.
        self._note(gather(callers, order, deadline_s=_ANSWER_S))
        senders = [node for node in callers if node.name in self._streams]
        return self._note(gather(senders, hear, deadline_s=timeout_s + _ANSWER_S))

    def _open(self, node: Node) -> Listening:
        request = self._request | {"addr": self._addresses[node.name]}
        stream: AgentStream[_Answer]
        stream = self._agent.open(node, "connectivity", request, _Answer, deadline_s=_ANSWER_S)  # type: ignore[arg-type]  # a union is no type
        try:
            opened = require_kind(stream.first, _Opened, node.name)
        except NodeFailed:
            stream.close()
            raise
        self._streams[node.name] = stream
        return Listening(node=node.name, ports=opened.ports, failed=opened.failed)

    def _order(self, node: Node, order: Record) -> None:
        with self._dropping(node) as stream:
            stream.send(order)

    def _hear(self, node: Node, kind: type[_Kind], timeout_s: float) -> _Kind:
        with self._dropping(node) as stream:
            record = stream.read(timeout_s + _ANSWER_S)
            if record is None:
                raise ContactLost("its agent ended during the network test", node=node.name)
        return require_kind(record, kind, node.name)

    @contextlib.contextmanager
    def _dropping(self, node: Node) -> Iterator[AgentStream[_Answer]]:
        stream = self._streams[node.name]
        try:
            yield stream
        except MultinodeError:
            del self._streams[node.name]
            stream.close()
            raise

    def _end(self, node: Node) -> None:
        stream = self._streams[node.name]
        with contextlib.suppress(MultinodeError):
            stream.send({"end": True})
            end = time.monotonic() + _ANSWER_S
            while (record := stream.read(time_left(end))) is not None:
                if isinstance(record, _Closed):
                    self._agent.keep(node, self._streams.pop(node.name))
                    return

    def _note(self, outcomes: Outcomes[Any]) -> tuple[Any, ...]:
        self.errors += outcomes.failed.values()
        return tuple(outcomes.found.values())


_PAIR_S = 0.5


def require_pairs(names: Sequence[str]) -> None:
    """Reject a measurement of all pairs if there are too many, or none."""
    if len(names) > ALL_PAIRS_NODES:
        raise UsageError(
            f"--pairs supports at most {ALL_PAIRS_NODES} nodes; this hostfile has {len(names)}",
            hint=f"use --nodes {ALL_PAIRS_NODES}, or a hostfile with fewer nodes",
        )
    if len(names) < 2:  # noqa: PLR2004 - a pair is two
        raise UsageError("--pairs needs at least two nodes; there is one", hint="use a hostfile with two or more nodes")


def measure_pairs(
    agent: AgentTransport,
    nodes: Sequence[Node],
    addresses: Mapping[str, str],
    ceilings: Mapping[str, float],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[PairSpeed, ...]:
    """Stream between all pairs, both ways.

    `ceilings` are payload in Gbit/s that each node's link carries, if known.
    """
    plan = ConnectivityPlan(master_port=None, ephemeral=1)
    with ConnectivityTest(agent, nodes, addresses, plan) as test:
        _raise_first(test.errors)
        stream = partial(test.stream, seconds=_PAIR_S)
        speeds = stream_pairs([node.name for node in nodes], stream, partial(least_of_pairs, ceilings=ceilings), say)
        _raise_first(test.errors)
    return speeds


def _raise_first(errors: Sequence[MultinodeError]) -> None:
    for error in errors:
        raise error
