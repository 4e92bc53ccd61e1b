"""Port of the rendezvous: the one that was asked for, or one derived from the run id, so that runs do not collide."""

from __future__ import annotations

import zlib

from multinode.cluster.facts import NodeFacts

# Below Linux's ephemeral ports (32768 to 60999), which any connection may take.
RENDEZVOUS_PORTS = range(20000, 30000)
_CANDIDATES = 16


def candidate_ports(run_id: str, asked: int | None) -> tuple[int, ...]:
    """Ports to try, in order: the one asked for, or those derived from the run id."""
    if asked is not None:
        return (asked,)
    first = zlib.crc32(run_id.encode())
    return tuple(RENDEZVOUS_PORTS[(first + step) % len(RENDEZVOUS_PORTS)] for step in range(_CANDIDATES))


def choose_master_port(run_id: str, asked: int | None, found: NodeFacts | None) -> int:
    """The first candidate that is free on node 0 by its facts; the first if none is."""
    ports = candidate_ports(run_id, asked)
    taken = found.port_users if found is not None else {}
    return next((port for port in ports if str(port) not in taken), ports[0])
