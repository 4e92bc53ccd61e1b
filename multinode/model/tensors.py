"""ModelTensors: the tensors of a model in the order in which they are registered, and in which gradients arrive.

Two sources give them: the table of architectures (`model_size`), without a node; and a node's own count of the model
that the job builds (`CountedModel`), for every architecture and adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from multinode.decoding import convert
from multinode.model.model_size import COUNTED_RANK, ModelShape
from multinode.records.samples import TokenWork
from multinode.stats.unknown import Unknown

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter."""

    rank: int
    targets: tuple[str, ...]  # names of its modules; `all` alone is every linear module


class Tensor(msgspec.Struct, frozen=True):
    """One tensor."""

    elements: int
    # whether it is a weight; biases and normalizations have an optimizer group of their own
    matrix: bool = True


class LayerSize(msgspec.Struct, frozen=True):
    """Elements of a layer, which FSDP wraps as a unit."""

    base: int  # without adapters
    adapters: int
    trained: int

    @property
    def all(self) -> int:
        """Adapters included."""
        return self.base + self.adapters


class ModelTensors(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a model with its adapters."""

    hidden: int  # width of the residual stream
    tied: bool  # whether the output layer is the embedding
    table: int  # elements of the embedding
    base: tuple[Tensor, ...]  # all but adapters, in the order in which modules register them
    trained: tuple[Tensor, ...]  # tensors with a gradient, in the order in which modules register them
    arriving: tuple[Tensor, ...]  # tensors with a gradient, in the order of the backward pass
    layers: tuple[LayerSize, ...]  # in the order of the forward pass
    outside: LayerSize  # everything outside the layers

    @property
    def parameters(self) -> int:
        """Elements without adapters."""
        return sum(tensor.elements for tensor in self.base)

    @property
    def trainable(self) -> int:
        """Elements with a gradient."""
        return sum(tensor.elements for tensor in self.trained)

    @property
    def adapters(self) -> int:
        """Elements of adapters."""
        return self.outside.adapters + sum(layer.adapters for layer in self.layers)


def tensors_of(shape: ModelShape, adapter: Adapter | None) -> ModelTensors:
    """The tensors of a known architecture."""
    first, last = _outer(shape, adapter)
    layer, base_layer = _layer(shape, adapter), _layer(shape, None)
    base_first, base_last = _outer(shape, None)
    sizes = _size(base_layer, layer, has_adapter=adapter is not None)
    return ModelTensors(
        hidden=shape.hidden,
        tied=shape.tied,
        table=shape.vocabulary * shape.hidden,
        base=(*base_first, *(base_layer * shape.layers), *base_last),
        trained=(*first, *(layer * shape.layers), *last),
        # The forward pass reversed. A tied embedding is complete at its first use, so it comes last.
        arriving=(*first, *(_used_in_layer(shape, adapter) * shape.layers), *last)[::-1],
        layers=(sizes,) * shape.layers,
        outside=_size((*base_first, *base_last), (*first, *last), has_adapter=adapter is not None),
    )


def _size(base: Iterable[Tensor], trained: Iterable[Tensor], *, has_adapter: bool) -> LayerSize:
    elements, gradients = (sum(tensor.elements for tensor in tensors) for tensors in (base, trained))
    return LayerSize(elements, gradients if has_adapter else 0, gradients)


def _layer(shape: ModelShape, adapter: Adapter | None) -> tuple[Tensor, ...]:
    names = _trained(shape.linears, adapter)
    linears = [tensor for name in names for tensor in _linear(shape, name, adapter)]
    return (*linears, *_norms(shape, adapter))


def _outer(shape: ModelShape, adapter: Adapter | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    table = shape.vocabulary * shape.hidden
    if adapter is None:
        head = () if shape.tied else (Tensor(table),)
        return (Tensor(table),), (Tensor(shape.hidden, matrix=False), *head)
    ends = (Tensor(adapter.rank * shape.vocabulary), Tensor(adapter.rank * shape.hidden))
    before = ends if _EMBEDDING in adapter.targets else ()
    # An adapter applies A first, which has the width of the inputs.
    return before, ends[::-1] if _HEAD in adapter.targets else ()


def _used_in_layer(shape: ModelShape, adapter: Adapter | None) -> tuple[Tensor, ...]:
    norms = _norms(shape, adapter)
    names = _trained(shape.linears, adapter)
    cut = names.index("gate_proj") if "gate_proj" in names else len(names)
    attention, mlp = (
        [tensor for name in part for tensor in _linear(shape, name, adapter)] for part in (names[:cut], names[cut:])
    )
    return (*norms[:-1], *attention, *norms[-1:], *mlp)


def _trained(names: Iterable[str], adapter: Adapter | None) -> list[str]:
    everything = adapter is None or adapter.targets == ("all",)
    return [name for name in names if everything or name in (adapter.targets if adapter else ())]


def _linear(shape: ModelShape, name: str, adapter: Adapter | None) -> Iterator[Tensor]:
    linear = shape.linears[name]
    if adapter is not None:
        yield Tensor(adapter.rank * linear.inputs)
        yield Tensor(adapter.rank * linear.outputs)
        return
    yield Tensor(linear.inputs * linear.outputs)
    if linear.bias:
        yield Tensor(linear.outputs, matrix=False)


def _norms(shape: ModelShape, adapter: Adapter | None) -> tuple[Tensor, ...]:
    if adapter is not None:
        return ()
    # Two of the residual stream's width: the rest is queries and keys, half each.
    head = (shape.norms_a_layer - 2 * shape.hidden) // 2
    sizes = [*([head, head] if head else []), shape.hidden, shape.hidden]
    return tuple(Tensor(size, matrix=False) for size in sizes)


# Larger counts are nonsense, and their products would be too large for a float.
_Elements = Annotated[int, Meta(gt=0, le=10**14)]
_Count = Annotated[int, Meta(gt=0, le=100_000)]
# The key of a node's count among the entries of a model's config.json.
_COUNTED = "counted"


class CountedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as a node counts it."""

    elements: _Elements
    matrix: bool
    trained: bool
    adapter: bool


class CountedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive parts of a model that are alike: layers, or what stands between them."""

    times: _Count
    layer: bool
    tensors: Annotated[tuple[CountedTensor, ...], Meta(max_length=20_000)]

    def whole(self) -> CountedPart:
        """Without adapters, every tensor trained."""
        return replace(self, tensors=tuple(replace(each, trained=True) for each in self.tensors if not each.adapter))

    def with_rank(self, times: float) -> CountedPart:
        """With adapters of a rank that is `times` as large."""
        resized = (
            replace(each, elements=round(each.elements * times)) if each.adapter else each for each in self.tensors
        )
        return replace(self, tensors=tuple(resized))


class CountedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A node's count of the model that a job builds, with its adapters.

    Attributes:
        hidden: width of the residual stream.
        tied: whether the output layer is the embedding.
        table: elements of the embedding.
        parts: of the model, in the order in which modules register their tensors.
        adapted: the same with a LoRA adapter of rank COUNTED_RANK on all linear modules, if the job attaches none; None
            where none can be attached.
        work: the weights that one token is multiplied with, of experts their share.
    """

    hidden: _Count
    tied: bool
    table: _Elements
    parts: Annotated[tuple[CountedPart, ...], Meta(max_length=20_000)]
    adapted: CountedModel | None = None
    work: TokenWork | Unknown

    def tensors(self) -> ModelTensors:
        """All of them; gradients are taken to arrive in the reverse of the order of the modules."""
        parts = [part for part in self.parts for _ in range(part.times)]
        all_tensors = [tensor for part in parts for tensor in part.tensors]
        trained = tuple(Tensor(each.elements, each.matrix) for each in all_tensors if each.trained)
        return ModelTensors(
            hidden=self.hidden,
            tied=self.tied,
            table=self.table,
            base=tuple(Tensor(each.elements, each.matrix) for each in all_tensors if not each.adapter),
            trained=trained,
            arriving=trained[::-1],
            layers=tuple(_counted_size(part.tensors) for part in parts if part.layer),
            outside=_counted_size([tensor for part in parts if not part.layer for tensor in part.tensors]),
        )

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is counted."""
        return any(tensor.adapter for part in self.parts for tensor in part.tensors)

    def token_work(self, *, recompute: bool) -> TokenWork | Unknown:
        """The weights per token; with `recompute`, gradient checkpointing repeats the layers, not the output layer."""
        if isinstance(self.work, Unknown):
            return self.work
        layers = max(0, self.work.active - self.table)
        return replace(self.work, recomputed=layers) if recompute else self.work

    def with_method(self, rank: int | None, counted_rank: int | None) -> CountedModel | None:
        """The same model, trained whole or with a LoRA adapter; None where that is not known.

        Args:
            rank: of the adapter; None trains the whole model.
            counted_rank: of the adapter that is counted; None without one.
        """
        if rank is None:
            return self._whole()
        if self.has_adapter:
            return self._with_rank(rank / counted_rank) if counted_rank else None
        return self.adapted._with_rank(rank / COUNTED_RANK) if self.adapted is not None else None  # noqa: SLF001

    def _whole(self) -> CountedModel | None:
        if not self.has_adapter:
            return self
        # Frameworks freeze encoders of images and sound, which only a count of the whole training shows.
        if isinstance(self.work, Unknown) or self.work.left_out:
            return None
        weights = self.work.passed + self.work.frozen
        work = replace(self.work, trained=weights, passed=0, frozen=0)
        return replace(self, parts=tuple(part.whole() for part in self.parts), work=work)

    def _with_rank(self, times: float) -> CountedModel:
        work = self.work
        if not isinstance(work, Unknown):
            work = replace(work, trained=round(work.trained * times))
        return replace(self, parts=tuple(part.with_rank(times) for part in self.parts), work=work)


def _counted_size(tensors: Iterable[CountedTensor]) -> LayerSize:
    found = list(tensors)
    return LayerSize(
        base=sum(each.elements for each in found if not each.adapter),
        adapters=sum(each.elements for each in found if each.adapter),
        trained=sum(each.elements for each in found if each.trained),
    )


def with_method(model: Mapping[str, Any], rank: int | None, counted_rank: int | None) -> dict[str, Any] | None:
    """A config.json with the node's count of another method (`CountedModel.with_method`); None where it is unknown."""
    counted = counted_model(model)
    varied = counted.with_method(rank, counted_rank) if counted is not None else None
    return None if varied is None else {**model, _COUNTED: msgspec.to_builtins(varied)}


def counted_model(model: Mapping[str, Any] | None) -> CountedModel | None:
    """The node's count among the entries of a config.json; None without one, or if it makes no sense."""
    counted = (model or {}).get(_COUNTED)
    try:
        return None if counted is None else convert(counted, CountedModel)
    except msgspec.ValidationError:
        return None
