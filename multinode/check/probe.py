"""Probe: ask every node for its facts, and how far its clock is off. All that a launch without checks needs."""

from __future__ import annotations

import time
from collections.abc import Sequence

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


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe asks beyond the node itself."""

    controller_cwd: str | None = None  # working directory if the hostfile names none and the node has it, too
    peers: tuple[str, ...] = ()  # addresses for which routes are asked
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()  # ports that should be free on node 0
    tools: tuple[str, ...] = ()  # programs of the job, looked up beside its interpreter and on PATH
    modules: tuple[str, ...] = ()  # modules that the job's interpreter should find, by their dotted names
    packages: bool = True  # whether to read package versions (starts the job's interpreter)
    contents: tuple[str, ...] = ()  # those of `paths` to digest
    datasets: tuple[str, ...] = ()  # datasets in a dataset_info.json of `contents` whose files are digested
    model: str | None = None  # directory of the model, whose config.json is read
    # the job's variables on every node, under which its torch is asked for its GPUs; None does not ask
    torch_env: dict[str, str] | None = None
    arguments: tuple[str, ...] = ()  # keys of a LLaMA-Factory YAML to look up among its arguments


def probe(agent: AgentTransport, cluster: Cluster, questions: Questions) -> Outcomes[NodeFacts]:
    """The facts of every node, or the error, in node-rank order."""
    agent.refresh()
    return gather(cluster.nodes, lambda node: _probe_node(agent, node, questions), deadline_s=PROBE_DEADLINE_S)


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


class SentFacts(NodeFacts, frozen=True, kw_only=True, tag_field="kind", tag="facts"):
    """A node's facts as it sends them."""


def _probe_node(agent: AgentTransport, node: Node, questions: Questions) -> NodeFacts:
    request = {"schema": 1, "python": node.python, "workdir": node.workdir, **msgspec.to_builtins(questions)}
    asked_s = time.time()
    if questions.torch_env is not None:
        # Only its own variables count: what the session has, the node adds.
        request["torch_env"] = node.env | questions.torch_env
    facts = agent.call(node, "probe", request, SentFacts, deadline_s=PROBE_DEADLINE_S)
    offset_s = _clock_offset(facts.time_s, asked_s, time.time())
    return NodeFacts(**{**msgspec.structs.asdict(facts), "node": node.name, "clock_offset_s": offset_s})


def _clock_offset(time_s: float | Unknown, asked_s: float, answered_s: float) -> float | Unknown:
    """How far the node's clock is ahead, in seconds; 0 if its time lies between question and answer."""
    if isinstance(time_s, Unknown):
        return time_s
    # The node reads its clock last, so the way back is short; a busy controller that reads late must not look like a
    # slow clock.
    return 0.0 if asked_s <= time_s <= answered_s else time_s - answered_s
