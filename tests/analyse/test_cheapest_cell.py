from __future__ import annotations

import msgspec
import pytest

from multinode.analyse.grid.cell_prices import cheapest
from multinode.analyse.grid.cells import CellRow, CellTable, Cheapest
from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.spread import Ranged

HOUR = 3600.0


def cell(label: str, hours: float, cost: float | None, *, late: float = 0.0, currency: str | None = "EUR") -> CellRow:
    whole_s = Ranged(value=hours * HOUR, low=hours * HOUR, high=(hours + late) * HOUR)
    return CellRow(label=label, whole_s=whole_s, whole_cost=cost, currency=currency if cost is not None else None)


def choose(*cells: CellRow, hours: float = 8) -> Cheapest:
    return cheapest(CellTable(run_id="run", job="job", cells=cells), hours * HOUR)


def test_the_cheapest_is_the_one_that_costs_least_of_those_in_time() -> None:
    found = choose(cell("slow", 10, 1.0), cell("right", 7, 2.5), cell("fast", 1, 12.0))
    assert (found.label, found.deadline_s) == ("right", 8 * HOUR)
    assert found.sentence == "right is the cheapest in time: the whole job costs 2.50 EUR and takes 7 h 00 min."


def test_a_cell_that_ends_at_the_deadline_ends_in_time() -> None:
    assert choose(cell("just", 8, 1.0)).label == "just"
    assert choose(cell("just", 8.001, 1.0)).label is None


def test_of_cells_that_cost_the_same_the_one_that_ends_first_is_named_first() -> None:
    found = choose(cell("late", 7, 2.0), cell("early", 3, 2.0), cell("dear", 1, 3.0))
    assert found.label == "early"
    assert "with late: each costs 2.00 EUR; it takes least, 3 h 00 min" in found.sentence


def test_a_spread_that_reaches_beyond_the_deadline_is_said_with_the_cheapest_that_does_not() -> None:
    found = choose(cell("risky", 7, 1.0, late=2), cell("safe", 6, 1.5, late=1), cell("safest", 1, 9.0))
    assert found.label == "risky"
    assert (
        "may take 9 h 00 min, and miss the deadline; the cheapest that cannot is safe, for 1.50 EUR." in found.sentence
    )
    assert "so may every other" in choose(cell("a", 7, 1.0, late=2), cell("b", 7, 2.0, late=2)).sentence
    assert "may take 9 h 00 min, and miss the deadline." in choose(cell("a", 7, 1.0, late=2)).sentence


def test_cells_in_time_that_have_no_price_are_counted() -> None:
    assert choose(cell("a", 1, 1.0), cell("b", 1, None)).sentence.endswith("1 cell that ends in time has no price.")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([], "How long the whole job takes is known of no cell: none was measured."),
        ([CellRow(label="a", missing={"whole_s": "no epochs"})], "is known of no cell: no epochs."),
        ([cell("a", 9, 1.0), cell("b", 20, 1.0)], "No cell ends within 8 h 00 min: the fastest, a, takes 9 h 00 min."),
        ([cell("a", 7, None)], "No cell that ends in time has a price: price= in the hostfile, or a prices file."),
        ([cell("a", 1, 1.0), cell("b", 1, 1.0, currency="CNY")], "Prices are in CNY and EUR: which cell"),
        ([cell("a", 1, 1.0), cell("b", 1, 1.0, currency=None)], "Prices are in EUR and a currency that is not told"),
    ],
)
def test_why_none_is_the_cheapest(cells: list[CellRow], said: str) -> None:
    found = choose(*cells)
    assert found.label is None
    assert said in found.sentence


def test_a_cell_that_ran_out_of_memory_is_not_chosen() -> None:
    ran_out = msgspec.structs.replace(cell("out", 1, 0.1), state="out_of_memory")
    assert choose(ran_out, cell("in", 2, 5.0)).label == "in"


def test_small_costs_keep_their_digits() -> None:
    assert "costs 0.00123 EUR" in choose(cell("a", 1, 0.001234)).sentence


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            Settings(model="70b"),
            Settings(model="1b"),
            "Cells differ in model, so that their whole jobs are not the same",
        ),
        (Settings(dataset="a"), Settings(dataset="b"), "differ in data set"),
        (Settings(model="m", stage="sft"), Settings(model="m"), "do not all tell their stage"),
        (Settings(model="m"), Settings(model="n", stage="pt"), "differ in model and do not all tell their stage"),
    ],
)
def test_of_different_jobs_none_is_the_cheapest(one: Settings, other: Settings, said: str) -> None:
    cells = [
        msgspec.structs.replace(cell(name, 1, cost), settings=settings)
        for name, cost, settings in (("a", 1.0, one), ("b", 2.0, other), ("c", 3.0, one))
    ]
    found = choose(*cells)
    assert found.label is None
    assert said in found.sentence
    assert "--where " in found.sentence
    assert choose(cells[0], cells[2]).label == "a"


def test_a_whole_job_of_more_samples_is_another_job() -> None:
    def with_rate(row: CellRow, rate: float) -> CellRow:
        return msgspec.structs.replace(row, samples_per_s=Ranged(value=rate, low=rate, high=rate))

    once, thrice = with_rate(cell("once", 1, 1.0), 10.0), with_rate(cell("thrice", 3, 2.0), 10.0)
    assert choose(once, thrice).label is None
    assert "train different numbers of samples" in choose(once, thrice).sentence
    assert choose(once, with_rate(cell("slow", 3, 2.0), 3.35)).label == "once"
