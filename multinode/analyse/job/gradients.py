"""Gradients: the tensors that a training has gradients of, their order, and the buckets that they are sent in.

Pure rules of torch's DDP and of DeepSpeed, read in their sources and compared with recorded runs. What is called with
the buckets, and how often, is in `step_messages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.analyse.job.model_size import ModelShape
from multinode.analyse.job.training import Adapter

__all__ = ["Gradient", "arriving", "fill_past", "fill_up_to", "layer_gradients", "outer_gradients", "registered"]

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class Gradient(msgspec.Struct, frozen=True):
    """One tensor's gradient.

    Attributes:
        matrix: whether it is of a weight; those of biases and normalisations lie in an optimizer group of their own.
    """

    elements: int
    matrix: bool = True


def registered(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """All gradients in the order in which the modules name their parameters."""
    first, last = outer_gradients(shape, adapter)
    return (*first, *(layer_gradients(shape, adapter) * shape.layers), *last)


def arriving(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """All gradients in the order in which the backward pass has them: the use of the forward pass turned round.

    A tied embedding, which the output layer uses too, is ready when its first use is reached, so it comes last.
    """
    first, last = outer_gradients(shape, adapter)
    used = (*first, *(_used_in_layer(shape, adapter) * shape.layers), *last)
    return used[::-1]


def layer_gradients(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """Those of one layer, as they are named: the projections, then the normalisations."""
    names = _trained(shape.linears, adapter)
    linears = [one for name in names for one in _linear_gradients(shape, name, adapter)]
    return (*linears, *_norms(shape, adapter))


def outer_gradients(shape: ModelShape, adapter: Adapter | None) -> tuple[tuple[Gradient, ...], tuple[Gradient, ...]]:
    """Those before the layers (the embedding) and those after them (the last normalisation, the output layer)."""
    table = shape.vocabulary * shape.hidden
    if adapter is None:
        head = () if shape.tied else (Gradient(table),)
        return (Gradient(table),), (Gradient(shape.hidden, matrix=False), *head)
    ends = (Gradient(adapter.rank * shape.vocabulary), Gradient(adapter.rank * shape.hidden))
    before = ends if _EMBEDDING in adapter.targets else ()
    # An adapter multiplies by A first, which has the inputs' width.
    return before, ends[::-1] if _HEAD in adapter.targets else ()


def fill_past(elements: Iterable[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Buckets of torch's DDP: tensors go in until a bucket has reached its cap, so the last one may carry it past.

    Args:
        elements: of the tensors, in order.
        caps: of the first bucket, the second, ...; the last one counts for all that follow.
    """
    buckets: list[int] = []
    held = 0
    for one in elements:
        held += one
        if held >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(held)
            held = 0
    return (*buckets, *([held] if held else []))


def fill_up_to(elements: Iterable[int], cap: int) -> tuple[int, ...]:
    """Buckets of DeepSpeed: one is sent before a tensor that would not fit; a tensor above the cap goes alone."""
    buckets: list[int] = []
    held = 0
    for one in elements:
        if held and held + one > cap:
            buckets.append(held)
            held = 0
        held += one
    return (*buckets, *([held] if held else []))


def _used_in_layer(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    norms = _norms(shape, adapter)
    names = _trained(shape.linears, adapter)
    cut = names.index("gate_proj") if "gate_proj" in names else len(names)
    attention, mlp = (
        [one for name in part for one in _linear_gradients(shape, name, adapter)] for part in (names[:cut], names[cut:])
    )
    return (*norms[:-1], *attention, *norms[-1:], *mlp)


def _trained(names: Iterable[str], adapter: Adapter | None) -> list[str]:
    everything = adapter is None or adapter.targets == ("all",)
    return [name for name in names if everything or name in (adapter.targets if adapter else ())]


def _linear_gradients(shape: ModelShape, name: str, adapter: Adapter | None) -> Iterator[Gradient]:
    linear = shape.linears[name]
    if adapter is not None:
        yield Gradient(adapter.rank * linear.inputs)
        yield Gradient(adapter.rank * linear.outputs)
        return
    yield Gradient(linear.inputs * linear.outputs)
    if linear.bias:
        yield Gradient(linear.outputs, matrix=False)


def _norms(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """Of queries and keys, where a model has them, before the two of the layer."""
    if adapter is not None:
        return ()
    # What two of the residual stream's width leave is that of queries and keys, half each.
    head = (shape.norms_a_layer - 2 * shape.hidden) // 2
    sizes = [*([head, head] if head else []), shape.hidden, shape.hidden]
    return tuple(Gradient(size, matrix=False) for size in sizes)
