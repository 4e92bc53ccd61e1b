from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multinode.strict_yaml import YamlError, dump_yaml, parse_yaml


def wrong(text: str) -> YamlError:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-5", 1e-5),
        ("-2E3", -2000.0),
        ("1.5e3", 1500.0),
        ("2.e+1", 20.0),
        ("12", 12),
        ("1.5", 1.5),
        ("true", True),
        ("no", False),
        ("null", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("1e-4x", "1e-4x"),
        ("2024-05-01", "2024-05-01"),
        ("[a, 1]", ["a", 1]),
        ("a: {b: c}", {"a": {"b": "c"}}),
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B"),
    ],
)
def test_values_are_read_as_llamafactory_reads_them(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


def test_anchors_and_merged_mappings_are_yaml_too() -> None:
    text = "base: &base {stage: sft, lr: 1}\nmine:\n  <<: *base\n  lr: 2\n"
    assert parse_yaml(text)["mine"] == {"stage": "sft", "lr": 2}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "duplicate key 'a' (line 1)"),
        ("a:\n  b: 1\n  b: 1", 3, "duplicate key 'b' (line 2)"),
        ("{a: 1, a: 2}", 1, "duplicate key 'a' (line 1)"),
        ("a: 1\n\tb: 2", 2, r"found character '\t' that cannot start any token"),
        ("a: [1, 2", 1, "while parsing a flow sequence"),
        ("a: 1\n---\nb: 2", 2, "found another document"),
        ("a: 1\nb: *gone", 2, "found undefined alias"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]", 2, "could not determine a constructor for the tag"),
        ("a: &a [*a]", 1, "an alias contains itself"),
        ("a: 1\nb: \x00", 2, "invalid character U+0000 in YAML"),
        ("a: !!int ''", None, "a value does not fit its type"),
        ("a: !!bool maybe", None, "a value does not fit its type"),
        ("a: !!timestamp soon", None, "a value does not fit its type"),
        ("[" * 5000, None, "it is nested too deeply"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int | None, message: str) -> None:
    error = wrong(text)
    assert error.line == line
    assert message in str(error)
    assert "\n" not in str(error)


def test_aliases_of_aliases_cannot_make_a_small_text_large() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "it expands to more than" in str(wrong("\n".join(lines)))
    merged = ["a0: &a0 {k: v}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    assert "it expands to more than" in str(wrong("\n".join(merged)))


def test_what_is_dumped_reads_the_same_here_and_in_plain_yaml() -> None:
    data: dict[str, Any] = {
        "b": "1e5",
        "a": 1e-5,
        "day": "2024-05-01",
        "flag": "no",
        "text": "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    }
    text = dump_yaml(data)
    assert parse_yaml(text) == data
    assert yaml.safe_load(text) == data
    assert list(parse_yaml(text)) == ["b", "a", "day", "flag", "text"]
    assert data["text"] in text


def test_a_date_that_yaml_would_make_stays_the_text_that_was_written() -> None:
    assert isinstance(yaml.safe_load("2024-05-01"), dt.date)
    assert dump_yaml({"run": parse_yaml("2024-05-01")}) == "run: '2024-05-01'\n"


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_data = st.dictionaries(st.text(), _scalars | st.lists(_scalars, max_size=3), max_size=4)


@given(_data)
def test_data_comes_back_from_its_yaml_as_it_was(data: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(data)) == data


def test_numbers_beyond_all_bounds_come_back() -> None:
    assert math.isnan(parse_yaml(dump_yaml({"x": math.nan}))["x"])
    assert parse_yaml(dump_yaml({"x": -math.inf}))["x"] == -math.inf


_tokens = st.sampled_from(
    [
        *[
            "a",
            "1",
            ": ",
            ":",
            "- ",
            "\n",
            "  ",
            "\t",
            "[",
            "]",
            "{",
            "}",
            ",",
            "&a ",
            "*a",
            "<<",
            "? ",
            "|\n",
            "'",
            '"',
        ],
        *[
            "!!int ",
            "!!float ",
            "!!bool ",
            "!!null ",
            "!!binary ",
            "!!timestamp ",
            "!!set ",
            "!!omap ",
            "!!pairs ",
            "!x ",
        ],
        *["#", "%", "---", "...", "0x", "1:30", "2024-13-45", ".inf", "\x07"],
    ]
)


@given(st.text() | st.lists(_tokens, max_size=14).map("".join))
def test_whatever_stands_in_a_yaml_it_is_data_or_one_error(text: str) -> None:
    try:
        parse_yaml(text)
    except YamlError as error:
        assert "\n" not in str(error)  # noqa: PT017 - an error is one of two right answers
