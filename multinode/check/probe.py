"""Probe: ask every node for its facts, and how far its clock is off. All that a launch without checks needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NodeFacts
from multinode.job.job import Job
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import Benchmark, CollectiveTest
from multinode.stats.unknown import Unknown
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Outcomes, gather

# nvidia-smi may take 30 s on a cold driver.
PROBE_DEADLINE_S = 45.0


class SentFacts(NodeFacts, frozen=True, kw_only=True, tag_field="kind", tag="facts"):
    """A node's facts as it sends them."""


def probe(  # noqa: PLR0913 - each is a question
    agent: AgentTransport,
    cluster: Cluster,
    *,
    controller_cwd: str | None = None,
    peers: Sequence[str] = (),
    paths: Sequence[str] = (),
    ports: Sequence[int] = (),
    tools: Sequence[str] = (),
    modules: Sequence[str] = (),
    packages: bool = True,
    contents: Sequence[str] = (),
    datasets: Sequence[str] = (),
    model: str | None = None,
    count: Job | Benchmark | None = None,
    torch_env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Outcomes[NodeFacts]:
    """The facts of every node, or the error, in node-rank order.

    Args:
        agent: the agent on the nodes.
        cluster: the nodes.
        controller_cwd: working directory if the hostfile names none and the node has it, too.
        peers: addresses for which routes are asked.
        paths: files and directories to look at.
        ports: those that should be free on node 0.
        tools: programs of the job, looked up beside its interpreter and on PATH.
        modules: modules that the job's interpreter should find, by their dotted names.
        packages: whether to read package versions, which starts the job's interpreter.
        contents: those of `paths` to digest.
        datasets: datasets in a dataset_info.json of `contents` whose files are digested.
        model: directory of the model, whose config.json is read.
        count: the job that builds it; None does not count its tensors.
        torch_env: the job's variables on every node, under which its torch is asked for its GPUs; None does not ask.
        arguments: keys of a LLaMA-Factory YAML to look up among its arguments.
    """
    agent.refresh()
    questions = {
        "controller_cwd": controller_cwd,
        "peers": peers,
        "paths": paths,
        "ports": ports,
        "tools": tools,
        "modules": modules,
        "packages": packages,
        "contents": contents,
        "datasets": datasets,
        "model": model,
        "arguments": arguments,
    }

    def ask(node: Node) -> NodeFacts:
        # Only the node's own variables count: what the session has, the node adds.
        env = None if torch_env is None else {**node.env, **torch_env}
        request = {"schema": 1, "python": node.python, "workdir": node.workdir, **questions, "torch_env": env}
        asked_s = time.time()
        facts = agent.call(node, "probe", request, SentFacts, deadline_s=PROBE_DEADLINE_S)
        offset_s = _clock_offset(facts.time_s, asked_s, time.time())
        return NodeFacts(**{**msgspec.structs.asdict(facts), "node": node.name, "clock_offset_s": offset_s})

    outcomes = gather(cluster.nodes, ask, deadline_s=PROBE_DEADLINE_S)
    if model is None or count is None:
        return outcomes
    from multinode.check.model_count import with_count

    def ask_count(node: Node, question: Mapping[str, Any], deadline_s: float) -> NodeFacts:
        place = {"python": node.python, "workdir": node.workdir, "controller_cwd": controller_cwd, "model": model}
        return agent.call(node, "probe", {"schema": 1, **place, "count": question}, SentFacts, deadline_s=deadline_s)

    return with_count(cluster, outcomes, count, ask_count)


def peer_addresses(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The addresses for data in the hostfile."""
    return tuple(node.addr for node in nodes if node.addr is not None)


def torch_environment(job: Job | Benchmark | None, options: LaunchOptions) -> dict[str, str] | None:
    """The variables under which the job's torch is asked for its GPUs; None if the job uses none, or none is known.

    A setup command may select another installation, or libraries without which torch finds no GPU.
    """
    is_program = options.engine is not None and not options.engine.kind.starts_workers
    on_cpus = isinstance(job, CollectiveTest) and job.backend == "gloo"
    return None if is_program or on_cpus or options.environment.prelude is not None else options.environment.env


def _clock_offset(time_s: float | Unknown, asked_s: float, answered_s: float) -> float | Unknown:
    """How far the node's clock is ahead, in seconds; 0 if its time lies between question and answer."""
    if isinstance(time_s, Unknown):
        return time_s
    # The node reads its clock last, so the way back is short; a busy controller that reads late must not look like a
    # slow clock.
    return 0.0 if asked_s <= time_s <= answered_s else time_s - answered_s
