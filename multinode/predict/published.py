"""Published figures of a training, as a file; each with separators, a unit, a spread, a range or an "about"."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.model.workload import JobSettings
from multinode.predict.calibration import Calibration, CalibrationRun, calibrate
from multinode.predict.cost_model import Scenario, hideable_share
from multinode.predict.evidence import Evidence, HoldoutRun
from multinode.predict.network_model import Link, stated_network
from multinode.predict.rounded import Rounded, parse_rounded
from multinode.predict.variants import Subject
from multinode.profile.step_split import StepSplit
from multinode.profile.summary import Summary
from multinode.stats.estimate import Spread
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work
from multinode.units import ETHERNET_MTU, MIB, format_rate, goodput_gb_per_s


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of a time such as 1d 2h, longest names first."""

    seconds: int
    names: tuple[str, ...]


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spellings of rates."""

    of_device: frozenset[str]
    each_device: tuple[str, ...]
    each_second: str
    handled: tuple[str, ...]
    words: dict[str, str]


class Titles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Words in titles next to the names of columns."""

    speed: frozenset[str]
    speed_of_device: frozenset[str]
    time: frozenset[str]
    neutral: frozenset[str]
    leading: tuple[str, ...]
    of_all: frozenset[str]
    of_device: frozenset[str]
    corners: frozenset[str]
    passed_over: frozenset[str]


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; its comments explain each key."""

    about: tuple[str, ...]
    about_behind: tuple[str, ...]
    to: tuple[str, ...]
    no_figure: frozenset[str]
    yes: tuple[str, ...]
    no: tuple[str, ...]
    out_of_memory: tuple[str, ...]
    of_gpu: tuple[str, ...]
    of_node: tuple[str, ...]
    thousands: dict[str, float]
    periods: tuple[Period, ...]
    seconds: dict[str, float]
    bytes: dict[str, float]
    things: dict[str, tuple[str, ...]]
    counted: dict[str, tuple[str, ...]]
    rates: Rates
    titles: Titles
    names: dict[str, tuple[str, ...]]
    bare: dict[str, tuple[str, ...]]


WORDS = msgspec.toml.decode(files(__package__).joinpath("published_words.toml").read_bytes(), type=Words)
"""The file's content."""


def any_of(words: Iterable[str]) -> str:
    """A pattern of any of these words, longest first, on word boundaries."""
    ordered = sorted(words, key=len, reverse=True)
    return "|".join(
        re.escape(word) + (r"(?![a-z])" if word[-1:].isascii() and word[-1:].isalpha() else "") for word in ordered
    )


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its lower-case unit, if any."""

    figure: Rounded
    unit: str = ""


_TAGS = re.compile(r"<sup>.*?</sup>|<br\s*/?>|</?\w+[^>]*>", re.IGNORECASE)
_PLUS_MINUS = "\u00b1"
_LATEX_SIGNS = {r"\pm": _PLUS_MINUS, r"\approx": "~", r"\sim": "~", r"\%": "%", r"\,": "", "{,}": ","}
_MATH = re.compile(r"\$([^$]*)\$")
_LATEX = re.compile(r"\\(?:text|math)(?:bf|rm|it|tt)?\b|\\(?:bf|rm|it|tt)\b|\\(?:underline|emph|uparrow|downarrow)\b")
# Daggers, a section sign, and arrows for the better direction.
_MARKS = re.compile(r"[*\u2020\u2021\u00a7\u2191\u2193]|\[\w\]$|\^\w$")
_QUOTED = re.compile(r"`([^`]*)`|\*\*(.*?)\*\*|__(.*?)__")


def plain_text(text: str) -> str:
    """A title or cell without Markdown, HTML and LaTeX markup and footnote marks.

    Full-width characters become ASCII; raised, circled or fraction digits stay, as they would change the number before
    them.
    """
    for sign, plain in _LATEX_SIGNS.items():
        text = text.replace(sign, plain)
    text = _MATH.sub(r"\1", text)
    text = _LATEX.sub("", _TAGS.sub(" ", html.unescape(text)))
    text = _QUOTED.sub(lambda match: next(filter(None, match.groups()), ""), text)
    text = "".join(char if unicodedata.category(char) == "No" else unicodedata.normalize("NFKC", char) for char in text)
    text = text.replace("_{", "").replace("{", "").replace("}", "").replace("\\", "")
    return _MARKS.sub("", text.strip()).strip()


_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:[ '\u2009\u202f][0-9]{3})+|[0-9]{1,40}"
_NUMBER = rf"(?:(?:{_GROUPED})(?:\.[0-9]{{0,40}})?|\.[0-9]{{1,40}})(?:[eE][-+]?[0-9]{{1,3}})?"
_THOUSANDS = f"(?:{any_of(WORDS.thousands)})"
_UNIT = r"(?:[^\W\d_]|[%/])[^0-9\u00b1~()\[\]\u2013\u2014+]*"
_TO = f"(?:{any_of(WORDS.to)})"
_FIGURE = re.compile(
    rf"(?P<about>(?:{any_of(WORDS.about)})\s*)?"
    rf"(?P<value>{_NUMBER})\s*(?P<times>{_THOUSANDS})?"
    rf"(?:\s*(?P<first>{_UNIT})?\s*\(?\s*(?:{_PLUS_MINUS}|\+/?-)\s*(?P<spread>{_NUMBER})\s*(?P<spread_times>{_THOUSANDS})?"
    rf"\s*(?P<percent>%)?\s*(?P<last>{_UNIT})?\)?"
    rf"|\s*(?P<low_unit>{_UNIT})?\s*{_TO}\s*(?P<high>{_NUMBER})\s*(?P<high_times>{_THOUSANDS})?"
    rf"|\s*[(\[]\s*(?P<least>{_NUMBER})\s*(?:{_TO}|,)\s*(?P<most>{_NUMBER})\s*[)\]])?"
    rf"\s*(?P<unit>{_UNIT})?",
    re.IGNORECASE,
)


def parse_published(text: str, *, kilo: int = 1000) -> Published:
    """A published figure, with its published bounds or those of its digits.

    Args:
        text: of a cell, plain: `1,234.5`, `3.2k tokens/s`, `119.6 +- 0.3`, `12~14`, `13 (12-14)`, `about 900`.
        kilo: the meaning of K.

    Raises:
        ValueError: it is not a positive number.
    """
    behind = next((word for word in WORDS.about_behind if text.endswith(word)), "")
    match = _FIGURE.fullmatch(text.removesuffix(behind).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    value = _number(match, "value", "times", kilo)
    if match["spread"]:
        value = _with_spread(match, value, kilo)
    elif match["high"]:
        value = _between(_number(match, "value", "times" if match["times"] else "high_times", kilo), match, kilo)
    elif match["least"]:
        low, high = (_scaled(match[name], match["times"], kilo).value for name in ("least", "most"))
        if not low <= value.value <= high:
            raise ValueError(f"{text!r} is outside its own range")
        value = Rounded(value=value.value, low=low, high=high)
    elif match["about"] or behind:
        value = _about(match, value, kilo)
    units = {unit.strip().lower() for name in ("first", "last", "low_unit", "unit") if (unit := match[name])}
    if len(units) > 1:
        raise ValueError(f"{text!r} has two units")
    return Published(figure=value, unit=units.pop() if units else "")


def _number(match: re.Match[str], name: str, times: str, kilo: int) -> Rounded:
    return _scaled(match[name], match[times], kilo)


def _scaled(text: str, times: str | None, kilo: int) -> Rounded:
    scale = WORDS.thousands[times.lower()] if times else 1
    if times and times.lower() == "k":
        scale = kilo
    digits = re.sub(r"[, '\u2009\u202f]", "", text)
    return parse_rounded(f"0{digits}" if digits.startswith(".") else digits, scale=scale)


def _with_spread(match: re.Match[str], value: Rounded, kilo: int) -> Rounded:
    spread = _scaled(match["spread"], match["spread_times"] or match["times"], kilo).value
    if match["percent"]:
        spread *= value.value / 100
    if spread >= value.value:
        raise ValueError(f"{match[0]!r} may be zero")
    return Rounded(value=value.value, low=value.value - spread, high=value.value + spread)


def _between(low: Rounded, match: re.Match[str], kilo: int) -> Rounded:
    high = _number(match, "high", "high_times", kilo)
    if not low.value <= high.value:
        raise ValueError(f"{match[0]!r} ends before it begins")
    return Rounded(value=(low.value + high.value) / 2, low=low.value, high=high.value)


def _about(match: re.Match[str], value: Rounded, kilo: int) -> Rounded:
    """One unit of the last non-zero digit in both directions: about 900 is 800 to 1000."""
    digits = Decimal(re.sub(r"[, '\u2009\u202f]", "", match["value"])).normalize()
    unit = _scaled(f"{Decimal(1).scaleb(int(digits.as_tuple().exponent)):f}", match["times"], kilo).value
    return Rounded(value=value.value, low=max(value.value - unit, value.value / 2), high=value.value + unit)


_PERIOD = re.compile(
    r"\s*,?\s*".join(
        rf"(?:(?P<p{period.seconds}>[0-9]{{1,9}}(?:\.[0-9]{{1,6}})?)\s*(?:{any_of(period.names)}))?"
        for period in WORDS.periods
    ),
    re.IGNORECASE,
)


def parse_period(text: str) -> Rounded:
    """A time in seconds, in English or Chinese: `2h05m`, `20 min 10 s`, `7.3 hours`.

    Raises:
        ValueError: it is not a time, or zero.
    """
    match = _PERIOD.fullmatch(text.strip())
    sizes = [period.seconds for period in WORDS.periods]
    parts = [(match[f"p{size}"], size) for size in sizes if match[f"p{size}"]] if match else []
    total = sum(float(number) * size for number, size in parts)
    if not total:
        raise ValueError(f"{text!r} is not a time")
    number, size = parts[-1]
    half = float(Decimal(1).scaleb(int(Decimal(number).as_tuple().exponent)) * size / 2)
    return Rounded(value=total, low=max(total - half, total / 2), high=total + half)


# Larger figures are typing errors; products stay far from float limits.
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_Count = Annotated[int, Meta(gt=0, le=1 << 20)]
# The same limit as the options of `predict`.
_Fleet = Annotated[int, Meta(gt=0, le=1024)]
_Parameters = Annotated[int, Meta(gt=0, le=10**14)]


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
    lora: Lora | None = None  # the adapter, with a shape


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link of a node: its rate, the measured one-way payload of a stream, or both."""

    gbit_per_s: _Positive | None = None  # of all its NICs together
    payload_mb_per_s: _Positive | None = None  # as from a file copy; or `payload_gbit_per_s`, as from iperf3
    payload_gbit_per_s: _Positive | None = None
    mtu: Annotated[int, Meta(ge=576, le=65536)] = ETHERNET_MTU
    rdma: bool = False


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of some workers: exactly one of step time, samples/s, tokens/s, and total runtime."""

    nodes: _Fleet = 1
    workers_per_node: _Fleet | None = None  # if equal on all nodes; otherwise `workers`, one number per node
    workers: tuple[_Fleet, ...] = ()
    per_device_batch: _Positive | None = None  # if it differs from that of the file; likewise `accumulation`
    accumulation: _Count | None = None
    step_time_ms: _Positive | None = None  # of an optimizer step
    # of all workers; likewise `tokens_per_s`, for `tokens_per_sample` of the file
    samples_per_s: _Positive | None = None
    tokens_per_s: _Positive | None = None
    tgs: _Positive | None = None  # tokens per GPU and second
    runtime_s: _Positive | None = None  # of the whole training, for `samples` of the file


class PublishedBenchmarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of published figures."""

    title: str = "published figures"  # for people
    model: Model
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "shard_grad_op", "hybrid_shard"]
    # for zero1, whether its states are sharded inside each node only, as in InternLM and others, with the updated
    # parameters gathered inside nodes. None if unknown.
    optimizer_within_node: bool | None = None
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    # per element on the wire; otherwise 4 with DDP, and by precision with the others
    gradient_bytes: Literal[2, 4] | None = None
    per_device_batch: _Positive  # samples per micro-batch of a worker
    accumulation: _Count = 1  # micro-batches per step
    overlap: bool = True  # whether gradient reduction overlaps with the backward pass
    # maximum size of a reduction: 25 is torch's default. Without it, the traffic after the last gradient is unknown.
    bucket_mib: _Positive | None = None
    tokens_per_sample: _Positive | None = None  # padded
    samples: _Positive | None = None  # of the whole training, all epochs; for `runtime_s`
    network: Network  # between the nodes
    backend: Literal["nccl", "gloo"] = "nccl"
    single_node: Speed
    several_nodes: Speed | None = None  # speed of several nodes, to test the model, which does not use it


_MS_PER_S, _MB_PER_GB, _BITS_PER_BYTE = 1e3, 1e3, 8
# Rounding allowance of a stream over its link rate.
_ABOVE_ITS_RATE = 1.05
_HALF_BYTES, _FP32_BYTES = 2, 4
_STRATEGIES = {
    "ddp": Strategy.DDP,
    "zero1": Strategy.ZERO1,
    "zero2": Strategy.ZERO2,
    "zero3": Strategy.ZERO3,
    "fsdp": Strategy.FSDP,
    "shard_grad_op": Strategy.SHARD_GRAD_OP,
    "hybrid_shard": Strategy.HYBRID_SHARD,
}


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
    alone, several = _layout(benchmarks.single_node, "single_node"), benchmarks.several_nodes
    if alone.nodes != 1:
        raise UsageError("single_node.nodes must be 1", hint="put figures of several nodes under several_nodes")
    layout = Layout(nodes=2, workers_per_node=alone.workers)
    if several is not None and (layout := _layout(several, "several_nodes")).nodes == 1:
        raise UsageError("several_nodes.nodes must be more than 1", hint="put figures of one node under single_node")
    strategy = _STRATEGIES[benchmarks.strategy]
    if benchmarks.optimizer_within_node and strategy is not Strategy.ZERO1:
        raise UsageError(f"optimizer_within_node applies to zero1, not to {benchmarks.strategy}")
    network = stated_network(_link(benchmarks.network), layout, benchmarks.backend, _stream(benchmarks.network))
    bucket = None if benchmarks.bucket_mib is None else benchmarks.bucket_mib * MIB
    work = Work(strategy=strategy, load=_load(benchmarks, strategy), bucket_bytes=bucket)
    share = hideable_share(strategy, lora=benchmarks.model.lora is not None)
    calibration = calibrate(_measured(benchmarks, benchmarks.single_node, "single_node"), work, network, share=share)
    today = Scenario(
        link=network.link,
        layout=layout,
        per_device_batch=_batch(benchmarks, several),
        accumulation=_accumulation(benchmarks, several),
        strategy=strategy,
        overlap=benchmarks.overlap,
    )
    rate = None if several is None else _measured(benchmarks, several, "several_nodes").summary.samples_per_s
    holdouts = () if rate is None else (_held(calibration, today, rate),)
    lora = benchmarks.model.lora
    subject = Subject(
        settings=JobSettings(
            model=benchmarks.model.name,
            method="full" if lora is None else "lora",
            lora_rank=None if lora is None else lora.rank,
            strategy=str(strategy),
            precision=benchmarks.precision,
        ),
        shape=_shape(benchmarks.model),
        targets=("all",) if lora is None else lora.targets,
    )
    return Evidence(
        calibration=msgspec.structs.replace(calibration, matrices=subject.matrices()),
        today=today,
        subject=subject,
        holdouts=holdouts,
        sources=(f"published figures: {benchmarks.title}",),
        notes=(*calibration.notes, f"no collective was measured: {_known(benchmarks.network)} of the network"),
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


def _batch(benchmarks: PublishedBenchmarks, speed: Speed | None) -> float:
    own = speed.per_device_batch if speed is not None else None
    return own or benchmarks.per_device_batch


def _accumulation(benchmarks: PublishedBenchmarks, speed: Speed | None) -> int:
    own = speed.accumulation if speed is not None else None
    return own or benchmarks.accumulation


def _held(calibration: Calibration, today: Scenario, rate: float) -> HoldoutRun:
    layout = today.layout
    name = f"the published figure of {layout.workers} workers on {layout.nodes} nodes"
    return HoldoutRun(name=name, calibration=calibration, scenario=today, samples_per_s=rate)


def _link(network: Network) -> Link:
    stream, rate = _stream(network), network.gbit_per_s
    if rate is None:
        if stream is None:
            hint = "give gbit_per_s: 1, or payload_gbit_per_s: 0.94, as iperf3 reports it"
            raise UsageError("network: needs a rate or a payload", hint=hint)
        rate = stream * _BITS_PER_BYTE if network.rdma else stream / goodput_gb_per_s(1.0, network.mtu)
    link = Link(gbit_per_s=rate, mtu=network.mtu, rdma=network.rdma)
    if stream is not None and stream > link.goodput_gb_per_s * _ABOVE_ITS_RATE:
        raise UsageError(
            f"network: a link of {rate:g} Gbit/s with an MTU of {network.mtu} carries "
            f"{link.goodput_gb_per_s * _BITS_PER_BYTE:.3g} Gbit/s of payload, not {stream * _BITS_PER_BYTE:.3g}",
            hint=(
                "give the rate of all NICs together in gbit_per_s, payload_gbit_per_s without the rate, or the MTU of "
                "jumbo frames: mtu: 9000"
            ),
        )
    return link


def _known(network: Network) -> str:
    stream = _stream(network)
    if stream is None:
        return "only the link rate is known"
    return f"only a stream of {format_rate(stream * _BITS_PER_BYTE)} is known"


def _stream(network: Network) -> float | None:
    if network.payload_mb_per_s is not None and network.payload_gbit_per_s is not None:
        raise UsageError("network: payload_mb_per_s and payload_gbit_per_s are the same value; give one")
    if network.payload_gbit_per_s is not None:
        return network.payload_gbit_per_s / _BITS_PER_BYTE
    return None if network.payload_mb_per_s is None else network.payload_mb_per_s / _MB_PER_GB


def _shape(model: Model) -> ModelShape | None:
    return parse_model(model.shape) if model.shape is not None else None


def _load(benchmarks: PublishedBenchmarks, strategy: Strategy) -> TrafficInputs:
    model, half = benchmarks.model, benchmarks.precision != "fp32"
    shape = _shape(model)
    if model.shape is not None and shape is None:
        raise UsageError(
            "model.shape: its parameters cannot be counted",
            hint="model_type, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, "
            "intermediate_size and vocab_size, as in config.json; or give model.trainable",
        )
    if shape is None:
        parameters, trainable = model.parameters, model.trainable
    elif model.trainable is not None or model.parameters is not None:
        raise UsageError("model: the parameters are counted from the shape", hint="remove parameters and trainable")
    else:
        lora = model.lora
        trainable = shape.parameters if lora is None else lora_parameters(shape, lora.rank, lora.targets)
        parameters = shape.parameters + (0 if lora is None else trainable or 0)
    if trainable is None:
        hint = "give model.trainable, the number of trainable parameters; or model.shape and model.lora"
        raise UsageError("model: the number of trainable parameters is unknown", hint=hint)
    if parameters is not None and parameters < trainable:
        raise UsageError(f"model: {trainable:,} trainable parameters of {parameters:,} is impossible")
    narrow = half and strategy is not Strategy.DDP
    return TrafficInputs(
        parameters=parameters,
        trainable=trainable,
        parameter_bytes=_HALF_BYTES if half else _FP32_BYTES,
        gradient_bytes=benchmarks.gradient_bytes or (_HALF_BYTES if narrow else _FP32_BYTES),
        optimizer_within_node=benchmarks.optimizer_within_node,
    )


def _measured(benchmarks: PublishedBenchmarks, speed: Speed, where: str) -> CalibrationRun:
    layout, batch = _layout(speed, where), _batch(benchmarks, speed)
    samples = layout.workers * batch * _accumulation(benchmarks, speed)
    rate = _samples_per_s(benchmarks, speed, samples, where)
    step_ms = samples / rate * _MS_PER_S
    summary = Summary(
        run_id=where,
        steps=1,
        steady_steps=1,
        rule="as published",
        step_time_ms=Spread(median=step_ms, p95=step_ms, cv=0.0),
        samples_per_s=rate,
        micro_steps=float(_accumulation(benchmarks, speed)),
        per_device_batch=batch,
        tokens_per_sample=benchmarks.tokens_per_sample,
        split=StepSplit(missing={"exposed_ms": "the data do not separate it"}),
    )
    return CalibrationRun(summary=summary, layout=layout)


def _samples_per_s(benchmarks: PublishedBenchmarks, speed: Speed, samples: float, where: str) -> float:
    ways = ("step_time_ms", "samples_per_s", "tokens_per_s", "tgs", "runtime_s")
    given: dict[str, float] = {name: figure for name in ways if (figure := getattr(speed, name)) is not None}
    if len(given) != 1:
        raise UsageError(f"{where}: needs exactly one of {', '.join(ways)}")
    ((name, figure),) = given.items()
    if name == "step_time_ms":
        return samples / figure * _MS_PER_S
    if name == "samples_per_s":
        return figure
    if name == "runtime_s":
        if benchmarks.samples is None:
            raise UsageError(f"{where}.runtime_s: the number of samples is unknown", hint="samples: 90000")
        return benchmarks.samples / figure
    if benchmarks.tokens_per_sample is None:
        raise UsageError(f"{where}.{name}: the tokens per sample are unknown", hint="tokens_per_sample: 2048")
    workers = _layout(speed, where).workers if name == "tgs" else 1
    return figure * workers / benchmarks.tokens_per_sample
