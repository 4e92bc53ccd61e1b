"""The peak memory of published trainings, estimated from their settings: how far off, by halves of memory_peaks.json.

The rows were split by the hash of their content before any of them was estimated: one half to fit the constants of
`multinode/model/memory.py`, the other put aside until these were fixed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

from multinode.job.deepspeed import DeepSpeedConfig
from multinode.model.memory import (
    NF4_BITS,
    DecoderWidths,
    MicroBatch,
    PeakMemory,
    StatePlacement,
    WorkerMemory,
    decoder_widths,
)
from multinode.model.model_size import lora_parameters, parse_model
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from multinode.units import GIB

PEAKS = Path(__file__).with_name("memory_peaks.json")
_BITS = {"nf4-dq": NF4_BITS, "nf4": 4.5, "int4": 4.16, "bf16": 16, "fp16": 16}
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_CLOSE = 0.15
# What torch can have of each.
_GPU_GIB = {"A100 80GB": 79.2, "A800 80GB": 79.2, "A100 40GB": 39.4, "RTX 3090 24GB": 23.7, "T4": 14.6}
_MISSING = 1.1


def published_gib(row: Mapping[str, Any], source: Mapping[str, Any]) -> float:
    """A published peak in GiB."""
    return float(row["peak"]) * (1e9 / GIB if source["unit"] == "GB" else 1.0)


def estimate(row: Mapping[str, Any], model: Mapping[str, Any], source: Mapping[str, Any]) -> PeakMemory:
    """The estimate from a row's settings and its source's code."""
    shape, widths = parse_model(model), decoder_widths(model)
    assert shape is not None
    assert widths is not None
    whole = row["method"] == "full"
    trained = shape.parameters if whole else lora_parameters(shape, row["rank"], row["targets"]) or 0
    ends = len(row.get("whole", ())) * widths.vocabulary * widths.hidden
    strategy, deepspeed = (
        Strategy.of_option(row["strategy"].lower().replace("-", "")),
        row["strategy"].startswith("ZeRO"),
    )
    load = TrafficInputs(
        # What PEFT trains whole it copies.
        parameters=shape.parameters + (0 if whole else trained + ends),
        trainable=trained + ends,
        parameter_bytes=2,
        gradient_bytes=2,
    )
    upcast = row.get("upcast") is True and not deepspeed
    quantised = row["method"] == "qlora"
    placement = StatePlacement(
        half=True,
        frozen_bits=_BITS[row["weights"]] if quantised else None,
        whole_layer=row["weights"] == "int4",
        whole_frozen=widths.outside // (2 if source.get("quantizes_head") is True else 1) if quantised else 0,
        whole_bits=32 if upcast else None,
        trained_bytes=_BYTES[row["trained"]],
        optimizer_elsewhere=row.get("optimizer_elsewhere") is True,
        parameters_elsewhere=row.get("parameters_elsewhere") is True,
    )
    batch = MicroBatch(
        samples=row["batch"],
        tokens=row["length"],
        recompute=row["checkpointing"],
        eager=row["attention"] == "eager",
        # litgpt's query, key and value matrices are one, with one adapter.
        adapted=None if whole else ("q_proj",) if row["source"] == "litgpt" else tuple(row["targets"]),
        dropout=source.get("dropout") is True,
        autocast=row.get("autocast", True) and not deepspeed,
        upcast=upcast,
        varied=row["lengths"] == "varied",
        fused_loss=row["source"] == "litgpt",
        half_logits=row.get("half_logits") is True,
        holds_outputs=source.get("holds_outputs") is True,
        keeps_inputs=quantised and _keeps_inputs(source.get("bitsandbytes")),
    )
    json_of_zero2 = source.get("zero2") if strategy is Strategy.ZERO2 else None
    deepspeed_json = None if json_of_zero2 is None else DeepSpeedConfig(stage=2, **json_of_zero2)
    layout = Layout(nodes=1, workers_per_node=row["workers"])
    found = WorkerMemory(
        strategy=strategy,
        load=load,
        layout=layout,
        placement=placement,
        widths=widths,
        batch=batch,
        deepspeed=deepspeed_json,
    ).peak()
    assert found is not None
    return found


def _keeps_inputs(bitsandbytes: str | None) -> bool:
    return bitsandbytes is not None and tuple(map(int, bitsandbytes.split("."))) < (0, 43, 2)


def quantity(row: Mapping[str, Any], peak: PeakMemory, source: Mapping[str, Any]) -> float:
    """What of the estimate the row gives."""
    named = {"allocated": peak.allocated_gib, "reserved": peak.reserved_gib}
    if "context_gib" in source:
        named["device"] = peak.reserved_gib + source["context_gib"]
    # A GPU does not show more than it has: its allocator then frees what it does not use.
    return min(named.get(row["quantity"], peak.shown.value), _GPU_GIB[row["gpu"]])


def deepspeed_gib(row: Mapping[str, Any], widths: DecoderWidths, parameters: int) -> float | None:
    """What DeepSpeed's own estimators say, of stages 2 and 3: the states, every parameter trained."""
    offload = row.get("optimizer_elsewhere") is True
    if row["strategy"] == "ZeRO-2":
        return float(zero2(parameters, row["workers"], 1, offload)[1]) / GIB
    if row["strategy"] != "ZeRO-3":
        return None
    largest = max((parameters - widths.outside) // widths.layers, widths.vocabulary * widths.hidden)
    both = row.get("parameters_elsewhere") is True
    return float(zero3(parameters, largest, row["workers"], 1, offload, both)[1]) / GIB


def main() -> None:
    """Print the rows of a half and how they came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("fit", "aside"), default="fit", help="which half of the rows")
    parser.add_argument("--rows", action="store_true", help="print every row")
    asked = parser.parse_args()
    data = json.loads(PEAKS.read_text())
    models, rows = data["models"], [row for row in data["peaks"] if row["half"] == asked.half]
    ratios, within, missing, inside = [], 0, 0, 0
    theirs = []
    for row in sorted(rows, key=lambda row: (row["source"], row["model"], row["method"], row["length"])):
        source = data["sources"][row["source"]]
        peak = estimate(row, models[row["model"]], source)
        mine, published = quantity(row, peak, source), published_gib(row, source)
        spread = peak.shown
        high, low = mine * spread.high / spread.value, mine * spread.low / spread.value
        ratios.append(mine / published)
        within += abs(mine / published - 1) <= _CLOSE
        missing += high < published / _MISSING
        inside += low <= published <= high
        shape, widths = parse_model(models[row["model"]]), decoder_widths(models[row["model"]])
        other = deepspeed_gib(row, widths, shape.parameters) if shape is not None and widths is not None else None
        if other is not None:
            theirs.append((row["method"], other / published, mine / published))
        if asked.rows:
            print(
                f"{row['source']:11}{row['model'][:22]:23}{row['method']:6}{row['strategy']:7}{row['batch']:3}"
                f"{row['length']:6} {row['attention']:6}{row['quantity'][:5]:6}{row['lengths'][:3]:4}"
                f"{'ckpt' if row['checkpointing'] else '-':5}{published:7.2f}{mine:7.2f} {mine / published:5.2f}"
            )
    off = sorted(abs(math.log(ratio)) for ratio in ratios)
    median, most = (math.expm1(off[len(off) * of_ten // 10]) for of_ten in (5, 9))
    print(
        f"{len(rows)} rows: {within} within 15%, {inside} in their interval, {missing} called fitting with 10% missing"
    )
    print(f"median error {median:.1%}, 90th percentile {most:.1%}")
    for methods in (("full",), ("lora", "qlora")):
        both = [(other, own) for method, other, own in theirs if method in methods]
        if both:
            near, own = (sum(abs(pair[place] - 1) <= _CLOSE for pair in both) for place in (0, 1))
            others = [other for other, _ in both]
            print(
                f"{len(both)} rows of {' and '.join(methods)} with ZeRO-2 or 3: DeepSpeed's {near} within 15%"
                f" ({min(others):.2f} to {max(others):.2f} times the published), ours {own}"
            )


if __name__ == "__main__":
    main()
