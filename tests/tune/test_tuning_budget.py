"""Which runs begin in the time that is left."""

from __future__ import annotations

import pytest

from multinode.series.grid import CellRecord, Grid, GridCell, GridRecord, Turn, due_turns
from multinode.tune.trial import fits, spent_s, time_needed_s

# Nobody knows how long the first two take before they have run.
EXPECTED = (None, None, 50.0, 40.0)


def grid(*took: tuple[float, ...], repeats: int = 3) -> GridRecord:
    """Cells whose runs took so long."""
    cells = tuple(
        CellRecord(
            cell=GridCell(label=str(index), nodes=2),
            state="measured" if done else "waiting",
            run_ids=tuple(f"{index}-{number}" for number in range(len(done))),
            took_s=done,
        )
        for index, done in enumerate(took)
    )
    return GridRecord(fingerprint="", command="", grid=Grid(nodes=(2,), repeats=repeats), cells=cells)


@pytest.mark.parametrize(
    ("took", "cell", "number", "budget_s", "begins"),
    [
        # Before anything is known.
        (((), (), (), ()), 0, 1, 1.0, True),
        (((100.0,), (), (), ()), 1, 1, 100.0, True),
        (((100.0,), (), (), ()), 1, 1, 99.0, False),
        # As expected; the better one has its time before the worse one.
        (((100.0,), (60.0,), (), ()), 2, 1, 210.0, True),
        (((100.0,), (60.0,), (), ()), 3, 1, 210.0, False),
        (((100.0,), (60.0,), (), ()), 3, 1, 250.0, True),
        # As it took. In the second round the worst is asked first, and leaves room for all others.
        (((100.0,), (60.0,), (30.0,), (20.0,)), 3, 2, 419.0, False),
        (((100.0,), (60.0,), (30.0,), (20.0,)), 2, 2, 400.0, True),
        (((100.0,), (60.0,), (30.0,), (20.0,)), 1, 2, 370.0, True),
        (((100.0,), (60.0,), (30.0,), (20.0,)), 3, 2, 420.0, True),
        # No third round before the second is complete.
        (((100.0, 100.0), (60.0, 60.0), (30.0,), (20.0,)), 0, 3, 520.0, True),
        (((100.0, 100.0), (60.0, 60.0), (30.0,), (20.0,)), 0, 3, 519.0, False),
    ],
)
def test_a_run_begins_where_all_that_come_before_it_fit(
    took: tuple[tuple[float, ...], ...], cell: int, number: int, budget_s: float, *, begins: bool
) -> None:
    assert fits(grid(*took), Turn(cell=cell, number=number), EXPECTED, budget_s) == begins


def test_what_is_left_takes_as_long_as_what_was_made() -> None:
    record = grid((100.0,), (60.0, 80.0), (), (), repeats=2)
    assert spent_s(record) == 240.0
    assert time_needed_s(record, due_turns(record), EXPECTED) == 100 + 2 * 50 + 2 * 40
