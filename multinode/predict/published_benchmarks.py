"""Evidence from published figures. Pure.

Missing figures are not invented: a figure that predictions need is an error.
"""

from __future__ import annotations

import msgspec

from multinode.errors import UsageError
from multinode.job.model_size import ModelShape, lora_parameters, parse_model
from multinode.job.step_calls import Work, hideable_share
from multinode.job.workload import JobSettings
from multinode.predict.calibration import Calibration, Measured, calibrate
from multinode.predict.cost_model import Scenario
from multinode.predict.evidence import Evidence, HoldoutRun
from multinode.predict.network_model import Link, stated_network
from multinode.predict.published import Model, Network, PublishedBenchmarks, Speed
from multinode.predict.variants import Subject
from multinode.profile.step_split import StepSplit
from multinode.profile.summary import Summary
from multinode.stats.estimate import Spread
from multinode.traffic.algorithms import Layout
from multinode.traffic.traffic import Strategy, TrafficInputs
from multinode.units import MIB, format_rate, goodput_gb_per_s

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


def _measured(benchmarks: PublishedBenchmarks, speed: Speed, where: str) -> Measured:
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
    return Measured(summary=summary, layout=layout)


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
