"""Prove that the rendezvous port can be reached: node 0 listens, the other nodes connect, nothing remains."""

from __future__ import annotations

import contextlib
import secrets

import msgspec

from multinode.core.cluster import Cluster
from multinode.errors import ContactLost, NodeFailed
from multinode.transport.agent import AgentTransport, Record
from multinode.transport.outcomes import Outcomes, gather

__all__ = ["CONNECT_TIMEOUT_S", "Listening", "Reached", "probe_port"]

CONNECT_TIMEOUT_S = 3.0
_DEADLINE_S = 15.0


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to connect.

    Attributes:
        addr: where to.
        port: likewise.
        ok: whether our listener answered.
        error: why not: `refused`, `timed out`, `no route`, or the system's words.
        ms: how long it took.
    """

    addr: str
    port: int
    ok: bool
    error: str | None = None
    ms: float | None = None


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """What the listener could bind."""

    ports: tuple[int, ...] = ()
    failed: dict[int, str] = {}


def probe_port(agent: AgentTransport, cluster: Cluster, addr: str, port: int) -> tuple[Listening, Outcomes[Reached]]:
    """Listen on node 0 at `addr:port` and connect to it from all other nodes.

    Returns:
        What node 0 could bind, and one answer for each other node; none where the port could not be bound.

    Raises:
        NodeError, NodeFailed: node 0 could not be asked.
    """
    token = secrets.token_hex(16)
    request = {"schema": 1, "addr": addr, "ports": [port], "token": token, "deadline_s": _DEADLINE_S}
    stream = agent.open(cluster.nodes[0], "listen", request, deadline_s=_DEADLINE_S)
    try:
        listening = _listening(stream.first, cluster.nodes[0].name)
        if listening.failed:
            return listening, Outcomes([])
        question = {
            "schema": 1,
            "targets": [{"addr": addr, "port": port}],
            "token": token,
            "timeout_s": CONNECT_TIMEOUT_S,
        }
        others = cluster.nodes[1:]
        return listening, gather(
            others,
            lambda node: _reached(agent.call(node, "connect", question, deadline_s=_DEADLINE_S), node.name),
            deadline_s=_DEADLINE_S,
        )
    finally:
        # Its end is waited for: the port must be free again before the job binds it.
        with contextlib.suppress(ContactLost):
            stream.finish(_DEADLINE_S)
        stream.close()


def _listening(record: Record | None, node: str) -> Listening:
    try:
        return msgspec.convert(record, Listening, str_keys=True)
    except msgspec.ValidationError as error:
        raise NodeFailed(f"its answer cannot be read: {error}", node=node) from error


def _reached(record: Record, node: str) -> Reached:
    try:
        return msgspec.convert(record["results"], list[Reached])[0]
    except (msgspec.ValidationError, LookupError) as error:
        raise NodeFailed(f"its answer cannot be read: {error}", node=node) from error
