"""Raw TCP and RDMA around the ring of nodes, between the turns of a collective and over the same NICs.

RawRing: the first worker of each node has an open port, which a thread serves. Each node streams to the next one while
the previous one streams to it. RdmaRing uses perftest's ib_write_bw over all RDMA ports at once. The programs are
children of the worker and have a deadline.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

from ..channel import Record
from ..connectivity.connections import ClientConnection, Connections, Listener, Ping, TimedStream
from ..facts.network import is_port_taken
from ..facts.nics import Counters, list_rdma_ports
from ..programs import Query, QueryFailed, find_program

_POLL_S = 1.0
_TIMEOUT_S = 10.0
_STREAM_S = 0.15
_PINGS = 50

Place = tuple[str, int, str]
"""Address, port and token of a node's listener."""


class RawRing:
    """This node's part in the TCP ring.

    Args:
        addr: this node's address on the data plane; None opens no port.
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
        """Make the next node this one's peer. If a node has no place, there is no peer.

        Args:
            places: places of all nodes, in node-rank order.
        """
        places_known = [place for place in places if place is not None]
        if self.place is not None and len(places_known) == len(places) > 1:
            self._peer = places_known[(places_known.index(self.place) + 1) % len(places_known)]

    def stream(self, connections: int) -> list[Record]:
        """Stream to the peer; results by connection, empty without a peer."""
        return self._call(TimedStream, connections, {"seconds": _STREAM_S})

    def ping(self) -> list[Record]:
        """Time round trips with the peer on one connection; empty without a peer."""
        return self._call(Ping, 1, {"count": _PINGS})

    def _call(
        self, kind: Callable[[Record, str, float], ClientConnection], count: int, target: dict[str, Any]
    ) -> list[Record]:
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
    """Serve connections until the worker ends."""
    while True:
        connections.turn(_POLL_S)


_PROGRAM = "ib_write_bw"
# Messages of the size of NCCL's slices, over enough queue pairs to saturate a port.
_OPTIONS = ("-s", "131072", "-q", "4", "-D", "2", "-F", "--report_gbits")
_DEADLINE_S = 20.0
_LISTEN_S = 5.0
_RDMA_POLL_S = 0.02
_GID_VARIABLE = "NCCL_IB_GID_INDEX"
# A port counts as used from this fraction (1 / 8) of the busiest port's bytes on, and from this number of bytes on.
_PART_OF_MOST, _LEAST_BYTES = 8, 1 << 16
# Output of RESULT_FMT_G, REPORT_FMT and REPORT_FMT_EXT in perftest_parameters.h (4.4 to 26.07).
_HEAD = re.compile(r"#bytes +#iterations +BW peak\[Gb/sec\] +BW average\[Gb/sec\]")
_ROW = re.compile(r"^ *(\d{1,18})\s+(\d{1,18})\s+[\d.]+\s+(\d+\.\d+)\s+[\d.]+\s*$", re.MULTILINE)

RdmaPlace = tuple[str, list[int]]
"""Address of a node's servers, and a TCP port for each of its RDMA ports."""


def used_ports(before: Counters, after: Counters) -> list[str]:
    """RDMA ports, `device/port`, that sent a considerable part of the bytes between the two readings."""
    sent = {
        name: (after[name]["tx_bytes"] or 0) - (counters["tx_bytes"] or 0)
        for name, counters in before.items()
        if "/" in name and name in after
    }
    least = max(_LEAST_BYTES, max(sent.values(), default=0) / _PART_OF_MOST)
    return [name for name, size in sent.items() if size >= least]


def parse_report(text: str) -> Optional[tuple[int, float]]:
    """Written bytes and average Gbit/s in the output of ib_write_bw; None if it has no result."""
    head = _HEAD.search(text)
    row = _ROW.search(text, head.end()) if head is not None else None
    if row is None or not float(row[3]):
        return None
    return int(row[1]) * int(row[2]), float(row[3])


class RdmaRing:
    """This node's part in the RDMA ring.

    Args:
        addr: this node's address on the data plane; perftest needs IPv4.
        names: RDMA ports to use, as returned by `used_ports`.
    """

    def __init__(self, addr: str, names: Sequence[str]) -> None:
        self._program = find_program(_PROGRAM, os.environ.get("PATH", os.defpath))
        ports = {f"{port['device']}/{port['port']}": port for port in list_rdma_ports()}
        self._ports = [ports[name] for name in names if name in ports]
        self.place: Optional[RdmaPlace] = None
        if self._program is not None and self._ports and ":" not in addr:
            self.place = (addr, _free_ports(addr, len(self._ports)))
        self._peer: Optional[RdmaPlace] = None
        self._servers: list[Query] = []

    def serve(self, places: Sequence[RdmaPlace]) -> None:
        """Start the servers for the previous node, and wait until they listen.

        Args:
            places: places of all nodes, in node-rank order.
        """
        if self.place is None:
            return
        self._peer = places[(list(places).index(self.place) + 1) % len(places)]
        # Nodes may use different numbers of ports: all use the smallest number.
        self._ports = self._ports[: min(len(ports) for _, ports in places)]
        mine = self.place[1][: len(self._ports)]
        self._servers = [self._start(port, tcp_port) for port, tcp_port in zip(self._ports, mine)]
        deadline = time.monotonic() + _LISTEN_S
        while time.monotonic() < deadline and not all(map(is_port_taken, mine)):
            time.sleep(_RDMA_POLL_S)

    def write(self) -> list[Record]:
        """Write to the next node and return results by port. Call it when all servers listen; they end with it."""
        if self._peer is None:
            return []
        addr, tcp_ports = self._peer
        clients = [self._start(port, tcp_port, addr) for port, tcp_port in zip(self._ports, tcp_ports)]
        return [_read_answer(f"{port['device']}:{port['port']}", client) for port, client in zip(self._ports, clients)]

    def close(self) -> None:
        """End the servers; after a success they have ended by themselves."""
        for server in self._servers:
            server.close()

    def _start(self, port: Record, tcp_port: int, *addr: str) -> Query:
        index = port.get("gid_index")
        named = os.environ.get(_GID_VARIABLE, "")
        if port["link_layer"] == "Ethernet" and (named.isdecimal() or index is not None):
            gid = ["-x", named if named.isdecimal() else str(index)]
        else:
            gid = []
        where = ["-d", port["device"], "-i", str(port["port"]), *gid, "-p", str(tcp_port)]
        return Query([str(self._program), *where, *_OPTIONS, *addr], deadline_s=_DEADLINE_S)


def _read_answer(name: str, client: Query) -> Record:
    try:
        report = parse_report(client.answer())
    except QueryFailed as error:
        return {"rdma_port": name, "error": str(error)}
    if report is None:
        return {"rdma_port": name, "error": f"{_PROGRAM} printed no result"}
    size_bytes, gbit_per_s = report
    return {"rdma_port": name, "size_bytes": size_bytes, "time_s": size_bytes * 8 / gbit_per_s / 1e9, "error": None}


def _free_ports(addr: str, count: int) -> list[int]:
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((addr, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
