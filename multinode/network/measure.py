"""nccl-test: a size scan of collectives, interleaved with raw TCP between the nodes, run like any job, and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from multinode.check.connectivity import measure_pairs, require_pairs
from multinode.check.probe import Questions, probe
from multinode.errors import Interrupted, UsageError
from multinode.job.engine_calls import StepMessages, messages_to_test, step_messages
from multinode.job.job import Job
from multinode.job.job_files import job_files
from multinode.job.planning import workers_of_nodes
from multinode.launch.context import Launch, Launched, Prepared, RunContext
from multinode.launch.launch import prepare, require_success, run_prepared
from multinode.network.scan_evidence import nic_ceilings
from multinode.network.size_scan import ScanReport, compare_scans, estimate_step, nics_of, read_ring, summarise_scan
from multinode.records.benchmark import CollectiveTest, in_turns
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.records.samples import parse_samples
from multinode.traffic.algorithms import Layout
from multinode.traffic.pair_speeds import PairSpeed

_REPORT = "nccl-test.json"
_MOST_MESSAGES = 24
# Each worker's share of a message starts at a multiple of this.
_EVEN_BYTES = 16


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure in addition to the collectives."""

    tcp: bool = True  # raw TCP around the ring of nodes, interleaved with the largest message of each collective
    pairs: bool = False  # raw TCP between every pair
    compare: str | None = None  # an earlier nccl-test to compare with: its id, its beginning, or `last`
    like: Job | None = None  # a training whose messages are measured instead of those of the test
    fresh: bool = False  # whether to tune anew if a tuning of the same command was interrupted


def nccl_test(launch: Launch, extent: Extent, context: RunContext) -> ScanReport:
    """Run the size scan."""
    before = _load(context.runs, extent.compare) if extent.compare is not None else None
    report, launched = run_scan(launch, extent, context)
    if before is not None:
        report = msgspec.structs.replace(report, changes=compare_scans(before, report))
    launched.directory.write(_REPORT, report)
    return report


def run_scan(launch: Launch, extent: Extent, context: RunContext) -> tuple[ScanReport, Launched]:
    """One run of the size scan, which counts as a measurement only once its report is stored."""
    if extent.pairs:
        require_pairs([node.name for node in launch.cluster.nodes])
    step = None
    if extent.like is not None:
        layout, model = _ask_for_model(extent.like, launch, context)
        step = step_messages(extent.like, model, layout)
        launch = _measuring(step, layout.workers, launch)
    if extent.tcp and len(launch.cluster.nodes) > 1 and isinstance(launch.job, CollectiveTest):
        test = msgspec.structs.replace(launch.job, messages=in_turns(launch.job.messages))
        launch = msgspec.structs.replace(launch, job=test)
    prepared = prepare(launch, context)
    directory = prepared.directory
    pairs = _measure_pairs(prepared, context) if extent.pairs else ()
    launched = run_prepared(prepared, context)
    require_success(launched, context)
    samples = {
        node.node_rank: list(parse_samples(directory.sample_lines(node.node_rank))) for node in launched.plan.nodes
    }
    tcp = msgspec.structs.replace(read_ring(launched.plan, samples), pairs=pairs)
    report = summarise_scan(launched.plan, prepared.facts, tcp, samples, str(launched.directory))
    if step is not None:
        report = msgspec.structs.replace(report, like=estimate_step(step, report.rows, report.curves))
    return report, launched


def load_scan(directory: RunDirectory) -> ScanReport | None:
    """The result of a stored nccl-test; None for another run."""
    return directory.read(_REPORT, ScanReport)


def _load(runs: Path, name: str) -> ScanReport:
    # `last` means the newest nccl-test.
    if name == "last":
        name = next((path.name for path in reversed(list_runs(runs)) if (path / _REPORT).is_file()), name)
    directory = RunDirectory.open(runs, name)
    report = load_scan(directory)
    if report is None:
        raise UsageError(
            f"run {directory.run_id} is not an nccl-test that succeeded",
            hint="list the runs and their kinds: multinode runs",
        )
    return report


def _ask_for_model(job: Job, launch: Launch, context: RunContext) -> tuple[Layout, dict[str, Any] | None]:
    """The layout of the training, and its model's config.json, which node 0 must have too."""
    questions = Questions(controller_cwd=str(Path.cwd()), packages=False, model=job_files(job).model)
    facts = probe(context.agent, launch.cluster, questions).require()
    by_name = {fact.node: fact for fact in facts}
    return Layout.of(workers_of_nodes(launch.cluster, by_name, launch.options.workers_per_node)), facts[0].model


def _measuring(step: StepMessages, workers: int, launch: Launch) -> Launch:
    messages = messages_to_test(step, most=_MOST_MESSAGES, multiple=_EVEN_BYTES * workers)
    test = msgspec.structs.replace(launch.job, messages=messages)
    return msgspec.structs.replace(launch, job=test)


def _measure_pairs(prepared: Prepared, context: RunContext) -> tuple[PairSpeed, ...]:
    addresses = {node.node: node.addr for node in prepared.plan.nodes if node.addr is not None}
    ceilings = nic_ceilings(nics_of(prepared.plan.nodes, prepared.facts))
    pairs = measure_pairs(context.agent, prepared.launch.cluster.nodes, addresses, ceilings, context.say)
    prepared.directory.write("pairs.json", pairs)
    if context.stop.count:
        raise Interrupted("interrupted", hint=f"results so far: {prepared.directory}")
    return pairs
