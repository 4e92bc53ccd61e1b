"""Traces of a run: brought home from its nodes, and read. What they tell is for `analyse`. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from multinode.analyse.steps.trace_events import TraceEvents, read_trace
from multinode.core.cluster.cluster import Cluster
from multinode.core.run.plan import LaunchPlan
from multinode.core.run.samples import TraceSample, parse_samples
from multinode.errors import MultinodeError
from multinode.store.run_directory import RunDirectory
from multinode.transport.agent import AgentTransport
from multinode.workflows.run.fetch import Wanted, fetch_files

__all__ = ["fetch_traces", "read_traces"]

# Packed; unpacked it takes many times as much.
_LARGEST_TRACE = 64 << 20


def fetch_traces(
    agent: AgentTransport,
    cluster: Cluster,
    plan: LaunchPlan,
    directory: RunDirectory,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Bring the profiler's windows home, into the run's `traces`; a node that cannot give them any more is left out.

    They are a help, and the run is over: that one is missing is said in the summary, as `read_traces` finds it.
    """
    if plan.trace is None:
        return
    nodes = {node.name: node for node in cluster.nodes}
    for node in plan.nodes:
        ranks = set(node.ranks) & {sample.rank for sample in _recorded(directory, node.node_rank)}
        if not ranks or node.node not in nodes:
            continue
        paths = tuple(f"{node.run_dir}/traces/{_trace_name(rank)}" for rank in sorted(ranks))
        wanted = Wanted(node=nodes[node.node], paths=paths, cwd=None)
        try:
            fetch_files(agent, wanted, directory.traces(), say)
        except MultinodeError as error:
            say(f"{node.node}: its traces could not be fetched: {error.message}")


def read_traces(directory: RunDirectory, ranks: Iterable[int]) -> tuple[dict[int, TraceEvents], dict[str, str]]:
    """The windows that came home, by rank, and why the others cannot be read."""
    events: dict[int, TraceEvents] = {}
    missing: dict[str, str] = {}
    for rank in ranks:
        path = directory.traces() / _trace_name(rank)
        try:
            with path.open("rb") as file:
                # What is cut off is no trace any more, and the reader says so.
                events[rank] = read_trace(file.read(_LARGEST_TRACE))
        except FileNotFoundError:
            missing[f"trace of rank {rank}"] = "it did not come home"
        except (OSError, ValueError) as error:
            missing[f"trace of rank {rank}"] = f"it cannot be read: {error}"
    return events, missing


def _trace_name(rank: int) -> str:
    """What a worker's trace is called, on its node and here."""
    return f"rank-{rank}.json.gz"


def _recorded(directory: RunDirectory, node_rank: int) -> list[TraceSample]:
    samples = parse_samples(directory.sample_lines(node_rank))
    return [sample for sample in samples if isinstance(sample, TraceSample) and sample.file is not None]
