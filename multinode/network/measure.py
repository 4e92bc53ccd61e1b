"""nccl-test: a size scan of collectives, interleaved with raw TCP between the nodes, run like any job, and judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.check.connectivity import measure_pairs, require_pairs
from multinode.check.probe import probe
from multinode.cluster.cluster import Cluster
from multinode.errors import Interrupted, UsageError
from multinode.job.job import TrainingJob
from multinode.job.job_files import job_files
from multinode.job.planning import workers_of_nodes
from multinode.launch.context import Launch, Launched, RunContext
from multinode.launch.launch import prepare, require_success, run_prepared
from multinode.model.engine_calls import StepMessages, messages_to_test, step_messages
from multinode.network.scan_changes import compare_scans
from multinode.network.scan_evidence import nic_ceilings
from multinode.network.size_scan import ScanReport, estimate_step, nics_of, read_ring, summarise_scan
from multinode.records.benchmark import COLLECTIVES, CollectiveTest, Message, check_choice
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.records.samples import parse_samples
from multinode.runs.stored_run import StoredRun
from multinode.traffic.algorithms import Layout
from multinode.traffic.pair_speeds import PairSpeed

_REPORT = "nccl-test.json"
_MOST_MESSAGES = 24
# Each worker's share of a message starts at a multiple of this.
_EVEN_BYTES = 16
_MOST_BYTES = 16 << 30
_MOST_SIZES = 1000
_TURNS = 5


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure in addition to the collectives."""

    # whether to measure raw TCP from each node to the next, interleaved with the largest messages
    tcp: bool = True
    pairs: bool = False  # whether to measure raw TCP between every pair of nodes
    # an earlier nccl-test to compare with: a run id, the beginning of a run id, or `last`
    compare: str | None = None
    like: TrainingJob | None = None  # a training job whose messages are measured instead of those of the test
    fresh: bool = False  # whether to start over if a tuning run of the same command was interrupted


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
    pairs = _measure_pairs(prepared, launch.cluster, context) if extent.pairs else ()
    launched = run_prepared(launch, prepared, context)
    require_success(launched, context)
    samples = {
        place.node_rank: list(parse_samples(directory.sample_lines(place.node_rank))) for place in launched.plan.places
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


def _ask_for_model(job: TrainingJob, launch: Launch, context: RunContext) -> tuple[Layout, dict[str, Any] | None]:
    """The layout of the training, and its model's config.json, which node 0 must have too."""
    cwd, model = str(Path.cwd()), job_files(job).model
    facts = probe(context.agent, launch.cluster, controller_cwd=cwd, packages=False, model=model, count=job).require()
    first = facts[launch.cluster.nodes[0].name]
    return Layout.of(workers_of_nodes(launch.cluster, facts, launch.workers_per_node)), first.model_config


def _measuring(step: StepMessages, workers: int, launch: Launch) -> Launch:
    messages = messages_to_test(step, most=_MOST_MESSAGES, multiple=_EVEN_BYTES * workers)
    test = msgspec.structs.replace(launch.job, messages=messages)
    return msgspec.structs.replace(launch, job=test)


def _measure_pairs(prepared: StoredRun, cluster: Cluster, context: RunContext) -> tuple[PairSpeed, ...]:
    places = prepared.require_plan().places
    addresses = {place.node: place.endpoint.addr for place in places if place.endpoint.addr is not None}
    ceilings = nic_ceilings(nics_of(places, prepared.facts))
    pairs = measure_pairs(context.agent, cluster.nodes, addresses, ceilings, context.say)
    prepared.directory.write("pairs.json", pairs)
    if context.stop.count:
        raise Interrupted("interrupted", hint=f"results so far: {prepared.directory}")
    return pairs


def check_reduction(redop: str, dtype: str) -> None:
    """Reject a reduction that the element type does not support.

    Raises:
        UsageError: an average of integers, which backends round differently or reject.
    """
    if redop == "avg" and "int" in dtype:
        raise UsageError(
            f"avg is not defined for {dtype}", hint="use --op sum, or a floating-point type: --dtype float"
        )


def scan_sizes(begin_bytes: int, end_bytes: int, *, factor: int = 2, step_bytes: int | None = None) -> tuple[int, ...]:
    """Return the sizes from `begin_bytes` to `end_bytes`, like the options -b, -e, -f and -i of nccl-tests.

    Each size is `factor` times the previous one, or `step_bytes` larger.

    Raises:
        UsageError: the range is empty, has too many sizes, or has invalid sizes.
    """
    if begin_bytes <= 0:
        raise UsageError("the smallest size (-b) must be positive", hint="for example -b 8")
    if end_bytes < begin_bytes:
        raise UsageError("the largest size (-e) is smaller than the smallest (-b)", hint="for example -b 64K -e 64M")
    if end_bytes > _MOST_BYTES:
        raise UsageError("the largest size (-e) is above 16 GiB", hint="for example -e 128M")
    if step_bytes is not None and step_bytes <= 0:
        raise UsageError("the step (-i) must be positive", hint="for example -i 1M, or -f 2 instead")
    if factor < 2:  # noqa: PLR2004 - any smaller one would never end
        raise UsageError("the factor (-f) must be 2 or more", hint="for steps of equal size: -i 1M")
    if step_bytes is not None and (end_bytes - begin_bytes) // step_bytes >= _MOST_SIZES:
        raise UsageError(f"the step (-i) gives more than {_MOST_SIZES} sizes", hint="use a larger step, or -f 2")
    sizes = []
    size = begin_bytes
    while size <= end_bytes:
        sizes.append(size)
        size = size * factor if step_bytes is None else size + step_bytes
    return tuple(sizes)


def scan_messages(collectives: Iterable[str], sizes_bytes: Sequence[int]) -> tuple[Message, ...]:
    """Return one message for each collective and size.

    Raises:
        UsageError: a collective is unknown.
    """
    names = [check_choice("collective", name, COLLECTIVES) for name in dict.fromkeys(collectives)]
    return tuple(Message(collective=name, size_bytes=size) for name in names for size in sizes_bytes)


def in_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages; the largest of each collective alternates with raw TCP, as the network is judged by it."""
    largest = {message.collective: message for message in sorted(messages, key=lambda message: message.size_bytes)}
    return tuple(
        msgspec.structs.replace(message, turns=_TURNS) if message is largest[message.collective] else message
        for message in messages
    )
