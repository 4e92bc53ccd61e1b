from __future__ import annotations

import msgspec
import pytest

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.findings.finding import Finding
from multinode.series.grid import (
    BATCH,
    CellRecord,
    Grid,
    GridRecord,
    cell_line,
    due_turns,
    end_line,
    left_s,
    state_line,
)
from multinode.sweep.grid_plan import plan_grid, plan_lines
from multinode.units import about

CLUSTER: Cluster = parse_hostfile("a\nb\n", "hosts")
GRID = Grid(settings={BATCH: (4, 1), "finetuning_type": ("lora", "full")}, nodes=(2,), workers_per_node=(1,), repeats=2)
CELLS = tuple(CellRecord(cell=cell) for cell in plan_grid(GRID, CLUSTER))
changed = msgspec.structs.replace


def record_of(*cells: CellRecord) -> GridRecord:
    return GridRecord(fingerprint="f", command="job", grid=GRID, cells=cells)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1, "about 10 s"),
        (44, "about 40 s"),
        (89, "about 90 s"),
        (240, "about 4 min"),
        (5300, "about 88 min"),
        (7800, "about 2 h 10 min"),
        (7200, "about 2 h"),
    ],
)
def test_a_guess_is_said_as_one(seconds: float, said: str) -> None:
    assert about(seconds) == said


def test_the_rest_takes_as_long_as_the_runs_so_far_did_in_the_mean() -> None:
    assert left_s(record_of(*CELLS), len(due_turns(record_of(*CELLS)))) is None
    first = changed(CELLS[0], state="measured", run_ids=("r",), took_s=(30.0,))
    out = changed(CELLS[1], state="out_of_memory", took_s=(10.0,))
    # One repeat of the first, and two each of the last two.
    assert left_s(record_of(first, out, *CELLS[2:]), len(due_turns(record_of(first, out, *CELLS[2:])))) == 5 * 20
    assert cell_line(3, 8, "2x1-lora-batch4", 240.0) == "[3/8] 2x1-lora-batch4, about 4 min left"
    assert cell_line(1, 8, "2x1-lora-batch4", None) == "[1/8] 2x1-lora-batch4"


def test_where_each_run_trains_for_a_time_the_rest_takes_that_and_what_comes_with_it() -> None:
    by_time = changed(record_of(*CELLS), minutes=2.0)
    assert left_s(by_time, len(due_turns(by_time))) == 8 * 120
    out = changed(CELLS[1], state="out_of_memory", took_s=(10.0,))
    assert (
        left_s(
            changed(by_time, cells=(CELLS[0], out, *CELLS[2:])),
            len(due_turns(changed(by_time, cells=(CELLS[0], out, *CELLS[2:])))),
        )
        == 6 * 120
    )
    first = changed(CELLS[0], state="measured", run_ids=("r",), took_s=(150.0,))
    assert (
        left_s(
            changed(by_time, cells=(first, out, *CELLS[2:])),
            len(due_turns(changed(by_time, cells=(first, out, *CELLS[2:])))),
        )
        == 5 * 150
    )


def test_a_run_that_was_cut_off_is_among_those_to_make() -> None:
    cut_off = changed(CELLS[0], state="running", current="r", attempts=1)
    lines = plan_lines(record_of(cut_off, *CELLS[1:]))
    assert sum(line.endswith("(running)") for line in lines) == 1
    assert lines[-1] == "4 cells, 2 times each: 8 runs to make"


def test_the_end_of_a_run_is_told_with_what_came_of_it() -> None:
    assert (
        end_line("2x1-lora-batch1", changed(CELLS[1], state="measured"), 24.123)
        == "2x1-lora-batch1: measured: 24.12 samples/s"
    )
    out = changed(CELLS[0], state="out_of_memory", out_of="gpu", why=Finding(message="b: CUDA out of memory"))
    assert end_line("2x1-lora-batch4", out, None) == "2x1-lora-batch4: out of GPU memory: b: CUDA out of memory"
    assert end_line("2x1-lora-batch4", changed(out, out_of="node"), None).startswith(
        "2x1-lora-batch4: out of the node's memory: "
    )
    assert (
        end_line(CELLS[0].cell.label, changed(CELLS[0], state="failed", why=Finding(message="a: boom")), None)
        == "2x1-lora-batch4: failed: a: boom"
    )


def test_cells_are_counted_by_state() -> None:
    states = ("measured", "out_of_memory", "skipped", "waiting")
    record = record_of(*(changed(cell, state=state) for cell, state in zip(CELLS, states, strict=True)))
    assert state_line(record) == "4 cells: 1 measured, 1 out of memory, 1 skipped, 1 waiting"


def test_a_plan_lists_the_cells_as_they_will_be_measured() -> None:
    record = record_of(changed(CELLS[0], state="measured", run_ids=("r",)), *CELLS[1:])
    settings = "--nodes 2 --workers-per-node 1 --set finetuning_type={} --set per_device_train_batch_size={}"
    assert plan_lines(record) == [
        f"1  2x1-lora-batch1  {settings.format('lora', 1)}",
        f"2  2x1-lora-batch4  {settings.format('lora', 4)}  (measured)",
        f"3  2x1-full-batch1  {settings.format('full', 1)}",
        f"4  2x1-full-batch4  {settings.format('full', 4)}",
        "4 cells, 2 times each: 7 runs to make",
    ]
