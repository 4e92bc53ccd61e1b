"""One node of a bench: its run in one phase, and what became of it; the runs of several nodes shown as one.

Which nodes are measured, and when, is `bench`'s.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import msgspec

from multinode.analyse.bench.bench import BenchPart
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import NodeFacts
from multinode.core.measure.benchmark import DeviceTest
from multinode.core.run.progress import RunProgress
from multinode.core.run.samples import Sample, parse_samples
from multinode.errors import MultinodeError
from multinode.store.run_directory import RunDirectory
from multinode.workflows.run.attach import cleanup_nodes
from multinode.workflows.run.context import Launch, Launched, RunContext
from multinode.workflows.run.launch import prepare, require_success, run_prepared

__all__ = ["Measured", "ShownTogether", "Turn", "make_turn", "measure_node"]

# Records of one worker or sampler that are looked at; a bench has some hundreds.
_MOST_SAMPLES = 100_000
_LAST_PORT = 65535


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One node in one phase, to be measured."""

    what: Launch
    phase: str
    node_rank: int
    node: Node


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it.

    Attributes:
        launched: its run; None where it never began.
        error: why it did not end well.
    """

    part: BenchPart
    launched: Launched | None = None
    error: MultinodeError | None = None


def make_turn(what: Launch, test: DeviceTest, phase: str, node_rank: int) -> Turn:
    """A node's run of a bench, which is named after it; its port is its own: some nodes may be of one machine."""
    node = what.cluster.nodes[node_rank]
    port = min(what.options.master_port + node_rank, _LAST_PORT)
    launch = msgspec.structs.replace(
        what,
        job=msgspec.structs.replace(test, turns=phase == "alone"),
        options=msgspec.structs.replace(what.options, master_port=port),
        cluster=msgspec.structs.replace(what.cluster, nodes=(node,)),
        run_id=f"{what.run_id}-{phase}-{node_rank}",
    )
    return Turn(what=launch, phase=phase, node_rank=node_rank, node=node)


def measure_node(turn: Turn, context: RunContext) -> Measured:
    """One node's run; whatever goes wrong with it is told, and is nobody else's trouble."""
    part = BenchPart(phase=turn.phase, node=turn.node.name, node_rank=turn.node_rank)
    launched = None
    try:
        prepared = prepare(turn.what, context)
        launched = run_prepared(prepared, context)
        part = _with_run(part, launched, prepared.facts.get(turn.node.name))
        require_success(launched, context)
    except MultinodeError as error:
        error.node = error.node or turn.node.name
        context.say(str(error))
        part = msgspec.structs.replace(part, error=error.message)
        return Measured(part=part, launched=launched, error=error)
    cleanup_nodes(launched, turn.what.cluster, context)
    return Measured(part=part, launched=launched)


def _with_run(part: BenchPart, launched: Launched, facts: NodeFacts | None) -> BenchPart:
    (node,) = launched.plan.nodes
    return msgspec.structs.replace(
        part,
        run_id=launched.run.run_id,
        ranks=node.ranks,
        gpus=node.gpus,
        facts=facts,
        samples=_samples(launched.directory),
    )


def _samples(directory: RunDirectory) -> tuple[Sample, ...]:
    """The first of them: a bench has few, whatever a node sends."""
    samples = []
    for sample in parse_samples(directory.sample_lines(0)):
        samples.append(sample)
        if len(samples) == _MOST_SAMPLES:
            break
    return tuple(samples)


class ShownTogether:
    """Shows the runs of several nodes as the progress of one; called from as many threads.

    Args:
        observe: is shown them all.
    """

    def __init__(self, observe: Callable[[RunProgress], None]) -> None:
        self._lock = threading.Lock()
        self._observe = observe
        self._seen: dict[int, RunProgress] = {}

    def outside_of(self, node_rank: int, context: RunContext) -> RunContext:
        """The outside of one node's run, which shows it among the others and tells no stages of its own."""
        own = copy.copy(context)
        own.observe = lambda progress: self._show(node_rank, progress)
        own.say = lambda _: None
        return own

    def _show(self, node_rank: int, progress: RunProgress) -> None:
        with self._lock:
            self._seen[node_rank] = progress
            seen = sorted(self._seen.items())
            nodes = [msgspec.structs.replace(node, node_rank=rank) for rank, one in seen for node in one.nodes]
            self._observe(
                msgspec.structs.replace(
                    progress,
                    run_id=progress.run_id.rpartition("-")[0],
                    world_size=sum(one.world_size for _, one in seen),
                    nodes=tuple(nodes),
                    elapsed_s=max(one.elapsed_s for _, one in seen),
                )
            )
