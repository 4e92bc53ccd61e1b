"""The link that two nodes need, by model, method and strategy, as `predict` says: docs/reference/bandwidth.md.

The speed of a node is taken from the FLOPs of a step, as if it had been published. After a change of the prediction:

    .venv/bin/python benchmarks/bandwidth_table.py >docs/reference/bandwidth.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from multinode.levers.averaging import Averaging
from multinode.levers.axes import LeverAxes
from multinode.levers.compression import Compression
from multinode.levers.levers import NONE, Levers
from multinode.model.flops import flops_per_token
from multinode.model.model_size import lora_parameters, parse_model
from multinode.predict.break_even import Needed, break_even
from multinode.predict.calibration import sent_as
from multinode.predict.cost_model import Scenario
from multinode.predict.evidence import Evidence
from multinode.predict.forecast import Forecast, ForecastRequest, PredictedScenario, make_forecast
from multinode.predict.prediction import calls_of, sent_bytes
from multinode.predict.published_benchmarks import (
    Lora,
    Model,
    Network,
    PublishedBenchmarks,
    Speed,
    evidence_of_benchmarks,
)
from multinode.predict.request import forecast_benchmarks
from multinode.traffic.algorithms import Layout
from multinode.units import format_rate

_ROOT = Path(__file__).parent.parent
_PUBLISHED = _ROOT / "configs" / "figures" / "two_boxes_lora.yaml"

# A node: what its GPUs compute is what sets the need for bandwidth.
_GPUS, _TFLOPS = 4, 66.0
_SEQUENCE_TOKENS, _SAMPLES, _ACCUMULATION = 2048, 2, 8
_LINKS = (1.0, 2.5, 10.0, 25.0, 100.0)
_RANK = 8
_TARGET = 0.9
_GB = 1e9
_Strategy = Literal["ddp", "zero2", "zero3"]
_NAMES: dict[_Strategy, str] = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3, FSDP"}


class _Size(NamedTuple):
    """What of a config.json decides the size of a Qwen2.5."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """As in config.json."""
        return {
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }


_MODELS = (
    _Size("Qwen2.5-0.5B", 896, 24, 14, 2, 4864, 151936, tied=True),
    _Size("Qwen2.5-1.5B", 1536, 28, 12, 2, 8960, 151936, tied=True),
    _Size("Qwen2.5-7B", 3584, 28, 28, 4, 18944, 152064),
    _Size("Qwen2.5-14B", 5120, 48, 40, 8, 13824, 152064),
    _Size("Qwen2.5-32B", 5120, 64, 40, 8, 27648, 152064),
    _Size("Qwen2.5-72B", 8192, 80, 64, 8, 29568, 152064),
)
_HEADER = f"""\
# How much bandwidth do I need?

<!-- Written by benchmarks/bandwidth_table.py. -->

This page shows predictions for **two nodes with {_GPUS} GPUs of {_TFLOPS:.0f} TFLOP/s each** (an RTX 4090 at 40% of its
peak). The training uses bf16, {_SAMPLES} sequences of {_SEQUENCE_TOKENS} tokens per GPU and micro-batch, and
{_ACCUMULATION} accumulation steps. For other models, nodes and batches, use `multinode predict`. To see whether a
training fits in memory, use `multinode advise`.

- *sent* is the traffic that each node's NIC sends in an optimizer step.
- Each percentage is the scaling efficiency of two nodes, followed by the range of the prediction in parentheses. At
  100%, two nodes are twice as fast as one; below 50%, they are slower than one.
- *break-even* is the link rate above which two nodes are faster than one.
- *90%* is the link rate at which two nodes reach 90% efficiency.
- *break-even* and *90%* assume TCP, which rarely carries more than 3 to 5 GB/s. `-` means that no link rate is enough
  with TCP.

[The last table](#full-fine-tuning-under-ddp-with-less-communication) shows the effect of compression and of less
frequent averaging.

GPUs that are twice as fast need twice the link rate. With DDP, twice as many accumulation steps halve the required
rate. ZeRO-2, ZeRO-3 and FSDP communicate in every micro-batch, so accumulation does not reduce the required rate.
Longer sequences and larger micro-batches reduce the required rate, because the step takes longer.

{{error}} For a comparison of predictions with measured training runs, see [benchmarks](../../benchmarks/README.md).

To predict your own training, run `multinode nccl-test`, `multinode contrast train.yaml`, and then
`multinode predict last --link 1,10,25,100`. To see why strategies differ so much, read
[the cost model](../explanation/cost-model.md).
"""


class _Lever(NamedTuple):
    """How nodes send less; nothing is DDP as it is."""

    words: str = "none"
    levers: Levers = NONE


_LEVERS = (
    _Lever(),
    _Lever("gradients in bf16", Levers(compression=Compression(kind="bf16"))),
    _Lever("PowerSGD, rank 4", Levers(compression=Compression(kind="powersgd:4"))),
    _Lever("local SGD, every 16 steps", Levers(averaging=Averaging(every=16))),
    _Lever("local SGD, every 16 steps, in bf16", Levers(averaging=Averaging(every=16, dtype="bf16"))),
    _Lever(
        "DiLoCo, every 64 steps, in bf16",
        Levers(averaging=Averaging(every=64, dtype="bf16", outer_lr=0.7, momentum=0.9)),
    ),
)
_WITH_LEVERS = frozenset({"Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-72B"})
_LEVERS_HEADER = """
## Full fine-tuning under DDP, with less communication

This table shows the effect of the options `--grad-compress` and `--average` of `multinode launch`. If nodes average
their parameters, *sent* is the mean over the steps from one averaging to the next. The efficiency compares samples/s.

All of these options except gradients in bf16 change the algorithm, so the loss may be worse
([what each one changes](../adr/0038-levers-are-judged-by-the-time-to-a-loss.md)). To measure whether an option pays
off in your training, use `multinode tune` ([how to](../how-to/train-over-slow-ethernet.md)).

"""
_RDMA_GBIT_PER_S = 100.0
_COLUMNS = (
    "model",
    "strategy",
    "sent",
    *(f"{link:g} Gbit/s" for link in _LINKS),
    f"{_RDMA_GBIT_PER_S:g} Gbit/s, RDMA",
    "break-even",
    f"{_TARGET:.0%}",
)


def main() -> None:
    """Print the page."""
    (tested,) = forecast_benchmarks(_PUBLISHED).back_test.tested
    assert tested.link_gbit_per_s is not None
    error = (
        "The inputs of these tables are coarse figures, not measured runs. With coarse figures, the cost model has "
        f"been checked against only one published training run, on {tested.nodes} nodes at "
        f"{format_rate(tested.link_gbit_per_s)}. The predicted step time was off by {abs(tested.error):.1%}. For other "
        "links, rely only on the ranges."
    )
    parts = [_HEADER.replace("{error}", error)]
    for title, rank in (("Full fine-tuning", None), (f"LoRA of rank {_RANK} on all linear modules", _RANK)):
        parts += [f"\n## {title}\n\n", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        parts += [_line(_row(model, strategy, rank)) for model in _MODELS for strategy in _NAMES]
    parts += [_LEVERS_HEADER, _line(_COLUMNS).replace("strategy", "option"), _line(["---"] * len(_COLUMNS))]
    models = [model for model in _MODELS if model.name in _WITH_LEVERS]
    parts += [_line(_row(model, "ddp", None, lever)) for model in models for lever in _LEVERS]
    print("".join(parts), end="")


def _row(model: _Size, strategy: _Strategy, rank: int | None, lever: _Lever | None = None) -> Iterator[str]:
    evidence = evidence_of_benchmarks(_benchmarks(model, strategy, rank, Network(gbit_per_s=_LINKS[0])))
    rdma = evidence_of_benchmarks(_benchmarks(model, strategy, rank, Network(gbit_per_s=_RDMA_GBIT_PER_S, rdma=True)))
    asked = lever or _Lever()
    scenario = _with_lever(evidence, asked)
    yield model.name
    yield _NAMES[strategy] if lever is None else lever.words
    yield _bytes(sent_bytes(scenario, calls_of(evidence.calibration, scenario)))
    for each, links in ((evidence, _LINKS), (rdma, (_RDMA_GBIT_PER_S,))):
        for one in _forecast(each, links, asked).scenarios:
            yield _efficiency(one)
    broken = break_even(evidence.calibration, scenario, target=_TARGET)
    yield from map(_link, (broken.beats_one, broken.efficient))


def _with_lever(evidence: Evidence, lever: _Lever) -> Scenario:
    layout = Layout(nodes=2, workers_per_node=_GPUS)
    today = msgspec.structs.replace(evidence.today, layout=layout, levers=lever.levers)
    return sent_as(evidence.calibration, today)


def _forecast(evidence: Evidence, links: tuple[float, ...], lever: _Lever) -> Forecast:
    request = ForecastRequest(
        links=links,
        nodes=(2,),
        workers_per_node=(_GPUS,),
        levers=LeverAxes.of(lever.levers),
        target=_TARGET,
    )
    return make_forecast(evidence, request)


def _benchmarks(model: _Size, strategy: _Strategy, rank: int | None, network: Network) -> PublishedBenchmarks:
    return PublishedBenchmarks(
        title=model.name,
        model=Model(name=model.name, shape=model.config, lora=None if rank is None else Lora(rank=rank)),
        strategy=strategy,
        per_device_batch=_SAMPLES,
        accumulation=_ACCUMULATION,
        tokens_per_sample=_SEQUENCE_TOKENS,
        network=network,
        single_node=Speed(workers_per_node=_GPUS, step_time_ms=_step_ms(model, rank)),
    )


def _step_ms(model: _Size, rank: int | None) -> float:
    shape = parse_model(model.config)
    if shape is None:
        raise ValueError(f"{model.name}: its shape is not known")
    adapter = None if rank is None else lora_parameters(shape, rank, ("all",))
    flops = flops_per_token(shape, _SEQUENCE_TOKENS, adapter_parameters=adapter)
    return flops.model * _SEQUENCE_TOKENS * _SAMPLES * _ACCUMULATION / (_TFLOPS * 1e12) * 1e3


def _bytes(count: float) -> str:
    value, unit = (count / 1e6, "MB") if count < _GB else (count / _GB, "GB")
    return f"{float(f'{value:.3g}'):g} {unit}"


def _efficiency(one: PredictedScenario) -> str:
    low, high = (min(1.0, rate / one.samples_per_s.value * one.efficiency) for rate in one.samples_per_s.bounds)
    return f"{min(1.0, one.efficiency):.0%} ({100 * low:.0f}-{100 * high:.0f})"


def _link(needed: Needed | None) -> str:
    if needed is None or (needed.value is None and not needed.always):
        return "-"
    if needed.always or needed.value is None:
        return "any"
    return format_rate(needed.value)


def _line(cells: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
