"""nccl-test: a sweep of all-reduce over the nodes, run like any other job, summed up in nccl-tests' columns."""

from __future__ import annotations

import msgspec

from multinode.analyse.collectives import CollectiveRow, collective_rows, collective_verdict
from multinode.core.samples import BenchmarkSample, CollectiveSample, parse_samples
from multinode.store.run_directory import RunDirectory
from multinode.workflows.launch import Launch, Outside, launch, require_success

__all__ = ["CollectiveReport", "nccl_test"]


class CollectiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `nccl-test --json` prints.

    Attributes:
        schema: `multinode.nccl-test/1`.
        run_id: the run.
        op: the collective.
        backend: `nccl` or `gloo`, as the workers chose it.
        world_size: workers in all, over `nodes` nodes.
        link_gbit_per_s: the slowest card's rate; None where one does not tell.
        rows: a row a size.
        verdict: one plain sentence.
        directory: where everything lies.
    """

    schema: str = "multinode.nccl-test/1"
    run_id: str
    op: str = "all_reduce"
    backend: str
    world_size: int
    nodes: tuple[str, ...]
    link_gbit_per_s: float | None
    rows: tuple[CollectiveRow, ...]
    verdict: str
    directory: str


def nccl_test(what: Launch, outside: Outside) -> CollectiveReport:
    """Run the sweep.

    Raises:
        RunFailed: it did not end well.
        Interrupted: the user stopped it.
        UsageError, NodeError, NodeFailed: as `launch`.
    """
    launched = launch(what, outside)
    require_success(launched, outside)
    directory = RunDirectory(launched.directory)
    lines = [line for node in launched.plan.nodes for line in directory.sample_lines(node.node_rank)]
    samples = list(parse_samples(lines))
    rates = [node.link_gbit_per_s for node in launched.plan.nodes]
    slowest = min((rate for rate in rates if rate), default=None) if all(rates) and len(rates) > 1 else None
    measured = [sample for sample in samples if isinstance(sample, CollectiveSample)]
    report = CollectiveReport(
        run_id=launched.run.run_id,
        backend=next((sample.backend for sample in samples if isinstance(sample, BenchmarkSample)), "unknown"),
        world_size=launched.plan.world_size,
        nodes=tuple(node.node for node in launched.plan.nodes),
        link_gbit_per_s=slowest,
        rows=(rows := collective_rows(measured, launched.plan.world_size, slowest)),
        verdict=collective_verdict(rows, slowest),
        directory=str(launched.directory),
    )
    directory.write("nccl-test.json", report)
    return report
