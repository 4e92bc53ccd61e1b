"""Records that a node may send, whatever they say: each field at its bounds or between them, for tests of liars."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from multinode.records.samples import Sample

__all__ = ["any_samples"]

# Small numbers, so that records meet: of one rank, step, group and list of calls.
_WHOLE = st.one_of(st.integers(-1, 3), st.integers(-(2**70), 2**70))
_NAMES = st.sampled_from(
    ["", "0", "all_reduce", "gloo", "nccl", "ens1f0", "cuda", "cpu", "ddp", "fsdp2", "data", "comm", "\x1b[2J"]
)
_SINGLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _WHOLE,
    str: _NAMES,
    float: st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e7)),
    bool: st.booleans(),
    type(None): st.none(),
}


def any_samples(most: int = 30) -> st.SearchStrategy[list[Sample]]:
    """Lists of records of any kind that decoding lets through."""
    return st.lists(_values(Sample), max_size=most)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    parts = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is typing.Annotated:
        return _bounded(*parts)
    if kind in _SINGLE:
        return _SINGLE[kind]
    if kind is tuple:
        return st.lists(_values(parts[0]), max_size=4).map(tuple)
    if kind is dict:
        return st.dictionaries(_values(parts[0]), _values(parts[1]), max_size=4)
    if parts:
        return st.one_of(*(_values(part) for part in parts))
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: _values(hints[name]) for name in kind.__struct_fields__})


def _bounded(kind: type[int | float], meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    least, most = meta.ge if meta.ge is not None else 1e-300, meta.le or 0
    if kind is int:
        ends = [int(least), int(most)]
        return st.one_of(st.integers(0, 3), st.sampled_from(ends), st.integers(*ends))
    return st.one_of(st.floats(least, most), st.sampled_from([float(least), float(most)]), st.floats(least, 100))
