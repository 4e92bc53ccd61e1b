"""What a layer is counted to keep for the backward pass, and the peak of a micro-batch, against torch and Llama."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

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


def made_model(widths: DecoderWidths, placement: StatePlacement, batch: MicroBatch) -> Any:
    """A Llama as a training has it."""
    config = LlamaConfig(
        hidden_size=widths.hidden,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.keys * widths.heads // widths.queries,
        intermediate_size=widths.inner,
        vocab_size=widths.vocabulary,
        num_hidden_layers=widths.layers,
        attn_implementation="eager" if batch.eager else "sdpa",
        use_cache=False,
    )
    frozen_half = batch.adapted is not None or placement.trained_bytes is not None
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16 if placement.half and frozen_half else torch.float32)
    if batch.adapted is not None:
        model = get_peft_model(model, LoraConfig(r=1, target_modules=list(batch.adapted), lora_dropout=0.0))
        model.enable_input_require_grads()
    model.train()
    return model


def saved_bytes(layers: int, placement: StatePlacement, batch: MicroBatch) -> int:
    """Bytes that torch saves for the backward pass of a model, its parameters and their casts aside."""
    model = made_model(replace(WIDTHS, layers=layers), placement, batch)
    storages: dict[int, int] = {}
    kept = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Of as many elements as tokens: a parameter has another shape.
        if batch.tokens in tensor.shape:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.randint(0, WIDTHS.vocabulary, (batch.samples, batch.tokens))
    casts = placement.half and batch.autocast and placement.trained_bytes is None
    autocast = torch.autocast("cpu", torch.bfloat16) if casts else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), autocast:
        model(input_ids=ids, labels=ids)
    return sum(storages.values())


@pytest.mark.parametrize("case", CASES)
def test_a_layer_keeps_what_is_counted(case: str) -> None:
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
    measured = saved_bytes(2, placement, batch) - saved_bytes(1, placement, batch)
    assert counted == pytest.approx(measured, rel=0.03)


class Live(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Counts the bytes of storages that operations make, from when they are made until nothing refers to them."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # torch keeps the Python object of a storage for as long as the storage.
        self._known = {tensor.untyped_storage()._cdata for tensor in known}  # noqa: SLF001
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        if size and key not in self._known:
            self._known.add(key)
            self._now += size
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


PEAKS: dict[str, dict[str, Any]] = {
    "the loss after a forward pass": {"vocabulary": 4000},
    "the loss while the loop holds the outputs": {"vocabulary": 4000, "holds_outputs": True},
    "the loss without checkpointing": {"vocabulary": 4000, "recompute": False},
    "a layer": {"vocabulary": 64},
    "a layer with an adapter of two modules": {"vocabulary": 64, "adapted": ("q_proj", "v_proj")},
}


@pytest.mark.parametrize("case", PEAKS)
def test_the_peak_of_a_micro_batch_is_what_is_counted(case: str) -> None:
    how = {"adapted": ALL, **PEAKS[case]}
    widths = replace(WIDTHS, layers=2, vocabulary=how.pop("vocabulary"))
    placement, batch = StatePlacement(half=True), MicroBatch(samples=2, tokens=512, **how)
    load = TrafficInputs(parameters=1000, trainable=1, parameter_bytes=2, gradient_bytes=2)
    memory = WorkerMemory(
        strategy=Strategy.DDP, load=load, layout=Layout(nodes=1), placement=placement, widths=widths, batch=batch
    )
    peak = memory.peak()
    assert peak is not None
    model = made_model(widths, placement, batch)
    if batch.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, widths.vocabulary, (batch.samples, batch.tokens))
    with Live([ids, *model.parameters(), *model.buffers()]) as live:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(input_ids=ids, labels=ids)
        loss = outputs.loss
        if not batch.holds_outputs:
            del outputs
        loss.backward()
    assert peak.passing_gib * (1 << 30) == pytest.approx(live.peak, rel=0.06)
