"""vary: a Calibration -> the same training under another strategy or method: what it sends and what it computes. Pure.

Settings that `predict` has as numbers (batch, accumulation, link) are a Scenario's, and not varied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.decoding import decode_json
from multinode.errors import JobError, UsageError
from multinode.job.deepspeed import HPZ_WORKERS
from multinode.job.job import TrainingJob
from multinode.model.flops import flops_of_weights, flops_per_token
from multinode.model.model_size import ModelShape, lora_parameters, parse_model, trained_matrices
from multinode.model.tensors import counted_model, with_method
from multinode.model.training import fsdp_word, refuse_unknown
from multinode.model.workload import JobSettings, read_work
from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import hideable_share
from multinode.predict.network_model import DoubtRules
from multinode.stats.unknown import Unknown
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work, passing_bytes
from multinode.units import format_figure

# Of compute, where FLOPs alone tell how much less or more another method has.
_OTHER_METHOD = 0.2
_FULL = "full"
# Of a rank.
_MOST_DIGITS = 9
# A key that leaves the number of parameters that a method trains as it is.
_OF_ANY_METHOD = frozenset({"quantization_bit"})
# Whose counts tell that of the others.
_COUNTED_METHODS = frozenset({_FULL, "lora", "qlora"})
_NO_SHAPE = "the compute of another method is unknown, because the model's shape or the sample length is unknown"


DOUBTS = DoubtRules("Uncertainty of a prediction: another training method")
_FROM_FLOPS = DOUBTS.doubt(
    "from-flops",
    "compute",
    about="compute time of a training method that was not measured",
    message="compute is assumed to take {times} times as long as measured, in proportion to the FLOPs",
)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was trained, as far as another strategy or method can be made of it."""

    settings: JobSettings
    job: TrainingJob | None = None  # as it ran; None of a script, or of figures
    model: dict[str, Any] | None = None  # its config.json; None is unknown
    shape: ModelShape | None = None  # of the model, where there is no config.json
    targets: tuple[str, ...] = ("all",)  # modules of an adapter, where there is no job

    def hideable_share(self, strategy: Strategy, *, lora: bool | None = None) -> float:
        """The fraction of compute beside which communication may run; without `lora` as the settings have it."""
        is_lora = self.settings.lora_rank is not None if lora is None else lora
        return hideable_share(strategy, lora=is_lora, recompute=self.settings.recompute is True)

    def known_shape(self) -> ModelShape | None:
        """The model's shape."""
        return self.shape or (parse_model(self.model) if self.model is not None else None)

    def matrices(self, method: str | None = None) -> tuple[tuple[int, int, int], ...]:
        """Rows, columns and count of those that a method trains, today's without one; empty is unknown."""
        shape, method = self.known_shape(), method or method_of(self.settings)
        if shape is None or method is None or not (method == _FULL or method.startswith("lora:")):
            return ()
        targets_ = self.job.arguments.get("lora_target", "all") if self.job is not None else ",".join(self.targets)
        targets = [name.strip() for name in targets_.split(",")] if isinstance(targets_, str) else []
        return trained_matrices(shape, parse_method(method), targets)


def method_of(settings: JobSettings) -> str | None:
    """`full`, `lora:8`, or what else the job calls it."""
    if settings.lora_rank is None:
        return settings.method
    return f"{settings.method}:{settings.lora_rank}"


def parse_method(text: str) -> int | None:
    """The rank of `lora:RANK`; None of `full`.

    Raises:
        UsageError: it is neither.
    """
    name, _, rank = text.partition(":")
    if text == _FULL:
        return None
    if name != "lora" or not rank.isascii() or not rank.isdigit() or len(rank) > _MOST_DIGITS or not int(rank):
        raise UsageError(f"cannot predict the method {text!r}", hint="write full, or lora:8")
    return int(rank)


def vary(calibration: Calibration, subject: Subject, *, strategy: Strategy, method: str | None = None) -> Calibration:
    """Calibration of the training with another strategy or method.

    Args:
        calibration: as measured.
        subject: what was trained.
        strategy: how the model is shared out.
        method: `full` or `lora:RANK`; None is as measured.
    """
    other = method is not None and method != method_of(subject.settings)
    if not other and strategy is calibration.work.strategy:
        return calibration
    rank = parse_method(method) if method is not None and other else None
    share = subject.hideable_share(strategy, lora=rank is not None if other else None)
    calibration = msgspec.structs.replace(
        calibration, costs=msgspec.structs.replace(calibration.costs, hideable_share=share)
    )
    varied = _work(calibration, subject, strategy, rank, other=other)
    if not other:
        calls = {**calibration.work.calls, **varied.calls}
        work = msgspec.structs.replace(calibration.work, load=varied.load, calls=calls)
        return msgspec.structs.replace(calibration, work=work)
    measured = _work(calibration, subject, calibration.work.strategy, rank, other=True)
    work = msgspec.structs.replace(measured, load=varied.load, calls={**measured.calls, **varied.calls})
    asked_for = msgspec.structs.replace(calibration, work=work, matrices=subject.matrices(method))
    return _of_method(calibration, subject, asked_for, rank)


def _of_method(calibration: Calibration, subject: Subject, other: Calibration, rank: int | None) -> Calibration:
    costs, work = calibration.costs, calibration.work
    ranks = ((subject.settings.lora_rank, work.load.trainable), (rank, other.work.load.trainable))
    before, after = (_token_flops(calibration, subject, rank_, trained) for rank_, trained in ranks)
    less = after / before
    passing = [
        passing_bytes(sent.calls_of(work.strategy, calibration.layout), 1, calibration.layout)
        for sent in (work, other.work)
    ]
    doubt = _FROM_FLOPS.found(None, relative=_OTHER_METHOD, times=format_figure(less, digits=2))
    return msgspec.structs.replace(
        other,
        costs=msgspec.structs.replace(
            costs,
            compute_ms=costs.compute_ms * less,
            optimizer_ms=costs.optimizer_ms * other.work.load.trainable / max(1, work.load.trainable),
            overlap=None,
        ),
        # Nobody measured it: what was carried on is as doubtful at the measured point as elsewhere.
        residual=msgspec.structs.replace(calibration.residual, at=None),
        local_ms=calibration.local_ms * passing[1] / passing[0] if passing[0] else calibration.local_ms,
        doubts=(*calibration.doubts, doubt),
    )


def _token_flops(calibration: Calibration, subject: Subject, rank: int | None, trained: int) -> float:
    """FLOPs per token of a method, of a mixture of experts those of its active parameters."""
    length = calibration.tokens_per_sample or subject.settings.sequence_length
    shape, recompute = subject.known_shape(), subject.settings.recompute is True
    if length is not None and shape is not None:
        adapter = None if rank is None else trained
        return flops_per_token(shape, length, adapter_parameters=adapter, recompute=recompute).hardware
    counted = None if subject.model is None else counted_model(_with_method(subject, subject.model, rank))
    work = None if counted is None else counted.token_work(recompute=recompute)
    if length is None or work is None or isinstance(work, Unknown):
        raise UsageError(_NO_SHAPE)
    return flops_of_weights(work, length).hardware


def _with_method(subject: Subject, model: dict[str, Any], rank: int | None) -> dict[str, Any]:
    """A model's config.json with the node's count of a method, if a node counted it.

    Raises:
        UsageError: the count does not tell that of the method.
    """
    settings = subject.settings
    if counted_model(model) is None or (rank is not None and rank == settings.lora_rank):
        return model
    varied = with_method(model, rank, settings.lora_rank) if settings.method in _COUNTED_METHODS else None
    if varied is None:
        raise UsageError(_NO_SHAPE)
    return varied


def _work(calibration: Calibration, subject: Subject, strategy: Strategy, rank: int | None, *, other: bool) -> Work:
    if subject.job is not None and subject.model is not None:
        config, text = _shared_out(subject.job, strategy, calibration.layout)
        if other:
            config |= {"finetuning_type": _FULL} if rank is None else {"finetuning_type": "lora", "lora_rank": rank}
        job = msgspec.structs.replace(subject.job, config=config, deepspeed_text=text)
        try:
            model = subject.model
            if other:
                refuse_unknown(job, besides=_OF_ANY_METHOD)
                model = _with_method(subject, model, rank)
            return read_work(job, model, calibration.layout)
        except JobError as error:
            raise UsageError(error.message, hint=error.hint) from None
    load = calibration.work.load
    return Work(strategy=strategy, load=_load_of(load, subject, rank) if other else load)


def _load_of(load: TrafficInputs, subject: Subject, rank: int | None) -> TrafficInputs:
    shape = subject.known_shape()
    trainable = None
    if shape is not None:
        trainable = shape.parameters if rank is None else lora_parameters(shape, rank, subject.targets)
    if shape is None or trainable is None:
        raise UsageError(
            "the number of trainable parameters of another method is unknown, because the model's shape is unknown"
        )
    parameters = shape.parameters + (0 if rank is None else trainable)
    return msgspec.structs.replace(load, parameters=parameters, trainable=trainable)


def _shared_out(job: TrainingJob, strategy: Strategy, layout: Layout) -> tuple[dict[str, Any], str | None]:
    config = {key: value for key, value in job.arguments.items() if key not in {"deepspeed", "fsdp"}}
    if strategy.engine == "FSDP":
        return config | {"fsdp": f"{fsdp_word(strategy)} auto_wrap"}, None
    if strategy is Strategy.DDP:
        return config, None
    text = _zero_json(job.deepspeed_text, strategy, layout)
    return config | {"deepspeed": job.arguments.get("deepspeed") or "ds.json"}, text


def _zero_json(text: str | None, strategy: Strategy, layout: Layout) -> str:
    data: dict[str, Any] = {}
    if text is not None:
        try:
            data = decode_json(text, dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            data = {}
    own = data.get("zero_optimization")
    zero = own if isinstance(own, Mapping) else {"overlap_comm": False}
    hpz = layout.workers_per_node if strategy is Strategy.ZERO3_HPZ else 1
    changed = {**zero, "stage": strategy.stage, HPZ_WORKERS: hpz}
    return msgspec.json.encode({**data, "zero_optimization": changed}).decode()
