"""Published tables of GPU speed, imported as they stand in configs/figures, against arithmetic done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from multinode.cluster.prices import Prices, parse_prices
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown, known
from multinode.sweep.cheapest import cheapest
from multinode.sweep.figures import CellRow, CellTable
from multinode.sweep.prices import with_prices
from multinode.sweep.table import relative_to
from multinode.tables.imported_rows import imported_rows
from multinode.tables.imported_table import Extras, ImportedRow, parse_table

CONFIGS = Path(__file__).parents[2] / "configs" / "figures"
FINETUNING = parse_table((CONFIGS / "published_gpus.yaml").read_text(), "published_gpus.yaml", Extras())
TRAINER = parse_table((CONFIGS / "published_batches.csv").read_text(), "published_batches.csv", Extras())
PRICES = parse_prices((CONFIGS / "gpu_prices.yaml").read_text())
FULL = "full-zero-3-offload"

# TFLOP/s in fp16 and dollars, published likewise: BERT's layer forward and backward, a matrix product, and the theory.
DEVICES = {
    "A100": {"theory": 312, "matmul": 230, "bert": 136, "price": 16000},
    "A6000": {"theory": 150, "matmul": 95, "bert": 70, "price": 4000},
    "V100": {"theory": 125, "matmul": 95, "bert": 64, "price": 3500},
    "RTX 3090 Ti": {"theory": 160, "matmul": 81, "bert": 62, "price": 1500},
}


def table_of(read: tuple[ImportedRow, ...], prices: Prices | None = PRICES) -> CellTable:
    table = CellTable(run_id="import", job="published", cells=imported_rows(read))
    return with_prices(relative_to(table), prices)


def rows_of(read: tuple[ImportedRow, ...]) -> dict[str, CellRow]:
    return {row.label: row for row in table_of(read).cells}


def value(figure: Estimate | Unknown) -> float:
    return known(figure).value


def test_the_tables_are_imported_whole() -> None:
    assert [len(FINETUNING.rows), len(TRAINER.rows)] == [21, 12]
    assert [row.label for row in rows_of(FINETUNING.rows).values() if row.state == "out_of_memory"] == [
        "rtx-4090-x1-lora-batch4",
        "rtx-4090-x1-qlora-paged-batch8",
    ]


@pytest.mark.parametrize(
    ("label", "times"),
    [
        (f"rtx-4090-x2-{FULL}-batch4", 1.0),
        (f"rtx-3090-x2-{FULL}-batch4", 0.794),  # 0.722 / 0.909
        (f"a800-pcie-x2-{FULL}-batch4", 1.250),  # 1.136 / 0.909
        (f"h800-nvlink-x2-{FULL}-batch4", 2.761),  # 2.51 / 0.909
        (f"rtx-4090-x1-{FULL}-batch4", 0.376),  # 0.342 / 0.909
    ],
)
def test_relative_speed_is_that_of_the_figures(label: str, times: float) -> None:
    table = relative_to(table_of(FINETUNING.rows), f"rtx-4090-x2-{FULL}-batch4")
    row = next(row for row in table.cells if row.label == label)
    assert row.relative is not None
    assert row.relative.value == pytest.approx(times, abs=5e-4)


@pytest.mark.parametrize(
    ("label", "for_10000"),
    [
        (f"rtx-4090-x2-{FULL}-batch4", 0.303),  # 0.909 / 30000
        (f"rtx-3090-x2-{FULL}-batch4", 0.602),  # 0.722 / 12000
        ("rtx-4090-x1-qlora-paged-batch1", 1.289),  # 1.933 / 15000
        ("rtx-4090-x2-qlora-paged-batch2", 1.166),  # 3.497 / 30000
    ],
)
def test_speed_for_money_is_that_of_the_figures(label: str, for_10000: float) -> None:
    found = rows_of(FINETUNING.rows)[label].samples_per_s_per_purchase
    assert 1e4 * known(found) == pytest.approx(for_10000, abs=5e-4)


def test_the_slower_gpu_gives_more_for_its_price() -> None:
    rows = rows_of(FINETUNING.rows)
    fast, slow = rows[f"rtx-4090-x2-{FULL}-batch4"], rows[f"rtx-3090-x2-{FULL}-batch4"]
    assert value(fast.samples_per_s) > value(slow.samples_per_s)
    assert known(slow.samples_per_s_per_purchase) / known(fast.samples_per_s_per_purchase) == pytest.approx(
        1.986, abs=5e-4
    )


@pytest.mark.parametrize(
    ("label", "price_per_hour", "cost"),
    [
        ("V100_4gpu_8", 21.2, 1.1995),  # 4 x 5.3; 203.6953 s of it
        ("V100_1gpu_8-fp16", 5.3, 0.2575),
        ("A100_1gpu_8-fp16", 9.3, 0.2976),
        ("A100_2gpu_8", 18.6, 1.3540),
    ],
)
def test_the_cost_of_a_training_is_its_time_at_its_price(label: str, price_per_hour: float, cost: float) -> None:
    row = rows_of(TRAINER.rows)[label]
    assert row.price_per_hour == pytest.approx(price_per_hour)
    assert row.whole_cost == pytest.approx(cost, abs=5e-5)
    assert row.samples_per_money == pytest.approx(value(row.samples_per_s) * 3600 / price_per_hour)


@pytest.mark.parametrize(("seconds", "label"), [(300, "V100_1gpu_8-fp16"), (120, "A100_1gpu_8-fp16"), (60, None)])
def test_the_cheapest_by_a_deadline_is_the_one_that_the_figures_make_it(seconds: float, label: str | None) -> None:
    assert cheapest(table_of(TRAINER.rows), seconds).label == label


def test_samples_per_second_over_the_runtime_are_the_samples_of_the_training() -> None:
    for row in imported_rows((*FINETUNING.rows, *TRAINER.rows)):
        if row.state == "measured":
            samples = 1100 if row.settings.lora_rank == 64 else 2048 * 2
            assert value(row.samples_per_s) * value(row.whole_s) == pytest.approx(samples, rel=0.006)


def test_the_global_batch_is_gpus_times_accumulation_times_the_batch_of_each() -> None:
    told = {row.words["label"]: row.figures for row in TRAINER.rows}
    assert len(told) == 10  # two names stand there twice, with fp16 and without
    for figures in (row.figures for row in TRAINER.rows):
        product = figures["world_size"].value * figures["accumulation"].value * figures["per_device_batch"].value
        assert figures["global_batch"].value == product
        assert figures["all_devices_batch"].value * 4 == product
        assert figures["steps"].value * product == 2048 * 2


@pytest.mark.parametrize(
    ("label", "published", "apart"),
    [
        # tokens/s = samples/s x 797459 / 1100. The first follows to a fifth of a percent. The other two were published
        # 2.0 % and 2.3 % above what their samples/s, and as much above what their runtimes, give.
        (f"rtx-4090-x1-{FULL}-batch8", 474.11, 0.0015),
        ("rtx-4090-x1-lora-batch2", 991.86, 0.0202),
        ("rtx-4090-x1-qlora-paged-batch4", 1169.29, 0.0234),
    ],
)
def test_tokens_follow_from_samples_as_far_as_they_do(label: str, published: float, apart: float) -> None:
    row = rows_of(FINETUNING.rows)[label]
    assert value(row.tokens_per_s) == published
    assert published / (value(row.samples_per_s) * 797459 / 1100) - 1 == pytest.approx(apart, abs=1e-4)


def test_tokens_that_are_not_told_follow_from_samples() -> None:
    row = rows_of(FINETUNING.rows)["rtx-4090-x2-lora-batch2"]
    assert value(row.tokens_per_s) == pytest.approx(2.609 * 797459 / 1100)
    assert rows_of(FINETUNING.rows)["rtx-4090-x1-qlora-batch2"].tokens_per_s == Unknown("not in the table")


def test_exactly_the_rows_that_contradict_themselves_by_more_than_two_percent_are_named() -> None:
    # By hand: 1.576 samples/s x 724.963 tokens are 1142.54 tokens/s, and 1169.29 were published, 2.3 % more. LoRA's
    # 991.86 are 2.03 % above 1.341 x 724.963, and 1.341 may be anything up to 1.3415: 1.99 %. All others, those in fp16
    # and those of the A100 among them, fit to 0.6 % in samples/s x runtime, steps/s x runtime, steps x batch and
    # samples/s over steps/s.
    named = {
        row.label: tuple(found.message for found in row.contradictions)
        for rows in (FINETUNING.rows, TRAINER.rows)
        for row in imported_rows(rows)
        if row.contradictions
    }
    assert named == {
        "rtx-4090-x1-qlora-paged-batch4": (
            "tokens/s is 1,169.29, but samples/s x tokens / samples is 1,142.54: 2.3% more",
        )
    }


def test_a_slip_of_the_pen_in_either_table_is_named() -> None:
    text = (CONFIGS / "published_batches.csv").read_text().replace("0.157,20.108", "0.175,20.108")
    slipped = imported_rows(parse_table(text, "published_batches.csv", Extras()).rows)[0]
    assert tuple(found.message for found in slipped.contradictions) == (
        "steps/s x runtime is 35.6467, but the number of steps is 32: 11.4% more",
        "samples/s divided by steps/s is 114.903, but the global batch is 128: 10.2% less",
    )


def test_flops_for_money_of_the_devices_are_those_of_the_figures() -> None:
    lines = ["gpu,gpus,model_tflops,price_purchase,currency"]
    lines += [f"{name},1,{told['bert']},{told['price']},USD" for name, told in DEVICES.items()]
    read = parse_table("\n".join(lines), "devices.csv", Extras())
    rows = rows_of(read.rows)
    for_1000 = {
        name: 1e3 * known(row.model_tflops) / known(row.price_purchase)
        for name, row in rows.items()
        if row.model_tflops is not None and row.price_purchase is not None
    }
    assert for_1000 == pytest.approx(
        {"a100-x1": 8.5, "a6000-x1": 17.5, "v100-x1": 18.2857, "rtx-3090-ti-x1": 41.3333}, rel=1e-4
    )
    assert {row.currency for row in rows.values()} == {"USD"}
    for told in DEVICES.values():
        assert told["bert"] < told["matmul"] < told["theory"]


def test_memory_that_was_published_as_mb_is_in_the_mib_that_gpus_are_counted_in() -> None:
    row = rows_of(FINETUNING.rows)["rtx-4090-x2-lora-batch2"]
    assert row.peak_memory_gib == pytest.approx(24331.9 / 1024)
