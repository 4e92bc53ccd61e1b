"""Model work: what a job's files say of the computation of a token, kept with the run; with its speed, MFU and HFU.

FLOPs are counted in `flops`, which has the peaks too. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.analyse.job.flops import Utilisation, flops_per_token, mean_peak, utilisation
from multinode.analyse.job.model_size import ModelShape, parse_model
from multinode.analyse.job.training import read_trained, refuse_unknown
from multinode.analyse.run.observed import Observed
from multinode.analyse.stats.unknown import UnknownError
from multinode.analyse.steps.throughput import Throughput
from multinode.analyse.traffic.calls import last_models
from multinode.core.job.job import Job, LlamaFactoryJob
from multinode.core.measure.benchmark import Benchmark
from multinode.errors import JobError

__all__ = ["ModelWork", "read_model_work", "utilisation_of"]


# They change the weights' type in memory, what the optimizer does, or who starts the workers, and no matrix.
_SAME_FLOPS = frozenset({"quantization_bit", "use_galore", "use_apollo", "use_ray"})


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the FLOPs of a token.

    Attributes:
        shape: of the model; None is unknown.
        adapter_parameters: of a LoRA or QLoRA adapter; None where the whole model is trained.
        recompute: whether each layer's forward pass is made again in the backward pass.
        packing: whether several samples share a row, so that a row's length says little about attention.
        reason: why nothing is known.
    """

    shape: ModelShape | None = None
    adapter_parameters: int | None = None
    recompute: bool = False
    packing: bool = False
    reason: str = ""


def read_model_work(job: Job | Benchmark, model: Mapping[str, Any] | None) -> ModelWork:
    """What the job's files say.

    Args:
        job: the job.
        model: the model's config.json; None where nobody could read it.
    """
    if not isinstance(job, LlamaFactoryJob):
        return ModelWork(reason="the model of a script is not known; FLOPs are counted for LLaMA-Factory's jobs")
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
        shape=shape,
        adapter_parameters=None if adapter is None else trainable,
        recompute=job.config.get("disable_gradient_checkpointing") is not True,
        packing=any(job.config.get(key) is True for key in ("packing", "neat_packing")),
    )


def utilisation_of(work: ModelWork, observed: Observed, speed: Throughput) -> Utilisation:
    """TFLOP/s, MFU and HFU.

    Tokens that are no padding count where they are known: what is computed for padding is lost.

    Raises:
        UnknownError: why there are none.
    """
    if work.shape is None:
        raise UnknownError(work.reason or "the model's shape is not known")
    tgs, length = speed.effective_tgs or speed.tgs, speed.tokens_per_sample
    if tgs is None or length is None:
        raise UnknownError("the training does not say how many tokens a step has")
    if speed.effective_tgs is not None and speed.tgs:
        length *= speed.effective_tgs / speed.tgs
    flops = flops_per_token(
        work.shape, length, adapter_parameters=work.adapter_parameters, recompute=work.recompute, causal=True
    )
    models = last_models(observed).values()
    names = [model.device_name for model in models if model.device == "cuda" and model.device_name]
    used = utilisation(flops, tgs, mean_peak(names) if len(names) == observed.world_size else None)
    notes = [used.rule, "tokens without padding" if speed.effective_tgs is not None else "padding counted as tokens"]
    if work.packing:
        notes.append("samples are packed: attention is an upper bound")
    return msgspec.structs.replace(used, rule="; ".join(notes))
