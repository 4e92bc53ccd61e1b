"""Model work: the computation per token according to a job's files; with the speed, MFU and HFU.

FLOPs and peaks are in `flops`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.errors import JobError
from multinode.job.flops import Utilisation, flops_per_token, mean_peak, utilisation
from multinode.job.job import Job, LlamaFactoryJob
from multinode.job.model_size import ModelShape, parse_model
from multinode.job.training import read_trained, refuse_unknown
from multinode.profile.calls import last_models
from multinode.profile.observed import Observed
from multinode.profile.throughput import Throughput
from multinode.records.benchmark import Benchmark
from multinode.records.samples import ModelSample
from multinode.stats.estimate import UnknownError

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# These change the weight dtype in memory, the optimizer, or the launcher, but no matrix product.
_SAME_FLOPS = frozenset({"quantization_bit", "use_galore", "use_apollo", "use_ray"})


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of FLOPs per token."""

    # of matrix products, if the files alone decide it (`fp8`); None uses the workers' records
    precision: str | None = None
    shape: ModelShape | None = None  # of the model; None if unknown
    adapter_parameters: int | None = None  # of a LoRA or QLoRA adapter; None if the whole model is trained
    recompute: bool = False  # whether each layer's forward pass is recomputed in the backward pass
    packing: bool = False  # whether several samples share a row, so that its length says little about attention
    reason: str = ""  # why nothing is known


def read_model_work(job: Job | Benchmark, model: Mapping[str, Any] | None) -> ModelWork:
    """The work according to the job's files.

    Args:
        job: the job.
        model: the model's config.json; None if it could not be read.
    """
    if not isinstance(job, LlamaFactoryJob):
        return ModelWork(reason="the model of a script is unknown; FLOPs are counted for LLaMA-Factory jobs only")
    if model is None:
        return ModelWork(reason=f"the config.json of {job.config.get('model_name_or_path')} could not be read")
    shape = parse_model(model)
    if shape is None:
        return ModelWork(reason=f"the layers of a {model.get('model_type')!r} model cannot be counted")
    try:
        refuse_unknown(job, besides=_SAME_FLOPS)
        adapter, trainable = read_trained(job, shape)
    except JobError as error:
        return ModelWork(reason=error.message)
    return ModelWork(
        precision="fp8" if job.config.get("fp8") is True else None,
        shape=shape,
        adapter_parameters=None if adapter is None else trainable,
        recompute=job.config.get("disable_gradient_checkpointing") is not True,
        packing=any(job.config.get(key) is True for key in ("packing", "neat_packing")),
    )


def utilisation_of(work: ModelWork, observed: Observed, speed: Throughput) -> Utilisation:
    """TFLOP/s, MFU and HFU.

    Tokens without padding count if known, as computation of padding is wasted.

    Raises:
        UnknownError: why there are none.
    """
    if work.shape is None:
        raise UnknownError(work.reason or "the model's shape is unknown")
    tgs, length = speed.effective_tgs or speed.tgs, speed.attention_length or _mean_length(speed)
    if tgs is None or length is None:
        raise UnknownError("the training does not report its tokens per step")
    flops = flops_per_token(
        work.shape, length, adapter_parameters=work.adapter_parameters, recompute=work.recompute, causal=True
    )
    used = utilisation(flops, tgs, *_peak(work, observed))
    notes = [used.rule, "tokens without padding" if speed.effective_tgs is not None else "padding counted as tokens"]
    if speed.attention_length is None:
        bound = "upper bound, samples are packed" if work.packing else "lower bound, by the mean length"
        notes.append(f"attention is a {bound}")
    return msgspec.structs.replace(used, rule="; ".join(notes))


def _mean_length(speed: Throughput) -> float | None:
    if speed.tokens_per_sample is None or speed.effective_tgs is None or not speed.tgs:
        return speed.tokens_per_sample
    return speed.tokens_per_sample * speed.effective_tgs / speed.tgs


def _peak(work: ModelWork, observed: Observed) -> tuple[float | None, str]:
    models = last_models(observed).values()
    names = [model.device_name for model in models if model.device == "cuda" and model.device_name]
    if len(names) < observed.world_size or not names:
        return None, "not every worker reported its GPU" if names else "no worker uses a GPU"
    dtypes = {work.precision or _precision(model) for model in models}
    dtype = dtypes.pop()
    if dtype is None or dtypes:
        return None, "the precision of the matrix products is unknown"
    return mean_peak(names, dtype)


def _precision(model: ModelSample) -> str | None:
    if model.mixed_precision not in {None, "no"}:
        return model.mixed_precision
    most = max((name for name in model.dtypes if name in _PRECISIONS), key=model.dtypes.__getitem__, default="")
    gathered = model.settings.get("param_dtype")
    precision = _PRECISIONS.get(gathered if isinstance(gathered, str) else most)
    # Older records have neither tf32 nor accelerate's handling of fp32 parameters.
    return precision if precision != "fp32" else {True: "tf32", False: "fp32", None: None}[model.tf32]
