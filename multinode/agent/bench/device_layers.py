"""One transformer layer each of BERT-large, GPT-2 medium and T5-large, in plain torch, as a training would compute it.

Random weights, no dropout; attention is torch's scaled_dot_product_attention. Needs torch, given by the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["LAYERS", "Shape", "layer_shape", "make_layer"]

_HIDDEN, _FEEDFORWARD, _HEADS = 1024, 4096, 16
# By device: samples at once, and tokens of each. Enough work to fill a GPU; little enough for one core.
_BATCHES = {"cuda": (16, 512), "cpu": (1, 128)}
_EPSILON = 1e-6
# Weights so small that what passes the layer stays finite in half precision.
_SCALE = 0.02


class Shape(NamedTuple):
    """The sizes of a layer, by the names of the record."""

    batch: int
    sequence: int
    hidden: int
    feedforward: int
    attentions: int


def layer_shape(name: str, device_type: str) -> Shape:
    """The sizes of a layer as it is measured on such a device."""
    batch, sequence = _BATCHES[device_type]
    return Shape(batch, sequence, _HIDDEN, _FEEDFORWARD, LAYERS[name].attentions)


def make_layer(torch: Any, name: str, device: Any, dtype: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer's forward pass as inference makes it, and its forward and backward pass as a training does.

    Args:
        torch: the module.
        name: of `LAYERS`.
        device: where it is computed.
        dtype: torch's, of weights and activations.
    """
    sizes = layer_shape(name, device.type)[:3]
    layer = LAYERS[name](torch, device, dtype, sizes)
    inputs = layer.normal(*sizes, scale=1.0)
    gradient = layer.normal(*sizes, scale=1.0).detach()

    def forward() -> None:
        with torch.no_grad():
            layer.run(inputs)

    def forward_and_backward() -> None:
        # The gradient of the input as well: only the first layer of a model does without.
        torch.autograd.grad(layer.run(inputs), [inputs, *layer.wanted], gradient)

    return forward, forward_and_backward


class _Layer(ABC):
    """What all of them have: weights, attention, and the two linear maps after it; `wanted` is what has gradients.

    Args:
        torch: the module.
        device: where it is computed.
        dtype: of everything.
        shape: batch, sequence and width of what goes in.
    """

    attentions = 1
    biased = True

    def __init__(self, torch: Any, device: Any, dtype: Any, shape: tuple[int, int, int]) -> None:
        self.torch = torch
        self.functional = torch.nn.functional
        self.wanted: list[Any] = []
        self._device, self._dtype, self._shape = device, dtype, shape
        self._projections = [[self._linear(_HIDDEN, _HIDDEN) for _ in range(4)] for _ in range(self.attentions)]
        self._up, self._down = self._linear(_FEEDFORWARD, _HIDDEN), self._linear(_HIDDEN, _FEEDFORWARD)
        self._norms = [self._norm() for _ in range(self.attentions + 1)]
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 - most layers have nothing beside
        """Make what this layer has beside."""

    @abstractmethod
    def run(self, inputs: Any) -> Any:
        """The forward pass."""

    def normal(self, *sizes: int, scale: float = _SCALE) -> Any:
        """Random numbers, of which a gradient is wanted."""
        made = self.torch.randn(*sizes, device=self._device, dtype=self._dtype) * scale
        return made.requires_grad_()

    def norm(self, number: int, inputs: Any) -> Any:
        """Layer norm `number`."""
        return self.functional.layer_norm(inputs, (_HIDDEN,), *self._norms[number])

    def attend(self, inputs: Any, memory: Any, number: int = 0, **options: Any) -> Any:
        """Attention `number` of the inputs to `memory`, which are the inputs themselves or an encoder's output."""
        query, key, value, out = self._projections[number]
        apart = [
            self._apply(weights, source).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for weights, source in ((query, inputs), (key, memory), (value, memory))
        ]
        mixed = self.functional.scaled_dot_product_attention(*apart, **options)
        return self._apply(out, mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, inputs: Any, activate: Callable[[Any], Any]) -> Any:
        """The two linear maps."""
        return self._apply(self._down, activate(self._apply(self._up, inputs)))

    def position_bias(self, *, causal: bool) -> Any:
        """What T5 adds to the scores of its attention, by head and distance."""
        length = self._shape[1]
        bias = self.normal(1, _HEADS, length, length).detach()
        if causal:
            future = self.torch.ones(length, length, device=self._device, dtype=self.torch.bool).triu(1)
            bias = bias.masked_fill(future, float("-inf"))
        return bias

    def _linear(self, rows: int, columns: int) -> list[Any]:
        return self._keep([self.normal(rows, columns), *([self.normal(rows)] if self.biased else [])])

    def _norm(self) -> list[Any]:
        ones = self.torch.ones(_HIDDEN, device=self._device, dtype=self._dtype).requires_grad_()
        return self._keep([ones, *([self.normal(_HIDDEN)] if self.biased else [])])

    def _keep(self, weights: list[Any]) -> list[Any]:
        self.wanted += weights
        return weights

    def _apply(self, weights: list[Any], inputs: Any) -> Any:
        return self.functional.linear(inputs, *weights)


class _Bert(_Layer):
    """An encoder that normalises after each of its two parts."""

    def run(self, inputs: Any) -> Any:
        attended = self.norm(0, inputs + self.attend(inputs, inputs))
        return self.norm(1, attended + self.feed_forward(attended, self.functional.gelu))


class _Gpt2(_Layer):
    """A decoder that normalises before each of its two parts; its tokens look back alone."""

    def run(self, inputs: Any) -> Any:
        normed = self.norm(0, inputs)
        attended = inputs + self.attend(normed, normed, is_causal=True)
        return attended + self.feed_forward(self.norm(1, attended), self._activate)

    def _activate(self, inputs: Any) -> Any:
        return self.functional.gelu(inputs, approximate="tanh")


class _T5Encoder(_Layer):
    """An encoder without biases, with root mean square norms, and a bias of its attention by distance."""

    biased = False
    causal = False

    def prepare(self) -> None:
        self._bias = self.position_bias(causal=self.causal)

    def run(self, inputs: Any) -> Any:
        attended = self._attend_self(inputs)
        return attended + self.feed_forward(self.norm(self.attentions, attended), self.functional.relu)

    def norm(self, number: int, inputs: Any) -> Any:
        # By hand, as T5 itself: torch has a function for it since 2.4 alone.
        variance = inputs.float().pow(2).mean(-1, keepdim=True)
        return inputs * self.torch.rsqrt(variance + _EPSILON).to(self._dtype) * self._norms[number][0]

    def _attend_self(self, inputs: Any) -> Any:
        normed = self.norm(0, inputs)
        return inputs + self.attend(normed, normed, attn_mask=self._bias, scale=1.0)


class _T5Decoder(_T5Encoder):
    """The same, looking back alone, and then at an encoder's output of the same length."""

    attentions = 2
    causal = True

    def prepare(self) -> None:
        super().prepare()
        (self._memory,) = self._keep([self.normal(*self._shape, scale=1.0)])

    def run(self, inputs: Any) -> Any:
        attended = self._attend_self(inputs)
        attended = attended + self.attend(self.norm(1, attended), self._memory, 1, scale=1.0)
        return attended + self.feed_forward(self.norm(2, attended), self.functional.relu)


LAYERS: dict[str, type[_Layer]] = {"bert": _Bert, "gpt2": _Gpt2, "t5_encoder": _T5Encoder, "t5_decoder": _T5Decoder}
"""By name: an encoder of BERT-large, a decoder of GPT-2 medium, and both of T5-large; all of one width."""
