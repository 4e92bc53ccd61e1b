"""The verb `connectivity`: opens ports, tries those of other nodes and streams to them.

Lines on stdin say what to try; several may be asked for one after the other. Ends with stdin, on `end`, or at its
deadline, and leaves no port open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from ..channel import Channel, Record
from .connections import Attempt, Call, Connections, Listener, Stream

_POLL_S = 0.2
_STDIN = 0
_CALLS: dict[str, Callable[[Record, str, float], Call]] = {"attempts": Attempt, "streams": Stream}


def run(request: Record, channel: Channel) -> None:
    """One record `listening`; one named like it for each order; `ended` when the ports are closed."""
    connections = Connections()
    listener = Listener(connections, request["token"], request["addr"])
    failed = {port: why for port in request["ports"] for why in [listener.open(port)] if why is not None}
    ports = [port for port in request["ports"] if port not in failed]
    ports += listener.open_ephemeral(int(request.get("ephemeral", 0)))
    channel.emit({"kind": "listening", "ports": ports, "failed": {str(port): why for port, why in failed.items()}})
    try:
        _Orders(connections, channel, request["token"]).serve(time.monotonic() + float(request["deadline_s"]))
    finally:
        listener.close()
        connections.close()
    channel.emit({"kind": "ended"})


class _Orders:
    """What the controller asks to be tried."""

    def __init__(self, connections: Connections, channel: Channel, token: str) -> None:
        self._connections = connections
        self._channel = channel
        self._token = token
        self._pending: list[tuple[str, list[Call]]] = []
        self._over = False

    def serve(self, deadline: float) -> None:
        """Until the end is asked for, stdin ends or `deadline`, on the monotonic clock, has passed."""
        self._connections.watch(_STDIN, self._read)
        while not self._over and not self._channel.closed and time.monotonic() < deadline:
            self._connections.turn(_POLL_S)
            self._answer()

    def _read(self) -> None:
        for line in self._channel.lines(0):
            order = json.loads(line)
            if order.get("end"):
                self._over = True
            for kind in _CALLS:
                if kind in order:
                    self._begin(kind, order)

    def _begin(self, kind: str, order: Record) -> None:
        timeout_s = float(order["timeout_s"])
        calls: list[Call] = [_CALLS[kind](target, self._token, timeout_s) for target in order[kind]]
        self._pending.append((kind, calls))
        for call in calls:
            self._connections.begin(call)

    def _answer(self) -> None:
        for kind, calls in [one for one in self._pending if all(call.result is not None for call in one[1])]:
            self._pending.remove((kind, calls))
            self._channel.emit({"kind": kind, "results": [call.result for call in calls]})
