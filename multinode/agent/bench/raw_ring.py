"""RawRing: raw TCP around the ring of nodes between the turns of a collective, over the same cards at the same time.

The first worker of each node has a port open, which a thread serves; each streams to the next node's while the one
before streams to it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional

from ..channel import Record
from ..connectivity.connections import Call, Connections, Listener, Ping, Stream

_POLL_S = 1.0
_TIMEOUT_S = 10.0
_STREAM_S = 0.15
_PINGS = 50

Place = tuple[str, int, str]
"""Where a node listens: address, port and token."""


class RawRing:
    """This node's place in the ring.

    Args:
        addr: of this node on the data plane; None opens no port.
    """

    def __init__(self, addr: Optional[str]) -> None:
        self.place: Optional[Place] = None
        self._peer: Optional[Place] = None
        served = Connections()
        token = secrets.token_hex(16)
        listener = Listener(served, token, addr or "")
        ports = listener.open_ephemeral(1) if addr is not None else []
        if addr is not None and ports:
            self.place = (addr, ports[0], token)
            threading.Thread(target=_serve, args=(served,), daemon=True).start()

    def join(self, places: Sequence[Optional[Place]]) -> None:
        """Make the next node this one's peer; without the places of all nodes there is none.

        Args:
            places: of all nodes, in node-rank order.
        """
        known = [place for place in places if place is not None]
        if self.place is not None and len(known) == len(places) > 1:
            self._peer = known[(known.index(self.place) + 1) % len(known)]

    def stream(self, connections: int) -> list[Record]:
        """What arrived at the peer, by connection; empty without one."""
        return self._call(Stream, connections, {"seconds": _STREAM_S})

    def ping(self) -> list[Record]:
        """The round trips with the peer, on one connection; empty without one."""
        return self._call(Ping, 1, {"count": _PINGS})

    def _call(self, kind: Callable[[Record, str, float], Call], count: int, target: dict[str, Any]) -> list[Record]:
        if self._peer is None:
            return []
        addr, port, token = self._peer
        connections = Connections()
        calls = [kind({"addr": addr, "port": port, **target}, token, _TIMEOUT_S) for _ in range(count)]
        for call in calls:
            connections.begin(call)
        while any(call.result is None for call in calls):
            connections.turn(_POLL_S)
        connections.close()
        return [call.result or {} for call in calls]


def _serve(connections: Connections) -> None:
    """Until the worker ends."""
    while True:
        connections.turn(_POLL_S)
