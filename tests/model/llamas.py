"""A Llama as a training job has it, and the bytes that torch keeps for its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from multinode.model.memory import DecoderWidths, MicroBatch, StatePlacement


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


def saved_bytes(widths: DecoderWidths, placement: StatePlacement, batch: MicroBatch) -> int:
    """Bytes that torch saves for the backward pass of a model, its parameters and their casts aside."""
    model = made_model(widths, placement, batch)
    storages: dict[int, int] = {}
    kept = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Of as many elements as tokens: a parameter has another shape.
        if batch.tokens in tensor.shape:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.randint(0, widths.vocabulary, (batch.samples, batch.tokens))
    casts = placement.half and batch.autocast and placement.trained_bytes is None
    autocast = torch.autocast("cpu", torch.bfloat16) if casts else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), autocast:
        model(input_ids=ids, labels=ids)
    return sum(storages.values())


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


def live_peak(widths: DecoderWidths, placement: StatePlacement, batch: MicroBatch) -> int:
    """Bytes that operations of a step have made and that something refers to, at their peak."""
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
    peak: int = live.peak
    return peak
