"""The training's own settings: those that fail or hang only with several nodes, and what its sharding costs there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from multinode.check.rule import Check, CheckFinding, CheckRules, Inspection, launch_check, listed
from multinode.cluster.accelerators import NVIDIA, accelerator_named
from multinode.errors import UsageError
from multinode.job.engines.engine import find_kind
from multinode.job.job import set_options
from multinode.job.settings import TrainingSettings, is_false, is_true
from multinode.stats.unknown import entries, or_empty, or_none
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, Strategy, nic_bytes, nic_time_s, strategy_calls
from multinode.units import (
    BITS_PER_BYTE,
    ETHERNET_MTU,
    MIB,
    format_count,
    format_duration,
    format_figure,
    format_rate,
    goodput_gb_per_s,
)

if TYPE_CHECKING:
    from multinode.job.deepspeed import DeepSpeedConfig
    from multinode.job.job import TrainingJob
    from multinode.model.training import ShardedTraining

_TRAINING = CheckRules("training")
_STRATEGY = CheckRules("strategy")

SPACE_IN_PATH = _TRAINING.error(
    about="the path of the home directory or of the training environment contains a space, and LLaMA-Factory splits "
    "paths at spaces",
    message="{what} {path!r} contains a space. LLaMA-Factory splits torchrun's command line at spaces, so the workers "
    "would get a path that does not exist",
    hint="{way!s}",
)
DEEPSPEED_CONTRADICTS = _TRAINING.error(
    about="a value in the DeepSpeed JSON contradicts the YAML",
    message="{key} is {value} in the DeepSpeed JSON, but {yaml_key} {said}. The Trainer refuses to start",
    hint=(
        'write "auto" in the DeepSpeed JSON, so that the value of the YAML applies: {json!s}. For one run, use '
        "--deepspeed-set {key}=auto"
    ),
)
BATCH_SIZE_FIXED = _TRAINING.error(
    about="train_batch_size in the DeepSpeed JSON does not match the number of workers",
    message="train_batch_size is {value} in the DeepSpeed JSON, but {micro} samples x {steps} accumulation steps x "
    "{workers} workers = {product}. The Trainer refuses to start",
    hint='in the DeepSpeed JSON, write "train_batch_size": "auto", which suits any number of nodes. For one run, use '
    "--deepspeed-set train_batch_size=auto",
)
ZERO3_ON_CPU = _TRAINING.error(
    about="ZeRO-3 on nodes without a GPU, with train_batch_size in the DeepSpeed JSON",
    message="the DeepSpeed JSON has ZeRO stage 3 and train_batch_size, and torch is built for CPUs here. "
    "{framework!s} loads the model before the process group exists, so DeepSpeed checks the batch size for one "
    "worker, and this check fails",
    hint="remove train_batch_size from the DeepSpeed JSON, or use stage 2: --deepspeed-set zero_optimization.stage=2",
)
DEVICES_NOT_NUMBERED = _TRAINING.warning(
    about="CUDA_VISIBLE_DEVICES has values other than numbers, but the job uses ZeRO-1 or ZeRO-2 of DeepSpeed 0.18.9 "
    "or later",
    message="{name} will be {value}, but DeepSpeed {version} expects whole numbers when ZeRO-{stage} starts (if "
    "nvidia-ml-py is installed). Each worker would fail with 'invalid literal for int()'",
    hint="{way!s}",
)
UNKNOWN_KEY = _TRAINING.error(
    about="LLaMA-Factory on a node does not know an argument in the YAML or --set",
    message="LLaMA-Factory{version} has no argument {key!r} ({place}) and refuses to start",
    hint="{fix!s}",
)
TIMEOUT_OF_AGES = _TRAINING.note(
    about=(
        "ddp_timeout is longer than a day (years in LLaMA-Factory's examples), so workers wait that long for a peer "
        "that does not respond"
    ),
    message="ddp_timeout is {timeout_s} s, {words}. multinode ends a run when a worker dies, but if a link silently "
    "drops packets, workers would wait until this timeout",
    hint="{option!s}",
)

_DEFAULTS = TrainingSettings()
# Key in the DeepSpeed JSON: key in the YAML, and the Trainer's default.
_MATCHES: dict[str, tuple[str, Any]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", _DEFAULTS.per_device_train_batch_size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", _DEFAULTS.gradient_accumulation_steps),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
    "optimizer.params.lr": ("learning_rate", _DEFAULTS.learning_rate),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
}
_FULL_EVAL = {"fp16": "fp16_full_eval", "bf16": "bf16_full_eval"}
_BATCH, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# DeepSpeed 37e232faf: `available_memory()` of each parameter group, in stage_1_and_2.py.
_NUMBERS_ALONE_SINCE = (0, 18, 9)
_DAY_S = 86400
_YEAR_S = 365.25 * _DAY_S
_ZERO_1_2 = (1, 2)
_ZERO3 = 3


@launch_check
def check_spaces(inspection: Inspection) -> Iterator[CheckFinding]:
    """Nothing that LLaMA-Factory puts on torchrun's command line contains a space."""
    for node, facts in inspection.known if _splits_words(inspection) else ():
        for name, path, way in (
            (
                "its home directory",
                or_none(facts.home),
                ("log in as a user whose home directory has no space: user= in the hostfile"),
            ),
            (
                "the interpreter",
                or_none(facts.python),
                "use a training environment at another path: python= in the hostfile",
            ),
        ):
            if path is not None and len(path.split()) > 1:
                yield SPACE_IN_PATH.found(node.name, what=name, path=path, way=way)


def _splits_words(inspection: Inspection) -> bool:
    job, engine = inspection.training, inspection.options.engine
    kind = find_kind(engine.name if engine is not None else job.kind.engine if job is not None else "")
    return job is not None and kind is not None and kind.splits_words


@launch_check
def check_arguments(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's framework has an argument for every key."""
    job = inspection.training
    if job is None:
        return
    for node, facts in inspection.known:
        version, unknown = entries(facts.packages).get(job.kind.packages[0]), entries(facts.unknown_arguments)
        # A node answers only for the keys that it was asked about.
        for key in (key for key in job.config if key in unknown):
            near = unknown[key]
            by_set = key in job.overridden
            written = f"--set {near}=..." if by_set else f"{near}: in {job.config_path}"
            yield UNKNOWN_KEY.found(
                node.name,
                version=f" {version}" if version else "",
                key=key,
                place="--set" if by_set else job.config_path,
                fix=f"the closest argument is {written}" if near else "remove it, or correct its name",
            )


@launch_check
def check_deepspeed(inspection: Inspection) -> Iterator[CheckFinding]:
    """Fixed values in the DeepSpeed JSON agree with the YAML."""
    job, (config, settings) = inspection.training, _settings(inspection)
    if job is None or settings is None:
        return
    for key, (yaml_key, default) in _MATCHES.items():
        expected, value = _expected(config, yaml_key, default), settings.fixed.get(key)
        if value is None or expected is None or value == expected:
            continue
        sentence = f"is {_json(expected)} in the YAML"
        own_key = job.own_name(yaml_key)
        if yaml_key not in config:
            sentence = f"is not in the YAML, so it defaults to {_json(expected)}"
        *groups, last = key.split(".")
        # `a.b` as JSON with b set to `auto`.
        auto = f'"{last}": "auto"'
        for group in reversed(groups):
            auto = f'"{group}": {{{auto}}}'
        yield DEEPSPEED_CONTRADICTS.found(None, key=key, value=_json(value), yaml_key=own_key, said=sentence, json=auto)


@Check
def check_batch_size(inspection: Inspection) -> Iterator[CheckFinding]:
    """A fixed train_batch_size matches the number of workers."""
    config, settings = _settings(inspection)
    value = settings.fixed.get("train_batch_size") if settings is not None else None
    counts = inspection.workers_of_nodes()
    micro, steps = (_expected(config, *_MATCHES[key]) for key in (_BATCH, _STEPS))
    if value is None or counts is None or micro is None or steps is None:
        return
    workers = sum(counts)
    product = micro * steps * workers
    if value != product:
        yield BATCH_SIZE_FIXED.found(None, value=value, workers=workers, micro=micro, steps=steps, product=product)


@Check
def check_deepspeed_on_cpu(inspection: Inspection) -> Iterator[CheckFinding]:
    """ZeRO-3 finds GPUs, or its JSON works without."""
    job, (_, settings) = inspection.training, _settings(inspection)
    if job is None or settings is None or settings.stage != _ZERO3 or not settings.names_train_batch_size:
        return
    for node, facts in inspection.known:
        if entries(facts.packages).get("torch", "").endswith("+cpu"):
            yield ZERO3_ON_CPU.found(node.name, framework=job.kind.title)


@launch_check
def check_deepspeed_devices(inspection: Inspection) -> Iterator[CheckFinding]:
    """DeepSpeed can parse the names of the devices."""
    _, settings = _settings(inspection)
    if settings is None or settings.stage not in _ZERO_1_2:
        return
    for node, facts in inspection.known:
        version = entries(facts.packages).get("deepspeed", "")
        if (
            accelerator_named(facts.accelerator) is not NVIDIA
            or (tuple(map(int, re.findall(r"\d+", version)[:3]))) < _NUMBERS_ALONE_SINCE
        ):
            continue
        name, given = NVIDIA.visible[0], node.env | inspection.options.environment.env
        value = given.get(name, "" if facts.visible_gpus else facts.env.get(name, ""))
        way = "write the GPU numbers of nvidia-smi instead"
        if name not in given and not NVIDIA.counts_alike(given):
            value = listed([gpu.uuid for gpu in facts.visible_gpus if gpu.uuid is not None])
            way = f"leave {listed(NVIDIA.order)} to multinode, which sets numbers"
        elif "MIG-" in value:
            way = "a MIG device has no number: uninstall nvidia-ml-py for this job, or use an older DeepSpeed:\n"
            way += f"{shlex.quote(or_none(facts.python) or 'python3')} -m pip uninstall nvidia-ml-py"
        if not all(entry.strip().isdigit() for entry in value.split(",") if value):
            yield DEVICES_NOT_NUMBERED.found(
                node.name, name=name, value=value, version=version, stage=settings.stage, way=way
            )


@Check
def check_timeout(inspection: Inspection) -> Iterator[CheckFinding]:
    """Workers that wait for a peer time out."""
    job = inspection.training
    timeout_s = _number(job.arguments.get("ddp_timeout")) if job is not None else None
    if job is not None and timeout_s is not None and timeout_s > _DAY_S and len(inspection.cluster.nodes) > 1:
        years = timeout_s / _YEAR_S
        words = f"{years:.1f} years" if years >= 1 else format_duration(timeout_s)
        yield TIMEOUT_OF_AGES.found(
            None, timeout_s=f"{timeout_s:.0f}", words=words, option=set_options(job, ddp_timeout=1800)
        )


def _settings(inspection: Inspection) -> tuple[dict[str, Any], DeepSpeedConfig | None]:
    job = inspection.training
    if job is None or job.deepspeed_text is None:
        return {}, None
    from multinode.job.deepspeed import parse_deepspeed

    return job.arguments, parse_deepspeed(job.deepspeed_text)


def _expected(config: dict[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if isinstance(default, bool):
        values = (value, config.get(_FULL_EVAL[key], False))
        return any(map(is_true, values)) if all(is_true(one) or is_false(one) for one in values) else None
    return _number(value)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


SENDS_TOO_MUCH = _STRATEGY.warning(
    about="ZeRO-3, FSDP, ZeRO-2 with accumulation or full fine-tuning on a link that is too slow",
    message="in every optimizer step, {name} sends {size} through each node's NIC ({workers}). This takes {time} at "
    "{link}. {other} would send {other_size} in {other_time}. These estimates ignore overlap with compute",
    hint="{way!s}",
)
SENDS_MUCH = _STRATEGY.note(
    about="communication takes a long time in every step, and no other sharding strategy sends much less",
    message="in every optimizer step, {name} sends {size} through each node's NIC ({workers}). This takes {time} at "
    "{link}. The estimate ignores overlap with compute",
    hint="{way!s}",
)

IGNORED = _STRATEGY.warning(
    about="accelerate ignores the sharding strategy for FSDP1 in the YAML",
    message="fsdp: {fsdp} would train as full_shard. With transformers {version}, accelerate reads the sharding "
    "strategy for FSDP1 only from FSDP_SHARDING_STRATEGY, which is not set",
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
_GIGA = 1e9
# A link is never assumed slower than any network.
_LEAST_GBIT_PER_S = 1e-4
_LEAST_MTU = 576
# Share of GPU memory for the frozen model; the rest is for activations, gradients and the context.
_MODEL_SHARE = 0.75


@Check
def check_strategy(inspection: Inspection) -> Iterator[CheckFinding]:
    """The gradients and weights of a step pass the links in reasonable time, or no strategy would be faster."""
    job, workers, link = inspection.training, inspection.workers_of_nodes(), _link(inspection)
    training = read_inspected(inspection)
    nodes = len(inspection.cluster.nodes)
    if job is None or training is None or workers is None or link is None or nodes == 1:
        return
    layout = Layout.of(workers)
    goodput, words = link
    gloo = all(not or_empty(fact.gpus) for fact in inspection.facts.values())
    calls = strategy_calls(training.strategy, training.load, layout)
    size = nic_bytes(calls, layout, training.accumulation, gloo=gloo)
    time_s = nic_time_s(size, goodput)
    values = {"name": training.name, "size": _format_bytes(size), "time": _format_time(time_s), "link": words}
    values["workers"] = format_count(sum(workers), "worker")
    other_size = nic_bytes(strategy_calls(Strategy.DDP, training.small, layout), layout, gloo=gloo)
    if time_s > _WARN_S and other_size < _MUCH_LESS * size and (way := _way_to_small(job, training, inspection)):
        yield SENDS_TOO_MUCH.found(
            None,
            **values,
            other="DDP with LoRA" if training.lora else f"DDP with LoRA at rank {TrainingSettings().lora_rank}",
            other_size=_format_bytes(other_size),
            other_time=_format_time(nic_time_s(other_size, goodput)),
            way=way,
        )
    elif time_s > _NOTE_S:
        yield SENDS_MUCH.found(None, **values, way=_amortise(job, training, calls))


@Check
def check_sharding(inspection: Inspection) -> Iterator[CheckFinding]:
    """FSDP shards the model as the YAML says."""
    job = inspection.training
    words = str(job.arguments.get("fsdp") or "").split() if job is not None else []
    name = next((word for word in words if word in {"shard_grad_op", "no_shard", "hybrid_shard"}), None)
    fsdp = job.arguments.get("fsdp_config") if job is not None else None
    fsdp = fsdp if isinstance(fsdp, dict) else {}
    # accelerate's own launcher sets the variable from its configuration.
    if name is None or str(fsdp.get("version") or fsdp.get("fsdp_version")) == "2" or "sharding_strategy" in fsdp:
        return
    for node, facts in inspection.known:
        version = entries(facts.packages).get("transformers", "")
        numbers = re.match(r"(\d+)\.(\d+)", version)
        is_recent = numbers is not None and (int(numbers[1]), int(numbers[2])) >= _NOT_TOLD_SINCE
        if is_recent and _STRATEGY_VARIABLE not in inspection.env(node):
            yield IGNORED.found(None, fsdp=name, version=version, name=name.upper())
            return


def read_inspected(inspection: Inspection) -> ShardedTraining | None:
    """What the job trains, from the facts of the nodes; None if that is unknown."""
    facts = inspection.facts.values()
    models = (fact.model_config for fact in facts if fact.model_config is not None)
    versions = (entries(fact.packages).get("transformers") for fact in facts)
    if inspection.training is None:
        return None
    try:
        from multinode.model.training import read_training

        return read_training(inspection.training, next(models, None), next(filter(None, versions), None))
    except UsageError:
        return None


def _way_to_small(job: TrainingJob, training: ShardedTraining, inspection: Inspection) -> str | None:
    """How a person gets to DDP with LoRA; None if that is what is trained, or a GPU cannot hold the whole model."""
    strategy = training.strategy
    sharded = strategy.gathers
    if (training.lora and strategy is Strategy.DDP) or (sharded and not _fits(training, inspection)):
        return None
    leave = "remove fsdp from the YAML" if strategy.engine == "FSDP" else set_options(job, deepspeed=None)
    memory = ", if a GPU holds the whole model" if sharded else ""
    if training.lora:
        steps = job.own_name("gradient_accumulation_steps")
        return f"{leave}{memory}; DeepSpeed ZeRO-2 with {steps}: 1 also sends little"
    also = "" if strategy is Strategy.DDP else f" and {leave}"
    adapter = set_options(job, finetuning_type="lora")
    return f"if an adapter is enough: {adapter}{also}{memory}; otherwise use a faster link"


def _fits(training: ShardedTraining, inspection: Inspection) -> bool:
    parameters = training.small.parameters or 0
    needed_mib = parameters * training.small.parameter_bytes / MIB
    gpus = [gpu for fact in inspection.facts.values() for gpu in or_empty(fact.gpus)]
    sizes = [gpu.memory_total_mib for gpu in gpus if gpu.memory_total_mib is not None]
    return not sizes or needed_mib < _MODEL_SHARE * min(sizes)


def _amortise(job: TrainingJob, training: ShardedTraining, calls: Iterable[Call]) -> str:
    if not any(call.per_micro_batch for call in calls):
        option = set_options(job, gradient_accumulation_steps=2 * training.accumulation)
        return f"gradients are sent once per step: {option} halves the bytes per sample"
    batch, steps = map(job.own_name, ("per_device_train_batch_size", "gradient_accumulation_steps"))
    return f"gradients are sent in every micro-batch: a larger {batch} with fewer {steps} sends less per sample"


def _link(inspection: Inspection) -> tuple[float, str] | None:
    rates = [stream.gbit_per_s or 0.0 for stream in inspection.connectivity.streams]
    measured = [rate for rate in rates if rate > _LEAST_GBIT_PER_S]
    if measured:
        slowest = min(measured)
        return slowest / BITS_PER_BYTE, f"{format_rate(slowest)} (measured between the nodes)"
    speeds = [(link.speed_gbit_per_s, link.mtu) for _, link in inspection.links if link.speed_gbit_per_s]
    speed, mtu = min(speeds, key=lambda each: each[0], default=(0.0, None))
    if not speed > _LEAST_GBIT_PER_S:
        return None
    mtu = mtu if mtu is not None and mtu >= _LEAST_MTU else ETHERNET_MTU
    return goodput_gb_per_s(speed, mtu), f"{format_rate(speed)} (negotiated by the slowest NIC)"


def _format_time(time_s: float) -> str:
    return format_duration(time_s) if time_s >= _LEAST_S else f"under {_LEAST_S} s"


def _format_bytes(size_bytes: float) -> str:
    """In powers of 1000, as for links: `84 MB`, `32.2 GB`."""
    value, unit = (size_bytes / _GIGA, "GB") if size_bytes >= _GIGA else (size_bytes / 1e6, "MB")
    return f"{format_figure(value)} {unit}"
