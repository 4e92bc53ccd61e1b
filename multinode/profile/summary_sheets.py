"""A Summary as text tables, most important first, for terminal and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from multinode.cluster.hostfile import fold_numbers
from multinode.figures.figure import Figure
from multinode.figures.frame import Frame
from multinode.profile.calls import SeenCall
from multinode.profile.machine_use import (
    CPU_BUSY,
    CPU_IOWAIT,
    CPU_STEAL,
    DIVIDED,
    GPU_CLOCK,
    GPU_INDEX,
    GPU_MEMORY,
    GPU_PCIE,
    GPU_POWER,
    GPU_SM,
    GPU_TEMPERATURE,
    GPU_THROTTLE,
    JOB_CORES,
    MEMORY_AVAILABLE,
    NODE_NAME,
    QUOTA_CORES,
    RETRANSMITTED,
    THROTTLED,
    WORKER_MEMORY,
    NodeUse,
    node_row,
)
from multinode.profile.nics import NIC_DROPS, NIC_IN, NIC_LINK, NIC_NAME, NIC_OUT, NIC_PEAK, NIC_SHARE, RATES
from multinode.profile.step_split import INSIDE, PARTS, WorkerSplit
from multinode.profile.summary import Rounds, Summary, unused_gpus
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME, TGS, TOKENS_PER_S
from multinode.render.sheet import Column, Sheet, figure, megabytes, percent
from multinode.stats.estimate import Estimate, value_of
from multinode.stats.unknown import UNMEASURED, Unknown, or_none, unknown_fields
from multinode.traffic.step_calls import SMALL_BYTES
from multinode.units import UNKNOWN, format_figure, format_sig

_NICS: tuple[Figure[Any], ...] = (
    *(NODE_NAME, NIC_NAME, NIC_IN, NIC_OUT, NIC_PEAK, NIC_LINK, NIC_SHARE, NIC_DROPS, RETRANSMITTED),
)
_PROCESSORS: tuple[Figure[Any], ...] = (
    *(CPU_BUSY, CPU_IOWAIT, CPU_STEAL, JOB_CORES, QUOTA_CORES, THROTTLED, MEMORY_AVAILABLE, WORKER_MEMORY),
)
_GPUS: tuple[Figure[Any], ...] = (
    *(NODE_NAME, GPU_INDEX, GPU_SM, GPU_MEMORY, GPU_POWER, GPU_CLOCK, GPU_TEMPERATURE, GPU_PCIE, GPU_THROTTLE),
)


def _nic_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    rows = tuple(node_row(node, nic) for node in nodes for nic in node.nics)
    note = "mean over the measured steps; peak: between two samples; retrans: retransmitted TCP segments of the node"
    return Frame(title="network, per NIC", rows=rows, figures=_NICS).sheet(notes=(note,))


def _processor_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    rows = [node_row(node) for node in nodes]
    # A row with only the node's name is dropped.
    told = tuple(row for row in rows if {figure.tell(row) for figure in _PROCESSORS} != {UNKNOWN})
    note = "free: the minimum available; worker: the maximum that one used, on its GPU if it has one"
    return Frame(title="CPU and memory", rows=told, figures=(NODE_NAME, *_PROCESSORS)).sheet(notes=(note,))


def _gpu_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    silent = any(gpu.peak_memory_gib == UNMEASURED and gpu.memory_total_gib is None and not gpu.mig for gpu in gpus)
    unified = ("a GPU without memory here shares its node's (unified memory): see free above",) if silent else ()
    rows = tuple(node_row(node, gpu) for node in nodes for gpu in node.gpus)
    note = "medians; memory and temperature are the highest. A waiting NCCL kernel counts as SM use"
    return Frame(title="GPUs", rows=rows, figures=_GPUS).sheet(notes=(note, *unified))


_OF_DIVIDED = "sm_percent, memory, power and energy"
_BAR = 30
_MOST_CALLS = 8
SMALLER = "Trainer: average_tokens_across_devices: false, a larger logging_steps"
"""Settings that avoid calls that cost a round trip."""
# Number of tiny calls per step that is worth a line.
_OFTEN = 0.5


def summary_sheets(summary: Summary) -> list[Sheet]:
    """Verdict, speed, step split, communication, machines, and missing figures; empty ones are excluded."""
    sheets = [
        verdict_sheet(summary),
        Sheet(title="speed", rows=tuple(_speed(summary))),
        _split_sheet(summary),
        Sheet(title="communication", rows=tuple(_communication(summary))),
        _bytes_sheet(summary),
        _calls_sheet(summary),
        _nic_sheet(summary.nodes),
        _processor_sheet(summary.nodes),
        _gpu_sheet(summary.nodes),
        _missing_sheet(summary),
    ]
    return [sheet for sheet in sheets if sheet.rows]


def verdict_sheet(summary: Summary) -> Sheet:
    """The bottleneck, stragglers, and the fix."""
    return Sheet(title="verdict", rows=tuple(_verdict(summary)))


def _bytes_sheet(summary: Summary) -> Sheet:
    bytes_per_step = summary.comm.bytes_per_step
    seen = tuple(or_none(size) for size in (bytes_per_step.calls, bytes_per_step.expected, bytes_per_step.nic))
    if set(seen) == {None}:
        return Sheet(title="bytes per step")
    columns = (
        Column("collective payload", "MB"),
        Column("expected NIC traffic", "MB"),
        Column("measured NIC traffic", "MB"),
    )
    return Sheet(
        title="bytes per step, one way, of the busiest",
        columns=columns,
        rows=(tuple(map(megabytes, seen)),),
        notes=summary.comm.explained,
    )


def _calls_sheet(summary: Summary) -> Sheet:
    calls = summary.comm.calls
    rows = [
        (
            call.op + (" (DDP bucket)" if call.source == "ddp" else ""),
            str(call.ranks),
            str(call.nodes),
            call.backend or UNKNOWN,
            format_figure(call.count, digits=4),
            megabytes(call.size_bytes),
            megabytes(call.size_bytes * call.count),
        )
        for call in calls[:_MOST_CALLS]
    ]
    left = len(calls) - len(rows)
    return Sheet(
        title="collectives per step and worker",
        columns=(
            Column("call", words=True),
            Column("workers"),
            Column("nodes"),
            Column("backend", words=True),
            Column("times"),
            Column("size", "MB"),
            Column("together", "MB"),
        ),
        rows=tuple(rows),
        notes=(f"and {left} smaller ones",) if left > 0 else (),
    )


def _verdict(summary: Summary) -> Iterator[tuple[str, ...]]:
    if summary.bottleneck is not None:
        yield "bottleneck", summary.bottleneck.message
    if (unused := unused_gpus(summary)) is not None:
        yield "GPUs", unused
    for late in summary.stragglers:
        cause = "" if late.cause == "unknown" else f"; likely cause: {late.cause.replace('_', ' ')}"
        yield "straggler", f"{late.message} (rank {fold_numbers(late.ranks)}){cause}"
        yield from (("", evidence.message) for evidence in late.causes)
        if late.hint:
            yield "hint", late.hint


def _speed(summary: Summary) -> Iterator[tuple[str, ...]]:
    if summary.steps:
        yield "steps", f"{summary.steps} recorded, {summary.steady_steps} measured; {summary.rule}"
    if (times := or_none(summary.step_time_ms)) is not None:
        spread = times.spread
        yield STEP_TIME.words, f"{spread.median:.1f} ms (p95 {spread.p95:.1f} ms, cv {spread.cv:.2f})"
    if (rate := value_of(summary.samples_per_s)) is not None:
        yield SAMPLES_PER_S.title, f"{format_sig(rate)} (all workers)"
    if tokens := _padded(summary, summary.tokens_per_s, summary.effective_tokens_per_s):
        yield TOKENS_PER_S.title, f"{tokens} (all workers)"
    if tokens := _padded(summary, summary.tgs, summary.effective_tgs):
        yield TGS.title, f"{tokens} (tokens/s per worker)"
    yield from _utilisation(summary)
    first, last = or_none(summary.first_loss), or_none(summary.last_loss)
    if first is not None and last is not None:
        yield "loss", f"{format_figure(first, digits=4)} to {format_figure(last, digits=4)}"
    parameters, trainable = or_none(summary.parameters), or_none(summary.trainable)
    if parameters is not None and trainable is not None:
        yield "model", f"{parameters:,} parameters, {trainable:,} trainable"


def _padded(summary: Summary, padded: Estimate | Unknown, effective: float | Unknown) -> str:
    counted = summary.counted_masks
    rests_on = "" if counted is None or counted == 1.0 else f" by the masks of {percent(counted)} of them"
    parts = [(value_of(padded), "padding counted"), (or_none(effective), f"without padding{rests_on}")]
    return ", ".join(f"{value:,.1f} {words}" for value, words in parts if value is not None)


def _utilisation(summary: Summary) -> Iterator[tuple[str, ...]]:
    used = summary.utilisation
    if isinstance(used, Unknown):
        return
    model, computed = format_sig(used.model_tflops), format_sig(used.hardware_tflops)
    yield "TFLOP/s", f"{model} per GPU for the model, {computed} computed; {used.rule}"
    if used.mfu is not None and used.hfu is not None:
        yield "MFU, HFU", f"{percent(used.mfu)}, {percent(used.hfu)} of {used.denominator}"
    else:
        yield "MFU, HFU", f"{UNKNOWN}: {used.denominator}"


def _split_sheet(summary: Summary) -> Sheet:
    mean = summary.split.mean
    if isinstance(mean, Unknown):
        return Sheet(title="where a step goes")
    return Sheet(
        title="where a step goes",
        columns=(Column("part", words=True), Column("time", "ms"), Column("of the step"), Column("", words=True)),
        rows=tuple(
            row
            for field, name in PARTS.items()
            for row in (
                _part(mean, or_none(getattr(mean, field)), name),
                *([_part(mean, mean.local_ms, INSIDE)] if field == "exposed_ms" and mean.local_ms else []),
            )
        ),
        notes=(summary.split.rule,) if summary.split.rule else (),
    )


def _part(mean: WorkerSplit, part_ms: float | None, name: str) -> tuple[str, ...]:
    share = part_ms / mean.step_ms if part_ms is not None and mean.step_ms > 0 else None
    bar = "" if share is None else "#" * round(_BAR * min(1.0, max(0.0, share)))
    return name, figure(part_ms), percent(share), bar


def _communication(summary: Summary) -> Iterator[tuple[str, ...]]:
    comm = summary.comm
    if summary.strategy != "unknown":
        yield "strategy", summary.strategy
    if summary.rounds is not None:
        yield from _rounds(summary.rounds)
        yield from _script_calls(summary.comm.calls)
    if (exposed_ms := value_of(comm.exposed_ms)) is not None:
        share = "" if comm.exposed_share is None else f", {percent(comm.exposed_share)} of the step"
        known = summary.split.steps.words
        yield "exposed", f"{exposed_ms:.1f} ms per step{share}{f', {known}' if known else ''}"
    if (overlap := or_none(comm.overlap)) is not None:
        yield "overlap", f"{percent(overlap)} of the communication overlaps with compute"
    yield from _bandwidth(summary)
    yield from _window(summary)


def _rounds(rounds: Rounds) -> Iterator[tuple[str, ...]]:
    if rounds.sync_ms is None or rounds.size_bytes is None:
        yield "rounds", f"no whole round of {rounds.every} steps was measured"
        return
    early = f", {rounds.early} of them early" if rounds.early else ""
    dtype = f" as {rounds.dtype}" if rounds.dtype else ""
    sent = f"{megabytes(rounds.size_bytes)} MB{dtype} in {rounds.sync_ms:.1f} ms"
    yield "rounds", f"{rounds.rounds} measured{early}; each averages {sent}"
    yield "drift", f"{format_sig(rounds.drift)} from the mean of all nodes, {format_sig(rounds.last_drift)} last"


def _script_calls(calls: Sequence[SeenCall]) -> Iterator[tuple[str, ...]]:
    small = sum(call.count for call in calls if call.nodes > 1 and call.size_bytes < SMALL_BYTES)
    if small >= _OFTEN:
        yield (
            "script",
            f"{format_figure(small)} small collectives per step between nodes, a round trip each ({SMALLER})",
        )


def _bandwidth(summary: Summary) -> Iterator[tuple[str, ...]]:
    seen = summary.comm.in_training
    if isinstance(seen.busbw_gb_per_s, Unknown):
        return
    words = f"{seen.busbw_gb_per_s:.3f} GB/s in training"
    if seen.source is not None:
        words += f" (by {seen.source})"
    if seen.alone is not None:
        words += f", {seen.alone.busbw_gb_per_s:.3f} GB/s alone (nccl-test {seen.alone.run_id})"
    yield "busbw", seen.sentence or words


def _window(summary: Summary) -> Iterator[tuple[str, ...]]:
    trace = summary.trace
    if trace is None:
        return
    busbw = or_none(trace.busbw_gb_per_s)
    parts = [
        f"{trace.comm_ms:.1f} ms communication per step" if trace.comm_ms is not None else "",
        f"{trace.exposed_ms:.1f} ms of it exposed" if trace.exposed_ms is not None else "",
        f"overlap {percent(trace.overlap)}" if trace.overlap is not None else "",
        f"busbw {busbw:.3f} GB/s" if busbw is not None else "",
        f"{fmean(worker.compute_ms for worker in trace.workers):.1f} ms computation" if trace.workers else "",
    ]
    text = ", ".join(part for part in parts if part)
    if text:
        yield "trace window", text
    if trace.agreement:
        yield "" if text else "trace window", trace.agreement


def _missing_sheet(summary: Summary) -> Sheet:
    names: dict[str, dict[str, None]] = {}
    for name, reason in _missing(summary):
        names.setdefault(reason, {})[name] = None
    return Sheet(
        title="missing",
        columns=(Column("figure", words=True), Column("why", words=True)),
        rows=tuple((", ".join(named), reason) for reason, named in names.items()),
    )


def _missing(summary: Summary) -> Iterator[tuple[str, str]]:
    comm, split, trace = summary.comm, summary.split, summary.trace
    bytes_per_step = {f"bytes_per_step.{name}": size for name, size in unknown_fields(comm.bytes_per_step).items()}
    parts = unknown_fields(split.mean)
    if isinstance(split.mean, Unknown) and split.mean != UNMEASURED:
        parts = dict.fromkeys((*PARTS, "overlap"), split.mean)
    unknown = unknown_fields(summary)
    yield from ((name, figure.reason) for name, figure in unknown.items())
    yield from summary.notes.items()
    # The split repeats figures of the communication.
    of_step = bytes_per_step | unknown_fields(comm)
    of_step |= {name: figure for name, figure in (parts | unknown_fields(split)).items() if name not in of_step}
    yield from ((name, figure.reason) for name, figure in of_step.items() if name != "mean")
    if trace is not None:
        yield from ((name, figure.reason) for name, figure in unknown_fields(trace).items())
        yield from trace.notes.items()
    nodes: dict[tuple[str, str], list[str]] = {}
    for node in summary.nodes:
        for entry in dict.fromkeys(_unknown_of(node)):
            nodes.setdefault(entry, []).append(node.node)
    for (name, reason), where in nodes.items():
        everywhere = len(where) == len(summary.nodes)
        yield name if everywhere else f"{name} ({', '.join(where)})", reason


def _unknown_of(node: NodeUse) -> Iterator[tuple[str, str]]:
    for nic in node.nics:
        for name, unknown in unknown_fields(nic).items():
            # All the rates of a NIC have one reason.
            yield nic.ifname if name in RATES else f"{nic.ifname} {name}", unknown.reason
    for gpu in node.gpus:
        for name, unknown in unknown_fields(gpu).items():
            yield f"gpu {gpu.index} {_OF_DIVIDED if unknown == DIVIDED else name}", unknown.reason
    for name, unknown in unknown_fields(node).items():
        yield name.removesuffix("_s"), unknown.reason
    yield from node.notes.items()
