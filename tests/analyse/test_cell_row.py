from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.analyse.comparison.contrast_side import SideRun
from multinode.analyse.grid.cell_rows import MeasuredCell, make_row
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.flops import Utilisation
from multinode.core.grid.grid import Cell, CellRecord
from tests.analyse.made_up_sides import node_use, run_of, split_summary, summary_of

CELL = Cell(label="1x2-lora-batch2", settings={"finetuning_type": "lora"}, nodes=1)


def row_of(*runs: SideRun, **known: Any) -> CellRow:
    record = CellRecord(cell=CELL, state="measured", run_ids=tuple(run.summary.run_id for run in runs))
    return make_row(MeasuredCell(record=record, runs=runs, **known))


def used(tflops: float) -> Utilisation:
    return Utilisation(
        model_tflops=tflops, hardware_tflops=1.5 * tflops, mfu=tflops / 165, hfu=None, denominator="165", rule=""
    )


def test_a_row_has_the_median_of_its_repeats_and_their_spread() -> None:
    row = row_of(*(run_of(summary_of(rate, tokens_per_s=128 * rate, tgs=64 * rate)) for rate in (24.0, 20.0, 25.0)))
    assert row.samples_per_s is not None
    assert row.tokens_per_s is not None
    assert row.tgs is not None
    assert (row.samples_per_s.value, row.samples_per_s.low, row.samples_per_s.high) == (24.0, 20.0, 25.0)
    assert (row.tokens_per_s.value, row.tgs.value, row.samples_per_s.repeats) == (128 * 24, 64 * 24, 3)
    assert (row.state, row.label, row.nodes, row.workers_per_node, row.world_size) == ("measured", CELL.label, 1, 2, 2)
    assert (row.settings.model, row.global_batch, row.varied) == ("tiny", 4, {"finetuning_type": "lora"})


def test_memory_is_of_the_worker_that_needed_most_in_any_repeat() -> None:
    peaks: tuple[dict[int, float], ...] = ({0: 3.0, 1: 4.5}, {0: 5.25}, {})
    runs = [run_of(summary_of(nodes=(node_use(peak_worker_memory_gib=peak),))) for peak in peaks]
    assert row_of(*runs).peak_memory_gib == 5.25
    bare = row_of(runs[-1])
    assert (bare.peak_memory_gib, bare.missing["peak_memory_gib"]) == (None, "no worker told its memory")


def test_the_network_s_share_is_what_a_step_exposes() -> None:
    runs = [run_of(split_summary(exposed_ms, step_ms=200.0)) for exposed_ms in (40.0, 60.0)]
    assert row_of(*runs).network_share == pytest.approx(0.25)
    unsplit = row_of(run_of(summary_of()))
    assert (unsplit.network_share, unsplit.missing["network_share"]) == (None, "its steps were not split")


def test_utilisation_stands_where_every_repeat_has_it_and_says_why_where_not() -> None:
    both = row_of(*(run_of(summary_of(utilisation=used(tflops))) for tflops in (40.0, 60.0)))
    assert (both.model_tflops, both.hardware_tflops) == (50.0, 75.0)
    assert both.mfu == pytest.approx(50 / 165)
    assert (both.hfu, both.missing["hfu"]) == (None, "165")
    reason = {"utilisation": "the model's shape is not known"}
    one = row_of(run_of(summary_of(utilisation=used(40.0))), run_of(summary_of(missing=reason)))
    assert (one.mfu, one.missing["mfu"]) == (None, "the model's shape is not known")


@pytest.mark.parametrize("tflops", [float("inf"), float("nan"), 1e300, -1.0])
def test_what_cannot_be_is_as_good_as_missing(tflops: float) -> None:
    row = row_of(run_of(summary_of(utilisation=used(tflops))))
    assert (row.model_tflops, row.mfu) == (None, None)
    assert "model_tflops" in row.missing


def test_prices_of_the_hostfile_stand_in_the_row() -> None:
    row = row_of(run_of(summary_of(tokens_per_s=2000.0), prices=(0.8,)), price_purchase=3200.0)
    assert (row.price_per_hour, row.price_purchase) == (0.8, 3200.0)
    assert row.cost_per_million_tokens == pytest.approx(0.8 / (2000 * 3600) * 1e6)
    bare = row_of(run_of())
    assert "price=" in bare.missing["price_per_hour"]
    assert "price_purchase=" in bare.missing["price_purchase"]


@pytest.mark.parametrize(
    ("state", "out_of", "shown"),
    [
        ("out_of_memory", "gpu", "out_of_memory"),
        ("out_of_memory", "node", "out_of_memory"),
        ("skipped", None, "skipped"),
        ("failed", None, "failed"),
        ("waiting", None, "waiting"),
        ("running", None, "waiting"),
    ],
)
def test_a_cell_without_figures_is_a_row_with_its_reason(state: str, out_of: str | None, shown: str) -> None:
    cell = msgspec.structs.replace(CELL, workers_per_node=4)
    row = make_row(MeasuredCell(record=CellRecord(cell=cell, state=state, out_of=out_of, reason="so it is")))
    assert (row.state, row.out_of, row.reason, row.samples_per_s) == (shown, out_of, "so it is", None)
    assert (row.nodes, row.world_size) == (1, 4)


def test_a_measured_cell_that_tells_no_speed_or_has_lost_its_runs_says_so() -> None:
    told = summary_of(missing={"samples_per_s": "no worker counted them"})
    silent = run_of(msgspec.structs.replace(told, samples_per_s=None))
    row = row_of(silent)
    assert (row.state, row.samples_per_s) == ("failed", None)
    assert "no worker counted them" in row.reason
    assert row_of().reason == "its runs are no longer stored"


def test_every_figure_of_a_measured_row_that_is_none_has_a_reason() -> None:
    row = row_of(run_of())
    elsewhere = {"out_of", "whole_s", "whole_cost", "samples_per_money", "samples_per_s_per_purchase", "relative"}
    unknown = {name for name in row.__struct_fields__ if getattr(row, name) is None} - elsewhere - {"currency"}
    assert unknown <= set(row.missing)
    assert all(row.missing.values())
    assert msgspec.json.decode(msgspec.json.encode(row), type=CellRow) == row
