from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.core.grid.grid_plan import override_text, parse_axes, parse_counts
from multinode.core.job.job import parse_overrides
from multinode.errors import JobError, UsageError

TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("b=1,2,4", (1, 2, 4)),
        ("b=8, 4", (8, 4)),
        ("t=lora,full", ("lora", "full")),
        ("packing=true,false", (True, False)),
        ("lr=1e-4,0.001", (1e-4, 1e-3)),
        ("deepspeed=configs/z2.json,null", ("configs/z2.json", None)),
        ("cutoff_len=1024", (1024,)),
        # A list is one value, and so is a text with a comma that is quoted.
        ("m=[a,b]", (["a", "b"],)),
        ("m=[a],[a,b]", (["a"], ["a", "b"])),
        ("""lora_target="q,v",all""", ("q,v", "all")),
        ("x=1,true,1.0", (1, True, 1.0)),
        ("x='null',null", ("null", None)),
    ],
)
def test_commas_part_values_that_are_each_read_as_yaml(text: str, values: tuple[Any, ...]) -> None:
    axes = parse_axes([text])
    assert list(axes) == [text.partition("=")[0]]
    (found,) = axes.values()
    assert [(type(one), one) for one in found] == [(type(one), one) for one in values]


def test_axes_keep_the_order_in_which_they_were_given() -> None:
    assert list(parse_axes(["b=1,2", "a=x", "c=3,4"])) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["b=1,2", "b=4"], "--set b is given twice"),
        (["b"], "--set 'b' is not KEY=VALUE"),
        (["a-b=1"], "--set 'a-b=1' is not KEY=VALUE"),
        (["b="], "--set b= has an empty value"),
        (["b=1,,2"], "--set b=1,,2 has an empty value"),
        (["b=,1"], "--set b=,1 has an empty value"),
        (["b=1,"], "--set b=1, has an empty value"),
        (["b=1,2,1"], "--set b=1,2,1: 1 stands twice"),
        (["b=[1,2"], "--set b=[1,2 is no list of YAML values"),
        (["b=a],[b]"], "--set b=a],[b] is no list of YAML values"),
        (["max_steps=10,20"], "--set max_steps=10,20: how long a cell trains is no axis"),
    ],
)
def test_what_is_no_axis_is_one_clear_error(texts: list[str], message: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_axes(texts)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_counts_are_numbers_from_one_on_each_once() -> None:
    assert parse_counts("--nodes", "2,1") == (2, 1)
    for text in ("", "0,1", "1,a", "1,,2", "-1", "1.5", "\u0662", "9" * 5000):
        with pytest.raises(UsageError, match="is not a list of numbers from 1 on"):
            parse_counts("--nodes", text)
    with pytest.raises(UsageError, match="--nodes 1,2,1: 1 stands twice"):
        parse_counts("--nodes", "1,2,1")


@given(VALUES)
def test_a_value_comes_back_from_its_text_as_launch_reads_it(value: Any) -> None:
    assert parse_overrides([override_text("key", value)]) == {"key": value}
