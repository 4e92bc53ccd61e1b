"""check: ask every node for its facts, test the connections, judge. Reports on the others if one is unreachable.

A launch runs those checks whose failure would make it hang or fail.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from multinode.check import gpus, interfaces, link, machine, memory, paths, ports, rdma, training, variables
from multinode.check.connectivity import ConnectivityPlan, choose_pairs, launch_pairs, run_connectivity_test
from multinode.check.link import least_speeds
from multinode.check.machine import needed_tools
from multinode.check.probe import peer_addresses, probe, torch_environment
from multinode.check.rule import SEVERITIES, Check, CheckFinding, CheckRule, CheckRules, Inspection, finding_of_error
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints, is_link_local
from multinode.cluster.facts import NodeFacts
from multinode.cluster.hostfile import parse_hostfile, render_hostfile
from multinode.cluster.quoting import as_steps
from multinode.errors import MultinodeError, NodeError, NodeFailed, UsageError
from multinode.job.job import Job
from multinode.job.job_files import absent_files, job_files, may_be_paths, with_sharding
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import argument_names, candidate_ports, choose_master_port, plan_launch
from multinode.records.run import make_run_id
from multinode.stats.unknown import Unknown, entries, or_empty, or_none
from multinode.traffic.pair_speeds import PairSpeed
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes

_SSH = CheckRules("ssh")

UNVERIFIED = _SSH.warning(
    about="a node's host key is not verified (StrictHostKeyChecking no)",
    message="ssh does not verify its host key (StrictHostKeyChecking no in the SSH configuration). Another machine "
    "could pose as the node and receive the job, so multinode sends no secrets to this node",
    hint="remove this setting for the node, compare the fingerprint of its key, and accept the key once:\nssh -o "
    "StrictHostKeyChecking=ask {node} true",
)


def check_ssh(errors: Iterable[MultinodeError]) -> Iterator[CheckFinding]:
    """Nodes that did not answer, as findings; the transport knows the reason and the fix."""
    for error in errors:
        yield finding_of_error("ssh", error)


def check_host_keys(agent: AgentTransport, nodes: Iterable[Node]) -> Iterator[CheckFinding]:
    """Nodes whose identity is not verified."""
    return (UNVERIFIED.found(node.name) for node in nodes if not agent.verifies(node))


_HEAD = """\
# One node per line, in node-rank order; the first is node rank 0. Written by `multinode init`, as the nodes reported.
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
    facts = probe(agent, cluster, peers=peer_addresses(cluster.nodes), tools=("torchrun",)).require()
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


def _fill_in(node: Node, facts: NodeFacts, place: Endpoint | None) -> Node:
    gpus = node.gpus
    if gpus is None and node.slots is None and facts.visible_gpus:
        gpus = tuple(gpu.index for gpu in facts.visible_gpus)
    # A link-local address may change at every boot: the interface alone finds it.
    found = place.addr if place is not None and not is_link_local(place.addr) else None
    return msgspec.structs.replace(
        node,
        gpus=gpus,
        slots=node.slots or (len(gpus) if gpus else 1),
        addr=node.addr or found,
        ifname=node.ifname or (place.ifname if place else None),
        python=node.python or _python_with_torch(facts),
    )


def _python_with_torch(facts: NodeFacts) -> str | None:
    return or_none(facts.python) if "torch" in entries(facts.packages) else entries(facts.interactive).get("python3")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _remarks(node: Node, facts: NodeFacts) -> Iterator[str]:
    gpus, torch_version = or_empty(facts.gpus), entries(facts.packages).get("torch")
    models = ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or "no GPU was found"
    count = f"{len(gpus)} x " if gpus else ""
    usable = or_none(facts.memory_limit_gib) or or_none(facts.memory_total_gib)
    memory = f", {usable:.0f} GiB of memory" if usable else ""
    cores = "" if isinstance(facts.cores, Unknown) else f", {facts.cores} cores"
    torch = f", torch {torch_version}" if torch_version is not None else ""
    yield f"{node.name}: {count}{models}{cores}{memory}{torch}"
    for interface in or_empty(facts.interfaces):
        if interface.name in node.ifnames and interface.speed_gbit_per_s:
            yield f"{interface.name}: {interface.speed_gbit_per_s:g} Gbit/s, MTU {interface.mtu}"
    if torch_version is None:
        python = or_none(facts.python) or "python3"
        yield f"{python} has no torch: python= must name the training environment's interpreter"


_EPHEMERAL_PORTS = 2
# Checks of the interpreter that was found before the job starts.
_SOFTWARE = frozenset({"interpreter", "packages", "versions"})
# Looks whether the job's files are there.
_FILES = "paths"


def check_launch(agent: AgentTransport, inspection: Inspection, say: Callable[[str], None]) -> tuple[CheckFinding, ...]:
    """The findings before a launch, of the nodes and then of the connections between them.

    Raises:
        NodeFailed: one would break the run; the others are in its detail.
    """
    cluster = inspection.cluster
    findings = sort_findings(concerning(check_all(inspection, before_launch=True), cluster, inspection.options))
    _raise_first_error(findings)
    if len(cluster.nodes) > 1:
        say("checking that the nodes can reach each other")
        met = _with_connectivity(agent, inspection)
        meeting = (finding for check in CHECKS if check.judges_meeting for finding in check(met))
        findings = sort_findings([*findings, *concerning(meeting, cluster, inspection.options)])
        _raise_first_error(findings)
    return findings


def _with_connectivity(agent: AgentTransport, inspection: Inspection) -> Inspection:
    """The inspection with its connectivity: the nodes have connected to node 0 and their neighbors."""
    nodes = inspection.cluster.nodes
    plan = ConnectivityPlan(
        pairs=launch_pairs([node.name for node in nodes]),
        master_port=inspection.master_port,
        ephemeral=_EPHEMERAL_PORTS,
    )
    addresses = {name: place.addr for name, place in inspection.endpoints.items() if place.addr is not None}
    connectivity, errors = run_connectivity_test(agent, nodes, addresses, plan)
    for error in errors:
        raise error
    return msgspec.structs.replace(inspection, connectivity=connectivity)


def concerning(findings: Iterable[CheckFinding], cluster: Cluster, options: LaunchOptions) -> tuple[CheckFinding, ...]:
    """Findings that concern the job: its setup may provide interpreter and files; a program needs no interpreter."""
    names = {node.name for node in cluster.nodes}
    # Nodes for which the job's files, and its interpreter, are unknown.
    files, software = set[str](), set[str]()
    if options.environment.prelude is not None:
        files, software = names, {node.name for node in cluster.nodes if node.python is None}
    if options.engine is not None and not options.engine.kind.starts_workers:
        software = names
    return tuple(
        finding
        for finding in findings
        if not (
            (finding.code == _FILES and finding.node in files)
            or (finding.code in _SOFTWARE and finding.node in software)
        )
    )


def _raise_first_error(findings: Iterable[CheckFinding]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first, *others = errors
    raise NodeFailed(
        first.message,
        node=first.node,
        hint=first.hint and first.hint.split("\n"),
        detail="\n".join(f"also {finding.node}: {finding.message}" for finding in others),
    )


# In the order of their module.
_MODULES = (machine, gpus, rdma, interfaces, variables, link, paths, training, memory, ports)
_MEMBERS = [value for module in _MODULES for value in vars(module).values()]
CHECKS = tuple(value for value in _MEMBERS if isinstance(value, Check))
_RULES = (UNVERIFIED, *(value for value in _MEMBERS if isinstance(value, CheckRule)))
# The rows of the matrix.
CHECK_NAMES = tuple(dict.fromkeys(rule.code for rule in _RULES))


def list_rules() -> tuple[CheckRule, ...]:
    """Every kind of finding, grouped by check, in the order of the checks; first the transport's errors."""
    from multinode.transport.refusals import REFUSALS, SLURM_REFUSALS

    unanswered = (
        _SSH.error(about=refusal.catches, message=refusal.message, hint=refusal.hint)
        for refusal in (*REFUSALS, *SLURM_REFUSALS)
    )
    late = _SSH.error(
        about="a node answers too late or disconnects during the check",
        message="no answer within {deadline_s} s",
        hint="check whether the node is up:\nssh {node} true",
    )
    return (*unanswered, late, *_RULES)


def check_all(inspection: Inspection, *, before_launch: bool = False) -> Iterator[CheckFinding]:
    """The findings of all checks, or of those before a launch."""
    for check in CHECKS:
        if check.before_launch or not before_launch:
            yield from check(inspection)


def sort_findings(findings: Iterable[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Errors first, without duplicates, otherwise in the order of the checks."""
    single = {(finding.node, finding.code, finding.message, finding.hint): finding for finding in findings}
    return tuple(sorted(single.values(), key=lambda finding: SEVERITIES.index(finding.severity)))


# Up to this number of nodes, streams between all pairs take seconds; above, they are made on request.
_STREAMS_NODES = 8
_STREAM_S = 0.3


class CheckOptions(LaunchOptions, frozen=True, kw_only=True):
    """How to check the nodes, and how the job will be launched."""

    # whether to measure the bandwidth between the nodes. Default: only if there are few nodes, and no run is active
    bandwidth: bool | None = None
    # directory of earlier runs, which show how much memory the job needs. If None, this is unknown
    runs: Path | None = None


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as checked."""

    name: str
    node_rank: int
    reached: bool
    addr: str | None = None  # its address for data, if found; also `ifname` and `link_gbit_per_s`
    ifname: str | None = None
    link_gbit_per_s: float | None = None
    python: str | None = None
    packages: dict[str, str] = {}


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `check --json` prints."""

    schema: str = "multinode.check/2"
    ok: bool
    nodes: tuple[CheckedNode, ...]
    checks: tuple[str, ...] = CHECK_NAMES
    findings: tuple[CheckFinding, ...]
    streams: tuple[PairSpeed, ...] = ()  # short TCP streams between the nodes, in Gbit/s of payload
    time_s: float

    @property
    def unreached(self) -> tuple[str, ...]:
        """Nodes that did not answer."""
        return tuple(node.name for node in self.nodes if not node.reached)


def check_cluster(
    agent: AgentTransport,
    cluster: Cluster,
    job: Job | None,
    options: CheckOptions,
    say: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Check the nodes, and the job if given. Never raises because of a node; that is a finding."""
    began = time.monotonic()
    say(f"probing {len(cluster.nodes)} nodes")
    run_id, port = make_run_id(), options.master_port
    outcomes = _probe(agent, cluster, job, options, candidate_ports(run_id, port))
    facts = outcomes.found
    inspection = Inspection(
        cluster=cluster,
        facts=facts,
        job=with_sharding(job, options.engine),
        options=options,
        master_port=choose_master_port(run_id, port, facts.get(cluster.nodes[0].name)),
        controller_cwd=str(Path.cwd()),
        absent_here=absent_files(job_files(job).needed),
        runs=options.runs,
    )
    inspection, findings = _inspect_network(agent, inspection, options, say)
    reached = [node for node in cluster.nodes if node.name in facts]
    findings = [
        *check_ssh(outcomes.failed.values()),
        *check_host_keys(agent, reached),
        *findings,
        *concerning(check_all(inspection), cluster, options),
    ]
    if job is not None and not any(finding.severity == "error" for finding in findings):
        findings += _check_plan(inspection, job, options)
    return CheckReport(
        ok=not any(finding.severity == "error" for finding in findings),
        nodes=tuple(_checked(inspection, index) for index in range(len(cluster.nodes))),
        findings=tuple(
            (msgspec.structs.replace(finding, hint=as_steps(finding.hint, cluster.nodes)) if finding.hint else finding)
            for finding in sort_findings(findings)
        ),
        streams=inspection.connectivity.streams,
        time_s=time.monotonic() - began,
    )


def _check_plan(inspection: Inspection, job: Job, options: LaunchOptions) -> list[CheckFinding]:
    try:
        plan_launch(inspection.cluster, job, inspection.facts, "check", options)
    except UsageError as error:
        return [finding_of_error("training", error)]
    return []


def _probe(
    agent: AgentTransport, cluster: Cluster, job: Job | None, options: LaunchOptions, ports: tuple[int, ...]
) -> Outcomes[NodeFacts]:
    files = job_files(job, options.code)
    return probe(
        agent,
        cluster,
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(cluster.nodes),
        paths=(*files.looked_at, *(may_be_paths(job) if options.code is not None else ())),
        ports=ports,
        tools=(*(needed_tools(job) or ("torchrun",)), *filter(None, (files.program,))),
        modules=tuple(filter(None, (files.module,))),
        contents=files.compared,
        datasets=files.datasets,
        model=files.model,
        count=job,
        torch_env=torch_environment(job, options),
        arguments=argument_names(job, cluster, options),
    )


def _inspect_network(
    agent: AgentTransport, inspection: Inspection, options: CheckOptions, say: Callable[[str], None]
) -> tuple[Inspection, list[CheckFinding]]:
    nodes = tuple(node for node, _ in inspection.known)
    if not nodes:
        return inspection, []
    try:
        places = choose_endpoints(msgspec.structs.replace(inspection.cluster, nodes=nodes), inspection.facts)
    except UsageError as error:
        return inspection, [finding_of_error("interface", error)]
    endpoints = {node.name: place for node, place in zip(nodes, places, strict=True)}
    inspection = msgspec.structs.replace(inspection, endpoints=endpoints)
    addresses = {name: place.addr for name, place in endpoints.items() if place.addr is not None}
    # A call over a NIC without a link times out; the check of the link reports it.
    down = {node.name for node, interface in inspection.links if not interface.up}
    present = [node for node in nodes if node.name in addresses and node.name not in down]
    if len(present) < 2:  # noqa: PLR2004 - a network needs two
        return inspection, []
    say(f"connecting {len(present)} nodes to each other")
    # A stream would take bandwidth from a run in progress.
    is_busy = any(
        process.supervised for facts in inspection.facts.values() for process in or_empty(facts.run_processes)
    )
    by_default = len(present) <= _STREAMS_NODES and not is_busy
    bandwidth = by_default if options.bandwidth is None else options.bandwidth
    plan = ConnectivityPlan(
        pairs=choose_pairs([node.name for node in present], random.Random()),  # noqa: S311 - no secret
        master_port=inspection.master_port,
        stream_s=_STREAM_S if bandwidth else None,
        least_gbit_per_s=least_speeds(inspection),
    )
    connectivity, errors = run_connectivity_test(agent, present, addresses, plan, say)
    findings = [finding_of_error("ssh" if isinstance(error, NodeError) else "ports", error) for error in errors]
    return msgspec.structs.replace(inspection, connectivity=connectivity), findings


def _checked(inspection: Inspection, index: int) -> CheckedNode:
    name = inspection.cluster.nodes[index].name
    facts = inspection.facts.get(name)
    place = inspection.place(name)
    return CheckedNode(
        name=name,
        node_rank=index,
        reached=facts is not None,
        addr=place.addr,
        ifname=place.ifname,
        link_gbit_per_s=place.link_gbit_per_s,
        python=or_none(facts.python) if facts else None,
        packages=entries(facts.packages) if facts else {},
    )
