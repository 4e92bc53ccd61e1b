"""PublishedBenchmarks: the file of a training's published figures, and the Evidence that it gives."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.model.flops import flops_per_token
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.model.workload import JobSettings
from multinode.predict.calibration import MOST_FIXED, Calibration, CalibrationRun, calibrate
from multinode.predict.cost_model import Scenario
from multinode.predict.evidence import Evidence, HoldoutRun
from multinode.predict.network_model import DoubtRules, Link, stated_network
from multinode.predict.prediction import LEAST_DOUBT, with_base
from multinode.predict.published import PublishedLink, parse_link, parse_published
from multinode.predict.rounded import product, round_number
from multinode.predict.variants import Subject
from multinode.profile.step_split import StepSplit
from multinode.profile.summary import StepTimes
from multinode.profile.throughput import Throughput
from multinode.stats.estimate import Estimate, exactly
from multinode.stats.unknown import UNMEASURED, Unknown
from multinode.strict_yaml import WrongValue
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work
from multinode.units import ETHERNET_MTU, MIB, format_figure, format_rate, goodput_gb_per_s

# Larger figures are typing errors; products stay far from float limits.
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_Count = Annotated[int, Meta(gt=0, le=1 << 20)]
# The options of `predict` have this limit, too.
_Fleet = Annotated[int, Meta(gt=0, le=1024)]
_Parameters = Annotated[int, Meta(gt=0, le=10**14)]
# A whole number, a fraction, or text such as `119.6 +- 0.3` or `about 900`: its digits are its bounds.
_Figure = Annotated[int, Meta(gt=0, le=10**12)] | _Positive | Annotated[str, Meta(min_length=1, max_length=60)]
# One NIC's rate, or as many: `100G`, `8x400G`, `200G InfiniBand`.
_RateText = Annotated[str, Meta(min_length=1, max_length=40)]


DOUBTS = DoubtRules("Uncertainty of a prediction: published figures")
_FEW_DIGITS = DOUBTS.doubt(
    "few-digits",
    "compute",
    about="a rounded published figure",
    message="the published figure of {where} is rounded and may be off by {relative:.0%}",
)

MISSING = RuleGroup("Assumptions of a prediction: published figures")
_START_UP = MISSING.rule(
    "start-up",
    about="a mean over all steps, including start-up",
    message="the mean over {steps} steps includes start-up. To narrow the intervals, add a figure that excludes the "
    "first steps, or a second figure with a different number of gradient accumulation steps",
    figures=("steps",),
)
_RATE_ALONE = MISSING.rule(
    "link-rate-alone",
    about="a network for which only the link rate is known",
    message="no collective was measured; only the link rate of the network is known",
)
_STREAM_ALONE = MISSING.rule(
    "stream-alone",
    about="a network for which only the rate of a stream is known",
    message="no collective was measured; only the rate of one stream is known ({rate})",
    figures=("stream_gbit_per_s",),
)


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter: its rank and target modules; `all` means every linear module."""

    rank: _Count
    targets: tuple[str, ...] = ("all",)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trained model: its shape, or its number of parameters."""

    name: str = "the model"  # for people
    shape: dict[str, Any] | None = None  # its config.json, or the part that decides its size
    parameters: _Parameters | None = None  # in total; needed without a shape for strategies that gather them
    trainable: _Parameters | None = None  # of them, without a shape
    active: _Parameters | None = None  # of a mixture of experts, those that a token passes; for `tflops_per_gpu`
    lora: Lora | None = None  # the adapter, with a shape


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link of a node: its rate, the measured one-way payload of a stream, or both."""

    gbit_per_s: _Positive | _RateText | None = None  # of all its NICs together, such as 100, `100G`, `8x400G`
    nics: Annotated[int, Meta(gt=0, le=64)] | None = None  # that the rate is of
    payload_mb_per_s: _Positive | None = None  # as from a file copy; or `payload_gbit_per_s`, as from iperf3
    payload_gbit_per_s: _Positive | None = None
    mtu: Annotated[int, Meta(ge=576, le=65536)] = ETHERNET_MTU
    rdma: bool = False  # whether collectives use RDMA, unless `gbit_per_s` names InfiniBand or RoCE
    cloud: bool | None = None  # whether the nodes are rented from a cloud, which may cap a TCP flow; None if unknown

    def __post_init__(self) -> None:
        """Refuse a rate that cannot be read."""
        try:
            stated = self.stated
        except ValueError as error:
            raise WrongValue(str(error), "gbit_per_s") from None
        if self.gbit_per_s is not None and stated.gbit_per_s is None:
            raise WrongValue(f"{self.gbit_per_s!r} is not a link rate; write it as 10GbE, 100G or 8x400G", "gbit_per_s")
        if self.nics is not None and stated.nics != self.nics:
            raise WrongValue(f"gbit_per_s names {stated.nics} NICs, but nics names {self.nics}", "nics")

    @property
    def stated(self) -> PublishedLink:
        """The rate of all NICs, their number, and whether collectives use RDMA."""
        text = self.gbit_per_s
        if not isinstance(text, str):
            return PublishedLink(gbit_per_s=text, nics=self.nics, rdma=self.rdma)
        link = parse_link(text, bare_gbit=1.0)
        return msgspec.structs.replace(link, nics=link.nics or self.nics, rdma=self.rdma or link.rdma is True)


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of some workers: exactly one of the figures in SPEEDS."""

    nodes: _Fleet = 1
    workers_per_node: _Fleet | None = None  # if equal on all nodes; otherwise `workers`, one number per node
    workers: tuple[_Fleet, ...] = ()
    # if it differs from that of the file; also `accumulation` and `global_batch`
    per_device_batch: _Positive | None = None
    accumulation: _Count | None = None
    global_batch: _Positive | None = None
    network: Network | None = None  # between its nodes, if it differs from that of the file
    steps: _Count | None = None  # that the figure is the mean of, if start-up is among them
    step_time_ms: _Figure | None = None  # of an optimizer step; or `step_time_s`
    step_time_s: _Figure | None = None
    # of all workers; also `tokens_per_s`, for `tokens_per_sample` of the file
    samples_per_s: _Figure | None = None
    tokens_per_s: _Figure | None = None
    tgs: _Figure | None = None  # tokens per GPU and second
    tflops_per_gpu: _Figure | None = None  # of the model, without recomputation
    runtime_s: _Figure | None = None  # of the whole training, for `samples` of the file

    def __post_init__(self) -> None:
        """Refuse a figure that cannot be read."""
        for name in SPEEDS:
            value = getattr(self, name)
            try:
                _ = value if value is None else _rounded(value)
            except ValueError as error:
                raise WrongValue(str(error), name) from None


SPEEDS = ("step_time_ms", "step_time_s", "samples_per_s", "tokens_per_s", "tgs", "tflops_per_gpu", "runtime_s")
"""The figures that a speed can have."""


class PublishedBenchmarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of published figures."""

    title: str = "published figures"  # for people
    model: Model
    strategy: str  # `ddp`, `zero1` to `zero3`, `fsdp`, `shard_grad_op`, `hybrid_shard`, or as an engine spells it
    # for zero1, whether its states are sharded inside each node only, as in InternLM and others, with the updated
    # parameters gathered inside nodes. None if unknown.
    optimizer_within_node: bool | None = None
    precision: str = "bf16"  # `bf16`, `fp16` or `fp32`
    # per element on the wire; otherwise 4 with DDP, and by precision with the others
    gradient_bytes: Annotated[int, Meta(ge=2, le=4, multiple_of=2)] | None = None
    activation_checkpointing: bool = False  # whether activations are recomputed in the backward pass
    # samples per micro-batch of a worker; two of this, `accumulation` and `global_batch` give the third
    per_device_batch: _Positive | None = None
    accumulation: _Count | None = None  # micro-batches per step; 1 if the others do not give it
    global_batch: _Positive | None = None  # samples per step of all workers
    overlap: bool = True  # whether gradient reduction overlaps with the backward pass
    # maximum size of a reduction: 25 is torch's default. Without it, the traffic after the last gradient is unknown.
    bucket_mib: _Positive | None = None
    tokens_per_sample: _Positive | None = None  # padded
    samples: _Positive | None = None  # of the whole training, all epochs; for `runtime_s`
    network: Network  # between the nodes
    backend: str = "nccl"  # or `gloo`
    single_node: Speed | tuple[Speed, ...] = ()  # one, or several of the same workers with other batches
    base: Speed | None = None  # instead of `single_node`, a speed of several nodes to start from
    several_nodes: Speed | None = None  # speed of several nodes, to test the model, which does not use it

    def __post_init__(self) -> None:
        """Refuse words that have no meaning here."""
        for name, parse in (("strategy", parse_strategy), ("precision", parse_precision)):
            try:
                parse(getattr(self, name))
            except ValueError as error:
                raise WrongValue(str(error), name) from None
        if self.backend not in _BACKENDS:
            raise WrongValue(f"invalid backend {self.backend!r}: use one of {', '.join(_BACKENDS)}", "backend")


_PRECISIONS = ("bf16", "fp16", "fp32")
_BACKENDS = ("nccl", "gloo")
_MS_PER_S, _MB_PER_GB, _BITS_PER_BYTE = 1e3, 1e3, 8
# Rounding allowance of a stream over its link rate.
_ABOVE_ITS_RATE = 1.05
_HALF_BYTES, _FP32_BYTES = 2, 4
_ENGINE_WORDS = re.compile(r"deepspeed|stage|[^a-z0-9]")


def _bare(strategy: str) -> str:
    return _ENGINE_WORDS.sub("", strategy.lower())


# Without case and signs: DeepSpeed's stages, PyTorch's ShardingStrategy, and FSDP's versions.
_STRATEGIES = {_bare(strategy.option): strategy for strategy in Strategy} | {
    **{_bare(strategy): strategy for strategy in Strategy},
    "zero0": Strategy.DDP,
    "noshard": Strategy.DDP,
    "fullshard": Strategy.FSDP,
    "fsdp1": Strategy.FSDP,
    "fsdp2": Strategy.FSDP,
    "hsdp": Strategy.HYBRID_SHARD,
}
# A mean over n steps and start-up has start-up for as long as this many steps at the most: people drop 5 to 10.
_START_UP_STEPS = 10


def parse_strategy(text: str) -> Strategy:
    """A strategy in the words of PyTorch or DeepSpeed: `DDP`, `ZeRO-3`, `FULL_SHARD`.

    Raises:
        ValueError: it is unknown; the message has the known ones.
    """
    strategy = _STRATEGIES.get(_bare(text))
    if strategy is None:
        raise ValueError(f"invalid strategy {text!r}: use one of {', '.join(strategy.option for strategy in Strategy)}")
    return strategy


def parse_precision(text: str) -> str:
    """`bf16`, `fp16` or `fp32`, also of `BF16` and `bfloat16`.

    Raises:
        ValueError: it is none of them.
    """
    precision = text.lower().replace("bfloat", "bf").replace("float", "fp")
    if precision not in _PRECISIONS:
        raise ValueError(f"invalid precision {text!r}: use one of {', '.join(_PRECISIONS)}")
    return precision


class _PublishedPoint(NamedTuple):
    """A speed of the file with what the file says beside it."""

    where: str  # its key
    layout: Layout
    per_device_batch: float
    accumulation: int
    rate: Estimate  # samples/s of all workers

    @property
    def samples(self) -> float:
        """Per step of all workers."""
        return self.layout.workers * self.per_device_batch * self.accumulation

    @property
    def step_ms(self) -> float:
        """Of an optimizer step."""
        return self.samples / self.rate.value * _MS_PER_S


def evidence_of_benchmarks(benchmarks: PublishedBenchmarks, stream: float | None = None) -> Evidence:
    """The inputs of predictions.

    Args:
        benchmarks: the figures.
        stream: measured TCP rate between the nodes in Gbit/s, replacing that of the file.

    Raises:
        UsageError: figures contradict each other, or a needed one is missing; the message names it.
    """
    if stream is not None:
        link = msgspec.structs.replace(benchmarks.network, payload_gbit_per_s=stream, payload_mb_per_s=None)
        benchmarks = msgspec.structs.replace(benchmarks, network=link)
    known, base = _known_points(benchmarks)
    first, several = known[0], benchmarks.several_nodes
    held = None if several is None else _point(benchmarks, several, "several_nodes")
    if held is not None and held.layout.nodes == 1:
        raise UsageError("several_nodes.nodes must be more than 1", hint="put figures of one node under single_node")
    layout = held.layout if held is not None else first.layout.on(max(2, first.layout.nodes))
    strategy = parse_strategy(benchmarks.strategy)
    if benchmarks.optimizer_within_node and strategy is not Strategy.ZERO1:
        raise UsageError(f"optimizer_within_node applies to zero1, not to {benchmarks.strategy}")
    stated = several.network if several is not None and several.network is not None else benchmarks.network
    network = msgspec.structs.replace(
        stated_network(_link(stated), layout, benchmarks.backend, _stream(stated)),
        nics=stated.stated.nics,
        cloud=stated.cloud,
    )
    bucket = None if benchmarks.bucket_mib is None else benchmarks.bucket_mib * MIB
    work = Work(strategy=strategy, load=_load(benchmarks, strategy), bucket_bytes=bucket)
    subject = _subject(benchmarks, strategy)
    calibration = calibrate(_run(benchmarks, first), work, network, share=subject.hideable_share(strategy))
    calibration = _with_points(calibration, known, base)
    today = Scenario(
        link=network.link,
        layout=layout,
        per_device_batch=(held or first).per_device_batch,
        accumulation=(held or first).accumulation,
        strategy=strategy,
        overlap=benchmarks.overlap,
    )
    if first.layout.nodes > 1:
        at = msgspec.structs.replace(
            today,
            link=network.link if base.network is None else _link(base.network),
            layout=first.layout,
            per_device_batch=first.per_device_batch,
            accumulation=first.accumulation,
        )
        calibration = with_base(calibration, at, first.step_ms)
    return Evidence(
        calibration=msgspec.structs.replace(calibration, matrices=subject.matrices()),
        today=today,
        subject=subject,
        holdouts=() if held is None else (_held(calibration, today, held.rate),),
        sources=(f"published figures: {benchmarks.title}",),
        notes=(
            *calibration.notes,
            *_start_up_notes(base),
            _known(stated),
        ),
    )


def _known_points(benchmarks: PublishedBenchmarks) -> tuple[list[_PublishedPoint], Speed]:
    """The points that predictions start from, and the first one's speed."""
    single = benchmarks.single_node
    if (benchmarks.base is None) == (not single):
        raise UsageError(
            "needs either single_node or base", hint="single_node for one node, base for several nodes to start from"
        )
    if benchmarks.base is not None:
        point = _point(benchmarks, benchmarks.base, "base")
        return [point], benchmarks.base
    speeds = (single,) if isinstance(single, Speed) else single
    many = len(speeds) > 1
    points = [
        _point(benchmarks, speed, f"single_node[{number}]" if many else "single_node")
        for number, speed in enumerate(speeds)
    ]
    for point in points:
        if point.layout.nodes != 1:
            hint = "put figures of several nodes under several_nodes, or under base to start from them"
            raise UsageError("single_node.nodes must be 1", hint=hint)
        if point.layout != points[0].layout:
            raise UsageError(
                f"{point.where}: its workers differ from those of the first figure",
                hint="give figures for the same workers",
            )
    return points, speeds[0]


def _with_points(calibration: Calibration, points: Sequence[_PublishedPoint], base: Speed) -> Calibration:
    """The calibration with what more than one figure of the same workers, or its rounding, tells."""
    first, costs = points[0], calibration.costs
    fixed_ms = _fixed_ms(points)
    if fixed_ms is not None:
        share = fixed_ms / first.step_ms
        costs = msgspec.structs.replace(costs.with_fixed(share, first.accumulation), most_fixed=0.0)
    elif base.steps is not None:
        started = _START_UP_STEPS / (_START_UP_STEPS + base.steps)
        costs = msgspec.structs.replace(costs, most_fixed=1 - (1 - MOST_FIXED) * (1 - started))
    rate, doubts = first.rate, calibration.doubts
    off = max(rate.high / rate.value, rate.value / rate.low) - 1
    if off > LEAST_DOUBT:
        doubts = (*doubts, _FEW_DIGITS.found(None, relative=off, where=first.where))
    return msgspec.structs.replace(calibration, costs=costs, doubts=doubts)


def _fixed_ms(points: Sequence[_PublishedPoint]) -> float | None:
    """Time per step that does not grow with its samples, from points with others; None if one alone is known.

    The line of least squares through the step times over the samples.
    """
    samples = [point.samples for point in points]
    mean = math.fsum(samples) / len(samples)
    spread = math.fsum((count - mean) ** 2 for count in samples)
    if not spread:
        return None
    times_ms = [point.step_ms for point in points]
    slope = math.fsum((count - mean) * time_ms for count, time_ms in zip(samples, times_ms, strict=True)) / spread
    if slope <= 0:
        raise UsageError(
            "single_node: steps with more samples did not take longer", hint="check per_device_batch and accumulation"
        )
    # Rounding and caches may put the line below zero; no step has less than nothing.
    fixed_ms = min(math.fsum(times_ms) / len(times_ms) - slope * mean, *times_ms)
    return max(0.0, fixed_ms)


def _start_up_notes(base: Speed) -> tuple[Finding, ...]:
    return () if base.steps is None else (_START_UP.found(None, steps=base.steps),)


def _subject(benchmarks: PublishedBenchmarks, strategy: Strategy) -> Subject:
    lora = benchmarks.model.lora
    return Subject(
        settings=JobSettings(
            model=benchmarks.model.name,
            method="full" if lora is None else "lora",
            lora_rank=None if lora is None else lora.rank,
            strategy=str(strategy),
            precision=parse_precision(benchmarks.precision),
            recompute=benchmarks.activation_checkpointing,
        ),
        shape=_shape(benchmarks.model),
        targets=("all",) if lora is None else lora.targets,
    )


def _point(benchmarks: PublishedBenchmarks, speed: Speed, where: str) -> _PublishedPoint:
    layout = _layout(speed, where)
    batch, accumulation = _batches(benchmarks, speed, layout.workers, where)
    samples = layout.workers * batch * accumulation
    return _PublishedPoint(
        where=where,
        layout=layout,
        per_device_batch=batch,
        accumulation=accumulation,
        rate=_samples_per_s(benchmarks, speed, samples, where),
    )


def _layout(speed: Speed, where: str) -> Layout:
    if (speed.workers_per_node is None) == (not speed.workers):
        raise UsageError(
            f"{where}: needs either workers_per_node or workers",
            hint="give workers_per_node: 8, or one number per node: workers: [4, 2]",
        )
    if speed.workers_per_node is not None:
        return Layout(nodes=speed.nodes, workers_per_node=speed.workers_per_node)
    count = len(speed.workers)
    if speed.nodes not in {1, count}:
        raise UsageError(f"{where}.workers: {count} numbers for {speed.nodes} nodes", hint="give one number per node")
    return Layout.of(speed.workers)


def _batches(benchmarks: PublishedBenchmarks, speed: Speed, workers: int, where: str) -> tuple[float, int]:
    """Samples of a micro-batch, and micro-batches per step; the global batch gives the one that is not told."""
    batch = speed.per_device_batch or benchmarks.per_device_batch
    total = speed.global_batch or benchmarks.global_batch
    accumulation = speed.accumulation or benchmarks.accumulation
    if total is None:
        if batch is None:
            hint = "give per_device_batch, or global_batch"
            raise UsageError(f"{where}: the number of samples per step is unknown", hint=hint)
        return batch, accumulation or 1
    if batch is None:
        accumulation = accumulation or 1
        return total / workers / accumulation, accumulation
    whole = total / (workers * batch)
    if whole != (accumulation or round(whole)) or whole < 1:
        raise UsageError(
            f"{where}: a global batch of {total:g} is not {workers} workers x {batch:g} samples"
            + (f" x {accumulation} micro-batches" if accumulation is not None else ""),
            hint="give two of per_device_batch, accumulation and global_batch",
        )
    return batch, round(whole)


def _held(calibration: Calibration, today: Scenario, rate: Estimate) -> HoldoutRun:
    layout = today.layout
    name = f"the published figure of {layout.workers} workers on {layout.nodes} nodes"
    return HoldoutRun(
        name=name,
        calibration=calibration,
        scenario=today,
        samples_per_s=rate,
    )


def _link(network: Network) -> Link:
    stream, stated = _stream(network), network.stated
    rate, rdma = stated.gbit_per_s, stated.rdma is True
    if rate is None:
        if stream is None:
            hint = "give gbit_per_s: 1, or payload_gbit_per_s: 0.94, as iperf3 reports it"
            raise UsageError("network: needs a rate or a payload", hint=hint)
        rate = stream * _BITS_PER_BYTE if rdma else stream / goodput_gb_per_s(1.0, network.mtu)
    link = Link(gbit_per_s=rate, mtu=network.mtu, rdma=rdma)
    if stream is not None and stream > link.goodput_gb_per_s * _ABOVE_ITS_RATE:
        raise UsageError(
            f"network: at {rate:g} Gbit/s with an MTU of {network.mtu}, a link carries "
            f"{format_figure(link.goodput_gb_per_s * _BITS_PER_BYTE)} Gbit/s of payload, not "
            f"{format_figure(stream * _BITS_PER_BYTE)}",
            hint=(
                "give the rate of all NICs together in gbit_per_s, payload_gbit_per_s without the rate, or the MTU of "
                "jumbo frames: mtu: 9000"
            ),
        )
    return link


def _known(network: Network) -> Finding:
    stream = _stream(network)
    if stream is None:
        return _RATE_ALONE.found(None)
    gbit_per_s = stream * _BITS_PER_BYTE
    return _STREAM_ALONE.found(None, rate=format_rate(gbit_per_s), stream_gbit_per_s=gbit_per_s)


def _stream(network: Network) -> float | None:
    if network.payload_mb_per_s is not None and network.payload_gbit_per_s is not None:
        raise UsageError("network: payload_mb_per_s and payload_gbit_per_s are the same value; give only one")
    if network.payload_gbit_per_s is not None:
        return network.payload_gbit_per_s / _BITS_PER_BYTE
    return None if network.payload_mb_per_s is None else network.payload_mb_per_s / _MB_PER_GB


def _shape(model: Model) -> ModelShape | None:
    return parse_model(model.shape) if model.shape is not None else None


def _load(benchmarks: PublishedBenchmarks, strategy: Strategy) -> TrafficInputs:
    model, half = benchmarks.model, parse_precision(benchmarks.precision) != "fp32"
    shape = _shape(model)
    if model.shape is not None and shape is None:
        raise UsageError(
            "model.shape: its parameters cannot be counted",
            hint="give model_type, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, "
            "intermediate_size and vocab_size, as in config.json; or give model.trainable",
        )
    if shape is None:
        parameters, trainable = model.parameters, model.trainable
    elif any(count is not None for count in (model.trainable, model.parameters, model.active)):
        hint = "remove parameters, trainable and active"
        raise UsageError("model: the parameters are counted from the shape", hint=hint)
    else:
        lora = model.lora
        trainable = shape.parameters if lora is None else lora_parameters(shape, lora.rank, lora.targets)
        parameters = shape.parameters + (0 if lora is None else trainable or 0)
    if trainable is None:
        hint = "give model.trainable, the number of trainable parameters; or model.shape and model.lora"
        raise UsageError("model: the number of trainable parameters is unknown", hint=hint)
    for what, count in (("trainable", trainable), ("active", model.active)):
        if parameters is not None and count is not None and parameters < count:
            raise UsageError(f"model: {what} parameters ({count:,}) cannot exceed all parameters ({parameters:,})")
    narrow = half and strategy is not Strategy.DDP
    return TrafficInputs(
        parameters=parameters,
        trainable=trainable,
        parameter_bytes=_HALF_BYTES if half else _FP32_BYTES,
        gradient_bytes=benchmarks.gradient_bytes or (_HALF_BYTES if narrow else _FP32_BYTES),
        optimizer_within_node=benchmarks.optimizer_within_node,
    )


def _run(benchmarks: PublishedBenchmarks, point: _PublishedPoint) -> CalibrationRun:
    """The point as a run on one node, whose whole step is its own work."""
    alone = point.layout.on(1)
    samples = alone.workers * point.per_device_batch * point.accumulation
    return CalibrationRun(
        name=point.where,
        speed=Throughput(
            samples_per_s=exactly(samples / point.step_ms * _MS_PER_S),
            micro_steps=float(point.accumulation),
            per_device_batch=point.per_device_batch,
            tokens_per_sample=UNMEASURED if benchmarks.tokens_per_sample is None else benchmarks.tokens_per_sample,
        ),
        step_time_ms=StepTimes(median=exactly(point.step_ms), p95=point.step_ms, cv=0.0),
        split=StepSplit(mean=Unknown("the published figures do not list it separately")),
        layout=alone,
    )


def _samples_per_s(benchmarks: PublishedBenchmarks, speed: Speed, samples: float, where: str) -> Estimate:
    given = [name for name in SPEEDS if getattr(speed, name) is not None]
    if len(given) != 1:
        raise UsageError(f"{where}: needs exactly one of {', '.join(SPEEDS)}")
    (name,) = given
    figure = _rounded(getattr(speed, name))
    if name == "samples_per_s":
        return figure
    if name in {"step_time_ms", "step_time_s"}:
        return product([exactly(samples)], [figure], _MS_PER_S if name == "step_time_ms" else 1.0)
    if name == "runtime_s":
        if benchmarks.samples is None:
            raise UsageError(f"{where}.runtime_s: the number of samples is unknown", hint="give samples: 90000")
        return product([exactly(benchmarks.samples)], [figure])
    if benchmarks.tokens_per_sample is None:
        hint = "give tokens_per_sample: 2048"
        raise UsageError(f"{where}.{name}: the number of tokens per sample is unknown", hint=hint)
    workers = 1 if name == "tokens_per_s" else _layout(speed, where).workers
    per_token = _tflops_per_token(benchmarks, where) if name == "tflops_per_gpu" else 1.0
    return product([figure, exactly(workers)], [exactly(benchmarks.tokens_per_sample), exactly(per_token)])


_TFLOP = 1e12
# Of a model whose shape is unknown, without its attention (Kaplan et al., arXiv 2001.08361).
_FLOPS_PER_PARAMETER = 6


def _tflops_per_token(benchmarks: PublishedBenchmarks, where: str) -> float:
    model, shape = benchmarks.model, _shape(benchmarks.model)
    if shape is not None:
        adapter = None if model.lora is None else lora_parameters(shape, model.lora.rank, model.lora.targets)
        return flops_per_token(shape, benchmarks.tokens_per_sample or 0.0, adapter_parameters=adapter).model / _TFLOP
    parameters = model.active or model.parameters or model.trainable
    if parameters is None:
        raise UsageError(f"{where}.tflops_per_gpu: the model's size is unknown", hint="give model.shape")
    return _FLOPS_PER_PARAMETER * parameters / _TFLOP


def _rounded(value: float | str) -> Estimate:
    """A figure of the file; its digits are its bounds."""
    if not isinstance(value, str):
        return round_number(value)
    found = parse_published(value)
    if found.unit:
        raise ValueError(f"{value!r} has a unit, but the name of its key already states it")
    return found.figure
