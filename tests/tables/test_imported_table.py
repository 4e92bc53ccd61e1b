from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.errors import UsageError
from multinode.predict.rounded import parse_rounded
from multinode.stats.estimate import exactly
from multinode.tables.imported_columns import IMPORTED
from multinode.tables.imported_table import Extras, ImportedTable, parse_table

REFERENCE = Path(__file__).parents[2] / "docs/reference/imported-columns.md"
PLAIN = "gpu,gpus,batch,samples/s\nRTX 4090,2,4,0.909\nRTX 3090,2,4,0.722\n"


def read(text: str, *, defaults: dict[str, str] | None = None, ignore: tuple[str, ...] = ()) -> ImportedTable:
    return parse_table(text, "table.csv", Extras(defaults=defaults or {}, ignore=ignore))


def complaint(text: str, *, defaults: dict[str, str] | None = None, ignore: tuple[str, ...] = ()) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text, defaults=defaults, ignore=ignore)
    return caught.value


def test_a_row_has_words_figures_and_its_line() -> None:
    first, second = read(PLAIN).rows
    assert first.words == {"device": "RTX 4090"}
    assert first.figures == {
        "world_size": exactly(2),
        "per_device_batch": exactly(4),
        "samples_per_s": parse_rounded("0.909"),
    }
    assert (first.line, second.line) == (2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + PLAIN,
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.rstrip("\n"),
        "\n\n" + PLAIN + "\n,,,\n",
        PLAIN.replace("RTX 4090", '"RTX 4090"').replace("samples/s", '"samples/s"'),
        PLAIN.replace(",", " , "),
        PLAIN.replace("gpu,gpus,batch,samples/s", "GPU Name,Num GPUs,Batch-Size,Samples/s"),
    ],
)
def test_the_same_table_is_read_however_a_program_writes_it(text: str) -> None:
    assert [(row.words, row.figures) for row in read(text).rows] == [
        (row.words, row.figures) for row in read(PLAIN).rows
    ]


def test_quotes_hold_delimiters_and_quotes() -> None:
    (row,) = read('name,samples/s\n"a, ""b"" and c",1.5\n').rows
    assert row.words["label"] == 'a, "b" and c'


def test_a_default_holds_where_a_row_says_nothing_and_not_where_it_denies() -> None:
    table = read("gpus,samples\n1,\n1,2048\n1,-\n", defaults={"samples": "1100", "epochs": "1"})
    assert [row.figures.get("dataset_samples") for row in table.rows] == [exactly(1100), exactly(2048), None]
    assert {row.figures["epochs"] for row in table.rows} == {exactly(1)}


def test_a_column_that_is_ignored_may_hold_anything() -> None:
    table = read("gpus,loss,note\n1,nan,\x07\n", ignore=("Loss", "note"))
    assert table.rows[0].figures == {"world_size": exactly(1)}
    assert table.ignored == ("Loss", "note")


@pytest.mark.parametrize(("cell", "out_of"), [("OOM", "gpu"), ("oom", "gpu"), ("OOM node", "node"), ("20", None)])
def test_out_of_memory_is_a_result(cell: str, out_of: str | None) -> None:
    assert read(f"gpus,memory_mb\n1,{cell}\n").rows[0].out_of == out_of


@pytest.mark.parametrize(
    ("column", "cell", "figure", "value"),
    [
        ("memory_mb", "15075.9", "peak_memory_gib", 15075.9e6 / 2**30),
        ("memory (MiB)", "1024", "peak_memory_gib", 1),
        ("Peak memory GB", "2", "peak_memory_gib", 2e9 / 2**30),
        ("runtime", "3:35:20", "whole_s", 12920),
        ("runtime_s", "203.6953", "whole_s", 203.6953),
        ("runtime_h", "1.5", "whole_s", 5400),
        ("step_time_s", "0.5", "step_time_ms", 500),
        ("epochs", "3", "epochs", 3),
        ("MFU", "45.2 %", "mfu", 0.452),
        ("hfu", "0.5", "hfu", 0.5),
        ("network share", "12%", "network_share", 0.12),
        ("energy_j_per_sample", "320", "energy_j_per_sample", 320),
        ("total_train_batch_size", "128", "global_batch", 128),
    ],
)
def test_the_unit_of_a_figure_is_its_columns(column: str, cell: str, figure: str, value: float) -> None:
    assert read(f"{column}\n{cell}\n").rows[0].figures[figure].value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "table.csv:1: it has no rows"),
        ("gpus\n", "table.csv:1: it has no rows"),
        ("gpus,samples_s\n1,2\n", "table.csv:1: unknown column 'samples_s' (nearest: samples)"),
        ("\ufeffsped,gpus\n1,2\n", "table.csv:1: unknown column 'sped'"),
        ("gpus,price\n1,2\n", "table.csv:1: unknown column 'price' (nearest: price_"),
        ("gpus,\N{SNOWMAN}\n1,2\n", "table.csv:1: unknown column '\N{SNOWMAN}'"),
        ("gpus,samples/s\n1,2,3\n", "table.csv:2: 3 cells under 2 titles"),
        ("gpus,samples/s\n1,0,085\n", "table.csv:2: 3 cells under 2 titles"),
        ("gpus;samples/s\n1;0,085\n", "table.csv:2: '0,085' is ambiguous (decimal or thousands separator)"),
        ("gpus,samples/s\n1\n", "table.csv:2: 1 cells under 2 titles"),
        ("gpus,\n1,7\n", "table.csv:2: a cell is in a column without a title"),
        ("gpus,gpus\n1,1\n", "table.csv:1: 'gpus' and 'gpus' mean the same thing"),
        ("gpus,num_gpus\n1,1\n", "table.csv:1: 'gpus' and 'num_gpus' mean the same thing"),
        ("memory_mb,memory_gib\n1,1\n", "table.csv:1: 'memory_mb' and 'memory_gib' mean the same thing"),
        ("gpus,samples/s\n1,1.5 it/s\n", "table.csv:2: samples/s: '1.5 it/s': expected a positive number"),
        ("gpus,samples/s\n1,=1+1\n", "table.csv:2: samples/s: '=1+1': expected a positive number"),
        ("gpus,samples/s\n1,1e400\n", "table.csv:2: samples/s: '1e400': expected a positive number"),
        ("gpus\n2.5\n", "table.csv:2: gpus: '2.5': expected a whole number, at least 1"),
        ("gpus\n\n0\n", "table.csv:3: gpus: '0': expected a whole number, at least 1"),
        ("gpus\n" + "9" * 400 + "\n", "table.csv:2: gpus: '9999"),
        ("mfu\n145.2\n", "table.csv:2: mfu: '145.2': expected a positive share, such as 0.45 or 45%"),
        ("hfu\n120 %\n", "table.csv:2: hfu: '120 %': expected a positive share"),
        ("fp16\nmaybe\n", "table.csv:2: fp16: 'maybe': expected true or false"),
        ("runtime\n1:2\n", "table.csv:2: runtime: '1:2': expected seconds, 2h05m, 28:04 (minutes) or 3:35:20 (hours)"),
        ("runtime\n0:00\n", "table.csv:2: runtime: '0:00': expected seconds"),
        ("gpus\nOOM\n", "table.csv:2: gpus: 'OOM': expected a whole number"),
        ("model\n\x1b[31mred\n", "table.csv:2: model: invalid character U+001B"),
        ("model\n\u202eevil\n", "table.csv:2: model: invalid character U+202E"),
        ('model\n"a\nb"\n', "table.csv:2: model: invalid character U+000A"),
        ("model\n" + "x" * 201 + "\n", "table.csv:2: model: 'xxx"),
        ('gpus,model\n1,a\n2,"b\n', "table.csv:3: it is not CSV: unexpected end of data"),
        ('model\n"a"b\n', "table.csv:2: it is not CSV: "),
        ("model\n" + "x" * 200_000 + "\n", "table.csv:2: it is not CSV: field larger than field limit"),
    ],
)
def test_a_wrong_cell_is_an_error_with_its_line(text: str, said: str) -> None:
    error = complaint(text)
    assert error.message.startswith(said)
    assert len(error.message) < 250
    assert error.hint


def test_an_unknown_column_is_told_which_there_are_and_how_to_pass_over_it() -> None:
    hint = complaint("gpus,loss\n1,2\n").hint or ""
    assert "samples_per_s" in hint
    assert "--ignore 'loss'" in hint


def test_a_default_that_is_wrong_is_named_as_the_option_that_it_was() -> None:
    error = complaint(PLAIN, defaults={"samples": "many"})
    assert error.message == "table.csv: --default samples=many: expected a whole number, at least 1"
    assert complaint(PLAIN, defaults={"sampels": "1"}).message == (
        "table.csv: unknown column 'sampels' (nearest: samples)"
    )


def test_a_cell_that_looks_like_a_formula_is_words_where_words_belong() -> None:
    assert read("model,gpus\n=HYPERLINK(1),1\n").rows[0].words["model"] == "=HYPERLINK(1)"


def test_ten_thousand_rows_are_a_table_and_a_flood_is_not() -> None:
    assert len(read("gpus,samples/s\n" + "1,2.5\n" * 10_000).rows) == 10_000
    assert "table.csv:20002: there are more than 20000 rows" in complaint("gpus\n" + "1\n" * 20_001).message


def test_every_column_is_in_the_reference_under_each_of_its_names() -> None:
    rows = re.findall(r"^\| `.+$", REFERENCE.read_text(), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[0])}
    assert set(IMPORTED) <= documented


_cells = st.sampled_from(
    ["gpus", "samples/s", "model", "runtime", "1", "2.5", "OOM", "28:04", "x", '"', ",", ";", "\n", "\r"]
)


@given(st.text() | st.lists(_cells | st.text(max_size=2), max_size=20).map("".join))
def test_any_text_is_a_table_or_one_error(text: str) -> None:
    try:
        found = read(text)
    except UsageError as error:
        assert error.message.startswith("table.csv:")  # noqa: PT017 - an error is one of two right answers
        assert "\n" not in error.message  # noqa: PT017 - as above
    else:
        assert found.rows


_names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12).filter(
    lambda text: text.lower() not in {"-", "null", "none", "n/a", "na"}
)


@given(st.lists(st.tuples(_names, st.integers(1, 10**6), st.floats(1e-3, 1e6)), min_size=1, max_size=8))
def test_what_a_program_writes_is_read_as_it_was(rows: list[tuple[str, int, float]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["name", "gpus", "samples_per_s"])
    writer.writerows(rows)
    found = read(text.getvalue()).rows
    assert [
        (row.words["label"], row.figures["world_size"].value, row.figures["samples_per_s"].value) for row in found
    ] == rows


def test_a_column_that_is_not_there_cannot_be_passed_over() -> None:
    error = complaint("gpus,loss\n1,2\n", ignore=("loss", "nothere"))
    assert error.message == "table.csv: it has no column 'nothere' to ignore"


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


def read_yaml(text: str, extras: Extras | None = None) -> ImportedTable:
    return parse_table(text, "table.yaml", extras or Extras())


def yaml_complaint(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_yaml(text)
    return caught.value


def test_both_forms_of_a_table_say_the_same() -> None:
    one, other = read_yaml(COLUMNS), read_yaml(MAPPINGS)
    assert [(row.words, row.figures) for row in one.rows] == [(row.words, row.figures) for row in other.rows]
    assert [row.line for row in one.rows] == [4, 5]
    assert one.rows[1].figures["whole_s"].value == 421


def test_a_figure_keeps_the_digits_that_it_was_written_with() -> None:
    assert read_yaml(COLUMNS).rows[0].figures["samples_per_s"] == parse_rounded("0.220")
    assert read_yaml(COLUMNS).rows[0].figures["samples_per_s"] != parse_rounded("0.22")


def test_what_the_user_says_comes_before_what_the_file_says() -> None:
    found = read_yaml(COLUMNS, Extras(defaults={"num_samples": "2048"}))
    assert found.rows[0].figures["dataset_samples"] == exactly(2048)
    assert found.rows[0].figures["epochs"] == exactly(1)


def test_null_denies_what_the_default_says() -> None:
    rows = read_yaml(
        "defaults: {samples: 1100}\nrows:\n- {gpus: 1}\n- {gpus: 1, samples: null}\n- {gpus: 1, samples: ~}\n"
    )
    assert [row.figures.get("dataset_samples") for row in rows.rows] == [exactly(1100), None, None]


def test_the_file_itself_may_pass_over_a_column() -> None:
    found = read_yaml("ignore: [loss]\nrows: [{gpus: 1, loss: [1, 2]}]".replace("[1, 2]", "nan"))
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
        ("columns: [gpus]\nrows:\n- [1]\n- [1, 2]", "table.yaml:4: 2 cells in a row of 1 columns"),
        ("- gpus: 1\n- 7", "table.yaml:2: expected a list"),
        ("- gpus: 1\n- gpus: [1]", "table.yaml:2: expected one word or number, not a list or a mapping"),
        ("- gpus: 1\n- {[1]: 2}", "table.yaml:2: "),
        ("row: []", "table.yaml:1: unknown key 'row': expected one of columns, rows, defaults, ignore"),
        ("defaults: [1]\nrows: []", "table.yaml:1: expected a mapping of columns to cells"),
        (
            "defaults:\n  samples: 1\n  epochs: many\nrows: [{gpus: 1}]",
            "table.yaml:3: epochs: 'many': expected a number",
        ),
        ("- gpus: 1\n  gpu: a\n  gpu: b", "table.yaml:3: duplicate key 'gpu' (line 2)"),
        ("- gpus: 1\n  num_gpus: 1", "table.yaml:2: 'gpus' and 'num_gpus' mean the same thing"),
        ("- gpus: 1\n  sped: 1", "table.yaml:2: unknown column 'sped'"),
        ('- model: "a\\u202eb"', "table.yaml:1: model: invalid character U+202E"),
        ("- gpus: 1\n- gpus: [", "table.yaml:2: "),
        ("- &a {gpus: 1}\n- {<<: *a, batch: 1}", "table.yaml:2: expected one word or number"),
        ("- &a [*a]", "table.yaml:1: "),
        ("- !!python/object/apply:os.system [ls]", "table.yaml:1: "),
        ("\x07", "table.yaml:1: invalid character U+0007 in YAML"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_place(text: str, said: str) -> None:
    error = yaml_complaint(text)
    assert error.message.startswith(said)
    assert error.hint


def test_aliases_that_unfold_without_bound_are_refused() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x]\n"
    for one, other in zip("abcdefghi", "bcdefghij", strict=True):
        bomb += f"{other}: &{other} [{', '.join([f'*{one}'] * 8)}]\n"
    assert "expands to more than" in yaml_complaint(bomb).message


_words = st.sampled_from(
    ["columns: ", "rows:\n", "defaults: ", "[gpus]", "- ", "[1]", "{gpus: 1}", "&a ", "*a", "\n", "~", "? "]
)


@given(st.text() | st.lists(_words | st.text(max_size=2), max_size=12).map("".join))
def test_any_text_is_a_table_or_one_error_with_its_line(text: str) -> None:
    try:
        found = read_yaml(text)
    except UsageError as error:
        assert error.message.startswith("table.yaml:")  # noqa: PT017 - an error is one of two right answers
        assert "\n" not in error.message  # noqa: PT017 - as above
    else:
        assert found.rows
