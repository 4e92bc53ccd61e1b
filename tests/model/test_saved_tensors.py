"""What a layer is counted to keep for the backward pass, and the peak of a micro-batch, against torch and Llama."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.model.memory import DecoderWidths, MicroBatch, StatePlacement, WorkerMemory
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs

pytestmark = [pytest.mark.torch]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDTHS = DecoderWidths(layers=1, hidden=256, queries=256, keys=128, heads=8, inner=704, vocabulary=64, tied=False)
TOKENS = 160
CASES = {
    "all weights, bf16": (StatePlacement(half=True, trained_bytes=2), MicroBatch(samples=1, tokens=TOKENS)),
    "all weights, fp32 under autocast": (StatePlacement(half=True), MicroBatch(samples=1, tokens=TOKENS)),
    "all weights, fp32": (StatePlacement(), MicroBatch(samples=1, tokens=TOKENS)),
    "LoRA under autocast": (StatePlacement(half=True), MicroBatch(samples=1, tokens=TOKENS, adapted=ALL)),
    "LoRA of two modules": (
        StatePlacement(half=True),
        MicroBatch(samples=1, tokens=TOKENS, adapted=("q_proj", "v_proj")),
    ),
    "LoRA without autocast": (
        StatePlacement(half=True),
        MicroBatch(samples=1, tokens=TOKENS, adapted=ALL, autocast=False),
    ),
    "eager attention, bf16": (
        StatePlacement(half=True, trained_bytes=2),
        MicroBatch(samples=1, tokens=TOKENS, eager=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_keeps_what_is_counted(case: str) -> None:
    from .llamas import saved_bytes

    placement, batch = CASES[case]
    batch = replace(batch, recompute=False)
    load = TrafficInputs(
        parameters=1000, trainable=1000 if batch.adapted is None else 1, parameter_bytes=2, gradient_bytes=2
    )
    memory = WorkerMemory(
        strategy=Strategy.DDP, load=load, layout=Layout(nodes=1), placement=placement, widths=WIDTHS, batch=batch
    )
    one, two = (replace(memory, widths=replace(WIDTHS, layers=layers)).peak() for layers in (1, 2))
    assert one is not None
    assert two is not None
    counted = (two.activations_gib - one.activations_gib) * (1 << 30)
    measured = saved_bytes(replace(WIDTHS, layers=2), placement, batch) - saved_bytes(WIDTHS, placement, batch)
    assert counted == pytest.approx(measured, rel=0.03)


PEAKS: dict[str, dict[str, Any]] = {
    "the loss after a forward pass": {"vocabulary": 4000},
    "the loss while the loop holds the outputs": {"vocabulary": 4000, "holds_outputs": True},
    "the loss without checkpointing": {"vocabulary": 4000, "recompute": False},
    "a layer": {"vocabulary": 64},
    "a layer with an adapter of two modules": {"vocabulary": 64, "adapted": ("q_proj", "v_proj")},
}


@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_of_a_micro_batch_is_what_is_counted(case: str) -> None:
    from .llamas import live_peak

    how = {"adapted": ALL, **PEAKS[case]}
    widths = replace(WIDTHS, layers=2, vocabulary=how.pop("vocabulary"))
    placement, batch = StatePlacement(half=True), MicroBatch(samples=2, tokens=512, **how)
    load = TrafficInputs(parameters=1000, trainable=1, parameter_bytes=2, gradient_bytes=2)
    memory = WorkerMemory(
        strategy=Strategy.DDP, load=load, layout=Layout(nodes=1), placement=placement, widths=widths, batch=batch
    )
    peak = memory.peak()
    assert peak is not None
    assert peak.passing_gib * (1 << 30) == pytest.approx(live_peak(widths, placement, batch), rel=0.06)
