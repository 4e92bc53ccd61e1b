"""observe: a run's directory -> what its nodes recorded, and its summary. Prints nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

from multinode.analyse.nccl_test.size_scan import ScanReport
from multinode.analyse.run.observed import Observed, ObservedNode, observe
from multinode.analyse.steps.summary import Summary, summarise
from multinode.analyse.steps.utilisation import ModelWork
from multinode.core.cluster.cluster import Cluster
from multinode.core.run.plan import LaunchPlan
from multinode.core.run.quoting import as_steps
from multinode.core.run.samples import Sample, StepSample, parse_samples
from multinode.errors import MultinodeError
from multinode.report.steps.bottleneck_words import with_words
from multinode.store.run_directory import RunDirectory, list_runs
from multinode.workflows.run.fetch import read_traces

__all__ = ["observe_run", "summarise_run"]

_MODEL = "model.json"
_SWEEP = "nccl-test.json"
# Of one kind and one worker, card or GPU: hours of steps, days of samples once a second. Of many workers fewer, as a
# record takes some 2 KB of memory.
_MOST_RECORDS = 50_000
_MOST_OF_ALL = 400_000
# Kinds of a node's workers, cards and GPUs: several times as many as there are.
_MOST_SERIES = 2000


def observe_run(directory: RunDirectory, plan: LaunchPlan) -> Observed:
    """What the nodes of a run recorded, as far as it has come home."""
    most = max(1, min(_MOST_RECORDS, _MOST_OF_ALL // max(1, plan.world_size)))
    return observe(
        plan.run_id,
        [
            ObservedNode(
                name=node.node,
                node_rank=node.node_rank,
                ranks=node.ranks,
                ifname=node.ifname,
                link_gbit_per_s=node.link_gbit_per_s,
                samples=samples,
                left_out=left_out,
            )
            for node in plan.nodes
            for samples, left_out in [_latest(directory, node.node_rank, most)]
        ],
    )


def _latest(directory: RunDirectory, node_rank: int, most: int) -> tuple[tuple[Sample, ...], int]:
    """Samples in their order, of each worker and kind the last ones alone, and how many steps of a worker went missing.

    A training may go on for weeks; what all nodes recorded of it need not fit into this machine's memory.
    """
    kept: dict[tuple[type[Sample], int | str], deque[tuple[int, Sample]]] = {}
    left_out: Counter[int] = Counter()
    passed_over = 0

    def lines() -> Iterator[bytes]:
        nonlocal passed_over
        for line in directory.sample_lines(node_rank, most):
            if line:
                yield line
            else:
                passed_over += 1

    for place, sample in enumerate(parse_samples(lines())):
        named = (getattr(sample, name, None) for name in ("rank", "ifname", "index"))
        whose = next((one for one in named if one is not None), 0)
        if (type(sample), whose) not in kept and len(kept) >= _MOST_SERIES:
            continue
        mine = kept.setdefault((type(sample), whose), deque(maxlen=most))
        if isinstance(sample, StepSample):
            # Those before it in its file were passed over.
            left_out[sample.rank] += passed_over + (len(mine) == most)
            passed_over = 0
        mine.append((place, sample))
    ordered = sorted((one for mine in kept.values() for one in mine), key=lambda one: one[0])
    return tuple(sample for _, sample in ordered), max(left_out.values(), default=0)


def summarise_run(directory: RunDirectory, plan: LaunchPlan) -> Summary:
    """Summarise a run's stored samples, and keep the summary beside them."""
    observed = observe_run(directory, plan)
    traces, unread = read_traces(directory, plan.trace.ranks if plan.trace else ())
    summary = summarise(
        observed,
        work=directory.read(_MODEL, ModelWork) or ModelWork(),
        traces=traces,
        sweep=_latest_scan(directory, plan),
        unread=unread,
    )
    cluster = directory.read("cluster.json", Cluster)
    nodes = cluster.nodes if cluster is not None else ()
    devices = {rank: events.device for rank, events in traces.items()}
    summary = with_words(summary, partial(as_steps, nodes=nodes), devices)
    directory.write("summary.json", summary)
    return summary


def _latest_scan(directory: RunDirectory, plan: LaunchPlan) -> ScanReport | None:
    """The newest nccl-test of the same nodes, links and as many workers; None where there is none that can be read."""
    names = [node.node for node in plan.nodes]
    links = [node.link_gbit_per_s for node in plan.nodes if node.link_gbit_per_s is not None]
    # A size scan on one node crosses no link, and says of none.
    alike = (names, plan.world_size, min(links) if len(links) == len(names) > 1 else None)
    for path in reversed(list_runs(directory.path.parent)):
        try:
            report = RunDirectory(path).read(_SWEEP, ScanReport)
        except MultinodeError:
            # Of an older release: what it measured is not worth failing a run that went well.
            continue
        if report is not None and (list(report.nodes), report.world_size, report.link_gbit_per_s) == alike:
            return report
    return None
