"""Nodes are not trusted: whatever their records say, a run that ended is summed up, and its summary can be stored."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from multinode.analyse.run.observed import ObservedNode, observe
from multinode.analyse.steps.summary import Summary, summarise
from multinode.core.run.samples import Sample

# Small numbers, so that records meet: of one rank, step, group and list of calls.
_WHOLE = st.one_of(st.integers(-1, 3), st.integers(-(2**70), 2**70))
_NAMES = st.sampled_from(
    ["", "0", "all_reduce", "gloo", "nccl", "ens1f0", "cuda", "cpu", "ddp", "fsdp2", "data", "\x1b[2J"]
)
_SINGLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _WHOLE,
    str: _NAMES,
    float: st.one_of(st.floats(), st.floats(0, 1e7)),
    bool: st.booleans(),
    type(None): st.none(),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    parts = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is typing.Annotated:
        return _values(parts[0])
    if kind in _SINGLE:
        return _SINGLE[kind]
    if kind is tuple:
        return st.lists(_values(parts[0]), max_size=4).map(tuple)
    if kind is dict:
        return st.dictionaries(_values(parts[0]), _values(parts[1]), max_size=4)
    if parts:
        return st.one_of(*(_values(part) for part in parts))
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: _values(hints[name]) for name in kind.__struct_fields__})


_ANYTHING = st.lists(_values(Sample), max_size=30)


@given(first=_ANYTHING, second=_ANYTHING)
def test_records_of_any_content_make_a_summary(first: list[Sample], second: list[Sample]) -> None:
    nodes = [
        ObservedNode(name="a", node_rank=0, ranks=(0, 1), ifname="ens1f0", samples=tuple(first)),
        ObservedNode(name="b", node_rank=1, ranks=(2, 3), ifname="ens1f0", samples=tuple(second)),
    ]
    summary = summarise(observe("r", nodes))
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary).run_id == "r"
