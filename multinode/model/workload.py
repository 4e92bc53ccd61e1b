"""Workload: what a run trained and with which settings, kept with the run for comparisons and predictions.

Read from the job before it starts; what the workers did is in the summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from multinode.errors import JobError
from multinode.figures.figure import Figure, Row
from multinode.job.job import Job, TrainingJob
from multinode.job.settings import is_false, is_true
from multinode.levers.levers import NONE, TYPES, Levers
from multinode.records.samples import plausible_count
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, Work
from multinode.units import UNKNOWN

T_co = TypeVar("T_co", covariant=True)

_RANKED = frozenset({"lora", "oft"})
_SHORTENING = frozenset({"max_steps", "num_train_epochs"})
_ZERO_0 = "DeepSpeed ZeRO-0"


_QLORA = "qlora"


class JobSettings(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="settings"):
    """The settings that the speed of a training depends on; None is unknown."""

    model: str | None = None  # name or path
    method: str | None = None  # `full`, `lora`, `qlora`, ... from the job; `script` for a script.
    lora_rank: int | None = None  # of an adapter
    stage: str | None = None  # `sft`, `pt`, `dpo`, ..
    dataset: str | None = None  # names, comma-separated; `synthetic` for synthetic data
    strategy: str | None = None  # as configured: `DDP`, `ZeRO-2`, ..
    per_device_batch: int | None = None  # samples per worker per micro-batch
    accumulation: int | None = None  # micro-batches per step
    sequence_length: int | None = None  # longest sample in tokens (`cutoff_len`)
    packing: bool | None = None  # whether several samples are packed into one sequence
    precision: str | None = None  # `fp32`, `bf16` or `fp16`
    recompute: bool | None = None  # whether activations are recomputed (gradient checkpointing)
    # whether gradients are reduced during the backward pass (DeepSpeed's `overlap_comm`; DDP always)
    overlap: bool | None = None
    levers: Levers = NONE  # what changes the training itself
    command: str | None = None  # of a script, as given

    @property
    def is_quantised(self) -> bool:
        """Whether its frozen weights are quantized, as in all kinds of QLoRA."""
        return self.method is not None and self.method.startswith(_QLORA)

    @property
    def by_name(self) -> dict[str, Any]:
        """Every setting for tables, with each lever in words as one; None is unknown, or a lever that is not used."""
        named: dict[str, Any] = {}
        for name, value in msgspec.structs.asdict(self).items():
            if name == "levers":
                named |= {lever.column: self.levers.words.get(field) for field, lever in TYPES.items()}
            else:
                named[name] = value
        return named


SETTINGS = tuple(JobSettings().by_name)
"""Names of settings in tables."""


class Setting(Figure[T_co], Generic[T_co], frozen=True):
    """A setting as a figure of tables.

    Attributes:
        key: of a job that holds the value.
        decided_by: further keys of a job that decide it.
    """

    key: str = ""
    decided_by: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a job that decide it."""
        return (self.key, *self.decided_by) if self.key else self.decided_by


def _model(row: Row) -> str:
    """A model as people call it: of a path its last part; a hub's `owner/name` stays."""
    model = row[MODEL]
    if isinstance(model, Unknown):
        return UNKNOWN
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return model.rstrip("/").rpartition("/")[2] or model if is_path else model


_SHARDING = ("deepspeed", "fsdp")
MODEL = Setting[str](
    "model",
    "model",
    about="name or path of the model",
    aliases=("model_name_or_path", "model_name", "base_model"),
    cell=_model,
    key="model_name_or_path",
)
DATASET = Setting[str]("dataset", "data set", about="data set, or `synthetic`", key="dataset")
METHOD = Setting[str](
    "method",
    "method",
    about="`full`, `lora`, `qlora` and so on; `script` for a script",
    aliases=("finetuning_type", "finetuning_method", "training_method"),
    key="finetuning_type",
    decided_by=("quantization_bit",),
)
LORA_RANK = Setting[int](
    "lora_rank",
    "LoRA rank",
    form="number",
    about="rank of the LoRA adapters",
    aliases=("lora_r",),
    key="lora_rank",
    decided_by=("finetuning_type", "quantization_bit"),
)
STAGE = Setting[str]("stage", "stage", about="`sft`, `pt`, `dpo` and so on", key="stage")
STRATEGY = Setting[str](
    "strategy",
    "strategy",
    about="`DDP`, `ZeRO-2` and so on, as configured",
    aliases=("parallelism",),
    decided_by=_SHARDING,
)
PRECISION = Setting[str](
    "precision",
    "precision",
    about="`fp32`, `bf16` or `fp16`",
    aliases=("dtype", "data_type"),
    decided_by=("bf16", "fp16", "pure_bf16"),
)
SEQUENCE_LENGTH = Setting[int](
    "sequence_length",
    "sequence",
    "tokens",
    form="number",
    about="maximum number of tokens per sample (`cutoff_len`)",
    phrase="sequence length",
    csv="sequence_length_tokens",
    aliases=(
        *("cutoff_len", "max_seq_length", "seq_len", "seq_length", "max_seq_len", "max_length", "context_length"),
        "sequence_len",
    ),
    key="cutoff_len",
)
PACKING = Setting[bool](
    "packing",
    "packing",
    about="whether several samples are packed into one sequence",
    decided_by=("packing", "neat_packing", "stage"),
)
RECOMPUTE = Setting[bool](
    "recompute",
    "recomputed",
    about="whether activations are recomputed (gradient checkpointing)",
    decided_by=("disable_gradient_checkpointing",),
)
OVERLAP = Setting[bool]("overlap", about="whether gradients are reduced during the backward pass", decided_by=_SHARDING)
LEVERS: tuple[Setting[Any], ...] = tuple(
    Setting[str](lever.column, lever.heading, about=lever.title, phrase=lever.phrase) for lever in TYPES.values()
)
COMMAND = Setting[str]("command", about="command of a script")
PER_DEVICE_BATCH = Setting[int](
    "per_device_batch",
    "batch",
    form="number",
    about="samples per worker per micro-batch",
    line="per-device batch",
    csv="per_device_batch_samples",
    aliases=(
        *("batch", "batch_size", "bs", "bsz", "micro_bsz", "per_device_train_batch_size", "per_device_batch_size"),
        *("train_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch", "micro_bs", "mbs"),
        *("batch_size_per_device", "batch_size_per_gpu", "batch_per_device", "batch_per_gpu"),
        *("per_gpu_batch_size", "per_gpu_bs"),
    ),
    key="per_device_train_batch_size",
)
ACCUMULATION = Setting[int](
    "accumulation",
    "accumulation",
    form="number",
    about="micro-batches per step",
    aliases=(
        *("gradient_accumulation_steps", "gradient_accumulation", "accumulation_steps", "accum_steps"),
        *("grad_accum", "grad_accum_steps", "grad_acc", "grad_acc_steps", "gas"),
    ),
    key="gradient_accumulation_steps",
)
GLOBAL_BATCH = Figure[int](
    "global_batch",
    "global batch",
    form="number",
    about="samples per optimizer step of all workers",
    line="global batch (samples)",
    csv="global_batch_samples",
    aliases=(
        *("total_train_bs", "total_train_batch_size", "global_batch_size", "gbs"),
        *("total_batch_size", "effective_batch_size", "global_bs", "total_bs", "total_batch", "effective_batch"),
    ),
)
JOB_SETTINGS: tuple[Setting[Any], ...] = (
    *(MODEL, DATASET, METHOD, LORA_RANK, STAGE, STRATEGY, PRECISION, SEQUENCE_LENGTH, PACKING, RECOMPUTE, OVERLAP),
    *LEVERS,
    *(COMMAND, PER_DEVICE_BATCH, ACCUMULATION),
)
"""Figures of JobSettings."""


# What two runs of one training have in common, however they are laid out.
_SAME = (
    "model",
    "dataset",
    "method",
    "lora_rank",
    "stage",
    "sequence_length",
    "packing",
    "precision",
    "recompute",
    "command",
)


class FullRun(msgspec.Struct, frozen=True, kw_only=True):
    """The user's full run, of which a short run is a part."""

    steps: int | None = None  # optimizer steps (`max_steps`); None if the job sets epochs
    epochs: float | None = None  # passes over the data, if the job sets them

    @classmethod
    def first_of(cls, full_runs: Iterable[FullRun]) -> FullRun:
        """The first that sets one of the two."""
        return next((full_run for full_run in full_runs if full_run != cls()), cls())


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`workload.json` of a run."""

    settings: JobSettings
    whole: FullRun = FullRun()
    work: Work | Unknown = UNMEASURED  # what it communicates, from the job's files
    versions: dict[str, str] = {}  # of torch, the engine and NCCL on node 0, by package


def read_workload(
    job: Job,
    model: Mapping[str, Any] | None,
    layout: Layout,
    *,
    versions: Mapping[str, str] | None = None,
    levers: Levers = NONE,
) -> Workload:
    """What a job trains, from its files alone.

    Args:
        job: the job.
        model: the model's config.json; None if it could not be read.
        layout: the workers.
        versions: of packages on node 0.
        levers: of the plan.
    """
    settings = msgspec.structs.replace(read_settings(job), levers=levers)
    packages = dict(versions or {})
    training = job.training
    if training is None:
        lacking = Unknown("the communication of a script is known only from its steps")
        return Workload(settings=settings, work=lacking, versions=packages)
    try:
        work: Work | Unknown = read_work(training, model, layout, packages.get("transformers"))
    except JobError as error:
        work = Unknown(error.message)
    return Workload(settings=settings, whole=_full_run(training), work=work, versions=packages)


def read_settings(job: Job) -> JobSettings:
    """The settings of a job, with the defaults of its framework. A value of the wrong type is unknown."""
    training = job.training
    if training is None:
        return JobSettings(method="script", command=" ".join(job.program))
    config, given = job.arguments, job.settings
    method, stage = given.finetuning_type, given.stage
    if method == "lora" and config.get("quantization_bit"):
        method = _QLORA
    strategy, overlap = _strategy(training)
    return JobSettings(
        model=name if isinstance(name := config.get("model_name_or_path"), str) else None,
        method=method,
        lora_rank=given.lora_rank if method in {*_RANKED, _QLORA} else None,
        stage=stage,
        dataset=_names(config.get("dataset")),
        strategy=strategy,
        per_device_batch=given.per_device_train_batch_size,
        accumulation=given.gradient_accumulation_steps,
        sequence_length=given.cutoff_len,
        packing=training.synthetic is None and _packs(config, stage),
        precision=_precision(config),
        recompute=not is_true(config.get("disable_gradient_checkpointing")),
        overlap=overlap,
    )


def differing_setting(ours: JobSettings, theirs: JobSettings) -> str:
    """The first setting that differs though one training has one of it; what is not known differs in nothing."""
    for name in _SAME:
        values = getattr(ours, name), getattr(theirs, name)
        if None not in values and values[0] != values[1]:
            return f"{name} {values[0]} and {values[1]}"
    return ""


def global_batch(settings: JobSettings, world_size: int | None) -> int | None:
    """Samples per optimizer step over all workers; None if a factor is unknown."""
    parts = [plausible_count(count) for count in (settings.per_device_batch, settings.accumulation, world_size)]
    product = 1
    for part in parts:
        if not part:
            return None
        product *= part
    return product


def read_work(
    job: TrainingJob, model: Mapping[str, Any] | None, layout: Layout, transformers: str | None = None
) -> Work:
    """The collective calls of one step, as the job's engine makes them."""
    from multinode.model.engine_calls import engine_calls
    from multinode.model.training import read_training

    training = read_training(job, model, transformers)
    calls, _ = engine_calls(job, training, layout)
    calls_by_strategy = {training.strategy: tuple(calls)} if calls else {}
    return Work(strategy=training.strategy, load=training.load, calls=calls_by_strategy)


def _packs(config: Mapping[str, Any], stage: str | None) -> bool:
    packing = config.get("packing")
    usual = stage == "pt" and not is_false(packing)
    return is_true(config.get("neat_packing")) or is_true(packing) or usual


def _full_run(job: TrainingJob) -> FullRun:
    own = job.uncut
    if own is None:
        own = job.config if _SHORTENING.isdisjoint(job.overridden) else job.given
    config = job.kind.arguments(own, job.verb)
    steps = config.get("max_steps")
    if type(steps) is int and steps > 0:
        return FullRun(steps=steps)
    epochs = job.kind.defaults.given(config).num_train_epochs
    return FullRun(epochs=float(epochs) if job.synthetic is None and epochs is not None else None)


def _strategy(job: TrainingJob) -> tuple[str | None, bool | None]:
    if job.arguments.get("deepspeed") is not None:
        from multinode.job.deepspeed import parse_deepspeed
        from multinode.model.training import deepspeed_strategy

        deepspeed = parse_deepspeed(job.deepspeed_text)
        if deepspeed is None:
            return None, None
        return str(deepspeed_strategy(deepspeed)) if deepspeed.stage else _ZERO_0, deepspeed.overlap_comm
    fsdp = job.arguments.get("fsdp")
    if not fsdp:
        return str(Strategy.DDP), True
    from multinode.model.training import named_fsdp

    return str(named_fsdp(fsdp) or Strategy.FSDP), True


def _precision(config: Mapping[str, Any]) -> str:
    if is_true(config.get("bf16")) or is_true(config.get("pure_bf16")):
        return "bf16"
    return "fp16" if is_true(config.get("fp16")) else "fp32"


def _names(value: object) -> str | None:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return ",".join(str(part).strip() for part in parts) or None
