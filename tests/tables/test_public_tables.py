"""Public tables: what an import reads of them by names alone, and what it asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.errors import UsageError
from multinode.stats.unknown import known
from multinode.sweep.figures import CellRow, CellTable
from multinode.sweep.screen import cells_sheet, lead
from multinode.sweep.table import relative_to
from multinode.tables.imported_rows import imported_rows
from multinode.tables.imported_table import Extras, ImportedRow, parse_table

PUBLIC = tomllib.loads((Path(__file__).parent / "cases" / "public.toml").read_text())["table"]
ARTICLES = tomllib.loads((Path(__file__).parent / "cases" / "articles.toml").read_text())
BY_SOURCE = {case["source"]: case for case in PUBLIC}


def rows(text: str, name: str = "table.csv", **extras: Any) -> tuple[ImportedRow, ...]:
    return parse_table(text, name, Extras(**extras)).rows


def cells(text: str, name: str = "table.csv", **extras: Any) -> tuple[CellRow, ...]:
    return imported_rows(rows(text, name, **extras))


def headline(text: str, **extras: Any) -> str:
    return lead(relative_to(CellTable(run_id="run", job="job", cells=cells(text, **extras))))


def figures(row: ImportedRow) -> dict[str, float]:
    return {name: figure.value for name, figure in row.figures.items()}


@pytest.mark.parametrize("source", [source for source, case in BY_SOURCE.items() if "error" in case])
def test_a_table_with_unknown_names_asks_for_them_or_names_its_line(source: str) -> None:
    case = BY_SOURCE[source]
    with pytest.raises(UsageError) as refused:
        rows(case["text"], f"table.{case['suffix']}")
    assert refused.value.message.startswith(case["error"])


@pytest.mark.parametrize("source", [source for source, case in BY_SOURCE.items() if "figures" in case])
def test_a_table_is_read_by_the_names_that_the_user_gives(source: str) -> None:
    case = BY_SOURCE[source]
    named = {name: case[name] for name in ("columns", "defaults", "skip_unknown") if name in case}
    table = parse_table(case["text"], f"table.{case['suffix']}", Extras(**named))
    assert [figures(row) for row in table.rows] == [pytest.approx(found, rel=1e-6) for found in case["figures"]]
    assert table.rows[0].words == case.get("words", {})
    assert list(table.labels) == case.get("labels", [])
    assert list(table.ignored) == case.get("ignored", [])


def test_unknown_columns_cannot_be_left_out_if_no_speed_is_left() -> None:
    (case,) = (case for source, case in BY_SOURCE.items() if source.startswith("Oneflow"))
    with pytest.raises(UsageError, match="without 'device num', "):
        rows(case["text"], "table.md", skip_unknown=True)


def test_samples_follow_from_tokens_if_the_user_says_how_many_a_sample_has() -> None:
    (case,) = (case for case in PUBLIC if case["suffix"] == "json")
    (row,) = cells(case["text"], "table.json", skip_unknown=True, defaults={"tokens_per_sample": "2048"})
    assert row.samples_per_s is not None
    assert known(row.samples_per_s).value == pytest.approx(8369.4557 / 2048)


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *rows))


@pytest.mark.parametrize("article", ARTICLES)
def test_tables_of_articles_are_read_with_names_of_columns_alone(article: str) -> None:
    table = ARTICLES[article]
    found = rows(markdown(table["titles"], table["rows"]), "article.md", columns=table["columns"])
    assert len(found) == len(table["rows"])
    assert figures(found[-1]) == pytest.approx(table["last"])


def test_a_row_that_ran_out_of_memory_is_never_the_fastest() -> None:
    text = "name,samples/s,memory\nsmall,2.0,20GB\nlarge,9.0,OOM\nlarger,3.0,22GB\n"
    assert headline(text).startswith("The fastest is larger at 3.00 samples/s, 1.5 times as fast as small; ")
    assert "2 of 3 cells measured, 1 out of memory" in headline(text)
    assert headline("name,tokens/s,memory\na,20,20GB\nb,90,OOM\n").startswith("The fastest is a at 20.0 tokens/s")
    first = "name,samples/s,memory\nlarge,9.0,OOM\nsmall,2.0,20GB\nlarger,3.0,22GB\n"
    assert "1.5 times as fast as small" in headline(first)


def test_labels_that_differ_hold_back_the_ratio() -> None:
    text = "name,Kernels,samples/s\na,naive,2.0\nb,fused,3.0\nc,fused,2.5\n"
    assert headline(text) == (
        "The fastest is b at 3.00 samples/s, though cells differ in Kernels; 3 of 3 cells measured."
    )
    assert "1.5 times as fast as a" in headline(text.replace("fused", "naive"))
    # A date that differs in every row tells nothing.
    assert "1.5 times as fast as a" in headline(text.replace("c,fused", "c,tuned"))


def test_labels_tell_rows_apart_and_stand_in_the_table() -> None:
    # The second has the name of a key of a job.
    text = "gpu,gpus,Distribution Type,deepspeed,tokens/s\nA100,2,ZeRO-2,on,1800\nA100,2,DDP,off,2700\n"
    found = cells(text)
    assert [row.label for row in found] == ["a100-x2-zero-2-on", "a100-x2-ddp-off"]
    shown = cells_sheet(CellTable(run_id="run", job="job", cells=found))
    assert [column.name for column in shown.columns][1:3] == ["Distribution Type", "deepspeed"]
    assert [row[1:3] for row in shown.rows] == [("ZeRO-2", "on"), ("DDP", "off")]


_pieces = st.sampled_from(
    [
        *("gpus", "samples/s", "note", "(k)", "| ", " | ", "  ", "\t", "---|", "|--|--|", "8", "14.2", "OOM", "45%"),
        *("\n", "{", "}", "[", "]", '"', ":", ",", "\u5343", "\u2502", "train_runtime", "log_history"),
    ]
)


@given(st.sampled_from(["md", "txt", "json", "jsonl"]), st.lists(_pieces | st.text(max_size=2), max_size=24))
def test_any_text_in_any_form_is_a_table_or_one_error(suffix: str, pieces: list[str]) -> None:
    try:
        found = rows("".join(pieces), f"table.{suffix}", skip_unknown=len(pieces) % 2 == 1)
    except UsageError as error:
        assert error.message.startswith((f"table.{suffix}:", f"table.{suffix}: "))  # noqa: PT017 - one of two right answers
    else:
        assert found
        assert imported_rows(found)
