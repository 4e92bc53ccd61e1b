"""Tables in the forms in which people publish them: which column a title means, what a cell says, and whole files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multinode.errors import UsageError
from multinode.stats.estimate import Estimate
from multinode.tables.imported_forms import nearest_columns, read_title
from multinode.tables.imported_table import Extras, ImportedRow, ImportedTable, parse_table

TABLES = Path(__file__).parent / "cases"
CASES = json.loads((TABLES / "cases.json").read_text())


def read(text: str, name: str = "table.csv", **extras: object) -> ImportedTable:
    return parse_table(text, name, Extras(**extras))  # type: ignore[arg-type]


def rows(text: str, name: str = "table.csv", **extras: object) -> tuple[ImportedRow, ...]:
    return read(text, name, **extras).rows


def refused(text: str, name: str = "table.csv", **extras: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(text, name, **extras)
    return caught.value


def figures(row: ImportedRow) -> dict[str, float]:
    return {name: figure.value for name, figure in row.figures.items()}


def test_a_table_in_chinese_has_the_values_that_it_shows() -> None:
    one, two, full = rows((TABLES / "zh.csv").read_text())
    assert one.words == {"model": "Qwen-7B", "device": "RTX 4090", "method": "LoRA"}
    settings = {"world_size": 8, "nodes": 1, "per_device_batch": 2, "accumulation": 4}
    assert figures(one) == pytest.approx(
        {**settings, "samples_per_s": 14.2, "tgs": 1850, "whole_s": 7500, "peak_memory_gib": 21.3e9 / 2**30}
    )
    assert two.figures["samples_per_s"] == Estimate(value=13, low=12, high=14)
    assert two.figures["tgs"] == Estimate(value=900, low=800, high=1000)
    assert two.figures["whole_s"].value == 9600
    assert full.words["method"].endswith("ZeRO-3")
    assert (full.out_of, full.figures.keys() & {"samples_per_s", "tgs"}) == ("gpu", set())


def test_seconds_a_step_are_no_steps_a_second() -> None:
    one, two = rows((TABLES / "sit.csv").read_text())
    assert [row.figures["step_time_ms"].value for row in (one, two)] == pytest.approx([2460, 8680])


def test_a_table_of_markdown_is_read_and_its_own_ratio_passed_over() -> None:
    table = read((TABLES / "dlperf.md").read_text(), "dlperf.md")
    assert [figures(row) for row in table.rows] == [
        {"nodes": nodes, "workers_per_node": 8, "per_device_batch": 32, "samples_per_s": speed}
        for nodes, speed in ((1, 921.32), (2, 1499.4))
    ]
    assert table.ignored == ("speedup",)


def test_what_the_trainer_prints_is_read() -> None:
    one, _ = rows((TABLES / "two.csv").read_text())
    assert figures(one) == {
        "nodes": 1,
        "world_size": 8,
        "per_device_batch": 1,
        "sequence_length": 2048,
        "accumulation": 8,
        "whole_s": 6203.7,
        "samples_per_s": 0.53,
        "steps_per_s": 0.033,
    }


@pytest.mark.parametrize(("title", "column", "scale"), CASES["titles"])
def test_a_title_is_the_column_that_it_names_in_its_unit(title: str, column: str, scale: float | None) -> None:
    known = read_title(title)
    assert known is not None
    (found,) = known.columns
    assert (found.column.name, found.scale) == (column, pytest.approx(scale) if scale else None)  # type: ignore[union-attr]


@pytest.mark.parametrize("title", CASES["unknown"])
def test_a_title_that_is_known_in_parts_is_unknown_and_nothing_is_suggested(title: str) -> None:
    assert read_title(title) is None
    assert "did you mean" not in refused(f"gpus,{title}\n1,2\n").message


@pytest.mark.parametrize(("title", "cell", "column", "bounds"), CASES["cells"])
def test_a_cell_is_the_figure_that_a_person_reads(title: str, cell: str, column: str, bounds: list[float]) -> None:
    found = rows(f"name,{title}\na,{cell}\n")[0].figures
    figure = found[column]
    assert [figure.value, figure.low, figure.high] == pytest.approx(bounds, rel=1e-4)
    assert list(found) == [column]


@pytest.mark.parametrize(("cell", "out_of"), CASES["absent"])
def test_out_of_memory_and_nothing_have_many_spellings(cell: str, out_of: str | None) -> None:
    (row,) = rows(f"gpus,samples/s\n1,{cell}\n")
    assert (row.out_of, list(row.figures)) == (out_of, ["world_size"])


@pytest.mark.parametrize(("title", "cell"), CASES["refused"])
def test_what_may_be_read_in_two_ways_or_is_another_quantity_is_refused(title: str, cell: str) -> None:
    error = refused(f"name,{title}\na,{cell}\n")
    assert f"{title}: {cell!r}: expected " in error.message


def test_a_memory_that_no_worker_has_was_in_another_unit() -> None:
    message = refused("gpus,memory_gb\n1,15387\n").message
    assert message == "table.csv:2: memory_gb: '15387': 14,330 GiB is more than a worker can have; did you mean MiB?"


def test_a_comma_among_semicolons_is_refused() -> None:
    assert "'1,234' is ambiguous (decimal or thousands separator)" in refused("gpus;tokens/s\n1;1,234\n").message


def test_all_unknown_columns_are_one_error_and_two_ways_past_it() -> None:
    text = "gpus,TFLOPs/GPU,loss,samples_s,samples/s\n8,120,0.1,3,14.2\n"
    error = refused(text)
    assert error.message == (
        "table.csv:1: 3 unknown columns: 'TFLOPs/GPU', 'loss', 'samples_s' (did you mean samples or samples_per_s?)"
    )
    table = read(text, columns={"TFLOPs/GPU": "model_tflops"}, skip_unknown=True)
    assert figures(table.rows[0]) == {"world_size": 8, "model_tflops": 120, "samples_per_s": 14.2}
    assert table.ignored == ("loss", "samples_s")


def test_a_column_that_is_named_has_to_be_there_and_its_name_to_be_known() -> None:
    assert "it has no column 'speed 1'" in refused("gpus\n1\n", columns={"speed 1": "tokens/s"}).message
    assert "there is no column 'token/h/s'" in refused("gpus,v\n1,2\n", columns={"v": "token/h/s"}).message


def test_figures_of_several_trainings_in_one_row_are_rows() -> None:
    wide = rows("name,samples/s (1 node),samples/s (2 nodes)\nLoRA,14.2,12~14\nfull,3.1,\n")
    assert [(row.words["label"], figures(row)) for row in wide] == [
        ("LoRA", {"nodes": 1, "samples_per_s": 14.2}),
        ("LoRA", {"nodes": 2, "samples_per_s": 13}),
        ("full", {"nodes": 1, "samples_per_s": 3.1}),
    ]


def test_titles_that_name_no_figure_are_told_which_it_is() -> None:
    text = "model,1 GPU,2 GPUs\nBERT,60.5,100\n"
    error = refused(text)
    assert "'1 GPU', '2 GPUs'" in error.message
    assert "--column '1 GPU=samples/s'" in (error.hint or "")
    one, two = rows(text, columns={"1 GPU": "samples/s", "2 GPUs": "samples/s"})
    assert (figures(one), figures(two)) == (
        {"world_size": 1, "samples_per_s": 60.5},
        {"world_size": 2, "samples_per_s": 100},
    )


def test_a_table_with_its_titles_at_the_left_is_turned() -> None:
    text = "| Metric | 1 node | 2 nodes |\n|---|---|---|\n| samples/s | 12.1 | 20.3 |\n| Step time | 850ms | 1.2 s |\n"
    assert [figures(row) for row in rows(text, "a.md")] == [
        {"nodes": 1, "samples_per_s": 12.1, "step_time_ms": 850},
        {"nodes": 2, "samples_per_s": 20.3, "step_time_ms": 1200},
    ]
    named = "| | A100 | H100 |\n|---|---|---|\n| samples/s | 12.1 | x |\n| gpus | 8 | 9.5 |\n"
    assert refused(named, "a.md").message == "a.md:4: gpus: '9.5': expected a whole number, at least 1"


def test_a_turned_table_may_begin_with_one_of_its_titles() -> None:
    text = "| GPU Number | 8 | 16 |\n|---|---|---|\n| TGS | 4078 | 3939 |\n| step time | 1.2 s | 1.3 s |\n"
    assert [figures(row) for row in rows(text, "a.md")] == [
        {"world_size": 8, "tgs": 4078, "step_time_ms": 1200},
        {"world_size": 16, "tgs": 3939, "step_time_ms": 1300},
    ]


@pytest.mark.parametrize(
    ("cell", "name", "counts"),
    [
        ("8 x A100", "A100", {"world_size": 8}),
        ("RTX 4090 x2", "RTX 4090", {"world_size": 2}),
        ("2x8xA100 80GB", "A100 80GB", {"nodes": 2, "workers_per_node": 8}),
        ("A100", "A100", {}),
        ("GTX 1080", "GTX 1080", {}),
    ],
)
def test_devices_may_stand_with_their_number(cell: str, name: str, counts: dict[str, int]) -> None:
    (row,) = rows(f"gpu,samples/s\n{cell},14.2\n")
    assert (row.words, figures(row)) == ({"device": name}, {**counts, "samples_per_s": 14.2})
    (row,) = rows(f"gpu,gpus,nodes,gpus_per_node\n{cell},16,2,8\n")
    assert figures(row) == {"world_size": 16, "nodes": 2, "workers_per_node": 8}


def test_nodes_and_gpus_may_stand_in_one_column() -> None:
    one, two = rows("Nodes x GPUs,samples/s\n2x8,14.2\n8,7.5\n")
    assert figures(one) == {"nodes": 2, "workers_per_node": 8, "samples_per_s": 14.2}
    assert figures(two) == {"world_size": 8, "samples_per_s": 7.5}


@pytest.mark.parametrize("heading", ["Results,,\n", "\n# Table 3\n"])
def test_a_heading_above_a_table_is_none_of_its_titles(heading: str) -> None:
    (row,) = rows(f"{heading}gpus,samples/s,model\n8,14.2,a\n")
    assert figures(row) == {"world_size": 8, "samples_per_s": 14.2}


def test_json_lines_are_rows() -> None:
    assert [figures(row) for row in rows('{"gpus": 8}\n\n{"gpus": 16}\n', "a.jsonl")] == [
        {"world_size": 8},
        {"world_size": 16},
    ]


def test_several_figures_of_one_cell_are_told_apart() -> None:
    text = "| gpus | Throughput (S/s \\| T/s \\| T/s/GPU) |\n|--|--|\n| 8 | 1.2 \\| 4915 \\| 614 |\n| 8 | OOM |\n"
    one, two = rows(text, "a.md")
    assert figures(one) == {"world_size": 8, "samples_per_s": 1.2, "tokens_per_s": 4915, "tgs": 614}
    assert two.out_of == "gpu"


def test_markdown_has_text_around_its_table_and_marks_in_it() -> None:
    text = (
        "# Speed\n\nText | with a bar\n\nGPU | samples/s\n:-- | --:\n**[A100](https://a.example)** | `14.2`\n\nmore\n"
    )
    (row,) = rows(text, "a.md")
    assert (row.words, figures(row), row.line) == ({"device": "A100"}, {"samples_per_s": 14.2}, 7)
    other = "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    assert len(rows(other + text + "\n" + other, "a.md")) == 1
    assert "it has 2 tables, in lines 5, 15" in refused(text + "\n" + text, "a.md").message
    assert "it has no table" in refused("gpus, samples/s\n", "a.md").message


@pytest.mark.parametrize(("text", "found"), CASES["json"])
def test_json_is_read_in_the_forms_that_programs_write(text: str, found: dict[str, float]) -> None:
    (row,) = rows(text, "a.json")
    assert figures(row) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a.json: it is not JSON"),
        ('[{"gpus": 8}, {"gpus": 0}]', "a.json: row 2: gpus: '0': expected a whole number"),
        ('[{"gpus": [8]}]', "a.json: row 1: expected one word or number"),
        ('{"gpus": [8], "tok/s": []}', "a.json: its columns have different lengths"),
        ('[{"gpus": 8, "v": 1}]', "a.json: row 1: unknown column 'v'"),
        ("[7]", "a.json: row 1: expected an object"),
        ("7", "a.json: expected a list of rows"),
        ('{"log_history": [{"loss": 1}]}', "a.json: its training was not finished"),
    ],
)
def test_json_that_is_no_table_says_where(text: str, said: str) -> None:
    assert refused(text, "a.json").message.startswith(said)


def test_the_table_of_mosaicml_keeps_its_capital_units() -> None:
    text = (
        "| SeqLen (T) | # GPU | MFU (%) | micro_bsz | Throughput (S/s) | Throughput (T/s) | Throughput (T/s/GPU)|\n"
        "|---|---|---|---|---|---|---|\n"
        "| 2048 | 64 | 53.33 | 8 | 12.83 | 26274 | 410.5 |\n"
    )
    (row,) = rows(text, "table.md")
    settings = {"sequence_length": 2048, "world_size": 64, "per_device_batch": 8}
    speeds = {"samples_per_s": 12.83, "tokens_per_s": 26274, "tgs": 410.5}
    assert figures(row) == pytest.approx({**settings, **speeds, "mfu": 0.5333})


def test_what_transformers_logs_to_wandb_is_read_as_it_is_exported() -> None:
    text = (
        "Name,Runtime,train/train_runtime,train/train_samples_per_second,train/loss,num_processes,User\n"
        "run-a,3605,3550.2,12.31,1.02,8,me\n"
    )
    (row,) = rows(text, ignore=("Runtime",))
    assert figures(row) == pytest.approx({"whole_s": 3550.2, "samples_per_s": 12.31, "world_size": 8})


def test_megatrons_figures_are_read_by_the_names_of_its_log() -> None:
    text = "gpus,elapsed time per iteration (ms),throughput per GPU (TFLOP/s/GPU)\n8,4093.5,181.2\n"
    (row,) = rows(text)
    assert figures(row) == pytest.approx({"world_size": 8, "step_time_ms": 4093.5, "model_tflops": 181.2})


def test_a_batch_of_millions_counts_tokens_and_is_refused() -> None:
    assert "did you mean tokens?" in refused("GPUs,Batch Size,tokens/s\n64,4M,205440\n").message


@pytest.mark.parametrize("title", ["Gbps", "EP", "CPU memory (GB)", "Memory saved", "step time std"])
def test_what_is_like_a_column_by_its_letters_alone_is_not_suggested(title: str) -> None:
    assert read_title(title) is None
    assert nearest_columns(title) == []


def test_the_workers_of_a_data_loader_are_no_devices() -> None:
    assert "num_workers" in refused("num_workers,samples/s\n4,120\n").message
