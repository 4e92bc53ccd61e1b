"""A Summary as text tables, most important first, for terminal and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import msgspec

from multinode.cluster.hostfile import fold_numbers
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.profile.calls import SeenCall
from multinode.profile.machine_use import (
    CPU_BUSY,
    CPU_IOWAIT,
    CPU_STEAL,
    DIVIDED,
    GPU_FIGURES,
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
from multinode.profile.measured import SPEEDS, speed_values
from multinode.profile.nics import NIC_DROPS, NIC_IN, NIC_LINK, NIC_NAME, NIC_OUT, NIC_PEAK, NIC_SHARE, RATES
from multinode.profile.step_bytes import BYTES_FIGURES
from multinode.profile.step_split import INSIDE, PART_NAMES, PARTS, WorkerSplit
from multinode.profile.summary import Rounds, Summary, unused_gpus
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME, TGS, TOKENS_PER_S
from multinode.render.sheet import Column, Sheet, megabytes, percent
from multinode.stats.estimate import Estimate, value_of
from multinode.stats.unknown import UNMEASURED, Unknown, or_none, unknown_fields
from multinode.traffic.step_calls import SMALL_BYTES
from multinode.units import UNKNOWN, format_figure, format_ms, format_sig

_NICS: tuple[Figure[Any], ...] = (
    *(NODE_NAME, NIC_NAME, NIC_IN, NIC_OUT, NIC_PEAK, NIC_LINK, NIC_SHARE, NIC_DROPS, RETRANSMITTED),
)
_PROCESSORS: tuple[Figure[Any], ...] = (
    *(CPU_BUSY, CPU_IOWAIT, CPU_STEAL, JOB_CORES, QUOTA_CORES, THROTTLED, MEMORY_AVAILABLE, WORKER_MEMORY),
)


def _nic_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    rows = tuple(node_row(node, nic) for node in nodes for nic in node.nics)
    note = "mean over the measured steps; peak: between two samples; retrans: retransmitted TCP segments of the node"
    return Frame(title="network, per NIC", rows=rows, figures=_NICS).sheet(notes=(note,))


def _processor_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    rows = [node_row(node) for node in nodes]
    # A row with only the node's name is dropped.
    told = tuple(row for row in rows if {figure.tell(row) for figure in _PROCESSORS} != {UNKNOWN})
    note = "free: minimum available memory; worker: largest peak memory of a worker (GPU memory if it has a GPU)"
    return Frame(title="CPU and memory", rows=told, figures=(NODE_NAME, *_PROCESSORS)).sheet(notes=(note,))


def _gpu_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    silent = any(gpu.peak_memory_gib == UNMEASURED and gpu.memory_total_gib is None and not gpu.mig for gpu in gpus)
    unified = (
        ("a GPU without a value for memory shares its node's memory (unified memory): see `free` above",)
        if silent
        else ()
    )
    rows = tuple(node_row(node, gpu) for node in nodes for gpu in node.gpus)
    note = "medians, except memory and temperature, which are maxima; a waiting NCCL kernel counts as SM use"
    return Frame(title="GPUs", rows=rows, figures=(NODE_NAME, *GPU_FIGURES)).sheet(notes=(note, *unified))


_OF_DIVIDED = "sm_percent, memory, power and energy"
_BAR = 30
_MOST_CALLS = 8
SMALLER = "with the Trainer, set average_tokens_across_devices: false and a larger logging_steps"
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
    sizes = msgspec.structs.asdict(summary.comm.bytes_per_step)
    return Frame(
        title="bytes per step and direction, busiest worker or NIC",
        rows=() if all(isinstance(size, Unknown) for size in sizes.values()) else (Row(summary, sizes),),
        figures=BYTES_FIGURES,
        notes=summary.comm.findings,
    ).sheet()


def _calls_sheet(summary: Summary) -> Sheet:
    calls = summary.comm.calls
    rows = tuple(map(_call_row, calls[:_MOST_CALLS]))
    left = len(calls) - len(rows)
    notes = (f"and {left} smaller ones",) if left > 0 else ()
    return Frame(title="collectives per step per worker", rows=rows, figures=_CALLS).sheet(notes=notes)


def _call_row(call: SeenCall) -> Row:
    op = call.op + (" (DDP bucket)" if call.source == "ddp" else "")
    return Row(call, msgspec.structs.asdict(call) | {_OP.name: op, _TOGETHER.name: call.step_bytes})


_OP = Figure[str]("op", "call", about="operation of the collective")
_TOGETHER = Figure[float]("step_bytes", "together", "MB", form="megabytes", about="total size of these calls in a step")
_CALLS: tuple[Figure[Any], ...] = (
    _OP,
    Figure[int]("ranks", "workers", form="number", about="number of workers in the call's group"),
    Figure[int]("nodes", "nodes", form="number", about="number of nodes in the call's group"),
    Figure[str]("backend", "backend", about="backend of the call's group"),
    Figure[float]("count", "times", form="four_digits", about="calls per step, mean of the measured steps"),
    Figure[float]("size_bytes", "size", "MB", form="megabytes", about="size of one call, as nccl-tests counts it"),
    _TOGETHER,
)


def _verdict(summary: Summary) -> Iterator[tuple[str, ...]]:
    if summary.bottleneck is not None:
        yield "bottleneck", summary.bottleneck.message
    if (unused := unused_gpus(summary)) is not None:
        yield "GPUs", unused
    for late in summary.stragglers:
        cause = "" if late.cause == "unknown" else f"; likely cause: {late.cause.replace('_', ' ')}"
        ranks = f"{'rank' if len(late.ranks) == 1 else 'ranks'} {fold_numbers(late.ranks)}"
        yield "straggler", f"{late.message} ({ranks}){cause}"
        yield from (("", evidence.message) for evidence in late.causes)
        if late.hint:
            yield "hint", late.hint


def _speed(summary: Summary) -> Iterator[tuple[str, ...]]:
    if summary.steps:
        yield "steps", f"{summary.steps} recorded, {summary.steady_steps} measured; {summary.rule}"
    if (times := or_none(summary.step_time_ms)) is not None:
        spread = times.spread
        yield STEP_TIME.words, f"{format_ms(spread.median)} (p95 {format_ms(spread.p95)}, cv {spread.cv:.2f})"
    if (rate := value_of(summary.samples_per_s)) is not None:
        yield SAMPLES_PER_S.title, f"{format_sig(rate)} (all workers)"
    values = speed_values(summary)
    for figure in SPEEDS:
        field, of = _WITHOUT_PADDING.get(figure.name, ("", figure.unit))
        speed = values[figure.name]
        text = _padded(summary, speed, getattr(summary, field)) if field else figure.text(speed)
        if text not in {"", UNKNOWN}:
            yield figure.title, f"{text} ({of})" if of else text
    yield from _utilisation(summary)
    first, last = or_none(summary.first_loss), or_none(summary.last_loss)
    if first is not None and last is not None:
        yield "loss", f"{format_figure(first, digits=4)} to {format_figure(last, digits=4)}"
    parameters, trainable = or_none(summary.parameters), or_none(summary.trainable)
    if parameters is not None and trainable is not None:
        yield "model", f"{parameters:,} parameters, {trainable:,} trainable"


# The same speed without padding, and of whom both are.
_WITHOUT_PADDING = {
    TOKENS_PER_S.name: ("effective_tokens_per_s", "all workers"),
    TGS.name: ("effective_tgs", "tokens/s per worker"),
}


def _padded(summary: Summary, padded: Estimate | Unknown, effective: float | Unknown) -> str:
    counted = summary.counted_masks
    rests_on = "" if counted is None or counted == 1.0 else f" (from {percent(counted)} of the attention masks)"
    parts = [(value_of(padded), "with padding"), (or_none(effective), f"without padding{rests_on}")]
    return ", ".join(f"{value:,.1f} {words}" for value, words in parts if value is not None)


def _utilisation(summary: Summary) -> Iterator[tuple[str, ...]]:
    used = summary.utilisation
    if isinstance(used, Unknown):
        return
    model, computed = format_sig(used.model_tflops), format_sig(used.hardware_tflops)
    yield "TFLOP/s", f"{model} per GPU for the model, {computed} including recomputation; FLOPs per token: {used.rule}"
    if used.mfu is not None and used.hfu is not None:
        yield "MFU, HFU", f"{percent(used.mfu)}, {percent(used.hfu)} of {used.denominator}"
    else:
        yield "MFU, HFU", f"{UNKNOWN}: {used.denominator}"


def _split_sheet(summary: Summary) -> Sheet:
    mean = summary.split.mean
    if isinstance(mean, Unknown):
        return Sheet(title="where a step goes")
    return Frame(
        title="where a step goes",
        rows=tuple(
            row
            for part in PARTS
            for row in (
                _part(mean, or_none(getattr(mean, part.name)), part.title),
                *([_part(mean, mean.local_ms, INSIDE)] if part.name == "exposed_ms" and mean.local_ms else []),
            )
        ),
        figures=(_PART, _PART_TIME, _OF_STEP, _BAR_OF_STEP),
    ).sheet(notes=(summary.split.rule,) if summary.split.rule else ())


def _part(mean: WorkerSplit, part_ms: float | None, name: str) -> Row:
    share = part_ms / mean.step_ms if part_ms is not None and mean.step_ms > 0 else None
    return Row(mean, {_PART.name: name, _PART_TIME.name: part_ms, _OF_STEP.name: share})


def _bar(row: Row) -> str:
    share = row[_OF_STEP]
    return "" if isinstance(share, Unknown) else "#" * round(_BAR * min(1.0, max(0.0, share)))


_PART = Figure[str]("part", "part", about="part of a step")
_PART_TIME = Figure[float]("part_ms", "time", "ms", form="ms", about="time of a part of the step, mean of the workers")
_OF_STEP = Figure[float]("of_step", "of the step", form="share", about="a part's share of the step time")
_BAR_OF_STEP = Figure[str]("bar", about="share of the step time as a bar", cell=_bar)


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
        yield "exposed", f"{format_ms(exposed_ms)} per step{share}{f', {known}' if known else ''}"
    if (overlap := or_none(comm.overlap)) is not None:
        yield "overlap", f"{percent(overlap)} of the communication overlaps with compute"
    yield from _bandwidth(summary)
    yield from _window(summary)


def _rounds(rounds: Rounds) -> Iterator[tuple[str, ...]]:
    if rounds.sync_ms is None or rounds.size_bytes is None:
        yield "rounds", f"no complete round of {rounds.every} steps was measured"
        return
    early = f", {rounds.early} of them early" if rounds.early else ""
    dtype = f" as {rounds.dtype}" if rounds.dtype else ""
    sent = f"{megabytes(rounds.size_bytes)} MB{dtype} in {format_ms(rounds.sync_ms)}"
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
    if found := summary.comm.in_training.findings:
        yield "busbw", f"{'; '.join(finding.message for finding in found)}."


def _window(summary: Summary) -> Iterator[tuple[str, ...]]:
    trace = summary.trace
    if trace is None:
        return
    busbw = or_none(trace.busbw_gb_per_s)
    parts = [
        f"{format_ms(trace.comm_ms)} communication per step" if trace.comm_ms is not None else "",
        f"{format_ms(trace.exposed_ms)} of it exposed" if trace.exposed_ms is not None else "",
        f"overlap {percent(trace.overlap)}" if trace.overlap is not None else "",
        f"busbw {busbw:.3f} GB/s" if busbw is not None else "",
        f"{format_ms(fmean(worker.compute_ms for worker in trace.workers))} computation" if trace.workers else "",
    ]
    text = ", ".join(part for part in parts if part)
    if text:
        yield "trace window", text
    if trace.findings:
        yield "" if text else "trace window", " ".join(finding.message for finding in trace.findings)


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
        parts = dict.fromkeys((*PART_NAMES, "overlap"), split.mean)
    unknown = unknown_fields(summary)
    yield from ((name, figure.reason) for name, figure in unknown.items())
    reported: dict[str, list[str]] = {}
    for note in summary.notes:
        reported.setdefault(note.concerns, []).append(note.message)
    yield from ((name, "; ".join(messages)) for name, messages in reported.items())
    # The split repeats figures of the communication.
    of_step = bytes_per_step | unknown_fields(comm)
    of_step |= {name: figure for name, figure in (parts | unknown_fields(split)).items() if name not in of_step}
    yield from ((name, figure.reason) for name, figure in of_step.items() if name != "mean")
    if trace is not None:
        yield from ((name, figure.reason) for name, figure in unknown_fields(trace).items())
        yield from ((note.concerns, note.message) for note in trace.notes)
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
    yield from ((note.concerns, note.message) for note in node.notes)
