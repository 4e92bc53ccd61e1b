"""The peak memory of a worker of a predicted training, from its settings. Pure."""

from __future__ import annotations

import math

from msgspec.structs import replace

from multinode.job.deepspeed import DeepSpeedConfig
from multinode.model.memory import (
    NF4_BITS,
    MicroBatch,
    PeakMemory,
    StatePlacement,
    WorkerMemory,
    decoder_widths,
    shape_widths,
)
from multinode.model.workload import JobSettings
from multinode.predict.cost_model import Scenario
from multinode.predict.variants import Subject
from multinode.traffic.step_calls import Strategy, TrafficInputs


def state_placement(settings: JobSettings, strategy: Strategy, deepspeed: DeepSpeedConfig | None) -> StatePlacement:
    """How wide the states are, and where they are kept."""
    sharing = deepspeed if strategy.engine == "DeepSpeed" else None
    return StatePlacement(
        half=settings.precision in {"bf16", "fp16"},
        frozen_bits=NF4_BITS if settings.is_quantised else None,
        optimizer_elsewhere=sharing is not None and sharing.offload_optimizer is not None,
        # Below stage 3 each worker keeps them whole, and DeepSpeed ignores `offload_param`.
        parameters_elsewhere=sharing is not None
        and sharing.offload_parameters is not None
        and strategy.shards_parameters,
    )


def worker_peak(
    subject: Subject | None,
    settings: JobSettings,
    scenario: Scenario,
    load: TrafficInputs,
    deepspeed: DeepSpeedConfig | None = None,
) -> PeakMemory | None:
    """What a worker needs with samples of the full length; None where the model's widths or the length are not known.

    Args:
        subject: what was trained.
        settings: of the training, whose method may be another.
        scenario: its batch, strategy and workers.
        load: what it trains.
        deepspeed: its DeepSpeed configuration; None is DeepSpeed's defaults.
    """
    if subject is None or settings.sequence_length is None:
        return None
    widths = decoder_widths(subject.model) if subject.model is not None else None
    if widths is None and subject.shape is not None:
        widths = shape_widths(subject.shape)
    if widths is None:
        return None
    placement = state_placement(settings, scenario.strategy, deepspeed)
    if placement.frozen_bits is not None:
        placement = replace(placement, whole_frozen=widths.outside)
    config = subject.job.arguments if subject.job is not None else {}
    batch = MicroBatch(
        samples=math.ceil(scenario.per_device_batch),
        tokens=settings.sequence_length,
        recompute=settings.recompute is not False,
        eager=config.get("flash_attn") == "disabled",
        adapted=None if settings.lora_rank is None else subject.targets,
        dropout=subject.job is not None and bool(subject.job.settings.lora_dropout),
        autocast=scenario.strategy.engine != "DeepSpeed",
        fused_loss=config.get("enable_liger_kernel") is True,
        varied=settings.packing is not True,
    )
    return WorkerMemory(
        strategy=scenario.strategy,
        load=load,
        layout=scenario.layout,
        placement=placement,
        widths=widths,
        batch=batch,
        deepspeed=deepspeed,
    ).peak()
