from __future__ import annotations

import pytest

from multinode.experiment.cell_rows import FullRunSamples
from multinode.experiment.cell_words import sweep_with_words
from multinode.experiment.cells import CellTable

TABLE = CellTable(run_id="run", job="job", cells=(), notes=("as it is",))


@pytest.mark.parametrize(
    ("full_run", "said"),
    [
        (
            FullRunSamples(samples=12_800, steps=100, worker_batch=16, workers=8),
            "12,800 samples in every cell (100 steps of 16 samples per worker on 8 workers)",
        ),
        (FullRunSamples(samples=1100, epochs=2.5), "2.5 epochs of the data set (1,100 samples)"),
        (FullRunSamples(epochs=1.0), "1 epoch of the data set"),
    ],
)
def test_what_the_full_run_trains_stands_before_the_other_notes(full_run: FullRunSamples, said: str) -> None:
    notes = sweep_with_words(TABLE, full_run).notes
    assert notes == (f"The full run is {said}, at the rate of the measured steps.", "as it is")


def test_of_a_full_run_that_is_unknown_nothing_is_said() -> None:
    assert sweep_with_words(TABLE, None).notes == ("as it is",)
