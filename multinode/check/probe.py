"""probe: ask every node for its facts, in one round trip each; a node that cannot answer is a finding.

`multinode init` writes a hostfile from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.check.rule import CheckFinding, Rule, RuleGroup, finding_of_error
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints
from multinode.cluster.facts import NodeFacts
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather
from multinode.transport.refusals import REFUSALS

# nvidia-smi may take 30 s on a cold driver.
PROBE_DEADLINE_S = 45.0
# The transport's messages for unreachable nodes, for the reference.
UNANSWERED = (
    *(Rule("ssh", "error", one.catches, one.message, one.hint) for one in REFUSALS),
    Rule(
        "ssh",
        "error",
        catches="a node answers too late, or disconnects during the check",
        message="no answer within {deadline_s} s",
        hint="see whether it is up:\nssh {node} true",
    ),
)

_SSH = RuleGroup("ssh")

UNVERIFIED = _SSH.warning(
    catches="a node's host key is not verified (StrictHostKeyChecking no)",
    message="its host key is not verified (StrictHostKeyChecking no in the SSH configuration): an impostor would get "
    "the job, so multinode sends it no secrets",
    hint="remove that setting for this node, compare the key's fingerprint, and accept it once:\nssh -o "
    "StrictHostKeyChecking=ask {node} true",
)


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe asks beyond the node itself."""

    controller_cwd: str | None = None  # working directory if the hostfile names none and the node has it, too
    peers: tuple[str, ...] = ()  # addresses for which routes are asked
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()  # ports that should be free on node 0
    tools: tuple[str, ...] = ()  # programs of the job, looked up beside its interpreter and on PATH
    packages: bool = True  # whether to read package versions (starts the job's interpreter)
    contents: tuple[str, ...] = ()  # those of `paths` to digest
    datasets: tuple[str, ...] = ()  # datasets in a dataset_info.json of `contents` whose files are digested
    model: str | None = None  # directory of the model, whose config.json is read
    arguments: tuple[str, ...] = ()  # keys of a LLaMA-Factory YAML to look up among its arguments


def probe(agent: AgentTransport, cluster: Cluster, questions: Questions) -> Outcomes[NodeFacts]:
    """The facts of every node, or the error, in node-rank order."""
    agent.refresh()
    return gather(cluster.nodes, lambda node: _probe_node(agent, node, questions), deadline_s=PROBE_DEADLINE_S)


def check_ssh(errors: Iterable[MultinodeError]) -> Iterator[CheckFinding]:
    """Nodes that did not answer, as findings; the transport knows the reason and the fix."""
    for error in errors:
        yield finding_of_error("ssh", error)


def check_host_keys(agent: AgentTransport, nodes: Iterable[Node]) -> Iterator[CheckFinding]:
    """Nodes whose identity is not verified."""
    return (UNVERIFIED.found(node.name) for node in nodes if not agent.verifies(node))


def peer_addresses(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The addresses for data in the hostfile."""
    return tuple(node.addr for node in nodes if node.addr is not None)


def _probe_node(agent: AgentTransport, node: Node, questions: Questions) -> NodeFacts:
    request = {"schema": 1, "python": node.python, "workdir": node.workdir, **msgspec.to_builtins(questions)}
    asked_s = time.time()
    facts = agent.call(node, "probe", request, NodeFacts, deadline_s=PROBE_DEADLINE_S)
    offset_s = _clock_offset(facts.time_s, asked_s, time.time())
    return msgspec.structs.replace(facts, node=node.name, clock_offset_s=offset_s)


def _clock_offset(time_s: float | None, asked_s: float, answered_s: float) -> float | None:
    """How far the node's clock is ahead, in seconds; 0 if its time lies between question and answer."""
    if time_s is None:
        return None
    # The node reads its clock last, so the way back is short; a busy controller that reads late must not look like a
    # slow clock.
    return 0.0 if asked_s <= time_s <= answered_s else time_s - answered_s


_HEAD = """\
# One node a line, in node-rank order; the first is node rank 0. Written by `multinode init` from what the nodes said.
#   slots=   workers          gpus=  ids of their GPUs      addr=  address on the training network
#   ifname=  its interface    python=  interpreter of the training environment
# More keys: workdir= user= port= key= jump= price= env.NAME=
"""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    cluster: Cluster  # the nodes with addr, ifname, slots, gpus and python filled in
    text: str  # the hostfile, with comments


def describe_nodes(agent: AgentTransport, cluster: Cluster) -> Described:
    """Probe the nodes and fill in what their lines do not specify."""
    questions = Questions(peers=peer_addresses(cluster.nodes), tools=("torchrun",))
    facts = {found.node: found for found in probe(agent, cluster, questions).require()}
    endpoints, trouble = _endpoints(cluster, facts)
    nodes = tuple(_fill_in(node, facts[node.name], endpoints.get(node.name)) for node in cluster.nodes)
    described = msgspec.structs.replace(cluster, nodes=nodes)
    lines = [_HEAD, *(f"# {line}\n" for line in trouble)]
    for node in nodes:
        lines += ["\n", *(f"# {_one_line(remark)}\n" for remark in _remarks(node, facts[node.name]))]
        lines.append(render_hostfile(msgspec.structs.replace(described, nodes=(node,))))
    text = "".join(lines)
    if parse_hostfile(text, cluster.source).nodes != nodes:
        raise NodeFailed("the nodes' answers do not make a valid hostfile: at least one answer is wrong")
    return Described(cluster=described, text=text)


def _endpoints(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> tuple[dict[str, Endpoint], tuple[str, ...]]:
    try:
        places = choose_endpoints(cluster, facts)
    except UsageError as error:
        return {}, (_one_line(f"No address was chosen. {error}"), _one_line(f"{error.hint}"))
    return {node.name: place for node, place in zip(cluster.nodes, places, strict=True)}, ()


def _fill_in(node: Node, found: NodeFacts, place: Endpoint | None) -> Node:
    gpus = node.gpus
    if gpus is None and node.slots is None and found.visible_gpus:
        gpus = tuple(gpu.index for gpu in found.visible_gpus)
    return msgspec.structs.replace(
        node,
        gpus=gpus,
        slots=node.slots or (len(gpus) if gpus else 1),
        addr=node.addr or (place.addr if place else None),
        ifname=node.ifname or (place.ifname if place else None),
        python=node.python or (found.python if "torch" in found.packages else found.interactive.get("python3")),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _remarks(node: Node, found: NodeFacts) -> Iterator[str]:
    models = ", ".join(dict.fromkeys(gpu.name for gpu in found.gpus)) or "no GPU was found"
    count = f"{len(found.gpus)} x " if found.gpus else ""
    usable = found.memory_limit_gib or found.memory_total_gib
    memory = f", {usable:.0f} GiB of memory" if usable else ""
    torch = f", torch {found.packages['torch']}" if "torch" in found.packages else ""
    yield f"{node.name}: {count}{models}, {found.cores} cores{memory}{torch}"
    for interface in found.interfaces:
        if interface.name in node.ifnames and interface.speed_gbit_per_s:
            yield f"{interface.name}: {interface.speed_gbit_per_s:g} Gbit/s, MTU {interface.mtu}"
    if "torch" not in found.packages:
        yield f"{found.python or 'python3'} has no torch: python= must name the training environment's interpreter"
