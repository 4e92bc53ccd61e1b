"""Budget: which runs of a tuning may begin in the time that is given. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from multinode.experiment.grid import GridRecord
from multinode.experiment.grid_plan import Turn
from multinode.experiment.grid_state import due_turns


def spent_s(record: GridRecord) -> float:
    """Wall time of all runs that came to an end."""
    return math.fsum(took for cell in record.cells for took in cell.took_s)


def time_needed_s(record: GridRecord, turns: Sequence[Turn], expected_s: Sequence[float | None]) -> float:
    """Of these runs: as long as earlier ones of the same cell took, else as expected; what nobody knows counts as none.

    Args:
        record: the grid.
        turns: runs of it.
        expected_s: of a run of each cell.
    """
    took = [cell.took_s for cell in record.cells]
    one_s = [statistics.fmean(done) if done else expected for done, expected in zip(took, expected_s, strict=True)]
    return math.fsum(one_s[turn.cell] or 0.0 for turn in turns)


def fits(record: GridRecord, turn: Turn, expected_s: Sequence[float | None], budget_s: float) -> bool:
    """Whether a run may begin: it fits beside all that come before it: earlier rounds, and of its own better cells.

    So the last round lacks what is predicted worst, and never what all are compared with.
    """
    before = [one for one in due_turns(record) if (one.number, one.cell) <= (turn.number, turn.cell)]
    return spent_s(record) + time_needed_s(record, before, expected_s) <= budget_s
