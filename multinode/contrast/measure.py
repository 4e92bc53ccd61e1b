"""Cut the job to the measured steps, measure the sides of a contrast in turns, compare, predict. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NodeFacts
from multinode.contrast.figures import ASKED, ENOUGH_SLOTS, INDIVISIBLE, NAMED_GPUS, TOO_FEW_SLOTS, Contrast
from multinode.contrast.judge import compare
from multinode.contrast.side import CONTRAST_FILE, make_side
from multinode.errors import MultinodeError, UsageError
from multinode.findings.finding import Finding
from multinode.job.deepspeed import fit_batch
from multinode.job.job import Job, change_arguments, describe_job, limit_steps, with_same_threads
from multinode.job.planning import with_workers, workers_of_nodes
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import (
    benchmark_mode,
    launch,
    probe_nodes,
    require_success,
    same_threads,
)
from multinode.launch.node_runs import cleanup_nodes
from multinode.launch.offline import plan_offline
from multinode.levers.axes import LeverAxes
from multinode.predict.forecast import ForecastRequest
from multinode.predict.recommendations import advise_runs
from multinode.predict.request import forecast_runs
from multinode.profile.observed import steps_to_run
from multinode.records.benchmark import Benchmark, describe_benchmark
from multinode.records.plan import LaunchPlan
from multinode.records.run import make_run_id
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import CellOutcome, CellRecord, Grid, GridCell, GridRecord, Turn, fingerprint, in_turns
from multinode.series.series import Resume, Series, status_of, take_up
from multinode.stats.unknown import Unknown
from multinode.units import format_count, format_list

Mode = Literal["same-workers", "scale-out", "fixed-global-batch"]


class ContrastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare in a contrast.

    Attributes:
        mode: what is equal on all sides: the number of workers, the batch per worker, or the samples per step. If None,
            the slots of node 0 determine the mode.
        counts: numbers of nodes to compare, from the top of the hostfile. Default: one node and all nodes.
        workers: number of workers on each node of the candidate. Default: as many as the mode allows.
        each_node: whether to also measure each node alone.
        baseline_gpus: GPUs on node 0 to use for the baseline: one for each worker on all nodes.
        accumulation: number of micro-batches per step of the job. None if unknown.
    """

    mode: Mode | None = None
    counts: tuple[int, ...] = ()
    workers: int | None = None
    each_node: bool = False
    baseline_gpus: tuple[int, ...] | None = None
    accumulation: int | None = None


class PlannedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side before its measurement."""

    role: str  # `baseline`, `candidate`, `point` or `each-node`
    label: str  # its unique name, the suffix of its runs' ids
    cluster: Cluster  # its nodes
    workers: tuple[int, ...]  # of each of them
    accumulation: int | None = None  # micro-batches per step that it is to make; None leaves the job's own

    @property
    def description(self) -> str:
        """In a few words."""
        nodes, equal = self.cluster.nodes, len(set(self.workers)) == 1
        workers = format_count(self.workers[0], "worker")
        if not equal:
            workers = f"{format_list(tuple(map(str, self.workers)))} workers"
        each = "each of " if equal else ""
        where = f"on {nodes[0].name}" if len(nodes) == 1 else f"on {each}{len(nodes)} nodes"
        steps = f", {self.accumulation} micro-batches per step" if self.accumulation is not None else ""
        return f"{workers} {where}{steps}"


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The sides of a contrast."""

    mode: Mode
    why: Finding  # reason of the mode
    sides: tuple[PlannedSide, ...]  # the baseline, the candidate, then the others

    @property
    def baseline(self) -> PlannedSide:
        """The side with the fewest nodes."""
        return self.sides[0]

    @property
    def candidate(self) -> PlannedSide:
        """The side with the most."""
        return self.sides[1]


def plan_sides(cluster: Cluster, slots: Sequence[int], request: ContrastRequest) -> Sides:
    """Choose the sides; `slots` are the possible workers of each node.

    Same workers where the user names node 0's GPUs for it, or the fewest nodes can hold one for each of the most;
    otherwise each node full.

    Raises:
        UsageError: fewer than two nodes, or a mode that these nodes, slots or the job do not allow.
    """
    counts = _counts(cluster, request)
    _require_slots(cluster, slots[: counts[-1]], request.workers)
    if request.baseline_gpus is not None:
        if request.mode not in {None, "same-workers"}:
            raise UsageError(f"--baseline-gpus works only with --mode same-workers, not with --mode {request.mode}")
        cluster_of, workers, why = _named(cluster, slots, request, counts)
        mode: Mode = "same-workers"
    else:
        cluster_of = {count: cluster.first(count) for count in counts}
        mode, workers, why = _choose(slots, counts, request)
    accumulation = _accumulations(counts, workers, request.accumulation) if mode == "fixed-global-batch" else {}
    order = (counts[0], counts[-1], *counts[1:-1])
    sides = [
        PlannedSide(
            role={counts[0]: "baseline", counts[-1]: "candidate"}.get(count, "point"),
            label={counts[0]: "baseline", counts[-1]: "candidate"}.get(count, f"{count}-nodes"),
            cluster=cluster_of[count],
            workers=workers[count],
            accumulation=accumulation.get(count),
        )
        for count in order
    ]
    if request.each_node:
        sides += _each_alone(cluster.first(counts[-1]), slots[: counts[-1]], sides[0])
    return Sides(mode=mode, why=why, sides=tuple(sides))


def _counts(cluster: Cluster, request: ContrastRequest) -> tuple[int, ...]:
    there = len(cluster.nodes)
    counts = tuple(sorted({1, *request.counts} if len(set(request.counts)) == 1 else set(request.counts or (1, there))))
    if there < 2:  # noqa: PLR2004 - one against many
        raise UsageError("a contrast needs two or more nodes, but the hostfile has one")
    if counts[0] < 1 or counts[-1] > there:
        raise UsageError(f"--nodes {','.join(map(str, request.counts))}: {cluster.source} has {there} nodes")
    if len(counts) == 1:
        raise UsageError("--nodes 1 gives only one side; a contrast needs two", hint="--nodes 1,2")
    return counts


def _require_slots(cluster: Cluster, slots: Sequence[int], workers: int | None) -> None:
    for node, has in zip(cluster.nodes, slots, strict=False):
        if workers is not None and has < workers:
            raise UsageError(
                f"{workers} workers are requested, but it has {format_count(has, 'slot')}",
                node=node.name,
                hint=f"use --workers-per-node {min(slots)}, or add slots (slots=) or GPUs (gpus=) in the hostfile",
            )


def _choose(
    slots: Sequence[int], counts: Sequence[int], request: ContrastRequest
) -> tuple[Mode, dict[int, tuple[int, ...]], Finding]:
    """Mode, workers of each node by number of nodes, and why."""
    most, mode = counts[-1], request.mode
    shared = _shared_total(slots, counts, request.workers)
    if mode in {None, "same-workers"} and shared:
        spread = {count: _spread(shared, slots[:count]) for count in counts}
        room = slots[: counts[0]]
        return "same-workers", spread, ENOUGH_SLOTS.found(None, first=_first(room), slots=sum(room), nodes=most)
    few = _why_not_shared(slots, counts, request.workers)
    if mode == "same-workers":
        raise UsageError(
            few.message, hint="name node 0's GPUs for the baseline with --baseline-gpus, or use --mode scale-out"
        )
    full = {count: (request.workers,) * count if request.workers else tuple(slots[:count]) for count in counts}
    return mode or "scale-out", full, ASKED.found(None) if mode else few


def _why_not_shared(slots: Sequence[int], counts: Sequence[int], workers: int | None) -> Finding:
    least, most = counts[0], counts[-1]
    if sum(slots[:least]) >= most * (workers or 1):
        return INDIVISIBLE.found(None, counts=format_list([str(count) for count in counts]))
    room, needed = slots[:least], format_count(workers or 1, "worker")
    # As the hostfile has it.
    first = f"node 0 has slots={room[0]}" if least == 1 else _first(room)
    return TOO_FEW_SLOTS.found(None, first=first, slots=sum(room), workers=needed, nodes=most)


def _first(slots: Sequence[int]) -> str:
    return f"{'node 0 has' if len(slots) == 1 else f'the first {len(slots)} nodes have'} {sum(slots)} slots"


def _shared_total(slots: Sequence[int], counts: Sequence[int], workers: int | None) -> int:
    """The most workers, or as many as asked for, that fit on each of these numbers of nodes; 0 where none do.

    Nodes that are alike get as many each.
    """
    room, most = sum(slots[: counts[0]]), counts[-1]
    even = workers is not None or len(set(slots[:most])) == 1
    for total in range(room, most - 1, -1) if workers is None else (workers * most,):
        if total <= room and (not even or all(total % count == 0 for count in counts)):
            return total
    return 0


def _spread(total: int, slots: Sequence[int]) -> tuple[int, ...]:
    """So many workers over these nodes, as evenly as their slots allow."""
    workers = [0] * len(slots)
    for _ in range(total):
        able = (node for node, count in enumerate(workers) if count < slots[node])
        workers[min(able, key=lambda node: workers[node])] += 1
    return tuple(workers)


def _accumulations(
    counts: Sequence[int], workers: dict[int, tuple[int, ...]], accumulation: int | None
) -> dict[int, int]:
    """Micro-batches per step of each side, so that a step has as many as the job makes of it on the most nodes."""
    if accumulation is None:
        raise UsageError(
            "multinode does not know the global batch of a script and cannot change it",
            hint="use --mode scale-out, which compares at the same batch per worker",
        )
    totals = {count: sum(workers[count]) for count in counts}
    batches = accumulation * totals[counts[-1]]
    for total in totals.values():
        if batches % total:
            raise UsageError(
                f"{batches} micro-batches per step are not divisible by {total} workers",
                hint=f"--set gradient_accumulation_steps={accumulation * total}",
            )
    return {count: batches // total for count, total in totals.items()}


def _each_alone(cluster: Cluster, slots: Sequence[int], baseline: PlannedSide) -> list[PlannedSide]:
    """Each node alone with as many workers as the baseline's nodes, or its slots; the baseline itself is left out."""
    alone = len(baseline.cluster.nodes) == 1
    return [
        PlannedSide(
            role="each-node",
            label=f"alone-{rank}",
            cluster=msgspec.structs.replace(cluster, nodes=(node,)),
            workers=(min(max(baseline.workers), slots[rank]),),
            accumulation=baseline.accumulation,
        )
        for rank, node in enumerate(cluster.nodes)
        if rank or not alone
    ]


def _named(
    cluster: Cluster, slots: Sequence[int], request: ContrastRequest, counts: Sequence[int]
) -> tuple[dict[int, Cluster], dict[int, tuple[int, ...]], Finding]:
    """Clusters and workers by number of nodes, with node 0's GPUs named for the baseline."""
    if counts[0] != 1 or len(counts) != 2:  # noqa: PLR2004 - one against many
        raise UsageError("--baseline-gpus compares only two sides", hint="remove --nodes, or give one number")
    most, gpus = counts[-1], request.baseline_gpus or ()
    workers = (request.workers,) * most if request.workers else tuple(slots[:most])
    if len(set(gpus)) != len(gpus):
        raise UsageError("--baseline-gpus names a GPU twice", hint="name each GPU once")
    if len(gpus) != sum(workers):
        named = format_count(len(gpus), "GPU")
        raise UsageError(
            f"--baseline-gpus names {named}, but all nodes together have {sum(workers)} workers",
            hint=f"name {sum(workers)} GPUs on node 0: --baseline-gpus takes one per worker",
        )
    first: Node = msgspec.structs.replace(cluster.nodes[0], gpus=gpus, slots=len(gpus))
    clusters = {1: msgspec.structs.replace(cluster, nodes=(first,)), most: cluster.first(most)}
    return clusters, {1: (len(gpus),), most: workers}, NAMED_GPUS.found(None, gpus=len(gpus))


_STEPS = 30
_ACCUMULATION = "gradient_accumulation_steps"


class Contrasted(msgspec.Struct, frozen=True, kw_only=True):
    """A measured contrast.

    Attributes:
        directory: its directory; its sides' runs are in the same root.
    """

    contrast: Contrast
    directory: Path

    def document(self) -> Contrast:
        """The document of `contrast --json`."""
        return self.contrast


def contrast(
    launch: Launch, context: RunContext, request: ContrastRequest, *, repeats: int = 1, resume: Resume | None = None
) -> Contrasted:
    """Measure every side several times, interleaved, and compare.

    After a failure or an interruption, the results are still compared if each side was measured once; the same command
    makes the runs that are missing.

    Raises:
        UsageError: the hostfile or the mode does not allow it.
        RunFailed: a run failed; its directory has everything.
        Interrupted: the user stopped the measurement.
    """
    sides = plan_sides(
        launch.cluster, _slots(launch, _facts(launch, context), request), _with_accumulation(request, launch)
    )
    context.say(f"{sides.mode}: {sides.why.message}")
    launch = benchmark_mode(same_threads(launch, [max(side.workers) for side in sides.sides], context, "on every side"))
    launch = msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind="contrast"))
    workers = max(sum(side.workers) for side in sides.sides)
    directory = take_up(launch, _series_record(launch, sides, repeats), context, resume or Resume(), workers=workers)
    with directory.lock():
        series = _SideSeries(launch, sides, context, directory)
        try:
            series.run(list(in_turns(range(len(sides.sides)), repeats)))
        except BaseException as error:
            if isinstance(error, MultinodeError) and all(cell.run_ids for cell in series.record.cells):
                context.say(f"the measurements made so far are compared in {series.conclude().directory}")
            series.end(status_of(error), error=error)
            raise
        contrasted = series.conclude()
        series.end("succeeded")
    return contrasted


def _series_record(launch: Launch, sides: Sides, repeats: int) -> GridRecord:
    measured = {
        "contrast": [(side.label, side.workers, side.accumulation, side.cluster.nodes) for side in sides.sides],
        "repeats": repeats,
    }
    cells = [
        GridCell(
            label=side.label,
            nodes=len(side.cluster.nodes),
            workers_per_node=side.workers[0] if len(set(side.workers)) == 1 else None,
        )
        for side in sides.sides
    ]
    return GridRecord(
        fingerprint=fingerprint({"": launch.job}, launch.cluster.nodes, launch, measured),
        command=describe_job(launch.job) if not isinstance(launch.job, Benchmark) else describe_benchmark(launch.job),
        grid=Grid(nodes=tuple(sorted({cell.nodes for cell in cells})), repeats=repeats),
        cells=tuple(CellRecord(cell=cell) for cell in cells),
        noun="side",
    )


class _SideSeries(Series):
    """The runs of a contrast, each of which must succeed."""

    def __init__(self, launch: Launch, sides: Sides, context: RunContext, directory: RunDirectory) -> None:
        super().__init__(context, directory)
        self._launch = launch
        self._sides = sides

    def title(self, cell: CellRecord) -> str:
        """The side, in a few words."""
        side = next(side for side in self._sides.sides if side.label == cell.cell.label)
        return f"{side.label}: {side.description}"

    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a run; a side without a speed is an error before the others are measured in vain."""
        side = self._sides.sides[turn.cell]
        launched = launch(_side_launch(self._launch, side, run_id), self.context)
        require_success(launched, self.context)
        cleanup_nodes(launched, side.cluster, self.context)
        measured = make_side(side.role, [StoredRun(launched.directory)])
        return CellOutcome(state="measured", value=measured.samples_per_s.value)

    def conclude(self) -> Contrasted:
        """Compare and store what is measured, of each side once or more."""
        runs = [[self._stored(run_id) for run_id in cell.run_ids] for cell in self.record.cells]
        sides = [
            make_side(side.role, [StoredRun(run) for run in of_side])
            for side, of_side in zip(self._sides.sides, runs, strict=True)
        ]
        last = runs[1][-1]
        plan = StoredRun(last).plan
        compared = compare(
            sides,
            mode=self._sides.mode,
            why=self._sides.why,
            job=plan.job if plan is not None else self.record.command,
            rule=StoredRun(last).require_summary().rule,
        )
        self.directory.write(CONTRAST_FILE, compared)
        compared = with_outlook(compared, self.context.runs)
        self.directory.write(CONTRAST_FILE, compared)
        return Contrasted(contrast=compared, directory=self.directory.path)

    def _stored(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.context.runs / run_id)


def cut_job(job: Job, steps: int | None, *, whole: bool = False) -> Job:
    """Limit the number of steps of a job for a measurement.

    Args:
        job: the job. For a script, set the number of steps with the arguments of the script.
        steps: number of measured steps after the warm-up. Default: 30, or all if the job has fewer.
        whole: whether to keep all steps of the job.

    Raises:
        UsageError: the number of steps of this job cannot be limited.
    """
    if whole and steps is not None:
        raise UsageError("--full-run and --steps are mutually exclusive", hint="use only one of them")
    if job.training is None:
        if steps is not None:
            raise UsageError(
                "--steps sets max_steps in a YAML job; this job is a script",
                hint="limit its steps with the script's own arguments",
            )
        return job
    max_steps, wanted = job.arguments.get("max_steps"), steps_to_run(steps or _STEPS)
    if whole or (steps is None and isinstance(max_steps, int) and 0 < max_steps <= wanted):
        return job
    return limit_steps(job, wanted)


def plan_offline_sides(launch: Launch, request: ContrastRequest) -> tuple[Sides, tuple[LaunchPlan, ...]]:
    """The sides and their plans, from the hostfile only."""
    sides = plan_sides(launch.cluster, _slots(launch, {}, request), _with_accumulation(request, launch))
    workers = [max(side.workers) for side in sides.sides]
    environment = with_same_threads(launch.environment, launch.cluster, workers)
    launch = benchmark_mode(msgspec.structs.replace(launch, environment=environment))
    run_id = make_run_id()
    return sides, tuple(plan_offline(_side_launch(launch, side, f"{run_id}-{side.label}")) for side in sides.sides)


def _facts(launch: Launch, context: RunContext) -> dict[str, NodeFacts]:
    has_counts = all(node.slots is not None or node.gpus is not None for node in launch.cluster.nodes)
    return {} if has_counts else probe_nodes(launch, context.agent)


def _slots(launch: Launch, facts: dict[str, NodeFacts], request: ContrastRequest) -> Sequence[int]:
    counts = []
    for node in launch.cluster.nodes:
        (slots,) = workers_of_nodes(msgspec.structs.replace(launch.cluster, nodes=(node,)), facts, None)
        has_count = node.slots is not None or node.gpus is not None
        counts.append(slots if has_count else max(slots, request.workers or 0))
    return counts


def _with_accumulation(request: ContrastRequest, launch: Launch) -> ContrastRequest:
    if launch.job.training is None:
        return request
    return msgspec.structs.replace(request, accumulation=launch.job.training.settings.gradient_accumulation_steps)


def _side_launch(launch: Launch, side: PlannedSide, run_id: str) -> Launch:
    cluster, launch = with_workers(side.cluster, launch, side.workers)
    job = launch.job
    if side.accumulation is not None:
        job = change_arguments(job, {_ACCUMULATION: side.accumulation})
    job = fit_batch(job, sum(side.workers))
    return msgspec.structs.replace(launch, cluster=cluster, job=job, run_id=run_id)


def with_outlook(compared: Contrast, runs: Path) -> Contrast:
    """Add predictions for other networks and settings, if possible.

    For nodes that average, or send less than gradients, predictions use the baseline only.
    """
    candidate = compared.candidate
    names = [*compared.baseline.run_ids, *candidate.run_ids]
    accumulation = None if isinstance(candidate.settings, Unknown) else candidate.settings.accumulation
    request = ForecastRequest(
        nodes=(1, candidate.nodes, 2 * candidate.nodes),
        accumulations=() if accumulation is None else (accumulation, 4 * accumulation),
    )
    try:
        plan = StoredRun(RunDirectory(runs / candidate.run_ids[-1])).plan
        if plan is not None and plan.levers.algorithm is not None:
            if len(set(plan.workers)) > 1:
                why = "averaging and gradient compression cannot be predicted for unequal nodes"
                return msgspec.structs.replace(compared, forecast=Unknown(why))
            lever = msgspec.structs.replace(
                request,
                levers=LeverAxes.of(plan.levers),
                workers_per_node=(candidate.workers_per_node,),
                link_measured=candidate.link_gbit_per_s,
            )
            return msgspec.structs.replace(compared, forecast=forecast_runs(runs, compared.baseline.run_ids, lever))
        return msgspec.structs.replace(
            compared, forecast=forecast_runs(runs, names, request), advice=advise_runs(runs, names).advice
        )
    except MultinodeError as error:
        return msgspec.structs.replace(compared, forecast=Unknown(error.message))
