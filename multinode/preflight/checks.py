"""Checks: facts -> findings, one small pure function each. What a finding says is what its user can act on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from multinode.core.cluster import Cluster
from multinode.core.collective_test import CollectiveTest
from multinode.core.facts import NodeFacts
from multinode.core.finding import Finding
from multinode.core.job import Job, LlamaFactoryJob
from multinode.errors import MultinodeError
from multinode.preflight.connect import Listening, Reached

__all__ = [
    "check_backend",
    "check_interpreter",
    "check_packages",
    "check_paths",
    "check_port",
    "check_port_free",
    "check_ssh",
    "check_versions",
    "check_workdir",
]

# Different versions of these on two nodes break the rendezvous, the collectives or the numbers.
_MUST_AGREE = ("torch", "llamafactory", "deepspeed", "transformers", "accelerate", "peft")


def check_ssh(errors: Iterable[MultinodeError]) -> Iterator[Finding]:
    """Every node answers over SSH and runs the agent."""
    for error in errors:
        yield Finding(severity="error", node=error.node, check="ssh", message=error.message, hint=error.hint)


def check_interpreter(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """The job's interpreter exists on every node."""
    for node in cluster.nodes:
        found = facts.get(node.name)
        if found is not None and found.python is None:
            yield Finding(
                severity="error",
                node=node.name,
                check="interpreter",
                message=f"no interpreter for the job: {found.missing.get('python', 'none was found')}",
                hint="name the training environment's in the hostfile: python=/path/to/env/bin/python",
            )


def check_packages(cluster: Cluster, facts: Mapping[str, NodeFacts], job: Job | CollectiveTest) -> Iterator[Finding]:
    """What the job imports is installed for its interpreter on every node."""
    needed = ("torch", "llamafactory") if isinstance(job, LlamaFactoryJob) else ("torch",)
    for node in cluster.nodes:
        found = facts.get(node.name)
        if found is None or found.python is None or "packages" in found.missing:
            continue
        missing = [name for name in needed if name not in found.packages]
        if missing:
            words = " and ".join(missing)
            yield Finding(
                severity="error",
                node=node.name,
                check="packages",
                message=f"{words} not installed for {found.python}",
                hint=f"on the node: {found.python} -m pip install {' '.join(missing)}; or correct python=",
            )


def check_backend(cluster: Cluster, facts: Mapping[str, NodeFacts], job: Job | CollectiveTest) -> Iterator[Finding]:
    """A collective test that asks for NCCL has a GPU on every node."""
    if not isinstance(job, CollectiveTest) or job.backend != "nccl":
        return
    for node in cluster.nodes:
        found = facts.get(node.name)
        if found is not None and not found.gpus:
            yield Finding(
                severity="error",
                node=node.name,
                check="backend",
                message=f"the nccl backend needs a GPU, and there is none ({found.missing.get('gpus', 'none listed')})",
                hint="--backend gloo measures the same network without a GPU",
            )


def check_versions(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """What must be equal on all nodes is equal to node 0's."""
    known = [(node.name, facts[node.name].packages) for node in cluster.nodes if node.name in facts]
    for package in _MUST_AGREE:
        versions = [(name, packages[package]) for name, packages in known if package in packages]
        for name, version in versions[1:]:
            first, expected = versions[0]
            if version != expected:
                yield Finding(
                    severity="error",
                    node=name,
                    check="versions",
                    message=f"{package} is {version} here and {expected} on {first}: the nodes would not fit together",
                    hint=f"on {name}: {facts[name].python} -m pip install {package}=={expected}",
                )


def check_paths(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """What the job reads stands at the same path on every node."""
    for node in cluster.nodes:
        found = facts.get(node.name)
        for path in found.paths if found else ():
            if path.kind == "missing":
                yield Finding(
                    severity="error",
                    node=node.name,
                    check="paths",
                    message=f"{path.path} is missing: the job reads it on every node",
                    hint=f"copy it there: rsync -a {shlex.quote(path.path)} {node.name}:{_parent(path.path, found)}/",
                )


def _parent(path: str, found: NodeFacts | None) -> str:
    """The directory that a path lies in, on the node; relative ones start at the job's directory."""
    folder, _, _ = path.rstrip("/").rpartition("/")
    if path.startswith(("/", "~")) or found is None or found.cwd is None:
        return shlex.quote(folder or "/")
    return shlex.quote(f"{found.cwd}/{folder}" if folder else found.cwd)


def check_workdir(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """A directory that the hostfile names exists."""
    for node in cluster.nodes:
        found = facts.get(node.name)
        if found is not None and "workdir" in found.missing:
            yield Finding(
                severity="error",
                node=node.name,
                check="workdir",
                message=f"the job's directory: {found.missing['workdir']}",
                hint="correct workdir= in the hostfile, or make the directory on the node",
            )


def check_port_free(cluster: Cluster, facts: Mapping[str, NodeFacts], port: int) -> Iterator[Finding]:
    """MASTER_PORT is free on node 0."""
    first = cluster.nodes[0]
    found = facts.get(first.name)
    if found is not None and str(port) in found.port_users:
        yield _port_in_use(first.name, port, found.port_users[str(port)])


def check_port(cluster: Cluster, port: int, listening: Listening, reached: Mapping[str, Reached]) -> Iterator[Finding]:
    """MASTER_PORT could be bound on node 0 and reached from every other node."""
    first = cluster.nodes[0].name
    for taken, reason in listening.failed.items():
        yield _port_in_use(first, taken, reason)
    for node, answer in reached.items():
        if not answer.ok:
            yield Finding(
                severity="error",
                node=node,
                check="master-port",
                message=f"it cannot reach {first} at {answer.addr}:{port} ({answer.error}): the rendezvous would hang",
                hint=_port_hint(answer, port),
            )


def _port_in_use(node: str, port: int, user: str) -> Finding:
    return Finding(
        severity="error",
        node=node,
        check="master-port",
        message=f"port {port}, the rendezvous, is {user if user.startswith('in use') else 'in use by ' + user}",
        hint="end that process, or choose another port: --master-port",
    )


def _port_hint(answer: Reached, port: int) -> str:
    if answer.error == "timed out":
        return (
            f"a firewall drops it: open port {port} (and the ephemeral ports) between the nodes, or try --master-port"
        )
    if answer.error == "no route":
        return "the data-plane address is wrong or its cable is out: correct addr= or ifname= in the hostfile"
    return f"is {answer.addr} the right address for the data plane? correct addr= in the hostfile"
