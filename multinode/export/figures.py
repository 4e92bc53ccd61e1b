"""Figures: the table of exported figures: names as in the JSON documents, and their meaning.

A name is a path that ends in its unit. `*` stands for one of several, named by a label: `nodes.*.nics.*.share` belongs
to a node's NIC. Each table is for one kind of record: a run's summary, a step, or the current state of a node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.profile.summary import Summary
from multinode.records.progress import NodeProgress

SUMMARY_FIGURES = {
    "steps": "recorded optimizer steps",
    "steady_steps": "measured steps, without warm-up",
    "samples_per_s": "samples per second of all workers",
    "tokens_per_s": "tokens per second of all workers, padding counted",
    "effective_tokens_per_s": "tokens per second of all workers, without padding",
    "tgs": "tokens per second and worker, padding counted",
    "all_steps_samples_per_s": "samples per second of all workers, warm-up included",
    "trainer_samples_per_s": "samples per second as the Trainer reports them",
    "step_time_ms.median": "step time, median of the measured steps",
    "step_time_ms.p95": "step time, 95th percentile of the measured steps",
    "step_time_ms.cv": "standard deviation of the step time over its mean",
    "parameters": "parameters of the model",
    "trainable": "parameters with gradients",
    "first_loss": "first logged loss",
    "last_loss": "last logged loss",
    "comm.bytes_per_step.calls": "collective payload per step and worker",
    "comm.bytes_per_step.expected": "expected traffic per step on the busiest NIC",
    "comm.bytes_per_step.nic": "measured traffic per step on that NIC",
    "comm.exposed_ms": "exposed communication per step, waiting for stragglers excluded",
    "comm.exposed_share": "exposed communication over step time",
    "comm.overlap": "share of the communication that compute overlapped",
    "comm.in_training_gb_per_s": "busbw of the training's own all-reduces",
    "split.mean.compute_ms": "forward and backward pass per step, mean of the workers",
    "split.mean.wait_ms": "waiting for stragglers per step, mean of the workers",
    "split.mean.data_ms": "waiting for batches per step, mean of the workers",
    "split.mean.optimizer_ms": "optimizer per step, mean of the workers",
    "split.mean.host_ms": "rest of the step, mean of the workers",
    "utilisation.model_tflops": "model TFLOP/s per device",
    "utilisation.hardware_tflops": "hardware TFLOP/s per device, recomputation included",
    "utilisation.mfu": "model FLOPs utilization",
    "utilisation.hfu": "hardware FLOPs utilization",
    "stragglers.*.late_ms": "delay of a node per step relative to its peers",
    "nodes.*.cpu_busy_percent": "CPU use of the node",
    "nodes.*.cpu_steal_percent": "CPU steal of the node",
    "nodes.*.job_cores": "CPU cores used by the job",
    "nodes.*.memory_available_gib": "minimum memory available to the job",
    "nodes.*.retransmitted_share": "TCP retransmits over sent segments",
    "nodes.*.nics.*.in_gbit_per_s": "received by the NIC, mean",
    "nodes.*.nics.*.out_gbit_per_s": "sent by the NIC, mean",
    "nodes.*.nics.*.peak_in_gbit_per_s": "received by the NIC, highest between two samples",
    "nodes.*.nics.*.peak_out_gbit_per_s": "sent by the NIC, highest between two samples",
    "nodes.*.nics.*.share": "busier direction of the NIC over its line rate",
    "nodes.*.gpus.*.sm_percent": "share of the time in which a kernel ran on the GPU",
    "nodes.*.gpus.*.peak_memory_gib": "peak memory in use on the GPU",
    "nodes.*.gpus.*.power_w": "power draw of the GPU",
    "nodes.*.gpus.*.temperature_c": "temperature of the GPU",
}
"""Of a run that has ended: the content of `summary` in `show --json`."""

STEP_FIGURES = {
    "step_time_ms": "step time, median of the workers",
    "samples_per_s": "samples per second of all workers",
    "tokens_per_s": "tokens per second of all workers, padding counted",
    "loss": "logged loss of this step",
    "comm.exposed_ms": "exposed communication, waiting for stragglers excluded",
    "comm.exposed_share": "exposed communication over step time",
    "comm.in_training_gb_per_s": "busbw of the step's all-reduces, by DDP's counters",
    "peak_worker_memory_gib": "peak memory of the worker that uses most",
    "nodes.*.in_gbit_per_s": "received by the node's busiest NIC since its previous step",
    "nodes.*.out_gbit_per_s": "sent by the node's busiest NIC since its previous step",
}
"""Of each step, during the run and afterwards."""

NODE_FIGURES = {
    "nodes.*.step": "last finished step of the node's workers",
    "nodes.*.total_steps": "steps of the training",
    "nodes.*.loss": "last logged loss",
    "nodes.*.step_time_us": "step time, median of the last steps",
    "nodes.*.samples_per_s": "samples per second of the node's workers, over the last steps",
    "nodes.*.tgs": "tokens per second and worker, over the last steps",
    "nodes.*.exposed_share": "exposed communication over step time, over the last steps",
    "nodes.*.net_in_gbit_per_s": "received by the node's busiest NIC",
    "nodes.*.net_out_gbit_per_s": "sent by the node's busiest NIC",
    "nodes.*.link_share": "busier direction of the data-plane NIC over its line rate",
    "nodes.*.gpu_percent": "SM use of the node's GPUs, mean",
    "nodes.*.gpu_memory_gib": "memory in use on the fullest GPU",
    "nodes.*.gpu_power_w": "power draw of a GPU, mean",
    "nodes.*.gpu_temperature_c": "temperature of the hottest GPU",
    "nodes.*.left_s": "estimated time to the end of the training",
}
"""Current state of a node, during the run."""

# Label by the name of the list.
_NAMED_BY = {"nodes": "node", "stragglers": "node", "nics": "ifname", "gpus": "index"}
_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


class Value(NamedTuple):
    """One figure of one record; `labels` replace the stars in its name, in order."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        """Its name with its labels in it, as a path: `nodes/box1/nics/ens1f0/share`."""
        words = iter(word for _, word in self.labels)
        parts = (next(words) if part == "*" else part for part in self.name.split("."))
        return "/".join(_STRANGE.sub("_", part) for part in parts)


def summary_values(summary: Summary) -> list[Value]:
    """Every figure in the summary; unknown and non-finite ones are omitted."""
    document = msgspec.to_builtins(summary)
    return [value for name in SUMMARY_FIGURES for value in _values(name, document)]


def node_values(nodes: Sequence[NodeProgress]) -> list[Value]:
    """Likewise for running nodes."""
    found = []
    for name in NODE_FIGURES:
        for node in nodes:
            value = getattr(node, name.rpartition(".")[2])
            if value is not None and math.isfinite(value):
                found.append(Value(name, value, (("node", node.name),)))
    return found


def _values(name: str, document: Mapping[str, Any]) -> Iterator[Value]:
    def walk(found: Any, parts: Sequence[str], labels: tuple[tuple[str, str], ...]) -> Iterator[Value]:
        if not parts:
            if isinstance(found, (int, float)) and math.isfinite(found):
                yield Value(name, found, labels)
        elif isinstance(found, Mapping):
            inner = found.get(parts[0])
            if parts[1:2] == ["*"]:
                key = _NAMED_BY[parts[0]]
                for one in inner or ():
                    yield from walk(one, parts[2:], (*labels, (key, str(one[key]))))
            else:
                yield from walk(inner, parts[1:], labels)

    yield from walk(document, name.split("."), ())
