from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.prices import Price, Prices
from multinode.contrast.unfinished import load_unfinished
from multinode.findings.finding import Finding, message_of
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import CellRecord, GridRecord
from multinode.stats.unknown import Unknown, known
from multinode.sweep.figures import CellTable
from multinode.sweep.measure import build_table, load_table, load_tables
from multinode.sweep.screen import constants_line, lead
from multinode.sweep.table import Look
from tests import make
from tests.golden import Golden, error_of
from tests.sweep.cells import GPU, PUBLISHED, SWEEP_RUN
from tests.sweep.stored_sweep import CELLS, store_sweep


def store_import(root: Path) -> None:
    make.store(
        root,
        PUBLISHED.run_id,
        run=msgspec.structs.replace(SWEEP_RUN, run_id=PUBLISHED.run_id, kind="import", nodes=()),
        sweep=PUBLISHED,
    )


def set_record(directory: RunDirectory, place: int, **changed: object) -> None:
    """Change what became of one cell, as the sweep does when it goes on."""
    record = directory.read("grid.json", GridRecord)
    assert record is not None
    cells: list[CellRecord] = list(record.cells)
    cells[place] = msgspec.structs.replace(cells[place], **changed)
    directory.write("grid.json", msgspec.structs.replace(record, cells=tuple(cells)))


def test_a_sweep_s_table_is_made_of_its_grid_and_its_runs_and_is_kept(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    table = build_table(directory, tmp_path)
    assert load_table(directory) == table
    first = table.cells[0]
    assert [row.label for row in table.cells] == [cell.record.cell.label for cell in CELLS]
    assert (first.device, first.node_names, first.workers_per_node) == (GPU, ("box1",), 2)
    assert first.samples_per_s is not None
    assert known(first.samples_per_s).repeats == 2
    assert first.whole_s is not None
    # A price by the hour of the node, one to buy of each of its GPUs.
    assert (first.price_per_hour, first.price_purchase) == (0.8, 3200.0)
    assert first.whole_cost == pytest.approx(0.8 * known(first.whole_s).value / 3600)
    assert table.cells[2].price_purchase == 6400.0
    out = table.cells[3]
    assert (out.state, message_of(out.why), out.settings.method, out.device) == (
        "out_of_memory",
        "CUDA out of memory on box1",
        "full",
        GPU,
    )


@pytest.mark.parametrize(
    ("told", "device"),
    [({"processor": "AMD EPYC 9B14 96-Core Processor"}, "AMD EPYC 9B14"), ({}, "CPU")],
    ids=["named", "of a release that did not ask"],
)
def test_a_cell_without_gpus_says_on_which_processors_it_ran(tmp_path: Path, told: dict[str, str], device: str) -> None:
    directory = store_sweep(tmp_path, cells=CELLS[:1])
    for run in (RunDirectory(tmp_path / run.run_id) for run in CELLS[0].runs):
        plan = run.read("plan.json", LaunchPlan)
        assert plan is not None
        nodes = tuple(msgspec.structs.replace(node, gpus=None) for node in plan.nodes)
        run.write("plan.json", msgspec.structs.replace(plan, nodes=nodes))
        run.write("facts.json", [{"node": node.place.node, **told} for node in nodes])
    table = build_table(directory, tmp_path)
    assert f", device {device}, " in constants_line(table)
    chosen = load_tables(tmp_path, ["last"], Look(where=(f"device={device}",)))
    assert [row.label for row in chosen.cells] == [table.cells[0].label]


def test_the_table_grows_with_the_sweep(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    set_record(directory, 1, state="running", run_ids=())
    assert [row.state for row in build_table(directory, tmp_path).cells][1] == "waiting"
    set_record(directory, 1, state="measured", run_ids=CELLS[1].record.run_ids)
    assert [row.state for row in build_table(directory, tmp_path).cells][1] == "measured"


def test_a_cell_whose_runs_were_removed_says_so(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    one, other = CELLS[0].record.run_ids
    shutil.rmtree(tmp_path / one)
    found = build_table(directory, tmp_path).cells[0]
    assert found.samples_per_s is not None
    assert (known(found.samples_per_s).repeats, found.run_ids) == (1, (other,))
    shutil.rmtree(tmp_path / other)
    gone = build_table(directory, tmp_path).cells[0]
    assert (gone.state, message_of(gone.why)) == ("failed", "its runs are no longer stored")


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, golden: Golden) -> None:
    directory = store_sweep(tmp_path)
    run = RunDirectory(tmp_path / CELLS[0].record.run_ids[0])
    refused = {"a run": error_of(build_table, run, tmp_path), "no table": error_of(load_tables, tmp_path, [run.run_id])}
    assert load_table(run) is None
    for stored in (
        '{"schema": "multinode.sweep/10", "cells": []}',
        "{}",
        '{"schema": "multinode.sweep/3", "cells": 5}',
        '{"schema": "multinode.sw',
    ):
        (directory.path / "sweep.json").write_text(stored)
        refused[stored] = error_of(load_tables, tmp_path, [directory.run_id])
    golden.check_errors("refused_table", refused, tmp_path)


def test_sweeps_and_imports_stand_in_one_table_each_once(tmp_path: Path) -> None:
    build_table(store_sweep(tmp_path), tmp_path)
    store_import(tmp_path)
    table = load_tables(tmp_path, ["20260301-ab", "20260302", "20260301-ab"])
    assert len(table.cells) == len(CELLS) + len(PUBLISHED.cells)
    assert table.run_id == "20260301-ab,20260302-cd"
    assert {row.source for row in table.cells} == {"measured", "imported"}
    assert all(row.relative is not None for row in table.cells if not isinstance(row.samples_per_s, Unknown))


def test_a_view_prices_filters_sorts_and_names_the_cheapest(tmp_path: Path) -> None:
    build_table(store_sweep(tmp_path), tmp_path)
    store_import(tmp_path)
    prices = Prices(currency="EUR", devices={"RTX 4090": Price(hourly=0.5, purchase=1700.0)})
    look = Look(
        baseline="1x2-lora-batch2",
        sort="-samples_per_money",
        where=("samples_per_money>0", "source=measured"),
        prices=prices,
        deadline_s=86400.0,
    )
    table = load_tables(tmp_path, ["20260301-ab"], look)
    assert table.cells[0].label == "1x2-lora-batch2"
    assert table.baseline == "1x2-lora-batch2"
    assert table.cheapest is not None
    assert (table.cheapest.label, len(table.cells)) == ("1x2-lora-batch2", 3)
    priced = load_tables(tmp_path, ["20260302"], Look(prices=prices, where=("device=RTX 4090",)))
    first = priced.cells[0]
    assert (first.price_per_hour, first.price_purchase, first.currency) == (0.5, 1700.0, "EUR")


def test_what_was_stored_is_what_is_read_back(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    build_table(directory, tmp_path)
    document = msgspec.json.decode((directory.path / "sweep.json").read_bytes())
    assert (document["schema"], len(document["cells"])) == ("multinode.sweep/3", 4)
    assert directory.read("sweep.json", CellTable) == load_tables(tmp_path, [directory.run_id])


def test_a_sweep_under_way_or_killed_shows_what_is_measured_so_far(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    run = directory.read("run.json", Run)
    assert run is not None
    directory.write("run.json", msgspec.structs.replace(run, status="running"))
    set_record(directory, 1, state="running", run_ids=())
    table = load_table(directory)
    assert table is not None
    assert [row.state for row in table.cells][:2] == ["measured", "waiting"]
    assert "1 waiting" in lead(table)
    # What an earlier part of it left is not taken for the whole.
    build_table(directory, tmp_path)
    set_record(directory, 1, state="failed", why=Finding(message="exit code 1"))
    again = load_table(directory)
    assert again is not None
    assert again.cells[1].state == "failed"


@pytest.mark.parametrize(("kind", "file"), [("bench", "bench.json"), ("contrast", "contrast.json")])
def test_a_bench_and_a_contrast_have_no_table_of_cells(tmp_path: Path, kind: str, file: str) -> None:
    """They have a grid, too, and their own result."""
    build_table(store_sweep(tmp_path), tmp_path)
    directory = store_sweep(tmp_path, "20990101-other")
    directory.write("run.json", msgspec.structs.replace(SWEEP_RUN, run_id="20990101-other", kind=kind))
    directory.write(file, {})
    assert load_table(directory) is None
    assert load_tables(tmp_path, ["last"]).run_id == SWEEP_RUN.run_id


def test_a_contrast_that_was_stopped_is_no_table_but_its_sides(tmp_path: Path) -> None:
    directory = store_sweep(tmp_path)
    directory.write("run.json", msgspec.structs.replace(SWEEP_RUN, kind="contrast", status="stopped"))
    assert load_table(directory) is None
    unfinished = load_unfinished(directory)
    assert unfinished is not None
    assert unfinished.verdict.startswith(f"{len(unfinished.measured)} of {len(unfinished.sides)} sides measured; ")
    assert [state.side is not None for state in unfinished.sides][:2] == [True, True]


def test_the_last_table_is_that_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    build_table(store_sweep(tmp_path), tmp_path)
    make.store(tmp_path, "20990101-cell", run=msgspec.structs.replace(SWEEP_RUN, run_id="20990101-cell"))
    assert load_tables(tmp_path, ["last"]).run_id == SWEEP_RUN.run_id
    store_import(tmp_path)
    assert load_tables(tmp_path, ["last"]).run_id == PUBLISHED.run_id
