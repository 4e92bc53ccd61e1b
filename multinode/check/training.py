"""The training's own settings: those that fail or hang only with several nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, launch_check, listed
from multinode.cluster.accelerators import NVIDIA, accelerator_named
from multinode.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.units import format_duration

SPACE_IN_PATH = Rule(
    "training",
    "error",
    catches="a space in the path of the home directory or of the training environment: LLaMA-Factory splits there",
    message=(
        "{what} {path!r} contains a space: LLaMA-Factory puts its path on torchrun's command line and splits it at "
        "spaces, so the workers would get a path that does not exist"
    ),
    hint="{way!s}",
)
DEEPSPEED_CONTRADICTS = Rule(
    "training",
    "error",
    catches="a number in the DeepSpeed JSON that contradicts the YAML",
    message="{key} is {value} in the DeepSpeed JSON, but {yaml_key} {said}: the Trainer refuses to start",
    hint='write "auto" in the DeepSpeed JSON, and the YAML decides: {json!s}; for one run: --deepspeed-set {key}=auto',
)
BATCH_SIZE_FIXED = Rule(
    "training",
    "error",
    catches="train_batch_size in the DeepSpeed JSON is for another number of workers",
    message=(
        "train_batch_size is {value} in the DeepSpeed JSON, but {micro} samples x {steps} accumulation steps x "
        "{workers} workers = {product}: the Trainer refuses to start"
    ),
    hint='write "train_batch_size": "auto" in the DeepSpeed JSON: it then fits any number of nodes; for one run: '
    "--deepspeed-set train_batch_size=auto",
)
ZERO3_ON_CPU = Rule(
    "training",
    "error",
    catches="ZeRO-3 on nodes without a GPU, with train_batch_size in the DeepSpeed JSON",
    message=(
        "the DeepSpeed JSON has ZeRO stage 3 and train_batch_size, and torch is built for CPUs here: LLaMA-Factory "
        "loads the model before the process group exists, and DeepSpeed's check of the batch size fails for one worker"
    ),
    hint="remove train_batch_size from the DeepSpeed JSON, or use stage 2: --deepspeed-set zero_optimization.stage=2",
)
DEVICES_NOT_NUMBERED = Rule(
    "training",
    "warning",
    catches=(
        "ZeRO-1 or ZeRO-2 of DeepSpeed 0.18.9 or later, and CUDA_VISIBLE_DEVICES holds something other than numbers"
    ),
    message=(
        "{name} will be {value}, and DeepSpeed {version} reads it as whole numbers when ZeRO-{stage} starts (where "
        "nvidia-ml-py is installed): each worker would fail with 'invalid literal for int()'"
    ),
    hint="{way!s}",
)
UNKNOWN_KEY = Rule(
    "training",
    "error",
    catches="a key in the YAML or --set is no argument of a node's LLaMA-Factory",
    message="LLaMA-Factory{version} has no argument {key!r} ({place}): it refuses to start",
    hint="{fix!s}",
)
TIMEOUT_OF_AGES = Rule(
    "training",
    "note",
    catches="ddp_timeout of years, as in LLaMA-Factory's examples: workers wait forever for a silent peer",
    message=(
        "ddp_timeout is {timeout_s} s, {words}: multinode ends a run when a worker dies, but if a link silently drops "
        "packets, the others would wait that long"
    ),
    hint="--set ddp_timeout=1800",
)

# Key in the DeepSpeed JSON: key in the YAML, and the Trainer's default.
_MATCHES: dict[str, tuple[str, Any]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
    "optimizer.params.lr": ("learning_rate", 5e-5),
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
def check_spaces(inspection: Inspection) -> Iterator[Case]:
    """Nothing that LLaMA-Factory puts on torchrun's command line contains a space."""
    for node, found in inspection.known if inspection.training is not None else ():
        for what, path, way in (
            (
                "its home directory",
                found.home,
                ("log in as a user whose home directory has no space: user= in the hostfile"),
            ),
            ("the interpreter", found.python, "use a training environment at another path: python= in the hostfile"),
        ):
            if path is not None and len(path.split()) > 1:
                yield SPACE_IN_PATH.found(node.name, what=what, path=path, way=way)


@launch_check
def check_arguments(inspection: Inspection) -> Iterator[Case]:
    """LLaMA-Factory has an argument for every key."""
    job = inspection.training
    if job is None:
        return
    for node, found in inspection.known:
        version = found.packages.get("llamafactory")
        # A node answers only for the keys that it was asked about.
        for key in (key for key in job.config if key in found.unknown_arguments):
            near = found.unknown_arguments[key]
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
def check_deepspeed(inspection: Inspection) -> Iterator[Case]:
    """Fixed values in the DeepSpeed JSON agree with the YAML."""
    config, settings = _settings(inspection)
    for key, (yaml_key, default) in _MATCHES.items():
        expected, value = _expected(config, yaml_key, default), settings.fixed.get(key)
        if value is None or expected is None or value == expected:
            continue
        said = f"is {_json(expected)} in the YAML"
        if yaml_key not in config:
            said = f"is not in the YAML, which means {_json(expected)}"
        *groups, last = key.split(".")
        # `a.b` as JSON with b set to `auto`.
        auto = f'"{last}": "auto"'
        for group in reversed(groups):
            auto = f'"{group}": {{{auto}}}'
        yield DEEPSPEED_CONTRADICTS.found(None, key=key, value=_json(value), yaml_key=yaml_key, said=said, json=auto)


@Check
def check_batch_size(inspection: Inspection) -> Iterator[Case]:
    """A fixed train_batch_size matches the number of workers."""
    config, settings = _settings(inspection)
    value, counts = settings.fixed.get("train_batch_size"), inspection.workers_of_nodes()
    micro, steps = (_expected(config, *_MATCHES[key]) for key in (_BATCH, _STEPS))
    if value is None or counts is None or micro is None or steps is None:
        return
    workers = sum(counts)
    product = micro * steps * workers
    if value != product:
        yield BATCH_SIZE_FIXED.found(None, value=value, workers=workers, micro=micro, steps=steps, product=product)


@Check
def check_deepspeed_on_cpu(inspection: Inspection) -> Iterator[Case]:
    """ZeRO-3 finds GPUs, or its JSON works without."""
    _, settings = _settings(inspection)
    for node, found in inspection.known if settings.stage == _ZERO3 and settings.names_train_batch_size else ():
        if found.packages.get("torch", "").endswith("+cpu"):
            yield ZERO3_ON_CPU.found(node.name)


@launch_check
def check_deepspeed_devices(inspection: Inspection) -> Iterator[Case]:
    """DeepSpeed can parse the names of the devices."""
    _, settings = _settings(inspection)
    for node, found in inspection.known if settings.stage in _ZERO_1_2 else ():
        version = found.packages.get("deepspeed", "")
        if accelerator_named(found.accelerator) is not NVIDIA or _numbers(version) < _NUMBERS_ALONE_SINCE:
            continue
        name, given = NVIDIA.visible[0], node.env | inspection.environment.env
        value = given.get(name, "" if found.visible_gpus else found.env.get(name, ""))
        way = "write the GPU numbers of nvidia-smi instead"
        if name not in given and not NVIDIA.counts_alike(given):
            value = listed([gpu.uuid for gpu in found.visible_gpus if gpu.uuid is not None])
            way = f"leave {listed(NVIDIA.order)} to multinode, which sets numbers"
        elif "MIG-" in value:
            way = "a MIG device has no number: uninstall nvidia-ml-py for this job, or use an older DeepSpeed:\n"
            way += f"{shlex.quote(found.python or 'python3')} -m pip uninstall nvidia-ml-py"
        if not all(entry.strip().isdigit() for entry in value.split(",") if value):
            yield DEVICES_NOT_NUMBERED.found(
                node.name, name=name, value=value, version=version, stage=settings.stage, way=way
            )


@Check
def check_timeout(inspection: Inspection) -> Iterator[Case]:
    """Workers that wait for a peer time out."""
    job = inspection.training
    timeout_s = _number(job.config.get("ddp_timeout")) if job is not None else None
    if timeout_s is not None and timeout_s > _DAY_S and len(inspection.cluster.nodes) > 1:
        years = timeout_s / _YEAR_S
        words = f"{years:.1f} years" if years >= 1 else format_duration(timeout_s)
        yield TIMEOUT_OF_AGES.found(None, timeout_s=f"{timeout_s:.0f}", words=words)


def _settings(inspection: Inspection) -> tuple[dict[str, Any], DeepSpeedConfig]:
    job = inspection.training
    if job is None:
        return {}, DeepSpeedConfig()
    return job.config, parse_deepspeed(job.deepspeed_text) or DeepSpeedConfig()


def _expected(config: dict[str, Any], key: str, default: Any) -> Any:
    value = config.get(key, default)
    if isinstance(default, bool):
        evaluation = config.get(_FULL_EVAL[key], False)
        return value or evaluation if isinstance(value, bool) and isinstance(evaluation, bool) else None
    return _number(value)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
