"""Strategy: the cost of the job's sharding strategy on these links, and cheaper ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule
from multinode.errors import UsageError
from multinode.job.step_calls import calls_of_strategy
from multinode.job.training import SMALL_RANK, STAGES, Training, read_training
from multinode.traffic.algorithms import Layout
from multinode.traffic.traffic import Strategy, TrafficInputs, card_bytes, card_time_s, step_exchanges
from multinode.units import format_count, format_duration, format_rate, goodput_gb_per_s

SENDS_TOO_MUCH = Rule(
    "strategy",
    "warning",
    catches="ZeRO-3, FSDP, ZeRO-2 with accumulation or full fine-tuning on a link that is too slow",
    message="{name} sends {size} through each node's NIC in every optimizer step ({workers}), which takes {time} at "
    "{link}; {other} would send {other_size}, in {other_time} (an estimate: overlap with compute is not subtracted)",
    hint="{way!s}",
)
SENDS_MUCH = Rule(
    "strategy",
    "note",
    catches="communication takes long in every step, and no other sharding sends much less",
    message="{name} sends {size} through each node's NIC in every optimizer step ({workers}), which takes {time} at "
    "{link} (an estimate: overlap with compute is not subtracted)",
    hint="{way!s}",
)

IGNORED = Rule(
    "strategy",
    "warning",
    catches="accelerate does not read the FSDP1 sharding strategy from the YAML",
    message=(
        "fsdp: {fsdp} is trained as full_shard: with transformers {version} accelerate reads the FSDP1 strategy only "
        "from FSDP_SHARDING_STRATEGY, which is not set"
    ),
    hint="--env FSDP_SHARDING_STRATEGY={name}",
)
_STRATEGY_VARIABLE = "FSDP_SHARDING_STRATEGY"
# With accelerate 1.11; transformers 4 put the YAML's words into the variable.
_NOT_TOLD_SINCE = (5, 6)

_WARN_S = 1.0
# A healthy pair of nodes at 1 Gbit/s stays below this with the small model of configs/tiny_sft.yaml.
_NOTE_S = 0.4
_LEAST_S = 0.1
_MUCH_LESS = 0.5
_SHARDED = (Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD)
_GIGA = 1e9
_BITS_PER_BYTE = 8
_BYTES_PER_MIB = 1 << 20
_ETHERNET_MTU = 1500
# A link is never assumed slower than any network.
_LEAST_GBIT_PER_S = 1e-4
_LEAST_MTU = 576
# Share of GPU memory for the frozen model; the rest is for activations, gradients and the context.
_MODEL_SHARE = 0.75


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Another way to train."""

    name: str
    way: str  # how a person gets there
    size_bytes: float  # what it sends


@Check
def check_strategy(inspection: Inspection) -> Iterator[Case]:
    """The gradients and weights of a step pass the links in reasonable time, or no strategy would be faster."""
    training, workers, link = _read(inspection), inspection.workers_of_nodes(), _link(inspection)
    nodes = len(inspection.cluster.nodes)
    if training is None or workers is None or link is None or nodes == 1:
        return
    layout = Layout.of(workers)
    goodput, words = link
    gloo = all(not found.gpus for found in inspection.facts.values())
    size = _sent(training.strategy, training.load, layout, gloo=gloo)
    time_s = card_time_s(size, goodput)
    values = {"name": training.name, "size": _format_bytes(size), "time": _format_time(time_s), "link": words}
    values["workers"] = format_count(sum(workers), "worker")
    other = _cheapest(training, layout, inspection, gloo=gloo)
    if other is not None and time_s > _WARN_S and other.size_bytes < _MUCH_LESS * size:
        yield SENDS_TOO_MUCH.found(
            None,
            **values,
            other=other.name,
            other_size=_format_bytes(other.size_bytes),
            other_time=_format_time(card_time_s(other.size_bytes, goodput)),
            way=other.way,
        )
    elif time_s > _NOTE_S:
        yield SENDS_MUCH.found(None, **values, way=_amortise(training, layout))


@Check
def check_sharding(inspection: Inspection) -> Iterator[Case]:
    """FSDP shards the model as the YAML says."""
    job = inspection.training
    words = str(job.config.get("fsdp") or "").split() if job is not None else []
    name = next((word for word in words if word in {"shard_grad_op", "no_shard", "hybrid_shard"}), None)
    told = job.config.get("fsdp_config") if job is not None else None
    told = told if isinstance(told, dict) else {}
    # accelerate's own launcher sets the variable from its configuration.
    if name is None or str(told.get("version") or told.get("fsdp_version")) == "2" or "sharding_strategy" in told:
        return
    for node, found in inspection.known:
        version = found.packages.get("transformers", "")
        numbers = re.match(r"(\d+)\.(\d+)", version)
        is_recent = numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NOT_TOLD_SINCE
        if is_recent and _STRATEGY_VARIABLE not in inspection.env(node):
            yield IGNORED.found(None, fsdp=name, version=version, name=name.upper())
            return


def _read(inspection: Inspection) -> Training | None:
    facts = inspection.facts.values()
    models = (found.model for found in facts if found.model is not None)
    versions = (found.packages["transformers"] for found in facts if "transformers" in found.packages)
    if inspection.training is None:
        return None
    try:
        return read_training(inspection.training, next(models, None), next(versions, None))
    except UsageError:
        return None


def _cheapest(training: Training, layout: Layout, inspection: Inspection, *, gloo: bool) -> _Choice | None:
    strategy = training.strategy
    sharded = strategy in _SHARDED
    if (training.lora and strategy is Strategy.DDP) or (sharded and not _fits(training, inspection)):
        return None
    # How to change from it to DDP.
    leave = "--set deepspeed=null" if strategy in STAGES else "remove fsdp from the YAML"
    memory = ", if a GPU holds the whole model" if sharded else ""
    if training.lora:
        way = f"{leave}{memory}; DeepSpeed ZeRO-2 with gradient_accumulation_steps: 1 also sends little"
    else:
        also = "" if strategy is Strategy.DDP else f" and {leave}"
        way = f"if an adapter is enough: --set finetuning_type=lora{also}{memory}; otherwise use a faster link"
    name = "DDP with LoRA" if training.lora else f"DDP with LoRA at rank {SMALL_RANK}"
    return _Choice(name=name, way=way, size_bytes=_sent(Strategy.DDP, training.small, layout, gloo=gloo))


def _fits(training: Training, inspection: Inspection) -> bool:
    parameters = training.small.parameters or 0
    needed_mib = parameters * training.small.parameter_bytes / _BYTES_PER_MIB
    gpus = [gpu for found in inspection.facts.values() for gpu in found.gpus]
    sizes = [gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib is not None]
    return not sizes or needed_mib < _MODEL_SHARE * min(sizes)


def _amortise(training: Training, layout: Layout) -> str:
    if not any(call.per_micro_batch for call in calls_of_strategy(training.strategy, training.load, layout)):
        return (
            f"gradients are sent once per step: --set gradient_accumulation_steps={2 * training.load.accumulation} "
            "halves the bytes per sample"
        )
    return (
        "every micro-batch sends: a larger per_device_train_batch_size with fewer gradient_accumulation_steps "
        "sends less per sample"
    )


def _link(inspection: Inspection) -> tuple[float, str] | None:
    rates = [one.gbit_per_s or 0.0 for one in inspection.connectivity.streams]
    measured = [rate for rate in rates if rate > _LEAST_GBIT_PER_S]
    if measured:
        slowest = min(measured)
        return slowest / _BITS_PER_BYTE, f"{format_rate(slowest)} (measured between the nodes)"
    speeds = [(link.speed_gbit_per_s, link.mtu) for _, link in inspection.links if link.speed_gbit_per_s]
    speed, mtu = min(speeds, key=lambda each: each[0], default=(0.0, None))
    if not speed > _LEAST_GBIT_PER_S:
        return None
    mtu = mtu if mtu is not None and mtu >= _LEAST_MTU else _ETHERNET_MTU
    return goodput_gb_per_s(speed, mtu), f"{format_rate(speed)} (what the slowest NIC negotiated)"


def _sent(strategy: Strategy, load: TrafficInputs, layout: Layout, *, gloo: bool) -> float:
    return card_bytes(step_exchanges(strategy, load, layout), layout, gloo=gloo)


def _format_time(time_s: float) -> str:
    return format_duration(time_s) if time_s >= _LEAST_S else f"under {_LEAST_S} s"


def _format_bytes(size_bytes: float) -> str:
    """In powers of 1000, as for links: `84 MB`, `32.2 GB`."""
    value, unit = (size_bytes / _GIGA, "GB") if size_bytes >= _GIGA else (size_bytes / 1e6, "MB")
    return f"{float(f'{value:.3g}'):g} {unit}"
