"""The port of the rendezvous: the one that was asked for, or one of the run's own, so that two runs do not meet."""

from __future__ import annotations

import zlib

from multinode.cluster.facts import NodeFacts

# Below the ephemeral ports of Linux (32768 to 60999), of which any connection may take one.
RENDEZVOUS_PORTS = range(20000, 30000)
_CANDIDATES = 16


def candidate_ports(run_id: str, asked: int | None) -> tuple[int, ...]:
    """The ports that a run may take, the first one that is free: the one asked for, else those that its id gives."""
    if asked is not None:
        return (asked,)
    first = zlib.crc32(run_id.encode())
    return tuple(RENDEZVOUS_PORTS[(first + step) % len(RENDEZVOUS_PORTS)] for step in range(_CANDIDATES))


def choose_master_port(run_id: str, asked: int | None, found: NodeFacts | None) -> int:
    """The first of them that is free on node 0, as far as its facts are known; the first where none is."""
    ports = candidate_ports(run_id, asked)
    taken = found.port_users if found is not None else {}
    return next((port for port in ports if str(port) not in taken), ports[0])
