"""What a plan says beside its commands: routes that leave the chosen network, and what becomes of its levers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from multinode.cluster.cluster import Cluster
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import NodeFacts
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.levers.balance import Balance
from multinode.levers.lever import Workers
from multinode.levers.levers import Levers
from multinode.stats.unknown import Unknown

NOTES = RuleGroup("Notes on a plan")
_NO_ROUTE = NOTES.rule(
    "no-route",
    about="a node without a route to a peer",
    message="{node} has no route to {peer}: {reason}",
    figures=("peer",),
)
_OTHER_INTERFACE = NOTES.rule(
    "other-interface",
    about="a node that listens on one interface but sends to a peer over another",
    message="{node} sends to {peer} over {ifname} but listens on {listens_on}",
    figures=("peer", "ifname", "listens_on"),
)
_NO_EFFECT = NOTES.rule(
    "no-effect",
    about="an option that has no effect if the job runs on one node",
    message="{option} has no effect if the job runs on one node{why}",
    figures=("option",),
)
_SHARES = NOTES.rule(
    "samples-by-speed",
    about="the number of samples per worker on each node, in proportion to its speed",
    message="samples per step per worker: {shares} ({option}{source})",
    figures=("shares", "option", "run_id"),
)
_RELATIVE_SHARES = NOTES.rule(
    "relative-samples",
    about="the relative number of samples per worker on each node, if the batch is unknown",
    message="relative number of samples per worker: {shares} ({option}{source})",
    figures=("shares", "option", "run_id"),
)


def route_notes(cluster: Cluster, endpoints: tuple[Endpoint, ...], facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Nodes whose kernel would send to a peer over another interface than the one they listen on."""
    for node, mine in zip(cluster.nodes, endpoints, strict=True):
        node_facts = facts.get(node.name)
        for route in node_facts.routes if node_facts else ():
            if mine.addr is None or route.peer == mine.addr:
                continue
            if isinstance(route.source, Unknown):
                yield _NO_ROUTE.found(node.name, peer=route.peer, reason=route.source.reason)
            elif route.source != mine.addr:
                yield _OTHER_INTERFACE.found(node.name, peer=route.peer, ifname=route.ifname, listens_on=mine.ifname)


def lever_notes(levers: Levers, workers: Workers) -> Iterator[Finding]:
    """Levers without an effect, and the samples that each node gets.

    Raises:
        UsageError: the speed of a node is unknown.
    """
    if len(workers.nodes) == 1:
        for lever in levers:
            if lever.idle_alone is not None:
                yield _NO_EFFECT.found(None, option=lever.option, why=lever.idle_alone)
    elif levers.balance is not None:
        yield _shares_note(levers.balance, workers)


def _shares_note(balance: Balance, workers: Workers) -> Finding:
    shares, speeds = balance.shares(workers), balance.of_workers(workers)
    firsts = [sum(workers.counts[:place]) for place in range(len(workers.counts))]
    texts = [f"{shares[first]:d}" if shares is not None else f"{speeds[first]:.3g}" for first in firsts]
    return (_SHARES if shares is not None else _RELATIVE_SHARES).found(
        None,
        shares=", ".join(f"{node} {text}" for node, text in zip(workers.nodes, texts, strict=True)),
        option=balance.option,
        source=f", as measured in run {balance.run_id}" if balance.run_id is not None else "",
        run_id=balance.run_id,
    )
