"""A group's members wait for each other in a hub on the master's port, which the launcher of node 0 holds."""

from __future__ import annotations

import selectors
import socket
import threading
import time

_CONNECT_S = 60.0


class Hub(threading.Thread):
    """Adds up what the members of each group send, and answers all of them once the last one has sent.

    A group that has lost a member is broken: whoever waits in it, then or later, is told so.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, address: str, port: int) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server((address, port))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._members: dict[socket.socket, str] = {}
        self._sent: dict[str, dict[socket.socket, int]] = {}
        self._broken: set[str] = set()

    def run(self) -> None:
        """Serve for as long as the process lives."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._selector.register(self._server.accept()[0], selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)

    def _hear(self, member: socket.socket) -> None:
        """One message, `group size value`, which fits into one packet: a member sends the next once it was answered."""
        try:
            words = member.recv(256).decode().split()
        except OSError:
            words = []
        if not words:
            self._selector.unregister(member)
            member.close()
            if member in self._members:
                self._break(self._members.pop(member))
            return
        group, size, value = words[0], int(words[1]), int(words[2])
        self._members[member] = group
        sent = self._sent.setdefault(group, {})
        sent[member] = value
        if group in self._broken:
            self._break(group)
        elif len(sent) == size:
            self._answer(group, str(sum(sent.values())))

    def _break(self, group: str) -> None:
        self._broken.add(group)
        self._answer(group, "broken")

    def _answer(self, group: str, text: str) -> None:
        for member in self._sent.pop(group, {}):
            try:
                member.sendall(f"{text}\n".encode())
            except OSError:
                # Its end comes to be heard, too.
                continue


class Member:
    """This process in a group."""

    def __init__(self, group: str, size: int, address: str, port: int) -> None:
        self._words = f"{group} {size}"
        self._socket = _connect(address, port)

    def add_up(self, value: int) -> int:
        """The sum of all members' values, once all have come here.

        Raises:
            RuntimeError: one of them is gone, or does not come in time, as gloo says it.
        """
        try:
            self._socket.sendall(f"{self._words} {value}\n".encode())
            answer = self._socket.recv(256).decode()
        except TimeoutError as error:
            waited_ms = 1000 * (self._socket.gettimeout() or 0)
            text = f"Timed out waiting {waited_ms:.0f}ms for recv operation to complete"
            raise RuntimeError(f"[gloo/transport/tcp/stand_in] {text}") from error
        except OSError as error:
            raise RuntimeError(f"[gloo/transport/tcp/stand_in] {error}") from error
        if not answer or answer == "broken\n":
            raise RuntimeError("[gloo/transport/tcp/stand_in] Connection closed by peer")
        return int(answer)

    def set_timeout(self, timeout_s: float) -> None:
        """How long the others are waited for from now on."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Leave."""
        self._socket.close()


def _connect(address: str, port: int) -> socket.socket:
    end = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
