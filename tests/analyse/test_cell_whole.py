from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.analyse.grid.cell_rows import with_whole_job
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.workload import Whole
from multinode.analyse.stats.spread import Ranged


def row(label: str, rate: float | None = 10.0, world_size: int = 2, batch: int | None = 4, **known: Any) -> CellRow:
    speed = None if rate is None else Ranged(value=rate, low=rate / 2, high=rate * 2)
    state = "skipped" if rate is None else "measured"
    return CellRow(label=label, state=state, samples_per_s=speed, world_size=world_size, global_batch=batch, **known)


def times(rows: tuple[CellRow, ...]) -> list[float | None]:
    return [one.whole_s.value if one.whole_s is not None else None for one in rows]


def test_epochs_are_so_many_times_the_data() -> None:
    rows, rule = with_whole_job([row("a", dataset_samples=1100), row("b", 20.0)], Whole(epochs=3.0))
    assert times(rows) == [330.0, 165.0]
    assert rule == "The whole job is 3 epochs of the data set (1,100 samples), at the rate of the steps that count."
    assert rows[0].whole_s == Ranged(value=330.0, low=165.0, high=660.0)


def test_a_cell_that_packs_its_data_otherwise_trains_the_same_data() -> None:
    rows, rule = with_whole_job([row("a", dataset_samples=1000), row("b", dataset_samples=250)], Whole(epochs=1.0))
    assert times(rows) == [100.0, 25.0]
    assert "samples)" not in rule


def test_steps_are_those_of_the_file_s_batch_on_the_most_workers_in_every_cell() -> None:
    cells = [row("a", batch=2), row("b", world_size=4, batch=64), row("c", None, world_size=8, batch=None)]
    rows, rule = with_whole_job(cells, Whole(steps=100), worker_batch=16)
    assert times(rows) == [1280.0, 1280.0, None]
    assert "12,800 samples in every cell (100 steps of 16 samples a worker on 8 workers)" in rule


def test_a_largest_cell_without_figures_counts_as_well() -> None:
    cells = [row("a", batch=32, world_size=4), msgspec.structs.replace(row("b", None, batch=None), world_size=None)]
    assert times(with_whole_job(cells, Whole(steps=10), worker_batch=8)[0]) == [32.0, None]
    assert times(with_whole_job(cells, Whole(steps=10), worker_batch=8, least_workers=8)[0]) == [64.0, None]
    assert times(with_whole_job(cells, Whole(steps=10), least_workers=8)[0]) == [64.0, None]


def test_steps_of_a_file_that_does_not_say_are_those_of_the_first_cell_with_the_most_workers() -> None:
    cells = [row("a", batch=2), row("b", world_size=4, batch=32), row("c", world_size=4, batch=64)]
    assert times(with_whole_job(cells, Whole(steps=10))[0]) == [32.0, 32.0, 32.0]


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (Whole(), "how many steps or epochs"),
        (Whole(epochs=1e300), "how many steps or epochs"),
        (Whole(epochs=2.0), "how many samples the data set has"),
        (Whole(steps=5), "the batch of a worker"),
    ],
)
def test_what_is_not_known_is_said_of_measured_rows(whole: Whole, reason: str) -> None:
    rows, rule = with_whole_job([row("a", batch=None), row("b", None, batch=None)], whole)
    assert (rows[0].whole_s, rule) == (None, "")
    assert reason in rows[0].missing["whole_s"]
    assert rows[1].missing == {}
