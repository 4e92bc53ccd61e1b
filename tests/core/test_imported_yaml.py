from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.core.grid.imported_table import Extras, ImportedTable, parse_table
from multinode.core.text.rounded import exactly, parse_rounded
from multinode.errors import UsageError

COLUMNS = """\
defaults: {samples: 1100, epochs: 1}
columns: [gpu, gpus, samples/s, runtime]
rows:
  - [RTX 4090, 1, 0.220, 3:35:20]
  - [RTX 4090, 2, null, "07:01"]
"""
MAPPINGS = """\
- {gpu: RTX 4090, gpus: 1, samples/s: 0.220, runtime: "3:35:20", samples: 1100, epochs: 1}
- {gpu: RTX 4090, gpus: 2, runtime: 7:01, samples: 1100, epochs: 1}
"""


def read(text: str, extras: Extras | None = None) -> ImportedTable:
    return parse_table(text, "table.yaml", extras or Extras())


def complaint(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text)
    return caught.value


def test_both_forms_of_a_table_say_the_same() -> None:
    one, other = read(COLUMNS), read(MAPPINGS)
    assert [(row.words, row.figures) for row in one.rows] == [(row.words, row.figures) for row in other.rows]
    assert [row.line for row in one.rows] == [4, 5]
    assert one.rows[1].figures["whole_s"].value == 421


def test_a_figure_keeps_the_digits_that_it_was_written_with() -> None:
    assert read(COLUMNS).rows[0].figures["samples_per_s"] == parse_rounded("0.220")
    assert read(COLUMNS).rows[0].figures["samples_per_s"] != parse_rounded("0.22")


def test_what_the_user_says_comes_before_what_the_file_says() -> None:
    found = read(COLUMNS, Extras(defaults={"num_samples": "2048"}))
    assert found.rows[0].figures["dataset_samples"] == exactly(2048)
    assert found.rows[0].figures["epochs"] == exactly(1)


def test_null_denies_what_the_default_says() -> None:
    rows = read("defaults: {samples: 1100}\nrows:\n- {gpus: 1}\n- {gpus: 1, samples: null}\n- {gpus: 1, samples: ~}\n")
    assert [row.figures.get("dataset_samples") for row in rows.rows] == [exactly(1100), None, None]


def test_the_file_itself_may_pass_over_a_column() -> None:
    found = read("ignore: [loss]\nrows: [{gpus: 1, loss: [1, 2]}]".replace("[1, 2]", "nan"))
    assert found.ignored == ("loss",)
    assert found.rows[0].figures == {"world_size": exactly(1)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "table.yaml:1: expected a list of rows"),
        ("seven", "table.yaml:1: expected a list of rows"),
        ("[]", "table.yaml:1: it has no rows"),
        ("rows: 7", "table.yaml:1: expected a list"),
        ("columns: {a: 1}\nrows: []", "table.yaml:1: expected a list"),
        ("columns: [gpus]\nrows:\n- [1]\n- [1, 2]", "table.yaml:4: 2 cells stand in a row of 1 columns"),
        ("- gpus: 1\n- 7", "table.yaml:2: expected a list"),
        ("- gpus: 1\n- gpus: [1]", "table.yaml:2: expected one word or number, not a list or a mapping"),
        ("- gpus: 1\n- {[1]: 2}", "table.yaml:2: "),
        ("row: []", "table.yaml:1: unknown key 'row': expected one of columns, rows, defaults, ignore"),
        ("defaults: [1]\nrows: []", "table.yaml:1: expected a mapping of columns to cells"),
        ("defaults:\n  samples: 1\n  epochs: x\nrows: [{gpus: 1}]", "table.yaml:3: epochs: 'x': expected a number"),
        ("- gpus: 1\n  gpu: a\n  gpu: b", "table.yaml:3: the key 'gpu' stands on line 2 already"),
        ("- gpus: 1\n  num_gpus: 1", "table.yaml:2: 'gpus' and 'num_gpus' tell the same"),
        ("- gpus: 1\n  speed: 1", "table.yaml:2: unknown column 'speed'"),
        ('- model: "a\\u202eb"', "table.yaml:1: model: the character U+202E stands in it"),
        ("- gpus: 1\n- gpus: [", "table.yaml:2: "),
        ("- &a {gpus: 1}\n- {<<: *a, batch: 1}", "table.yaml:2: expected one word or number"),
        ("- &a [*a]", "table.yaml:1: "),
        ("- !!python/object/apply:os.system [ls]", "table.yaml:1: "),
        ("\x07", "table.yaml:1: the character U+0007 may not stand in YAML"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_place(text: str, said: str) -> None:
    error = complaint(text)
    assert error.message.startswith(said)
    assert error.hint


def test_aliases_that_unfold_without_bound_are_refused() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x]\n"
    for one, other in zip("abcdefghi", "bcdefghij", strict=True):
        bomb += f"{other}: &{other} [{', '.join([f'*{one}'] * 8)}]\n"
    assert "unfolds to more than" in complaint(bomb).message


_words = st.sampled_from(
    ["columns: ", "rows:\n", "defaults: ", "[gpus]", "- ", "[1]", "{gpus: 1}", "&a ", "*a", "\n", "~", "? "]
)


@given(st.text() | st.lists(_words | st.text(max_size=2), max_size=12).map("".join))
def test_any_text_is_a_table_or_one_error_with_its_line(text: str) -> None:
    try:
        found = read(text)
    except UsageError as error:
        assert error.message.startswith("table.yaml:")  # noqa: PT017 - an error is one of two right answers
        assert "\n" not in error.message  # noqa: PT017 - as above
    else:
        assert found.rows
