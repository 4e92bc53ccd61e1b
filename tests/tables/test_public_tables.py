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
from multinode.sweep.cell_sheet import lead
from multinode.sweep.cell_table import relative_to
from multinode.sweep.cells import CellRow, CellTable
from multinode.tables.imported_rows import imported_rows
from multinode.tables.imported_table import Extras, ImportedRow, parse_table

PUBLIC = tomllib.loads((Path(__file__).parent / "cases" / "public.toml").read_text())["table"]
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
    with pytest.raises(UsageError, match="nothing measured is left without 'device num', "):
        rows(case["text"], "table.md", skip_unknown=True)


def test_samples_follow_from_tokens_if_the_user_says_how_many_a_sample_has() -> None:
    (case,) = (case for case in PUBLIC if case["suffix"] == "json")
    (row,) = cells(case["text"], "table.json", skip_unknown=True, defaults={"tokens_per_sample": "2048"})
    assert row.samples_per_s is not None
    assert known(row.samples_per_s).value == pytest.approx(8369.4557 / 2048)


# Articles of one author, figures as published: prices, fine-tuning, a grid of batches, FLOP/s of devices.
ARTICLES = {
    "prices": (
        "| GPU | second-hand price (CNY) |\n|---|---|\n| RTX 4090 | 15000 |\n| RTX 3090 | 6000 |\n| A100 | 80000 |\n"
        "| RTX 2080 Ti 22G | 2400 |\n| A6000 | 30000 |\n| V100 16G | 1000 |\n",
        {"second-hand price (CNY)": "price_purchase_gpu"},
        {"price_purchase_gpu": 15000},
    ),
    "fine-tuning": (
        "| base | card | cards | method | batch | train samples/s | wall | peak (MiB) |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| baichuan2-7b | RTX 4090 | 1 | full ZeRO-3 offload | 1 | 0.085 | 3:35:20 | 15075.9 |\n"
        "| baichuan2-7b | RTX 4090 | 2 | full ZeRO-3 offload | 4 | 0.909 | 20:10 | 19869.9 |\n"
        "| baichuan2-7b | RTX 4090 | 1 | LoRA | 4 | - | - | OOM |\n"
        "| chatglm3-6b | RTX 4090 | 1 | QLoRA | 2 | 1.727 | 10:36 | 11722 |\n",
        {
            "base": "model",
            "card": "gpu",
            "cards": "gpus",
            "train samples/s": "samples/s",
            "wall": "runtime",
            "peak (MiB)": "memory",
        },
        {
            "world_size": 1,
            "per_device_batch": 1,
            "samples_per_s": 0.085,
            "whole_s": 12920,
            "peak_memory_gib": 15075.9 / 1024,
        },
    ),
    "batches": (
        "| run | fp16 | train bs | total train bs | updates | it/s | seq/s | wall (s) |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| V100_4gpu_8 | false | 32 | 128 | 32 | 0.157 | 20.108 | 203.6953 |\n"
        "| A100_1gpu_8 | true | 8 | 32 | 128 | 1.111 | 35.552 | 115.2122 |\n",
        {"run": "name", "updates": "steps", "wall (s)": "runtime"},
        {
            "all_devices_batch": 32,
            "global_batch": 128,
            "steps": 32,
            "steps_per_s": 0.157,
            "samples_per_s": 20.108,
            "whole_s": 203.6953,
        },
    ),
    "devices": (
        "| device | BERT forward and backward (TFLOP/s) | fp16 matrix product (TFLOP/s) | price (USD) |\n"
        "|---|---|---|---|\n"
        "| A100 | 136 | 230 | 16000 |\n| A6000 | 70 | 95 | 4000 |\n| RTX 3090 Ti | 62 | 81 | 1500 |\n",
        {
            "BERT forward and backward (TFLOP/s)": "model_tflops",
            "fp16 matrix product (TFLOP/s)": "hardware_tflops",
            "price (USD)": "price_purchase_gpu",
        },
        {"model_tflops": 136, "hardware_tflops": 230, "price_purchase_gpu": 16000},
    ),
}


@pytest.mark.parametrize("article", ARTICLES)
def test_tables_of_articles_are_read_with_names_of_columns_alone(article: str) -> None:
    text, columns, first = ARTICLES[article]
    found = rows(text, "article.md", columns=columns)
    assert len(found) == text.count("\n") - 2
    assert figures(found[0]) == pytest.approx(first)


def test_a_row_that_ran_out_of_memory_is_never_the_fastest() -> None:
    text = "name,samples/s,memory\nsmall,2.0,20GB\nlarge,9.0,OOM\nlarger,3.0,22GB\n"
    assert headline(text).startswith("The fastest is larger with 3.00 samples/s, 1.5 times as fast as small; ")
    assert "2 of 3 cells measured, 1 out of memory" in headline(text)
    assert headline("name,tokens/s,memory\na,20,20GB\nb,90,OOM\n").startswith("The fastest is a with 20.0 tokens/s")
    first = "name,samples/s,memory\nlarge,9.0,OOM\nsmall,2.0,20GB\nlarger,3.0,22GB\n"
    assert "1.5 times as fast as small" in headline(first)


def test_labels_that_differ_hold_back_the_ratio() -> None:
    text = "name,Kernels,samples/s\na,naive,2.0\nb,fused,3.0\nc,fused,2.5\n"
    assert headline(text) == (
        "The fastest is b with 3.00 samples/s, though cells differ in Kernels; 3 of 3 cells measured."
    )
    assert "1.5 times as fast as a" in headline(text.replace("fused", "naive"))
    # A date that differs in every row tells nothing.
    assert "1.5 times as fast as a" in headline(text.replace("c,fused", "c,tuned"))


def test_labels_tell_rows_apart_and_stand_in_the_table() -> None:
    text = "gpu,gpus,Distribution Type,tokens/s\nA100,2,ZeRO-2,1800\nA100,2,DDP,2700\n"
    found = cells(text)
    assert [row.label for row in found] == ["a100-x2-zero-2", "a100-x2-ddp"]
    assert [row.varied for row in found] == [{"Distribution Type": "ZeRO-2"}, {"Distribution Type": "DDP"}]


_pieces = st.sampled_from(
    ["gpus", "samples/s", "note", "(k)", "| ", " | ", "  ", "\t", "---|", "|--|--|", "8", "14.2", "OOM", "45%"]
    + ["\n", "{", "}", "[", "]", '"', ":", ",", "\u5343", "\u2502", "train_runtime", "log_history"]
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
