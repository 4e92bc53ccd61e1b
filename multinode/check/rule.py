"""Inspection: the input of all checks. CheckRule: the text of a finding. Check: what looks for it.

Equal findings of several nodes are reported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from multinode.check.connectivity import ConnectivityResult
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import Interface, NodeFacts
from multinode.errors import MultinodeError, UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import NODES, Rule, RuleGroup
from multinode.job.job import Job, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import workers_of_nodes
from multinode.records.benchmark import Benchmark
from multinode.stats.unknown import or_empty
from multinode.units import format_list

_NOWHERE = Endpoint(addr=None, ifname=None)


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the nodes and the job."""

    cluster: Cluster  # all nodes of the hostfile
    facts: dict[str, NodeFacts]  # by node name, of those that answered
    master_port: int  # port of the rendezvous on node 0
    job: Job | Benchmark | None = None  # what shall run; None is any training
    options: LaunchOptions = LaunchOptions()  # how it would be launched
    # by node name, the data plane of those that answered; empty where none could be chosen
    endpoints: dict[str, Endpoint] = {}
    # how connections between them went; empty where none were tried
    connectivity: ConnectivityResult = ConnectivityResult()
    controller_cwd: str | None = None  # the directory of the launch; None is not known
    # paths of the job that are not on this machine, each with the one whose name is nearest, if any
    absent_here: dict[str, str | None] = {}
    runs: Path | None = None  # the directory of runs, whose records are known; None is unknown

    @property
    def known(self) -> Iterator[tuple[Node, NodeFacts]]:
        """The nodes that answered, with their facts, in node-rank order."""
        for node in self.cluster.nodes:
            facts = self.facts.get(node.name)
            if facts is not None:
                yield node, facts

    @property
    def links(self) -> Iterator[tuple[Node, Interface]]:
        """The interface for data of each node that has one, in node-rank order."""
        for node, _ in self.known:
            interface = self.link(node.name)
            if interface is not None:
                yield node, interface

    @property
    def nics(self) -> dict[str, Interface]:
        """The interface for data of each node by node name, without loopback."""
        return {node.name: link for node, link in self.links if link.kind != "loopback"}

    @property
    def rails(self) -> tuple[dict[str, Interface], ...]:
        """`nics`, but the first interfaces of nodes whose hostfile names several; then the second ones, and so on."""
        several = {node.name: self.place(node.name).ifnames for node, _ in self.known}
        named = [
            {
                name: link
                for name, ifnames in several.items()
                if place < len(ifnames)
                and (link := self._interface(name, ifnames[place])) is not None
                and link.kind != "loopback"
            }
            for place in range(max(map(len, several.values()), default=0))
        ]
        single = {name: link for name, link in self.nics.items() if not several[name]}
        return (single | (named[0] if named else {}), *named[1:])

    @property
    def training(self) -> TrainingJob | None:
        """The job, if it is a training of a framework."""
        return self.job.training if self.job is not None else None

    def link(self, node: str) -> Interface | None:
        """A node's interface for data; None if unknown."""
        return self._interface(node, self.place(node).ifname)

    def _interface(self, node: str, ifname: str | None) -> Interface | None:
        interfaces = or_empty(self.facts[node].interfaces) if node in self.facts else ()
        return next((interface for interface in interfaces if interface.name == ifname), None)

    def env(self, node: Node) -> dict[str, str]:
        """The job's variables on a node that answered: its own, the hostfile's, the command line's."""
        return self.facts[node.name].env | node.env | self.options.environment.env

    def place(self, node: str) -> Endpoint:
        """A node's endpoint; empty if unknown."""
        return self.endpoints.get(node, _NOWHERE)

    def require_workers(self) -> dict[str, int]:
        """Workers of each node that answered (of all if none did): as asked for, or from hostfile and GPUs."""
        nodes = tuple(node for node, _ in self.known) or self.cluster.nodes
        answered = msgspec.structs.replace(self.cluster, nodes=nodes)
        workers = workers_of_nodes(answered, self.facts, self.options.workers_per_node)
        return dict(zip((node.name for node in nodes), workers, strict=True))

    def workers_of_nodes(self) -> tuple[int, ...] | None:
        """Workers of each node, in order; None if one has too few, or did not answer and the others differ.

        A node that did not answer is assumed to be like the others.
        """
        try:
            workers = self.require_workers()
        except UsageError:
            return None
        if len(workers) < len(self.cluster.nodes) and len(set(workers.values())) > 1:
            return None
        usual = max(workers.values())
        return tuple(workers.get(node.name, usual) for node in self.cluster.nodes)


SEVERITIES = ("error", "warning", "note")


class CheckFinding(Finding, frozen=True, kw_only=True):
    """What a check found on a node, or in the whole cluster."""

    code: str = msgspec.field(name="check")  # the check's name, as in the matrix
    severity: str  # `error` (the training would fail or hang), `warning` (it may), `note` (for information)
    by_hand: bool = False  # whether it concerns only launches without multinode


def finding_of_error(check: str, error: MultinodeError) -> CheckFinding:
    """A finding for something that could not be asked."""
    hint = "\n".join(error.hint_lines) or None
    return CheckFinding(severity="error", node=error.node, code=check, message=error.message, hint=hint)


_MOST_NAMES = 8


class CheckRule(Rule, frozen=True, kw_only=True):
    """One kind of finding of a check, whose name is its code."""

    severity: str  # as in `CheckFinding`
    by_hand: bool = False  # as in `CheckFinding`

    def found(self, on: str | None, /, **values: object) -> CheckFinding:
        """As of any rule, with its severity."""
        return CheckFinding(**self.fields(on, values), severity=self.severity, by_hand=self.by_hand)


class CheckRules(RuleGroup):
    """The rules of one check, a column of the matrix, by severity."""

    def __init__(self, check: str) -> None:
        super().__init__(check)
        self.error, self.warning, self.note = (partial(self._declare, severity) for severity in SEVERITIES)

    def _declare(self, severity: str, *, about: str, message: str, hint: str, by_hand: bool = False) -> CheckRule:
        return self.add(
            CheckRule(code=self.title, severity=severity, about=about, message=message, hint=hint, by_hand=by_hand)
        )


class Check(msgspec.Struct, frozen=True):
    """A check: a function from an inspection to findings."""

    judge: Callable[[Inspection], Iterable[CheckFinding]]
    before_launch: bool = False  # whether a launch runs it: its errors would make the run hang or fail
    judges_meeting: bool = False  # whether it also judges the connections between nodes

    def __call__(self, inspection: Inspection) -> Iterator[CheckFinding]:
        """Its findings; equal ones of several nodes are merged."""
        shared: dict[tuple[str, str], list[CheckFinding]] = {}
        for finding in self.judge(inspection):
            if NODES in finding.message + (finding.hint or ""):
                shared.setdefault((finding.message, finding.hint or ""), []).append(finding)
            else:
                yield finding
        for (message, hint), findings in shared.items():
            names = listed(str(finding.node) for finding in findings)
            yield msgspec.structs.replace(
                findings[0],
                node=findings[0].node if len(findings) == 1 else None,
                message=message.replace(NODES, names),
                hint=hint.replace(NODES, names),
            )


launch_check = partial(Check, before_launch=True)
meeting_check = partial(Check, before_launch=True, judges_meeting=True)


class _Disagreement(NamedTuple):
    """A node, its value, and another node with the expected value."""

    node: str
    value: Any
    peer: str
    expected: Any


def disagreements(values: Mapping[str, Any], *, majority: bool = False) -> Iterator[_Disagreement]:
    """The nodes that differ from the first, or from the majority.

    Of equally frequent values the first is the majority's.
    """
    if not values:
        return
    ordered = list(values.values())
    expected = Counter(ordered).most_common(1)[0][0] if majority else ordered[0]
    peer = next(node for node, value in values.items() if value == expected)
    for node, value in values.items():
        if value != expected:
            yield _Disagreement(node, value, peer, expected)


def listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """`a`, `a and b`, `a, b and c`, without duplicates; those after `most` are counted."""
    return format_list(list(dict.fromkeys(names)), most, "more")
