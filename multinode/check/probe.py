"""probe: ask every node for its facts, in one round trip each; what kept a node from answering is a finding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.check.rule import Finding, Rule, finding_of_error
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NodeFacts
from multinode.errors import MultinodeError
from multinode.transport.agent import AgentTransport
from multinode.transport.fan_out import Outcomes, gather
from multinode.transport.refusals import REFUSALS

# nvidia-smi may take 30 s on a cold driver.
PROBE_DEADLINE_S = 45.0
# What the transport says of a node that cannot be asked, for the reference.
UNANSWERED = (
    *(Rule("ssh", "error", one.catches, one.message, one.hint) for one in REFUSALS),
    Rule(
        "ssh",
        "error",
        catches="a node that answers too late, or goes away while it is asked",
        message="no answer within {deadline_s} s",
        hint="is it alive? Try:\nssh {node} true",
    ),
)

UNVERIFIED = Rule(
    "ssh",
    "warning",
    catches="a node whose host key is compared with no known one (StrictHostKeyChecking no)",
    message="its host key is compared with no known one (StrictHostKeyChecking no in the SSH configuration): whoever "
    "answers in its place gets the job, so no secret is sent to it",
    hint="take that setting out for it, and accept the key once, after comparing its fingerprint:\n"
    "ssh -o StrictHostKeyChecking=ask {node} true",
)


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe asks beyond the node itself.

    Attributes:
        controller_cwd: directory to run in where the hostfile names none and the node has it too.
        peers: addresses to which routes are asked for.
        ports: ports that node 0 should have free.
        tools: programs of the job, looked for beside its interpreter and on PATH.
        packages: whether versions in the job's environment are read (it starts the job's interpreter).
        contents: those of `paths` whose content is digested.
        datasets: names whose files are digested, of those in a dataset_info.json among `contents`.
        model: directory of the model, whose config.json is read.
        arguments: keys of a LLaMA-Factory YAML; which of them are no arguments is asked.
    """

    controller_cwd: str | None = None
    peers: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    tools: tuple[str, ...] = ()
    packages: bool = True
    contents: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    model: str | None = None
    arguments: tuple[str, ...] = ()


def probe(agent: AgentTransport, cluster: Cluster, questions: Questions) -> Outcomes[NodeFacts]:
    """The facts of every node, or why there are none, in node-rank order."""
    return gather(cluster.nodes, lambda node: _probe_node(agent, node, questions), deadline_s=PROBE_DEADLINE_S)


def check_ssh(errors: Iterable[MultinodeError]) -> Iterator[Finding]:
    """What kept nodes from answering, as findings; the transport has said why and what fixes it."""
    for error in errors:
        yield finding_of_error("ssh", error)


def check_host_keys(agent: AgentTransport, nodes: Iterable[Node]) -> Iterator[Finding]:
    """Nodes of which nobody makes sure that they are the ones which are meant."""
    return (UNVERIFIED.found(node.name).finding() for node in nodes if not agent.verifies(node))


def peer_addresses(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The data-plane addresses that the hostfile names."""
    return tuple(node.addr for node in nodes if node.addr is not None)


def _probe_node(agent: AgentTransport, node: Node, questions: Questions) -> NodeFacts:
    request = {"schema": 1, "python": node.python, "workdir": node.workdir, **msgspec.to_builtins(questions)}
    asked_s = time.time()
    facts = agent.call(node, "probe", request, NodeFacts, deadline_s=PROBE_DEADLINE_S)
    offset_s = _clock_offset(facts.time_s, asked_s, time.time())
    return msgspec.structs.replace(facts, node=node.name, clock_offset_s=offset_s)


def _clock_offset(time_s: float | None, asked_s: float, answered_s: float) -> float | None:
    """How far the node's clock is ahead of ours, in seconds; 0 where its time lies between question and answer."""
    if time_s is None:
        return None
    # The node reads its clock last, so the time from there to here is small; that a busy controller comes late to
    # read an answer must not look like a clock that is behind.
    return 0.0 if asked_s <= time_s <= answered_s else time_s - answered_s
