"""Throughput over the measured steps: samples and tokens per second, MFU and HFU. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from multinode.errors import JobError
from multinode.figures.figure import Figure
from multinode.job.job import Job
from multinode.job.settings import is_true
from multinode.model.model_size import ModelShape, parse_model
from multinode.profile.calls import last_models
from multinode.profile.observed import Observed
from multinode.records.benchmark import BenchedPeak, Benchmark
from multinode.records.samples import ModelSample, Sample, StepSample, TokenWork
from multinode.stats.estimate import Estimate, estimate_rate, value_of
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, known, or_none, reason_of
from multinode.units import format_count

if TYPE_CHECKING:
    from multinode.model.flops import Flops

# On a GPU, the tokens without padding become known some steps late. The change of that delay between two records is an
# error, which is too large over fewer steps.
_LEAST_LATE_STEPS = 50
# Fewer rounds show less of the variation than their steps.
_LEAST_ROUNDS = 3


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a training; sums over sums, never means of rates.

    A step missing for a worker is excluded for it alone, both time and work, so each worker's rate is its own work over
    its own time.
    """

    samples_per_s: Estimate | Unknown = UNMEASURED  # of all workers
    tokens_per_s: Estimate | Unknown = UNMEASURED  # of all workers, including padding
    effective_tokens_per_s: float | Unknown = UNMEASURED  # of all workers, without padding
    # share of the tokens with counted masks, from which the padding of others is estimated; None without a figure
    # that excludes padding
    counted_masks: float | None = None
    # tokens per second and GPU (on CPUs: worker), including padding; `effective_tgs` without
    tgs: Estimate | Unknown = UNMEASURED
    effective_tgs: float | Unknown = UNMEASURED
    tokens_per_sample: float | Unknown = UNMEASURED  # mean padded length of a sample
    # sequence length that the mean token attends to: sum of squared lengths over sum of lengths, without padding if
    # known
    attention_length: float | Unknown = UNMEASURED
    per_device_batch: float | Unknown = UNMEASURED  # samples per micro-batch of a worker, median
    micro_steps: float | Unknown = UNMEASURED  # forward passes per step of one worker (gradient accumulation), mean

    @property
    def accumulation(self) -> int:
        """Forward passes per step as a whole number; 1 if they are unknown."""
        return max(1, round(or_none(self.micro_steps) or 1))


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """A counted quantity: its field, its name in words, and whether a GPU's worker knows it late."""

    field: str
    meaning: str
    comes_late: bool = False


class _Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Work of all workers, and per second."""

    total: int
    per_s: Estimate


_SAMPLES = _Work(field="samples", meaning="the number of samples per step")
_TOKENS = _Work(field="tokens", meaning="the number of tokens per step")
_TOO_LATE = f"a GPU reports its padding a few steps late, so more than {_LEAST_LATE_STEPS} measured steps are needed"
_EFFECTIVE = _Work(field="effective_tokens", meaning="the number of tokens without padding", comes_late=True)


NO_STEP = "no worker recorded a step"


def measure_throughput(observed: Observed) -> Throughput:
    """Throughput over the measured steps; a figure is unknown if a worker has none."""
    steps, world = observed.counted_steps, max(1, _distinct_gpus(observed))
    samples, tokens, effective = (
        found(partial(_rate, observed, steps, work)) for work in (_SAMPLES, _TOKENS, _EFFECTIVE)
    )
    records = [record for step in steps for record in step.values()]
    return Throughput(
        samples_per_s=found(lambda: known(samples).per_s),
        tokens_per_s=found(lambda: known(tokens).per_s),
        effective_tokens_per_s=found(lambda: known(effective).per_s.value),
        counted_masks=None if isinstance(effective, Unknown) else _counted_masks(records),
        tgs=found(lambda: known(tokens).per_s * (1 / world)),
        effective_tgs=found(lambda: known(effective).per_s.value / world),
        tokens_per_sample=found(lambda: known(tokens).total / known(samples).total),
        attention_length=found(lambda: _attention_length(records, tokens)),
        per_device_batch=found(lambda: _batch(records, samples)),
        micro_steps=found(lambda: _micro_steps(observed, records)),
    )


def _micro_steps(observed: Observed, records: Sequence[StepSample]) -> float:
    micro_steps = [record.micro_steps for record in records if record.micro_steps]
    if not micro_steps:
        raise UnknownError("no forward pass with gradients was seen" if observed.steps else NO_STEP)
    return statistics.fmean(micro_steps)


def _batch(records: Sequence[StepSample], samples: _Rate | Unknown) -> float:
    batches = [record.samples / record.micro_steps for record in records if record.samples and record.micro_steps]
    if not batches:
        known(samples)
        raise UnknownError("no forward pass with gradients was seen")
    return statistics.median(batches)


def _counted_masks(records: Sequence[StepSample]) -> float | None:
    tokens = sum(record.tokens or 0 for record in records)
    estimated = sum(min(record.estimated_tokens or 0, record.tokens or 0) for record in records)
    return 1 - estimated / tokens if tokens else None


def _attention_length(records: Iterable[StepSample], padded: _Rate | Unknown) -> float:
    tokens, squares = 0, 0
    for record in records:
        length = record.tokens if record.effective_tokens is None else record.effective_tokens
        if length is None or record.squared_lengths is None:
            tokens = 0
            break
        tokens, squares = tokens + length, squares + record.squared_lengths
    if not tokens or not squares:
        known(padded)
        raise UnknownError("the training does not report its sequence length")
    return squares / tokens


def all_steps_samples_per_s(observed: Observed) -> float | None:
    """Samples per second including warm-up, as the Trainer counts; None if a worker's samples are unknown."""
    rate = or_none(found(lambda: _rate(observed, list(observed.steps.values()), _SAMPLES)))
    measured = or_none(found(lambda: _rate(observed, observed.counted_steps, _SAMPLES)))
    if rate is None or measured is None:
        return rate.per_s.value if rate is not None else None
    # Steps that were not read contain no warm-up.
    more = (observed.recorded - len(observed.steps)) * measured.total / len(observed.counted)
    return (rate.total + more) / (rate.total / rate.per_s.value + more / measured.per_s.value)


def _rate(observed: Observed, steps: Sequence[dict[int, StepSample]], work: _Work) -> _Rate:
    if not any(steps):
        raise UnknownError(NO_STEP)
    on_gpu = {rank for rank, model in last_models(observed).items() if model.device == "cuda"}
    total, per_s = 0, 0.0
    for rank in sorted(rank for node in observed.nodes for rank in node.ranks):
        records = [step[rank] for step in steps if rank in step and step[rank].step_time_us is not None]
        counts: list[int | None] = [getattr(record, work.field) for record in records]
        numbers = [count for count in counts if count is not None]
        if not records:
            raise UnknownError(f"rank {rank} recorded no measured step")
        if len(numbers) < len(counts):
            raise UnknownError(f"the training does not report {work.meaning} (rank {rank})")
        if work.comes_late and rank in on_gpu:
            records, numbers = _between_arrivals(records, numbers)
            if len(records) < _LEAST_LATE_STEPS:
                raise UnknownError(_TOO_LATE)
        total += sum(numbers)
        per_s += sum(numbers) / sum(record.step_time_us or 0.0 for record in records) * 1e6
    if not total:
        raise UnknownError(f"the training does not report {work.meaning}: it counted none")
    return _Rate(total=total, per_s=_estimate(steps, work, per_s, observed.syncs))


def _estimate(steps: Sequence[dict[int, StepSample]], work: _Work, per_s: float, syncs: Collection[int]) -> Estimate:
    timed = [
        [record for step in part for record in step.values() if record.step_time_us is not None]
        for part in _parts(steps, syncs)
    ]
    estimate = estimate_rate(
        [statistics.fmean(getattr(record, work.field) or 0 for record in workers) for workers in timed if workers],
        [statistics.fmean(record.step_time_us or 0.0 for record in workers) for workers in timed if workers],
    )
    return estimate * (per_s / estimate.value)


def _parts(steps: Sequence[dict[int, StepSample]], syncs: Collection[int]) -> Iterator[list[dict[int, StepSample]]]:
    if len(syncs) < _LEAST_ROUNDS:
        yield from ([step] for step in steps)
        return
    part: list[dict[int, StepSample]] = []
    for step in steps:
        part.append(step)
        if syncs and next((record.step for record in step.values()), None) in syncs:
            yield part
            part = []


def _between_arrivals(records: Sequence[StepSample], counts: Sequence[int]) -> tuple[list[StepSample], list[int]]:
    """Steps after the first late record up to the last one; their records cover as many, slightly earlier steps.

    The first record covers steps that may not be measured.
    """
    places = [place for place, count in enumerate(counts) if count]
    within = slice(places[0] + 1, places[-1] + 1) if places else slice(0)
    return list(records[within]), list(counts[within])


_NS_PER_S = 1e9


def trained_s(samples: Iterable[Sample]) -> float | None:
    """Seconds from a node's first step to the expected end of the step that was cut off.

    A training that is stopped at its limit is cut off inside a step, so a median step is added: if that reaches the
    limit, it made all the steps that fit. Of several workers, the one that trained least counts, by its own node's
    monotonic clock.

    Returns:
        The time; None if a worker, or the node, recorded fewer than two steps.
    """
    ends_ns: dict[int, list[int]] = {}
    for sample in samples:
        if isinstance(sample, StepSample):
            ends_ns.setdefault(sample.rank, []).append(sample.mono_ns)
    if not ends_ns or any(len(ends) < 2 for ends in ends_ns.values()):  # noqa: PLR2004 - a step lies between two ends
        return None
    return min(map(_worker_ns, ends_ns.values())) / _NS_PER_S


def _worker_ns(ends_ns: list[int]) -> float:
    ends_ns = sorted(ends_ns)
    return ends_ns[-1] - ends_ns[0] + statistics.median(after - before for before, after in itertools.pairwise(ends_ns))


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# These change the weight dtype in memory, the optimizer, or the launcher, but no matrix product.
_SAME_FLOPS = frozenset({"quantization_bit", "use_galore", "use_apollo", "use_ray"})


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of FLOPs per token."""

    # of matrix products, if the files alone decide it (`fp8`); None uses the workers' records
    precision: str | None = None
    shape: ModelShape | Unknown = Unknown("the model's shape is unknown")
    adapter_parameters: int | None = None  # of a LoRA or QLoRA adapter; None if the whole model is trained
    recompute: bool = False  # whether each layer's forward pass is recomputed in the backward pass
    packing: bool = False  # whether several samples share a row, so that its length says little about attention
    by_workers: bool = False  # whether the workers' own count of their modules' weights stands in for it
    counted: TokenWork | None = None  # a node's count of them before the run, for workers that do not tell theirs


def read_model_work(job: Job | Benchmark, model: Mapping[str, Any] | None) -> ModelWork:
    """The work according to the job's files.

    Args:
        job: the job.
        model: the model's config.json; None if it could not be read.
    """
    training = job.training
    if training is None:
        return ModelWork(by_workers=True, shape=Unknown("the workers do not know the modules of the script's model"))
    from multinode.model.training import read_trained, refuse_unknown

    precision = "fp8" if is_true(training.arguments.get("fp8")) else None
    packing = any(is_true(training.arguments.get(key)) for key in ("packing", "neat_packing"))
    recompute = not is_true(training.arguments.get("disable_gradient_checkpointing"))
    try:
        refuse_unknown(training, besides=_SAME_FLOPS)
        shape = None if model is None else parse_model(model)
        if shape is None:
            unknown = f"the config.json of {training.arguments.get('model_name_or_path')} could not be read"
            if model is not None:
                unknown = f"the layers of a {model.get('model_type')!r} model cannot be counted"
            from multinode.model.tensors import counted_model

            node = counted_model(model)
            work = Unknown(unknown) if node is None else node.token_work(recompute=recompute)
            counted, lacking = None if isinstance(work, Unknown) else work, Unknown(unknown)
            return ModelWork(precision=precision, packing=packing, by_workers=True, shape=lacking, counted=counted)
        adapter, trainable = read_trained(training, shape)
    except JobError as error:
        return ModelWork(shape=Unknown(error.message))
    return ModelWork(
        precision=precision,
        shape=shape,
        adapter_parameters=None if adapter is None else trainable,
        recompute=recompute,
        packing=packing,
    )


_TERA = 1e12


class Utilisation(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="utilisation"):
    """How much of its GPUs a training uses.

    Published tables report one or the other: "TFLOPs" in XTuner's speed benchmarks and "achieved teraFLOP/s" of
    Megatron-LM (arXiv 2104.04473, equation 3) are hardware figures with recomputation; PaLM's MFU (arXiv
    2204.02311, appendix B) is a model figure. XTuner counts causal attention half; the other two count it whole, as
    the summary of a run does.
    `tests/job/test_flops.py` reproduces the first two.
    """

    model_tflops: float  # TFLOP/s per GPU that the model needs
    hardware_tflops: float  # TFLOP/s per GPU including recomputation
    mfu: float | None  # model_tflops over the peak in the precision used; None if the peak is unknown
    hfu: float | None  # hardware_tflops over the peak; None if the peak is unknown
    denominator: str  # the peak in words, or why there is none
    rule: str  # how FLOPs were counted


SAMPLES_PER_S = Figure[Estimate](
    "samples_per_s",
    "samples/s",
    form="figure",
    about="samples per second of all workers",
    aliases=("train_samples_per_second",),
    has_range=True,
)
TOKENS_PER_S = Figure[Estimate](
    "tokens_per_s",
    "tokens/s",
    form="figure",
    about="tokens per second of all workers, including padding",
    aliases=("train_tokens_per_second",),
    has_range=True,
)
TGS = Figure[Estimate](
    "tgs",
    "TGS",
    "tokens/s",
    form="figure",
    about="tokens per second per worker, including padding",
    line="TGS (tokens/s per worker)",
    csv="tgs_tokens_per_s_per_worker",
    aliases=("tokens_per_gpu_per_s",),
    has_range=True,
)
EFFECTIVE_TOKENS_PER_S = Figure[float](
    "effective_tokens_per_s", about="tokens per second of all workers, excluding padding"
)
STEP_TIME = Figure[Estimate](
    "step_time_ms",
    "step",
    "ms",
    form="ms",
    about="median time of an optimizer step",
    phrase="step time",
    has_range=True,
)
STEP_TIME_P95 = Figure[float](
    "step_time_p95_ms",
    "step, p95",
    "ms",
    form="ms",
    about="95th percentile of the time of an optimizer step",
    phrase="step time, p95",
)
STEP_TIME_CV = Figure[float](
    "step_time_cv", form="figure", about="standard deviation of the step time divided by its mean"
)
MODEL_TFLOPS = Figure[float](
    "model_tflops",
    "TFLOP/s",
    "a worker",
    form="figure",
    about="TFLOP/s per worker, excluding recomputation",
    csv="model_tflop_per_s_per_worker",
    # As Megatron-LM logs it.
    aliases=("throughput per GPU (TFLOP/s/GPU)",),
)
MFU = Figure[float]("mfu", "MFU", form="share", about="model FLOPs utilization", aliases=("model_flops_utilization",))
HARDWARE_TFLOPS = Figure[float](
    "hardware_tflops",
    "hardware",
    "TFLOP/s",
    form="figure",
    about="TFLOP/s per worker, including recomputation",
    csv="hardware_tflop_per_s_per_worker",
)
HFU = Figure[float]("hfu", "HFU", form="share", about="hardware FLOPs utilization")


def utilisation(flops: Flops, tgs: float, peak_tflops: float | None, denominator: str) -> Utilisation:
    """TFLOP/s per GPU at a speed, and the share of the peak.

    Args:
        flops: of one token.
        tgs: tokens per second and GPU, without padding: computing for padding counts as lost.
        peak_tflops: of the GPU, or the mean of several (`mean_peak`); None if unknown.
        denominator: the peak in words, or why there is none.
    """
    model, hardware = (tgs * each / _TERA for each in (flops.model, flops.hardware))
    return Utilisation(
        model_tflops=model,
        hardware_tflops=hardware,
        mfu=model / peak_tflops if peak_tflops else None,
        hfu=hardware / peak_tflops if peak_tflops else None,
        denominator=denominator,
        rule=flops.rule,
    )


def utilisation_of(
    work: ModelWork, observed: Observed, speed: Throughput, benched: Collection[BenchedPeak] = ()
) -> Utilisation:
    """TFLOP/s, MFU and HFU.

    Tokens without padding count if known, as computation of padding is wasted.

    Args:
        work: computation according to the job's files.
        observed: the run.
        speed: its throughput.
        benched: what benches measured, for GPUs whose peak is unknown.

    Raises:
        UnknownError: why there are none.
    """
    shape = work.shape
    token_work = _told_work(work, observed) if isinstance(shape, Unknown) else None
    tgs = or_none(speed.effective_tgs) or value_of(speed.tgs)
    length = or_none(speed.attention_length) or _mean_length(speed)
    if tgs is None or length is None:
        raise UnknownError("the training does not report its tokens per step")
    # With the peaks of all GPUs: a run whose tokens are unknown imports none of it.
    from multinode.model.flops import flops_of_weights, flops_per_token

    if not isinstance(shape, Unknown):
        adapter, recompute = work.adapter_parameters, work.recompute
        flops = flops_per_token(shape, length, adapter_parameters=adapter, recompute=recompute, causal=False)
    elif token_work is not None:
        flops = flops_of_weights(token_work, length)
    used = utilisation(flops, tgs, *_peak(work, observed, benched))
    notes = [used.rule, _padding_words(speed)]
    sharing = observed.world_size - _distinct_gpus(observed)
    if sharing:
        count = format_count(observed.world_size - sharing, "GPU")
        notes.append(f"{observed.world_size} workers share {count}, which counts once")
    if isinstance(speed.attention_length, Unknown):
        bound = "an upper bound (packed samples)" if work.packing else "a lower bound (from the mean length)"
        notes.append(f"attention is {bound}")
    return msgspec.structs.replace(used, rule="; ".join(notes))


def _padding_words(speed: Throughput) -> str:
    return "padding counted as tokens" if isinstance(speed.effective_tgs, Unknown) else "tokens without padding"


def _distinct_gpus(observed: Observed) -> int:
    """How many GPUs the workers use: several may share one. Workers that do not tell theirs count as one each."""
    told = [model.device_uuid for model in last_models(observed).values() if model.device_uuid is not None]
    return len(set(told)) + observed.world_size - len(told)


def _told_work(work: ModelWork, observed: Observed) -> TokenWork:
    """What the workers say of the model, if that is the same of all."""
    works = {model.token_work for model in last_models(observed).values()} if work.by_workers else set()
    if len(works) > 1:
        raise UnknownError("the workers hold different parts of the model")
    told = next(iter(works), None) or work.counted
    if told is None:
        raise UnknownError(reason_of(work.shape))
    return known(told)


def _mean_length(speed: Throughput) -> float | None:
    length, effective, padded = or_none(speed.tokens_per_sample), or_none(speed.effective_tgs), value_of(speed.tgs)
    return length if length is None or effective is None or not padded else length * effective / padded


def _peak(work: ModelWork, observed: Observed, benched: Collection[BenchedPeak]) -> tuple[float | None, str]:
    models = last_models(observed).values()
    names = [model.device_name for model in models if model.device == "cuda" and model.device_name]
    if len(names) < observed.world_size or not names:
        return None, "not every worker reported its GPU" if names else "no worker uses a GPU"
    dtypes = {work.precision or _precision(model) for model in models}
    dtype = dtypes.pop()
    if dtype is None or dtypes:
        return None, "the precision of the matrix products is unknown"
    from multinode.model.flops import mean_peak

    return mean_peak(names, dtype, benched)


def _precision(model: ModelSample) -> str | None:
    if model.mixed_precision is not None:
        return model.mixed_precision
    most = max((name for name in model.dtypes if name in _PRECISIONS), key=model.dtypes.__getitem__, default="")
    gathered = model.settings.get("param_dtype")
    precision = _PRECISIONS.get(gathered if isinstance(gathered, str) else most)
    return precision if precision != "fp32" else {True: "tf32", False: "fp32", None: None}[model.tf32]
