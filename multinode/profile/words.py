"""The bandwidth of a training's own all-reduces in a sentence, beside nccl-test's, and the bytes by two counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from multinode.profile.bottleneck import WORTH, Bottleneck, is_bound
from multinode.profile.in_training import InTraining
from multinode.profile.inspector_view import NEWER_PLUGIN
from multinode.profile.likely_causes import Disturbance, LikelyCause, Peers
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.stragglers import Straggler
from multinode.profile.summary import Summary
from multinode.profile.trace_view import Agreement, compare_window
from multinode.units import format_list

_MOST_NAMED = 4


class _Words(NamedTuple):
    text: str
    hint: str


_VERSIONS = "install the same versions on {node} as on the others, and measure again"
_WORK = (
    "give every worker the same amount of work: the same batch size on every node, and samples of similar length "
    "together (group_by_length) or packed (packing)"
)
_LIMIT = (
    "raise the CPU limit of the job on {node}: CPUQuota= of systemd, --cpus of docker, limits.cpu of a pod, "
    "--cpus-per-task of Slurm"
)
_HOLDER = "see whose process it is, and whether it may be ended: "
_SENSORS = "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE"
_WATCH = "look at it while it trains: ssh {node} {watch}"
_THROTTLED = "for {throttled_share:.0%} of the time, on {they} for {peers_throttled_share:.0%}"
_CLOCKS = (
    "clocks of a GPU of {node} throttled ({what}) for {throttled_share:.0%} of the time, of {they} for "
    "{peers_throttled_share:.0%}{degrees}"
)

# By code. Beside the figures there are `node`, `they` (its peers), and the parts of _PARTS.
_CAUSES = {
    "throttled_share": _Words(f"CPU throttled (cgroup) on {{node}}{{limit}} {_THROTTLED}", _LIMIT),
    "throttled_share_alone": _Words(
        "CPU throttled (cgroup) on {node}{limit} for {throttled_share:.0%} of the time, no limit on {they}", _LIMIT
    ),
    "cpu_steal_percent": _Words(
        "CPU steal {cpu_steal_percent:.0f} % on {node}, {peers_cpu_steal_percent:.0f} % on {they}",
        "{node} shares its CPUs with other virtual machines: give it dedicated ones, or leave it out",
    ),
    "cpu_iowait_percent": _Words(
        "iowait {cpu_iowait_percent:.0f} % on {node}, {peers_cpu_iowait_percent:.0f} % on {they}",
        "see which disk it is: ssh {node} iostat -x 1 5",
    ),
    "little_memory": _Words(
        "{node} had {memory_available_gib:.2f} GiB of memory left, {they} {peers_memory_available_gib:.2f} GiB",
        "see what uses it, and whether it swaps: ssh {node} 'free -h; ps aux --sort=-rss | head'; what a container may "
        "use is not in `free`, but in multinode check",
    ),
    "gpu_heat": _Words(
        _CLOCKS.replace("{what}", "heat"),
        "cool it better: fans, dust, the GPUs next to it; see ssh {node} nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    ),
    "gpu_power": _Words(
        _CLOCKS.replace("{what}", "a power limit"),
        "compare the power limits: ssh {node} nvidia-smi -q -d POWER,PERFORMANCE",
    ),
    "gpu_clocks": _Words(
        "GPU {gpu:.0f} of {node} ran at {sm_clock_mhz:.0f}{most_mhz} MHz, {they} at {peers_sm_clock_mhz:.0f} MHz",
        "see what throttles its clocks: ssh {node} nvidia-smi -q -d CLOCK,PERFORMANCE",
    ),
    "pcie": _Words(
        "GPU {gpu:.0f} of {node} had PCIe {pcie}, {they} {peers_pcie}",
        "reseat the GPU, or give it a slot with all lanes; see ssh {node} nvidia-smi "
        "--query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv",
    ),
    "more_tokens": _Words(
        "{workers} had {tokens_per_step:.0f} tokens per step, {they} {peers_tokens_per_step:.0f}", _WORK
    ),
    "more_samples": _Words(
        "{workers} had {samples_per_step:.0f} samples per step, {they} {peers_samples_per_step:.0f}", _WORK
    ),
    "slow_data": _Words(
        "{workers} waited {data_ms:.0f} ms per step for batches, {they} {peers_data_ms:.0f} ms",
        "look at where {node} reads its data, and how fast: ssh {node} iostat -x 1 5; more loader workers "
        "(dataloader_num_workers) hide a slow disk",
    ),
    "busy_cpus": _Words(
        "{node}'s job used {cores_used} cores{when}, {peers_cores_used} on {they}, and its CPUs are "
        "{cpu_busy_percent:.0f} % busy",
        "see what else runs there: ssh {node} top -b -n 1",
    ),
    "fewer_cores": _Words(
        "{node}'s job used {cores_used} cores{when}, {peers_cores_used} on {they}",
        "see whether the job may use fewer cores on {node}: a cgroup, taskset, OMP_NUM_THREADS",
    ),
    "nothing_differs": _Words("{longer}no difference from {they} explains it; compared: {looked_at}", _WATCH),
    "nothing_to_compare": _Words(
        "{longer}nothing else that was recorded of {node} can be compared with {they}", _WATCH
    ),
    "few_threads": _Words(
        "threads per worker: {threads:.0f} on {node}, {peers_threads:g} on {they}",
        "set env.OMP_NUM_THREADS= in the hostfile to the same for every node, {node} included",
    ),
    "few_cores": _Words(
        "cores that a worker may use: {cores:.0f} on {node}, {peers_cores:g} on {they}",
        "see what its workers may run on: ssh {node} nproc; a cpuset or taskset takes cores away",
    ),
    "gpu_in_use": _Words("before the measurement its GPU was used by {holders}", f"{_HOLDER}ssh {{node}} nvidia-smi"),
    "other_load": _Words(
        "other processes used {others_cores:.1f} of {node}'s {node_cores:.0f} cores{load_there}",
        "see what else runs there: ssh {node} top",
    ),
    "shared_processors": _Words(
        "all {node_cores:.0f} cores that {node} sees were busy, and its own workers used {job_cores:.1f} of "
        "{own_cores}",
        "nodes on one machine share its cores: compare them alone",
    ),
    "other_name": _Words(
        "{node} has {name}, {they} {peers_name}",
        "in one training the slower device sets the pace: train on equal devices, or give it less work",
    ),
    "other_torch": _Words("{node} has torch {torch}, {they} {peers_torch}", _VERSIONS),
    "other_cuda": _Words("{node} has torch built with CUDA {cuda}, {they} {peers_cuda}", _VERSIONS),
    "other_capability": _Words("{node} has kernels for {capability}, {they} {peers_capability}", _VERSIONS),
    "own_gpu_in_use": _Words("before the measurement it was used by {holders}", f"{_HOLDER}nvidia-smi"),
    "own_gpu_heat": _Words("its clocks were throttled by heat for {throttled_share:.0%} of the time", _SENSORS),
    "own_gpu_power": _Words(
        "its clocks were throttled by a power limit for {throttled_share:.0%} of the time", _SENSORS
    ),
    "own_gpu_clocks": _Words(
        "it ran at {sm_clock_mhz:.0f} of {sm_clock_max_mhz:.0f} MHz",
        "nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc resets clocks that were set by hand",
    ),
    "usual_matmul": _Words(
        "usual reasons are a power limit below the GPU's own, heat, clocks that were set by hand, a GPU that others "
        "use, and a torch that was built without kernels for it",
        "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE on the node while bench runs",
    ),
    "usual_memory": _Words(
        "usual reasons are memory clocks that were set by hand, error correction of GPUs that have it as an option, "
        "and a GPU that others use",
        "nvidia-smi -q -d CLOCK,ECC on the node while bench runs",
    ),
}
# Parts of a sentence, by name: the one whose figures are known, else the last.
_PARTS = {
    "limit": (" ({quota_cores:.2f} cores)", ""),
    "degrees": (" ({temperature_c:.0f} C and {peers_temperature_c:.0f} C)", ""),
    "most_mhz": (" of {sm_clock_max_mhz:.0f}", ""),
    "load_there": (", {peers_others_cores:.1f} of those of {they}", ""),
    "own_cores": ("the {cores:.0f} that they may run on", "them"),
    "longer": ("{workers} computed {compute_ms:.0f} ms per step, {they} {peers_compute_ms:.0f} ms; ", ""),
}
_OF_DEVICE = {
    "when": {"cpu": " during compute"},
    "watch": {"cpu": "top -b -n 1", "gpu": "nvidia-smi dmon -c 10"},
}
_LOOKED_AT = {"data": "waits for batches", "cpus": "processors", "gpus": "GPUs", "disk": "waits for a disk"}
_DISTURBANCES = {
    "throttled_share": "CPU throttled (cgroup) for {throttled_share:.0%} of the time",
    "cpu_steal_percent": "CPU steal {cpu_steal_percent:.0f}%",
    "retransmitted_share": "TCP retransmits: {retransmitted_share:.2%} of the segments that it sent",
    "other_load": "other processes used {others_percent:.0f}% of its {node_cores:.0f} CPU cores",
    "heat": "its GPU {gpu:.0f} reached {temperature_c:.0f} C",
    "throttled_clocks": "clocks of its GPU {gpu:.0f} throttled ({reason}) for {throttled_share:.0%} of the time",
}


def cause_with_words(one: LikelyCause, write_hint: Callable[[str], str] = str) -> LikelyCause:
    """The same with its sentence and what to do about it; as it is, where an earlier release has worded it.

    Args:
        one: by its code.
        write_hint: a hint as its node is reached.
    """
    if not one.code:
        return one
    words: dict[str, object] = {**one.figures, "node": one.node}
    if one.peers is not None:
        words["they"] = peers_words(one.peers)
    if "ranks" in one.figures:
        ranks = str(one.figures["ranks"])
        words["workers"] = f"rank{'s' if ',' in ranks else ''} {ranks} on {one.node}"
    words |= {f"{name}_used": _cores(one.figures[figure]) for name, figure in _CORES.items() if figure in one.figures}
    words |= {name: by_device.get(str(one.figures.get("device")), "") for name, by_device in _OF_DEVICE.items()}
    compared = str(one.figures.get("compared", "")).split(", ")
    words["looked_at"] = ", ".join(_LOOKED_AT.get(name, name) for name in compared)
    words |= {name: _part(texts, words) for name, texts in _PARTS.items()}
    text, hint = _CAUSES[one.code]
    return msgspec.structs.replace(one, sentence=text.format_map(words), hint=write_hint(hint.format_map(words)))


def peers_words(peers: Peers) -> str:
    """Whom a machine or a worker is compared with."""
    if peers.kind == "nodes":
        return format_list(peers.names, _MOST_NAMED)
    return "the other workers of its node" if peers.kind == "workers" else "the same device alone"


def disturbance_words(one: Disturbance) -> str:
    """What was seen on which node."""
    return f"{one.node}: {_DISTURBANCES[one.code].format_map(one.figures)}"


_CORES = {"cores": "job_cores", "peers_cores": "peers_job_cores"}


def _cores(used: float | str) -> str:
    return f"{float(used):.2f}" if float(used) < 1000 else f"{float(used):.3g}"  # noqa: PLR2004 - decimals say nothing


def _part(texts: tuple[str, str], words: dict[str, object]) -> str:
    known, unknown = texts
    try:
        return known.format_map(words)
    except KeyError:
        return unknown


# Steps and records do not end at the same moment.
_ALIKE = 0.05
_SPOKEN = {
    "trace": "by the transfers of the profiler's window",
    "nccl inspector": "by the records of NCCL's Inspector plugin, each by the worker that waited least",
    "ddp span": "by DDP's counters: first bucket to last, waiting for buckets included, so that it is a lower bound",
}


def in_training_words(training: InTraining) -> str:
    """Its sentence; empty where no bandwidth is known."""
    if training.busbw_gb_per_s is None or training.source is None:
        return ""
    parts = [f"The training's all-reduces reach {training.busbw_gb_per_s:.3g} GB/s busbw, {_SPOKEN[training.source]}"]
    if training.recorded < 1.0:
        parts.append(f"these are samples: {training.recorded:.0%} of the operations were recorded, {NEWER_PLUGIN}")
    if training.alone is not None and training.alone.busbw_gb_per_s > 0:
        share = training.busbw_gb_per_s / training.alone.busbw_gb_per_s
        parts.append(
            f"that is {share:.0%} of the {training.alone.busbw_gb_per_s:.3g} GB/s that nccl-test "
            f"({training.alone.run_id}) measured for the same sizes"
        )
    if training.bytes_per_step is not None and training.asked_bytes:
        counted = f"{training.bytes_per_step / 1e6:.3g} MB per step by NCCL"
        alike = abs(training.bytes_per_step / training.asked_bytes - 1) <= _ALIKE
        parts.append(f"{counted}, {'as' if alike else 'and'} {training.asked_bytes / 1e6:.3g} MB by the calls")
    return f"{'; '.join(parts)}."


def agreement_words(found: Agreement | None) -> str:
    """Its sentence; empty without a window."""
    if found is None:
        return ""
    worker, counted = found.worker, found.counted
    window = f"{worker.exposed_ms:.1f} ms of {worker.step_ms:.1f} ms"
    if counted is None or counted.exposed_ms is None:
        return f"Exposed communication: {window} per step in the window; it is unknown outside of it."
    both = (
        f"Exposed communication per step: {window} in the window, "
        f"{counted.exposed_ms:.1f} ms of {counted.step_ms:.1f} ms by the counters"
    )
    if found.outcome == "agrees":
        return f"{both}: they agree, {found.apart:.1%} of the step apart."
    return f"{both}: {found.apart:.0%} of the step apart, {_reason(found, counted.step_ms)}."


def _reason(found: Agreement, step_ms: float) -> str:
    worker = found.worker
    match found.outcome:
        case "few_steps":
            return f"and the window has too few steps ({worker.steps}) to tell"
        case "slowed":
            return f"as the profiler made a step {worker.step_ms / step_ms - 1:.0%} longer"
        case "host_bound":
            busy = worker.compute_ms / worker.step_ms
            return f"as the GPU computed {busy:.0%} of the time and waited for the host in the rest"
    return "and nothing recorded says why"


_TAKES = {
    "network": "exposed communication takes {share}",
    "data": "waiting for batches takes {share}",
    "host": "time outside compute, communication, data and optimizer takes {share}",
}
_TURNS = "waiting for slower workers takes {share}; they take turns: no single one is to blame"
_NO_ONE = "waiting for other workers takes {share}; none of them stands out as the slow one"
_THREE_DIGITS = 100


def with_words(
    summary: Summary, write_hint: Callable[[str], str] = str, devices: Mapping[int, str] | None = None
) -> Summary:
    """The summary with the sentences of its stragglers, its bandwidth, its traces and its bottleneck.

    Args:
        summary: by codes.
        write_hint: a hint as the nodes are reached.
        devices: of the traced workers, by rank, as their traces have them.
    """
    stragglers = tuple(straggler_with_words(one, write_hint) for one in summary.stragglers)
    training = summary.comm.in_training
    training = msgspec.structs.replace(training, sentence=in_training_words(training))
    comm = msgspec.structs.replace(summary.comm, in_training=training)
    trace = summary.trace
    if trace is not None:
        agreement = agreement_words(compare_window(trace, summary.split, devices or {}))
        trace = msgspec.structs.replace(trace, agreement=agreement)
    summary = msgspec.structs.replace(summary, stragglers=stragglers, comm=comm, trace=trace)
    found = summary.bottleneck
    if found is None:
        return summary
    sentence = (
        summary.strategy.replace("no communication", "no gradient synchronisation detected", 1)
        if found.kind == "no_communication"
        else bottleneck_words(found, summary.split, summary.stragglers)
    )
    return msgspec.structs.replace(summary, bottleneck=msgspec.structs.replace(found, sentence=sentence))


def straggler_with_words(one: Straggler, write_hint: Callable[[str], str] = str) -> Straggler:
    """The straggler with its evidence and its hint; as it is, where an earlier release has worded it."""
    causes = tuple(cause_with_words(cause, write_hint) for cause in one.causes)
    if not causes:
        return one
    evidence = tuple(cause.sentence for cause in causes)
    return msgspec.structs.replace(one, causes=causes, evidence=evidence, hint=causes[0].hint)


def bottleneck_words(found: Bottleneck, split: StepSplit, stragglers: Sequence[Straggler] = ()) -> str:
    """What holds the training up most, with its figures.

    Args:
        found: in the split.
        split: where a step's time goes.
        stragglers: nodes that the others wait for.
    """
    mean = split.mean
    if found.kind == "unknown" or mean is None:
        return f"bottleneck unknown: {split.missing.get('exposed_ms', 'no measured step was recorded')}"
    if found.kind == "compute":
        return _compute_bound(found, split, mean)
    if found.kind != "straggler":
        words = _TAKES[found.kind]
    elif stragglers:
        worst = max(stragglers, key=lambda straggler: straggler.late_ms)
        evidence = f": {worst.evidence[0]}" if worst.evidence else ""
        return f"waiting for {worst.node} takes {_share(found, mean)}{evidence}"
    else:
        words = _TURNS if found.take_turns else _NO_ONE
    return words.format(share=_share(found, mean))


def _compute_bound(found: Bottleneck, split: StepSplit, mean: WorkerSplit) -> str:
    threshold = f"{WORTH:.0%}"
    if found.share is not None:
        own = f"compute and optimizer take {_share(found, mean)}"
        return f"compute-bound: {own}; nothing else takes more than {threshold}"
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in split.missing]
    sentence = f"nothing that was measured takes more than {threshold} of {_ms(mean.step_ms)} per step"
    if unknown:
        sentence += f"; not measured: {', '.join(unknown)}"
    if is_bound(split) and mean.data_ms is not None and mean.data_ms > WORTH * mean.step_ms:
        waited = f"{_ms(mean.data_ms)} ({mean.data_ms / mean.step_ms:.0%})"
        sentence += f"; the host waited {waited} for batches, during which the GPU may have computed"
    return sentence


def _share(found: Bottleneck, mean: WorkerSplit) -> str:
    share = found.share or 0.0
    return f"{_ms(share * mean.step_ms)} of {_ms(mean.step_ms)} per step ({share:.0%})"


def _ms(time_ms: float) -> str:
    """`512 ms`, `4.2 ms`: three significant digits."""
    return f"{time_ms:.0f} ms" if time_ms >= _THREE_DIGITS else f"{time_ms:.3g} ms"
