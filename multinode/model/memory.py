"""The GPU memory of a worker: the states of a training, and the peak of a step with its activations. Pure.

Counts what eager PyTorch and the engines keep. What it fits, and which change makes it fit, is not judged here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.job.deepspeed import DeepSpeedConfig
from multinode.model.model_size import ModelShape
from multinode.stats.estimate import Estimate
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from multinode.units import GIB
from multinode.worker.token_work import EXPERTS_PER_TOKEN

COUNTED = "parameters, gradients, Adam states and DDP buckets, without activations"
_FP32_BYTES, _HALF_BYTES = 4, 2
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Of a weight in bitsandbytes' NF4 with double quantization: blocks of 64 share 8 bits, and 256 of these share 32."""


class StatePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """How wide the training states are, and where they are kept."""

    half: bool = False  # whether the training computes in bf16 or fp16
    frozen_bits: float | None = None  # per quantized parameter; None is 16 in half precision, otherwise 32
    # whether all quantized weights of a layer are whole in half precision while it is computed, as GPTQ's are; those of
    # bitsandbytes are one matrix at a time
    whole_layer: bool = False
    whole_frozen: int = 0  # frozen parameters that are not quantized: embedding and output layer
    whole_bits: int | None = None  # of each of these; None is 16 in half precision, otherwise 32
    trained_bytes: int | None = None  # per trained parameter without DeepSpeed; None is 4
    moment_bytes: int | None = None  # of each of Adam's moments; None is as wide as the parameter, and 4 in DeepSpeed
    optimizer_elsewhere: bool = False  # whether the optimizer states are in host memory or on disk
    parameters_elsewhere: bool = False  # whether the parameters are in host memory or on disk


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one worker, in GiB."""

    parameters_gib: float  # trained and frozen
    gradients_gib: float  # of the trained parameters
    optimizer_gib: float  # Adam's two moments, and DeepSpeed's fp32 copy
    buckets_gib: float = 0.0  # into which DDP copies the gradients

    @property
    def total_gib(self) -> float:
        """The sum."""
        return self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.buckets_gib


def memory_need(
    strategy: Strategy, load: TrafficInputs, layout: Layout, placement: StatePlacement
) -> MemoryNeed | None:
    """Memory of the states; None if the number of parameters is unknown.

    With T trained and F frozen parameters on n workers, in bytes, as the engines keep them:
    - DDP: 4T, gradients 4T, Adam 8T, buckets 4T (torch copies gradients into buckets unless it uses views).
      LLaMA-Factory and autocast keep trained parameters in fp32.
    - ZeRO-1 in half: 2T, gradients 2T, (4 + 8)T/n (Rajbhandari et al. 2020); in fp32 4T and 4T. ZeRO-2: gradients
    /n.
      ZeRO-3: parameters /n as well, frozen ones included.
    - ZeRO-3 hpZ: as ZeRO-3, and all parameters once more over the workers of a node.
    - FSDP: 4T, 4T and 8T, all /n, frozen parameters too; SHARD_GRAD_OP keeps the parameters whole; hybrid shard
      divides by the workers of a node.
    """
    if load.parameters is None:
        return None
    workers = _sharing(strategy, layout)
    trained, frozen = load.trainable, max(0, load.parameters - load.trainable)
    deepspeed = strategy.engine == "DeepSpeed"
    width = _trained_bytes(strategy, placement)
    whole_bits = placement.whole_bits or 8 * (_HALF_BYTES if placement.half else _FP32_BYTES)
    whole = min(placement.whole_frozen, frozen)
    frozen_bits = placement.frozen_bits or 8 * (_HALF_BYTES if placement.half else _FP32_BYTES)
    parameters = trained * width + (whole * whole_bits + (frozen - whole) * frozen_bits) / 8
    moment = placement.moment_bytes or (_FP32_BYTES if deepspeed else width)
    optimizer = trained * (2 * moment + (_FP32_BYTES if deepspeed else 0))
    kept = 0.0 if placement.parameters_elsewhere else parameters / (workers if strategy.shards_parameters else 1)
    if strategy is Strategy.ZERO3_HPZ:
        kept += parameters / layout.workers_per_node
    # DeepSpeed moves gradients to where the optimizer is (ZeRO-Offload, Ren et al. 2021).
    elsewhere = deepspeed and strategy.shards_gradients and placement.optimizer_elsewhere
    gradients = 0.0 if elsewhere else trained * width / (workers if strategy.shards_gradients else 1)
    return MemoryNeed(
        parameters_gib=kept / GIB,
        gradients_gib=gradients / GIB,
        optimizer_gib=0.0
        if placement.optimizer_elsewhere
        else optimizer / (1 if strategy is Strategy.DDP else workers) / GIB,
        buckets_gib=trained * width / GIB if strategy is Strategy.DDP and layout.workers > 1 else 0.0,
    )


def _sharing(strategy: Strategy, layout: Layout) -> int:
    return layout.workers_per_node if strategy is Strategy.HYBRID_SHARD else layout.workers


def _trained_bytes(strategy: Strategy, placement: StatePlacement) -> int:
    if strategy.engine == "DeepSpeed":
        return _HALF_BYTES if placement.half else _FP32_BYTES
    return placement.trained_bytes or _FP32_BYTES


class DecoderWidths(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of a decoder's layers, in elements per token."""

    layers: int
    hidden: int  # of the residual stream
    queries: int  # of all query heads together
    keys: int  # of all key heads together; the values have as many
    heads: int  # query heads
    inner: int  # of the MLP; of a mixture of experts, of all experts that a token passes
    vocabulary: int
    tied: bool  # whether the output layer is the embedding

    @property
    def outside(self) -> int:
        """Parameters of embedding and output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


_HEAD = 128
_MOST = 10**7
_LANGUAGE = ("text_config", "llm_config", "language_config")


def decoder_widths(model: Mapping[str, Any]) -> DecoderWidths | None:
    """The widths that a config.json gives, of a multimodal model those of its language model; None if it does not."""
    nested = (model.get(key) for key in _LANGUAGE)
    config = next((part for part in nested if isinstance(part, Mapping)), model)
    hidden, layers, heads = (
        _size(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    vocabulary, inner = _size(config, "vocab_size") or _size(model, "vocab_size"), _inner(config)
    if hidden is None or layers is None or heads is None or vocabulary is None or inner is None:
        return None
    head = _size(config, "head_dim") or hidden // heads
    tied = config.get("tie_word_embeddings", model.get("tie_word_embeddings"))
    return DecoderWidths(
        layers=layers,
        hidden=hidden,
        queries=heads * head,
        keys=(_size(config, "num_key_value_heads") or heads) * head,
        heads=heads,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied is True,
    )


def shape_widths(shape: ModelShape) -> DecoderWidths:
    """The widths of a known architecture; the heads are taken to be 128 wide."""
    queries, keys = shape.linears["q_proj"].outputs, shape.linears["k_proj"].outputs
    return DecoderWidths(
        layers=shape.layers,
        hidden=shape.hidden,
        queries=queries,
        keys=keys,
        heads=max(1, queries // _HEAD),
        inner=shape.linears["gate_proj"].outputs,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
    )


def _inner(config: Mapping[str, Any]) -> int | None:
    experts = next((count for name in EXPERTS_PER_TOKEN if (count := _size(config, name)) is not None), None)
    each = _size(config, "moe_intermediate_size")
    dense = _size(config, "intermediate_size")
    if experts is None:
        return dense
    each = each or dense
    shared = _size(config, "shared_expert_intermediate_size") or (_size(config, "n_shared_experts") or 0) * (each or 0)
    return experts * each + shared if each is not None else None


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < _MOST else None


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker computes at once, and how."""

    samples: int
    tokens: int  # of each sample, padded
    recompute: bool = True  # whether each layer keeps only its input (gradient checkpointing)
    eager: bool = False  # whether attention keeps its scores, instead of flash attention or torch's SDPA
    adapted: tuple[str, ...] | None = None  # modules with an adapter, `all` alone is every one; None trains all
    dropout: bool = False  # whether each adapter drops other elements of its input, of which it keeps a copy and a mask
    autocast: bool = True  # whether half precision is by autocast, as in the Trainer without DeepSpeed
    upcast: bool = False  # whether the residual stream is fp32, as after PEFT's prepare_model_for_kbit_training
    # whether the logits stay in half precision until the loss, in models whose code does not widen them
    half_logits: bool = False
    # whether the training loop holds the model's outputs, and so the logits, in the backward pass; the Trainer does not
    holds_outputs: bool = False
    keeps_inputs: bool = False  # whether quantized matrices keep their inputs, as in bitsandbytes before 0.43.2
    fused_loss: bool = False  # whether the loss is computed without all logits at once, as Liger does
    varied: bool = True  # whether samples differ in length, which fragments the allocator's memory


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The peak memory of one worker by parts, in GiB."""

    states: MemoryNeed
    gathered_gib: float  # parameters gathered for their use, and buckets of DeepSpeed
    activations_gib: float  # kept for the backward pass
    working_gib: float  # of the loss or of one layer, whichever needs more, on the way back
    step_gib: float  # of the optimizer's step beside the states, when none of the three before is needed
    stranded_gib: float = 0.0  # of the loss, in blocks that the allocator keeps and nothing after it fits
    varied: bool = False  # as in MicroBatch
    workers: int = 1  # of the whole training

    @property
    def passing_gib(self) -> float:
        """What comes and goes in each micro-batch."""
        return self.activations_gib + self.working_gib

    @property
    def allocated_gib(self) -> float:
        """As torch.cuda.max_memory_allocated counts."""
        return self.states.total_gib + max(self.gathered_gib + self.passing_gib, self.step_gib)

    @property
    def reserved_gib(self) -> float:
        """As torch.cuda.max_memory_reserved counts: with what the allocator has not reused."""
        return self._with_waste(_VARIED_WASTE if self.varied else _WASTE) + self.stranded_gib

    @property
    def context_gib(self) -> float:
        """What CUDA, its kernels and NCCL take beside torch's allocator."""
        return _CONTEXT_GIB + (_NCCL_GIB if self.workers > 1 else 0.0)

    @property
    def shown(self) -> Estimate:
        """What nvidia-smi shows on a GPU with room for it, in GiB, with the interval of nine of ten published peaks."""
        return _within(self.reserved_gib + self.context_gib, _VARIED_OFF if self.varied else _OFF)

    @property
    def needed(self) -> Estimate:
        """What suffices, in GiB: on a full GPU, the allocator frees what samples of other lengths have left."""
        return _within(self._with_waste(_WASTE) + self.context_gib, _OFF)

    @property
    def parts(self) -> dict[str, float]:
        """Of what suffices, in GiB, by name."""
        parts = {"states": self.states.total_gib}
        if self.gathered_gib + (1 + _WASTE) * self.passing_gib < self.step_gib:
            parts["optimizer step"] = self.step_gib
        else:
            parts |= {"gathered parameters and buckets": self.gathered_gib, "activations": self.activations_gib}
            parts["workspace"] = self.working_gib
        parts["reserved but unallocated"] = self._with_waste(_WASTE) - math.fsum(parts.values())
        return parts | {"CUDA": self.context_gib}

    def _with_waste(self, waste: float) -> float:
        passing = (1 + waste) * self.passing_gib
        return (1 + _STATE_WASTE) * self.states.total_gib + max(self.gathered_gib + passing, self.step_gib)


def _within(value: float, off: tuple[float, float]) -> Estimate:
    return Estimate(value=value, low=value * off[0], high=value * off[1])


# Fitted to half of benchmarks/memory_peaks.json: what the allocator holds and does not use, of what comes and goes in
# samples of one length and of several, and of the states; and how far published peaks are from the estimate (5th and
# 95th percentile).
_WASTE, _VARIED_WASTE, _STATE_WASTE = 0.2, 2.0, 0.08
_OFF, _VARIED_OFF = (0.89, 1.2), (0.89, 1.77)
# Measured: 0.14 GiB on a T4, 0.4 to 0.6 on an A100 or H100.
_CONTEXT_GIB, _NCCL_GIB = 0.45, 0.4
# The logarithms of the probabilities, the gradients of these and those of the logits.
_COPIES_OF_LOGITS = 3
# Of an element that dropout keeps or drops.
_MASK_BYTES = 1
_GROUP_ELEMENTS = 1_000_000_000
_ZERO3 = 3
# The parts of a layer whose inputs the adapters read.
_READERS = {
    "q_proj": "stream",
    "k_proj": "stream",
    "v_proj": "stream",
    "o_proj": "attention",
    "gate_proj": "normalized",
    "up_proj": "normalized",
    "down_proj": "product",
}


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the peak memory of one worker of a training.

    Bytes per token and layer that a Llama-like layer keeps for the backward pass, with hidden h, queries q, keys k and
    inner i of w bytes each:
    - attention: w(2q + 2k); eager attention also each score in fp32, as softmax is computed, and a copy in half
      precision;
    - MLP: 3wi, and wi more if its last matrix is trained;
    - two normalizations, in fp32 inside: 4h each; 6h if they are trained, 8h if their input is fp32;
    - the inputs of trained matrices: wh for q, k and v together, and for the MLP; autocast from fp32, and adapters
      wider than their input or with dropout, keep a copy for each matrix.
    This is what torch saves (`saved_tensors_hooks`), to 1%. With checkpointing each layer keeps its input alone, and
    one layer at a time has all of this. On the way back, the loss needs 12 bytes per logit, and eager attention of one
    layer its scores four times: softmax's output, its gradient, the product of both (torch's `softmax_backward_cuda`)
    and the result. bitsandbytes dequantizes one matrix at a time. At the optimizer's step torch's AdamW makes a copy of
    the size of the parameters, DeepSpeed one of its part of the gradients in fp32.
    """

    strategy: Strategy
    load: TrafficInputs
    layout: Layout
    placement: StatePlacement
    widths: DecoderWidths
    batch: MicroBatch
    deepspeed: DeepSpeedConfig | None = None  # None is its defaults

    def peak(self) -> PeakMemory | None:
        """The peak of a step; None if the number of parameters is unknown."""
        states = memory_need(self.strategy, self.load, self.layout, self.placement)
        if states is None:
            return None
        batch, widths, tokens = self.batch, self.widths, self.batch.samples * self.batch.tokens
        scores = widths.heads * batch.tokens if batch.eager else 0
        layer = self._layer_bytes()
        back, back_score = self._back_bytes, 3 * _FP32_BYTES + self._width
        kept_score = _FP32_BYTES + (self._width if self._width < _FP32_BYTES else 0)
        if batch.recompute:
            kept = self._stream_width * widths.hidden
            working = max(layer + back, layer - back + back_score * scores)
        else:
            kept, working = layer + kept_score * scores, max(back, (back_score - kept_score) * scores)
        # Autocast keeps its copies of the weights for the backward pass.
        copies = _HALF_BYTES * self.load.trainable if self._casts else 0
        held, loss = (widths.vocabulary * each for each in (self._held_logit_bytes, self._logit_bytes))
        return PeakMemory(
            states=states,
            gathered_gib=self._gathered_bytes() / GIB,
            activations_gib=(tokens * widths.layers * kept + copies) / GIB,
            working_gib=max(tokens * (working + held) + self._dequantized_bytes, tokens * (loss + held)) / GIB,
            step_gib=self._step_bytes() / GIB,
            # The attention scores of a sample are larger blocks than its logits.
            stranded_gib=tokens * loss / GIB if scores > widths.vocabulary else 0.0,
            varied=batch.varied,
            workers=self.layout.workers,
        )

    @property
    def _width(self) -> int:
        return _HALF_BYTES if self.placement.half and not self.batch.upcast else _FP32_BYTES

    @property
    def _trained_width(self) -> int:
        return _trained_bytes(self.strategy, self.placement)

    @property
    def _casts(self) -> bool:
        """Whether autocast computes in half with the whole model's weights in fp32."""
        computes_half = self.placement.half and self.batch.autocast and self.strategy is Strategy.DDP
        return computes_half and self.batch.adapted is None and self._trained_width == _FP32_BYTES

    @property
    def _stream_width(self) -> int:
        return _FP32_BYTES if self._casts else self._width

    @property
    def _logit_bytes(self) -> int:
        """In fp32 (transformers' ForCausalLMLoss); without widening only under autocast."""
        batch = self.batch
        if batch.fused_loss:
            return 0
        is_half = batch.half_logits and self.placement.half and not batch.autocast
        return _COPIES_OF_LOGITS * (_HALF_BYTES if is_half else _FP32_BYTES)

    @property
    def _held_logit_bytes(self) -> int:
        """As the model returns them."""
        if not self.batch.holds_outputs:
            return 0
        return _HALF_BYTES if self.placement.half and self.batch.autocast else self._width

    @property
    def _dequantized_bytes(self) -> int:
        widths = self.widths
        if self.placement.frozen_bits is None:
            return 0
        rows = 2 * (widths.queries + widths.keys) + 3 * widths.inner if self.placement.whole_layer else widths.inner
        return _HALF_BYTES * widths.hidden * rows

    @property
    def _back_bytes(self) -> int:
        """Of the MLP on the way back: the gradients of its three products; of the adapter's copy of one, in fp32."""
        adapted = self.batch.adapted or ()
        casts = self._trained_width != self._width and (adapted == ("all",) or "down_proj" in adapted)
        return self.widths.inner * (3 * self._width + (_FP32_BYTES if casts else 0))

    def _layer_bytes(self) -> int:
        width, widths, whole = self._width, self.widths, self.batch.adapted is None
        norms = 2 * widths.hidden * (_FP32_BYTES + (self._stream_width if whole else 0))
        products = width * (2 * widths.queries + 2 * widths.keys + (4 if whole else 3) * widths.inner)
        if whole:
            return norms + products + (5 if self._casts else 2) * width * widths.hidden
        return norms + products + self._adapted_bytes()

    def _adapted_bytes(self) -> int:
        widths, adapted = self.widths, self.batch.adapted or ()
        sizes = {"attention": widths.queries, "product": widths.inner}
        read = [part for name, part in _READERS.items() if adapted == ("all",) or name in adapted]
        kept = {*_READERS.values()} if self.batch.keeps_inputs else set[str]()
        casts, own = self._trained_width != self._width, 0
        if casts or self.batch.dropout:
            narrow = casts and self.batch.autocast and self.placement.half
            each = (_HALF_BYTES if narrow else self._trained_width) + (_MASK_BYTES if self.batch.dropout else 0)
            own = sum(each * sizes.get(part, widths.hidden) for part in read)
        else:
            kept |= {*read}
        # What attention returns is kept anyway.
        return own + sum(self._width * sizes.get(part, widths.hidden) for part in kept - {"attention"})

    def _step_bytes(self) -> float:
        if self.placement.optimizer_elsewhere:
            return 0.0
        part = self.load.trainable / (1 if self.strategy is Strategy.DDP else _sharing(self.strategy, self.layout))
        if self.strategy.engine == "DeepSpeed":
            # ZeRO-3 goes through its part in groups.
            return _FP32_BYTES * (min(part, _GROUP_ELEMENTS) if self.strategy.stage == _ZERO3 else part)
        return self._trained_width * part

    def _gathered_bytes(self) -> float:
        strategy, widths, parameters = self.strategy, self.widths, self.load.parameters or 0
        width = _HALF_BYTES if self.placement.half else _FP32_BYTES
        if strategy.engine == "DeepSpeed":
            settings = self.deepspeed or DeepSpeedConfig(stage=strategy.stage or 0)
            # `auto` is the Trainer's. Stages 1 and 2 fill one bucket while another is sent, stage 3 has one.
            bucket = settings.reduce_bucket_elements or widths.hidden**2
            bucket *= 2 if settings.overlap_comm and strategy.stage != _ZERO3 else 1
            return width * (bucket + (min(parameters, settings.reuse_elements) if strategy.stage == _ZERO3 else 0))
        if not strategy.shards_parameters:
            return 0.0
        layer = max(0, parameters - widths.outside) / widths.layers
        is_adapter = self.load.trainable < parameters
        bits = self.placement.frozen_bits if is_adapter and self.placement.frozen_bits else 8 * width
        # Two layers, one used and one prefetched; embedding and output layer; the gradients of a layer.
        return 2 * layer * bits / 8 + width * (widths.outside + self.load.trainable / widths.layers)
