"""Operations that the device benchmark measures: matrix products, memory bandwidth and transformer layers.

Each is a function to call repeatedly; the caller provides torch and times the calls. The controller computes FLOPs and
bytes from the sizes. Layers of BERT-large, GPT-2 medium and T5-large are written in plain torch, with random weights,
without dropout, and with torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Optional

from ..channel import Record
from ..facts.cgroups import MemoryReader

_HIDDEN, _FEEDFORWARD, _HEADS = 1024, 4096, 16
# Batch size and sequence length by device: enough work to fill a GPU, and little enough for one core.
_BATCHES = {"cuda": (16, 512), "cpu": (1, 128)}
_EPSILON = 1e-6
_MS_PER_S = 1e3
# Weights are this small so that activations stay finite in half precision.
_SCALE = 0.02
_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Major compute capability of the first NVIDIA generation with TF32 and BF16 tensor cores.
_AMPERE = 8
_SIZES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
_MIB, _GIB = 1 << 20, 1 << 30
_CACHE = "/sys/devices/system/cpu/cpu0/cache/index3/size"
# Buffers are 4 times as large as the cache, and at most 1 / 16 of the memory, since several workers may have some.
_BEYOND_CACHE, _OF_MEMORY = 4, 16


class DeviceOp(NamedTuple):
    """One operation to measure."""

    fields: Record  # fields of its record
    # returns the function to call repeatedly, which keeps its buffers alive
    make: Callable[[], Callable[[], Any]]


def find_device(torch: Any, *, kind: Optional[str], need: str) -> Any:
    """The device of this worker's local rank, of torch's kind (`cuda`, `xpu`); the kind None is the CPU.

    Raises:
        RuntimeError: there is no such GPU; the message begins with `need`.
    """
    if kind is None:
        return torch.device("cpu")
    module = getattr(torch, kind)
    seen, local_rank = module.device_count(), int(os.environ["LOCAL_RANK"])
    if local_rank >= seen:
        raise RuntimeError(f"{need}: worker {local_rank} sees {seen} GPUs")
    device = torch.device(kind, local_rank)
    module.set_device(device)
    return device


def time_events(module: Any, run: Callable[[], Any], calls: int, count: int) -> list[float]:
    """Seconds of `calls` calls, measured `count` times by the device's events, without the host's time.

    Args:
        module: torch's module of the device, as `torch.cuda` or `torch.xpu`.
        run: makes one call.
        calls: calls between two events.
        count: number of timings.
    """
    events = [module.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            run()
        event.record()
    module.synchronize()
    return [first.elapsed_time(second) / _MS_PER_S for first, second in zip(events, events[1:])]


def list_ops(torch: Any, request: Record, device: Any) -> Iterator[DeviceOp]:
    """Operations that a request asks for on this device, small matrices before large ones.

    Args:
        torch: the module.
        request: the fields of a DeviceTest.
        device: the torch.device.
    """
    offered = _offered(torch, device)
    for op in _asked_ops(torch, request, device, offered):
        is_lacking = op.fields["dtype"] not in offered and op.fields["test"] in {"matmul", *LAYERS}
        yield op._replace(make=partial(_refuse, op.fields["dtype"])) if is_lacking else op


def _refuse(dtype: str) -> Callable[[], Any]:
    raise TypeError(f"this device does not support {dtype}")


def _asked_ops(torch: Any, request: Record, device: Any, offered: tuple[str, ...]) -> Iterator[DeviceOp]:
    """Requested operations, even of types that the device lacks; by default, of the types that it supports."""
    dtypes = request["dtypes"] or [dtype for dtype in _DTYPES if dtype in offered]
    if "matmul" in request["kinds"]:
        for dtype in dtypes:
            for size in request["sizes"] or _SIZES[device.type]:
                fields = {"test": "matmul", "dtype": dtype, "size": size}
                yield DeviceOp(fields, partial(_matmul, torch, device, dtype, size))
    if "memory" in request["kinds"]:
        yield from _memory_ops(torch, device)
    if "layers" in request["kinds"]:
        for dtype in dtypes if request["dtypes"] else [_of_trainings(torch, device)]:
            for name in LAYERS:
                yield from _layer_ops(torch, device, name, dtype)


def _offered(torch: Any, device: Any) -> tuple[str, ...]:
    """Types that the device supports."""
    if device.type == "cpu":
        return ("fp32", "fp16", "bf16")
    # The capability numbers of AMD's GPUs have another meaning.
    if torch.version.hip is not None:
        return ("fp32", "fp16", "bf16")
    return tuple(_DTYPES) if torch.cuda.get_device_capability(device)[0] >= _AMPERE else ("fp32", "fp16")


def _of_trainings(torch: Any, device: Any) -> str:
    if device.type == "cpu":
        return "fp32"
    return "bf16" if "bf16" in _offered(torch, device) else "fp16"


def _set_type(torch: Any, dtype: str) -> Any:
    """Torch's type; also makes tensor cores multiply fp32 matrices for `tf32`, and only for it."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return getattr(torch, _DTYPES[dtype])


def _matmul(torch: Any, device: Any, dtype: str, size: int) -> Callable[[], Any]:
    kind = _set_type(torch, dtype)
    # Random numbers: multiplying zeros takes less power, which allows higher clocks.
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def _memory_ops(torch: Any, device: Any) -> Iterator[DeviceOp]:
    """A copy; the triad a = b + s * c, which reads two buffers and writes one; and transfers to and from a GPU."""
    kinds: dict[str, Callable[..., Callable[[], Any]]] = {"copy": _copy, "triad": _triad}
    if device.type == "cuda":
        kinds |= {"to_device": _to_device, "from_device": _from_device}
    count = _buffer_bytes(torch, device) // 4
    for test, make in kinds.items():
        fields = {"test": test, "dtype": "fp32", "size": count, "width_bytes": 4}
        yield DeviceOp(fields, partial(make, torch, device, count))


def _copy(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.randn(count, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _triad(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    first, second = torch.randn(count, device=device), torch.randn(count, device=device)
    return partial(torch.add, first, second, alpha=3.0, out=torch.empty_like(first))


def _to_device(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, pin_memory=True)
    return partial(torch.empty(count, device=device).copy_, source, non_blocking=True)


def _from_device(torch: Any, device: Any, count: int) -> Callable[[], Any]:
    source = torch.zeros(count, device=device)
    return partial(torch.empty(count, pin_memory=True).copy_, source, non_blocking=True)


def _layer_ops(torch: Any, device: Any, name: str, dtype: str) -> Iterator[DeviceOp]:
    for backward in (False, True):
        fields = {"test": name, "dtype": dtype, "backward": backward, **layer_sizes(name, device.type)}
        yield DeviceOp(fields, partial(make_layer, torch, device, name, dtype, backward=backward))


def _buffer_bytes(torch: Any, device: Any) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(min(_GIB, free // _OF_MEMORY))
    wanted = max(128 * _MIB, _BEYOND_CACHE * (_cache_bytes() or 0))
    return min(wanted, _GIB, MemoryReader().read().available // _OF_MEMORY)


def _cache_bytes() -> Optional[int]:
    """Bytes of the processor's L3 cache; None if unknown."""
    with contextlib.suppress(OSError, ValueError), open(_CACHE, encoding="ascii") as file:
        return int(file.read().strip().removesuffix("K")) << 10
    return None


def layer_sizes(name: str, device_type: str) -> dict[str, int]:
    """Sizes of a layer on this type of device, by the fields of the record."""
    batch, sequence = _BATCHES[device_type]
    attentions = 2 if LAYERS[name].has_memory else 1
    sizes = {"batch": batch, "sequence": sequence, "hidden": _HIDDEN, "feedforward": _FEEDFORWARD}
    return {**sizes, "attentions": attentions}


def make_layer(torch: Any, device: Any, name: str, dtype: str, *, backward: bool) -> Callable[[], Any]:
    """A function that runs a layer's forward pass as in inference, or forward and backward pass as in training."""
    sizes = (*_BATCHES[device.type], _HIDDEN)
    layer = Layer(torch, device, name, _set_type(torch, dtype), sizes)
    inputs = layer.normal(*sizes, scale=1.0)
    gradient = layer.normal(*sizes, scale=1.0).detach()

    def forward() -> None:
        with torch.no_grad():
            layer.run(inputs)

    def forward_and_backward() -> None:
        # The gradient of the input is computed, too: all layers but a model's first need it.
        torch.autograd.grad(layer.run(inputs), [inputs, *layer.wanted], gradient)

    return forward_and_backward if backward else forward


class LayerKind(NamedTuple):
    """Properties in which the layers differ."""

    activation: str
    is_t5: bool = False  # no biases, RMS norms, and a relative position bias in the attention
    norms_after: bool = False  # whether it normalises after each part instead of before
    looks_back: bool = False  # whether its attention is causal
    has_memory: bool = False  # whether it has cross-attention to an encoder's output of equal length


LAYERS = {
    "bert": LayerKind("gelu", norms_after=True),
    "gpt2": LayerKind("gelu_tanh", looks_back=True),
    "t5_encoder": LayerKind("relu", is_t5=True),
    "t5_decoder": LayerKind("relu", is_t5=True, looks_back=True, has_memory=True),
}
"""Layers by name: BERT-large's encoder, GPT-2 medium's decoder, and both of T5-large; all have one width."""


class Layer:
    """The weights of a layer and its forward pass; `wanted` are the tensors with gradients.

    Args:
        torch: the module.
        device: the torch.device.
        name: a key of `LAYERS`.
        dtype: torch's type of weights and activations.
        shape: batch, sequence and width of the input.
    """

    def __init__(self, torch: Any, device: Any, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        self._kind = LAYERS[name]
        self._torch, self._functional = torch, torch.nn.functional
        self._device, self._dtype = device, dtype
        self.wanted: list[Any] = []
        attentions = 2 if self._kind.has_memory else 1
        self._projections = [[self._linear(_HIDDEN, _HIDDEN) for _ in range(4)] for _ in range(attentions)]
        self._up, self._down = self._linear(_FEEDFORWARD, _HIDDEN), self._linear(_HIDDEN, _FEEDFORWARD)
        self._norms = [self._norm_weights() for _ in range(attentions + 1)]
        self._memory = self._keep([self.normal(*shape, scale=1.0)])[0] if self._kind.has_memory else None
        self._options = self._attention_options(shape[1])

    def run(self, inputs: Any) -> Any:
        """The forward pass."""
        if self._kind.norms_after:
            attended = self._norm(0, inputs + self._attend(inputs, inputs))
            return self._norm(1, attended + self._feed_forward(attended))
        normed = self._norm(0, inputs)
        attended = inputs + self._attend(normed, normed, **self._options)
        if self._memory is not None:
            attended = attended + self._attend(self._norm(1, attended), self._memory, 1, scale=1.0)
        return attended + self._feed_forward(self._norm(-1, attended))

    def normal(self, *sizes: int, scale: float = _SCALE) -> Any:
        """Normally distributed random numbers that require a gradient."""
        made = self._torch.randn(*sizes, device=self._device, dtype=self._dtype) * scale
        return made.requires_grad_()

    def _attention_options(self, length: int) -> dict[str, Any]:
        if not self._kind.is_t5:
            return {"is_causal": self._kind.looks_back}
        bias = self.normal(1, _HEADS, length, length).detach()
        if self._kind.looks_back:
            future = self._torch.ones(length, length, device=self._device, dtype=self._torch.bool).triu(1)
            bias = bias.masked_fill(future, float("-inf"))
        return {"attn_mask": bias, "scale": 1.0}

    def _norm(self, number: int, inputs: Any) -> Any:
        weights = self._norms[number]
        if not self._kind.is_t5:
            return self._functional.layer_norm(inputs, (_HIDDEN,), *weights)
        # Computed as in T5: torch's own function for it needs torch 2.4.
        variance = inputs.float().pow(2).mean(-1, keepdim=True)
        return inputs * self._torch.rsqrt(variance + _EPSILON).to(self._dtype) * weights[0]

    def _attend(self, inputs: Any, memory: Any, number: int = 0, **options: Any) -> Any:
        """Attention of the inputs to `memory`, which is the inputs themselves or an encoder's output."""
        query, key, value, out = self._projections[number]
        apart = [
            self._apply(weights, source).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for weights, source in ((query, inputs), (key, memory), (value, memory))
        ]
        mixed = self._functional.scaled_dot_product_attention(*apart, **options)
        return self._apply(out, mixed.transpose(1, 2).flatten(2))

    def _feed_forward(self, inputs: Any) -> Any:
        raised = self._apply(self._up, inputs)
        if self._kind.activation == "relu":
            return self._apply(self._down, self._functional.relu(raised))
        approximate = "tanh" if self._kind.activation == "gelu_tanh" else "none"
        return self._apply(self._down, self._functional.gelu(raised, approximate=approximate))

    def _linear(self, rows: int, columns: int) -> list[Any]:
        return self._keep([self.normal(rows, columns), *([] if self._kind.is_t5 else [self.normal(rows)])])

    def _norm_weights(self) -> list[Any]:
        ones = self._torch.ones(_HIDDEN, device=self._device, dtype=self._dtype).requires_grad_()
        return self._keep([ones, *([] if self._kind.is_t5 else [self.normal(_HIDDEN)])])

    def _keep(self, weights: list[Any]) -> list[Any]:
        self.wanted += weights
        return weights

    def _apply(self, weights: list[Any], inputs: Any) -> Any:
        return self._functional.linear(inputs, *weights)
