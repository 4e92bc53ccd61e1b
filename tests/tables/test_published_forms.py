"""Tables in the forms in which people publish them: which column a title means, what a cell says, and whole files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.errors import UsageError
from multinode.stats.estimate import Estimate
from multinode.tables.imported_columns import ImportedColumn
from multinode.tables.imported_table import Extras, ImportedRow, ImportedTable, parse_table
from multinode.tables.imported_titles import nearest_column, read_title
from tests.golden import Golden

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
    text = (TABLES / "dlperf.md").read_text()
    assert refused(text, "dlperf.md").message == (
        "dlperf.md:1: unknown column 'samples/s(PyTorch)' (nearest: samples_per_s)"
    )
    table = read(text, "dlperf.md", columns={"samples/s(PyTorch)": "samples/s"})
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
    found = read_title(title)
    assert isinstance(found, ImportedColumn)
    assert (found.column.name, found.scale) == (column, pytest.approx(scale) if scale else None)


@pytest.mark.parametrize("title", CASES["unknown"])
def test_a_title_that_is_known_in_parts_is_unknown(title: str) -> None:
    assert read_title(title) is None
    assert refused(f"gpus,{title}\n1,2\n").message.startswith(f"table.csv:1: unknown column {title!r}")


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


TWO_TABLES = "| gpus | samples/s |\n|--|--|\n| 8 | 14.2 |\n\ntext\n\n| gpus | tokens/s |\n|--|--|\n| 16 | 900 |\n"
UNKNOWN = "gpus,TFLOPs/GPU,loss,samples_s,samples/s\n8,120,0.1,3,14.2\n"


def test_what_cannot_be_read_is_refused(golden: Golden) -> None:
    cases: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a memory that no worker has": ("gpus,memory_gb\n1,15387\n", "a.csv", {}),
        "a comma among semicolons": ("gpus;tokens/s\n1;1,234\n", "a.csv", {}),
        "a share above 100%": ("mfu\n0.4\n120\n", "a.csv", {}),
        "a batch of millions": ("GPUs,Batch Size,tokens/s\n64,4M,205440\n", "a.csv", {}),
        "unknown columns": (UNKNOWN, "a.csv", {}),
        "numbers of an unknown column": ('gpus,mystery,samples/s\n8,"12~14",1\n', "a.csv", {}),
        "workers of a data loader": ("num_workers,samples/s\n4,120\n", "a.csv", {}),
        "nothing measured without them": ("gpus,img rate,loss\n8,120,0.1\n", "a.csv", {"skip_unknown": True}),
        "nothing measured": ("gpus,Speed of it\n8,fast\n", "a.csv", {"skip_unknown": True}),
        "--column without its title": ("gpus\n1\n", "a.csv", {"columns": {"speed 1": "tokens/s"}}),
        "--column without its name": ("gpus,v\n1,2\n", "a.csv", {"columns": {"v": "token/h/s"}}),
        **{
            f"--column '{title}={name}'": (f"gpus,{title}\n8,9\n", "a.csv", {"columns": {title: name}})
            for title, name in (
                ("Speed A (tokens/s)", "samples/s"),
                ("Speed A (%)", "samples/s"),
                ("Latency (ms)", "tokens/s"),
                ("it/s", "samples/s"),
                ("Wall (GB)", "runtime"),
            )
        },
        "a title that turns the text around": ("gpus,a\u202eb,samples/s\n8,x,1\n", "a.csv", {}),
        "a column of words and numbers": ("gpus,Kernels\n8,fused\n8,7\n", "a.csv", {}),
        "two columns of one title": ("gpus,Kernels,Kernels\n8,fused,naive\n", "a.csv", {}),
        "two tables": (TWO_TABLES, "a.md", {}),
        "--table 3 of two": (TWO_TABLES, "a.md", {"table": 3}),
        "--table 2 of one": ("gpus\n1\n", "a.csv", {"table": 2}),
        "a shifted row": ("gpus  samples/s  tokens/s\n8  14.2\n16     2.5  900\n", "a.txt", {}),
        "prose": ("8 GPUs are fast.\nTruly.\n", "a.txt", {}),
        "Markdown without a table": ("gpus, samples/s\n", "a.md", {}),
        **{
            text: (text, "a.json", {})
            for text in (
                '[{"gpus": 8}, {"gpus": 0}]',
                '[{"gpus": [8]}]',
                '{"gpus": [8], "tok/s": []}',
                '[{"gpus": 8, "v": 1}]',
                "[7]",
                "7",
                '{"log_history": [{"loss": 1}]}',
            )
        },
    }
    golden.check_errors(
        "refused_forms", {case: refused(text, file, **more) for case, (text, file, more) in cases.items()}
    )
    # The words are the parser's.
    assert refused("{", "a.json").message.startswith("a.json: it is not JSON")


def test_there_are_two_ways_past_unknown_columns() -> None:
    table = read(UNKNOWN, columns={"TFLOPs/GPU": "model_tflops"}, skip_unknown=True)
    assert figures(table.rows[0]) == {"world_size": 8, "model_tflops": 120, "samples_per_s": 14.2}
    assert table.ignored == ("loss", "samples_s")


def test_a_row_out_of_memory_is_measured() -> None:
    assert rows("gpus,samples/s\n8,OOM\n", skip_unknown=True)[0].out_of == "gpu"


@pytest.mark.parametrize(
    ("title", "name", "cell", "column", "value"),
    [
        ("tokens/sec(k)", "tokens/s", "249", "tokens_per_s", 249_000),
        ("Rate (M)", "tokens/s", "1.5", "tokens_per_s", 1.5e6),
        ("\u541e\u5410 (\u5343)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate (k)", "tokens/s", "1.5k", "tokens_per_s", 1500),  # of the cell; it is not scaled twice
        ("K tokens/s (ours)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Latency(ms)", "step_time", "395", "step_time_ms", 395),
        ("Latency (s)", "step_time_ms", "0.395", "step_time_ms", 395),
        ("mean_latency_sec", "step_time", "0.395", "step_time_ms", 395),
        ("Peak (MiB)", "memory_gib", "2048", "peak_memory_gib", 2),
        ("Wall (h)", "runtime", "2", "whole_s", 7200),
        ("B", "batch", "4", "per_device_batch", 4),  # a title is no scale
        ("data (k)", "samples", "50", "dataset_samples", 50_000),
        ("Rate (x1000)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate (10^3)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate [in thousands]", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate (\u00d71000)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate (ktok/s)", "tokens/s", "1.5", "tokens_per_s", 1500),
        ("Rate (\u4e07 tokens/s)", "tokens/s", "1.5", "tokens_per_s", 15_000),
        ("rate (m)", "tokens/s", "1.5", "tokens_per_s", 1.5e6),
        ("wall (m)", "runtime", "2", "whole_s", 120),
        ("Size (B)", "batch", "32", "per_device_batch", 32),  # B is the batch of a formula
    ],
)
def test_unit_and_scale_of_a_title_count_whatever_column_the_user_names(
    title: str, name: str, cell: str, column: str, value: float
) -> None:
    (row,) = rows(f"name,{title}\na,{cell}\n", columns={title: name})
    assert figures(row) == pytest.approx({column: value})


def test_text_of_an_unknown_column_is_a_label() -> None:
    text = "gpus,Kernels,Hint,samples/s\n8,fused,-,14.2\n8,naive,,12\n8,,-,11\n"
    table = read(text)
    assert [row.labels for row in table.rows] == [{"Kernels": "fused"}, {"Kernels": "naive"}, {}]
    assert (table.labels, table.ignored) == (("Kernels",), ("Hint",))


@pytest.mark.parametrize(
    "cell", ["7", "0", "-3.5", "1.88x", "45 %", "$3.20", "12~14", "1.2e+16", "28:04", "2h05m", "1,234.5", "3 epochs"]
)
def test_numbers_of_an_unknown_column_are_an_error(cell: str) -> None:
    number = refused('gpus,mystery,samples/s\n8,"7",1\n')
    assert refused(f'gpus,mystery,samples/s\n8,"{cell}",1\n').message == number.message


@pytest.mark.parametrize("cell", ["fused", "A100", "8x H100", "2025-02-16", "config_A100x1x8", "v1.13", "True"])
def test_words_with_digits_are_text(cell: str) -> None:
    assert rows(f"gpus,mystery,samples/s\n8,{cell},1\n")[0].labels == {"mystery": cell}


def test_shares_above_one_are_percent_in_the_whole_column() -> None:
    found = rows("MFU,HFU\n40.85,0.45\n0.90,45%\n45.2%,0.5\n")
    assert [row.figures["mfu"].value for row in found] == pytest.approx([0.4085, 0.009, 0.452])
    assert [row.figures["hfu"].value for row in found] == pytest.approx([0.45, 0.45, 0.5])


def test_one_of_several_tables_is_chosen_by_its_number() -> None:
    assert figures(rows(TWO_TABLES, "a.md", table=2)[0]) == {"world_size": 16, "tokens_per_s": 900}


@pytest.mark.parametrize(
    "text",
    [
        "gpus  samples/s  gpu type\n8          14.2  RTX 4090\n16           28  A100\n",
        "gpus | samples/s | gpu type\n   8 |      14.2 | RTX 4090\n  16 |        28 | A100\n",
        """
+------+-----------+----------+
| gpus | samples/s | gpu type |
|------+-----------+----------|
| 8    | 14.2      | RTX 4090 |
| 16   | 28        | A100     |
+------+-----------+----------+
""",
        "Results\n\ngpus\tsamples/s\tgpu type\n8\t14.2\tRTX 4090\n16\t28\tA100\n\nend\n",
        """
\u2502 gpus \u2502 samples/s \u2502 gpu type \u2502
\u2502 8    \u2502 14.2      \u2502 RTX 4090 \u2502
\u2502 16   \u2502 28        \u2502 A100     \u2502
""",
        # As pandas prints it, with row names.
        """
   gpus  samples/s  gpu type
0     8       14.2  RTX 4090
1    16         28      A100
""",
    ],
)
def test_aligned_text_is_read_however_a_program_draws_it(text: str) -> None:
    found = rows(text, "a.txt")
    assert [(row.words["device"], figures(row)) for row in found] == [
        ("RTX 4090", {"world_size": 8, "samples_per_s": 14.2}),
        ("A100", {"world_size": 16, "samples_per_s": 28}),
    ]


def test_an_empty_cell_of_aligned_text_is_the_one_under_its_title() -> None:
    text = """
\u5361\u6570  \u6a21\u578b     samples/s  tokens/s
   8  \u5343\u95ee 7B       14.2
  16  b                         900
"""
    one, two = rows(text, "a.txt")
    assert (figures(one), figures(two)) == (
        {"world_size": 8, "samples_per_s": 14.2},
        {"world_size": 16, "tokens_per_s": 900},
    )


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


def test_markdown_has_text_around_its_table_and_marks_in_it() -> None:
    text = (
        "# Speed\n\nText | with a bar\n\nGPU | samples/s\n:-- | --:\n**[A100](https://a.example)** | `14.2`\n\nmore\n"
    )
    (row,) = rows(text, "a.md")
    assert (row.words, figures(row), row.line) == ({"device": "A100"}, {"samples_per_s": 14.2}, 7)
    other = "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    assert len(rows(other + text + "\n" + other, "a.md")) == 1


@pytest.mark.parametrize(("text", "found"), CASES["json"])
def test_json_is_read_in_the_forms_that_programs_write(text: str, found: dict[str, float]) -> None:
    (row,) = rows(text, "a.json")
    assert figures(row) == found


def test_what_transformers_logs_to_wandb_is_named_by_the_user() -> None:
    text = (
        "Name,Runtime,train/train_runtime,train/train_samples_per_second,train/loss,num_processes,User\n"
        "run-a,3605,3550.2,12.31,1.02,8,me\n"
    )
    named = {"train/train_runtime": "runtime", "train/train_samples_per_second": "samples/s"}
    (row,) = rows(text, ignore=("Runtime",), columns=named, skip_unknown=True)
    assert figures(row) == pytest.approx({"whole_s": 3550.2, "samples_per_s": 12.31, "world_size": 8})
    assert row.labels == {"User": "me"}


def test_megatrons_figures_are_read_by_the_names_of_its_log() -> None:
    text = "gpus,elapsed time per iteration (ms),throughput per GPU (TFLOP/s/GPU)\n8,4093.5,181.2\n"
    (row,) = rows(text)
    assert figures(row) == pytest.approx({"world_size": 8, "step_time_ms": 4093.5, "model_tflops": 181.2})


@pytest.mark.parametrize(
    ("title", "nearest"),
    [
        ("SeqLen (T)", "sequence_length"),
        ("NumProcess", "devices"),
        ("Sharding Strategy", "strategy"),
        ("Latency(ms)", "step_time_ms"),
        ("\u6027\u80fd (tokens/s)", "tokens_per_s"),
        ("Throughput (S/s)", "samples_per_s, tokens_per_s or tgs"),
        ("Model TFLOP", "model_tflops"),
        ("EP", None),
    ],
)
def test_the_nearest_column_is_that_of_the_name_or_of_the_unit(title: str, nearest: str | None) -> None:
    assert read_title(title) is None
    assert nearest_column(title) == nearest
