"""Rows of several nodes are judged by the link that their table tells, as `predict` judges a published figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.predict.forecast import ForecastRequest, make_forecast
from multinode.predict.published_benchmarks import Model, Network, PublishedBenchmarks, Speed, evidence_of_benchmarks
from multinode.predict.shortfall import shortfall_words
from multinode.results.run_page import table_text
from multinode.stats.unknown import reason_of
from multinode.sweep.figures import BY_NAME, CellRow, cell_row
from multinode.sweep.measure import load_tables
from multinode.tables.imported_rows import import_table, imported_rows
from multinode.tables.imported_table import Extras, parse_table

# 7 billion parameters, gathered twice and reduced once in bf16: some 40 GB through the 8 NICs of a node, 0.1 s.
RDMA = """\
model,params,gpu,nodes,gpus per node,strategy,precision,batch,network,samples/s
llama,7B,H100,1,8,FSDP,bf16,2,8x400G InfiniBand,10.0
llama,7B,H100,4,8,FSDP,bf16,2,8x400G InfiniBand,38.0
llama,7B,H100,4,8,FSDP,bf16,2,8x400G InfiniBand,9.00
"""
# 110 million gradients in fp32: 352 ms at 10 Gbit/s.
TCP = """\
| GPUs | nodes | strategy | batch | parameters (M) | link | s/it |
|---|---|---|---|---|---|---|
| 1 | 1 | DDP | 8 | 110 | - | 0.40 |
| 2 | 2 | DDP | 8 | 110 | 10GbE | 0.62 |
| 2 | 2 | DDP | 8 | 110 | 10GbE | 3.62 |
"""


def rows(text: str, name: str = "table.csv", extras: Extras | None = None) -> tuple[CellRow, ...]:
    return imported_rows(parse_table(text, name, extras or Extras()).rows)


def words(row: CellRow) -> str:
    return shortfall_words(row.shortfall) if row.shortfall is not None else reason_of(row.unjudged)


def test_over_rdma_the_sentence_is_that_of_predict() -> None:
    alone, fast, slow = rows(RDMA)
    assert (words(alone), words(fast)) == ("", "")
    assert words(slow).startswith(
        "4.4x slower than 3,200 Gbit/s over RDMA allows; the measured speed corresponds to a link of about "
    )
    assert words(slow).endswith("Check whether NCCL uses RDMA on every NIC: multinode nccl-test")
    same = PublishedBenchmarks(
        model=Model(parameters=7 * 10**9, trainable=7 * 10**9),
        strategy="fsdp",
        per_device_batch=2,
        network=Network(gbit_per_s="8x400G", rdma=True),
        single_node=Speed(workers_per_node=8, samples_per_s="10.0"),
        several_nodes=Speed(nodes=4, workers_per_node=8, samples_per_s="9.00"),
    )
    told = make_forecast(evidence_of_benchmarks(same), ForecastRequest(links=(3200.0,))).shortfall
    assert told is not None
    assert words(slow) == shortfall_words(told)


def test_over_tcp_below_25_gbit_a_speed_inside_the_interval_is_not_judged() -> None:
    alone, inside, beyond = rows(TCP, "table.md")
    assert (words(alone), words(inside)) == ("", "")
    assert (
        "slower than 10 Gbit/s allows; the measured speed corresponds to a link of about 1.2 Gbit/s. Measure the link"
        in words(beyond)
    )


@pytest.mark.parametrize(
    ("left_out", "needed"),
    [
        ("params", "needs the column parameters"),
        ("strategy", "needs the column strategy"),
        ("precision", "needs the column precision"),
        ("batch", "needs the column per_device_batch"),
        ("gpus per node", "needs the column workers_per_node"),
    ],
)
def test_what_a_judgement_lacks_is_named_where_a_link_is_told(left_out: str, needed: str) -> None:
    lines = [line.split(",") for line in RDMA.splitlines()]
    at = lines[0].index(left_out)
    alone, *several = rows("\n".join(",".join([*line[:at], *line[at + 1 :]]) for line in lines))
    assert [words(row) for row in several] == [needed, needed]
    assert alone.unjudged is None


def test_several_columns_that_lack_are_named_together() -> None:
    found = rows("nodes,gpus per node,link,samples/s\n2,8,RoCE,9.0\n")
    assert [words(row) for row in found] == [
        "needs the columns network_gbit_per_s, strategy, per_device_batch and parameters"
    ]


def test_without_a_link_nothing_is_said() -> None:
    found = rows(RDMA.replace("8x400G InfiniBand", "-"))
    assert [words(row) for row in found] == ["", "", ""]


@pytest.mark.parametrize(
    "change", [("H100,1,8", "A100,1,8"), ("llama,7B,H100,1", "qwen,7B,H100,1"), ("H100,1,8", "H100,1,4")]
)
def test_a_row_of_one_node_that_trains_otherwise_is_no_measure(change: tuple[str, str]) -> None:
    assert words(rows(RDMA.replace(*change))[2]) == "needs a row for one node with 8 workers and the same training job"


def test_of_several_rows_of_one_node_the_nearest_batch_counts_then_the_slowest() -> None:
    one, *others = RDMA.splitlines()[1:]
    title = RDMA.splitlines()[0]
    slower, larger = one.replace("10.0", "2.5"), one.replace("bf16,2", "bf16,4").replace("10.0", "2.5")
    assert words(rows("\n".join([title, one, larger, *others]))[3]).startswith("4.4x slower")
    assert words(rows("\n".join([title, one, slower, *others]))[3]) == ""


def test_an_adapters_traffic_is_that_of_what_is_trained() -> None:
    lora = RDMA.replace("model,", "model,method,").replace("llama,", "llama,lora,").replace("FSDP", "DDP")
    assert words(rows(lora)[2]) == "needs the column trainable_parameters"
    found = rows(lora, extras=Extras(defaults={"trainable_params": "20M"}))[2]
    assert words(found).startswith("4.4x slower than 3,200 Gbit/s over RDMA allow")


def test_numbers_that_no_cluster_has_are_a_reason() -> None:
    found = rows(RDMA.replace("H100,4,8", "H100,1000000,8"))
    assert words(found[1]).startswith("Expected `int` <= 1024")


def test_a_strategy_that_is_not_predicted_is_named() -> None:
    assert words(rows(RDMA.replace("FSDP", "TP8 PP4"))[2]).startswith(
        "invalid strategy 'TP8 PP4': use one of ddp, zero1"
    )


@pytest.mark.parametrize(
    ("title", "cell", "figures", "rdma"),
    [
        ("network", "10GbE", {"network_gbit_per_s": 10}, None),
        ("Link", "8 x 400 Gbps RoCE", {"network_gbit_per_s": 3200, "nics": 8}, "yes"),
        ("link (Gbit/s)", "25", {"network_gbit_per_s": 25}, None),
        ("network_bandwidth_gbps", "100", {"network_gbit_per_s": 100}, None),
        ("link (Mbit/s)", "500", {"network_gbit_per_s": 0.5}, None),
        ("network_gbit_per_s", "8x400", {"network_gbit_per_s": 3200, "nics": 8}, None),
        ("network", "InfiniBand", {}, "yes"),
        ("params", "7B", {"parameters": 7e9}, None),
        ("#params (M)", "110.5", {"parameters": 110.5e6}, None),
        ("model size", "1.3B parameters", {"parameters": 1.3e9}, None),
        ("params", "6,738,415,616", {"parameters": 6738415616}, None),
        ("trainable_params", "21.4M", {"trainable_parameters": 21.4e6}, None),
    ],
)
def test_links_and_sizes_are_read_as_people_write_them(
    title: str, cell: str, figures: dict[str, float], rdma: str | None
) -> None:
    (row,) = parse_table(f"| gpus | {title} |\n|---|---|\n| 2 | {cell} |\n", "table.md", Extras()).rows
    found = {name: figure.value for name, figure in row.figures.items() if name != "world_size"}
    assert found == pytest.approx(figures)
    assert row.words.get("rdma") == rdma


def test_its_own_column_says_whether_infiniband_carries_rdma() -> None:
    (row,) = parse_table("gpus,rdma,link\n2,no,200G InfiniBand\n", "table.csv", Extras()).rows
    assert row.words["rdma"] == "no"


@pytest.mark.parametrize("cell", ["8x400 Gbit/s over RDMA", "1,600 Gbit/s", "500 Mbit/s"])
def test_a_link_is_shown_as_it_is_read(cell: str) -> None:
    assert BY_NAME["network_gbit_per_s"].tell(cell_row(rows(f"nodes;link\n2;{cell}\n")[0])) == cell


def test_a_size_is_shown_as_it_is_read() -> None:
    assert BY_NAME["parameters"].tell(cell_row(rows("nodes,params\n2,7.24B\n")[0])) == "7.24B"
    assert BY_NAME["trainable_parameters"].tell(cell_row(rows("nodes,trainable_params\n2,21.4M\n")[0])) == "21.4M"


def test_the_stored_table_and_its_page_have_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text(RDMA)
    imported = import_table(tmp_path / "runs", path)
    stored = load_tables(tmp_path / "runs", ["last"])
    assert stored == imported.table
    assert words(stored.cells[2]).startswith("4.4x slower")
    assert "4.4x slower than 3,200 Gbit/s over RDMA allow" in table_text(stored, "html")
