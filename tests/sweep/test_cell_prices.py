from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.prices import Price, Prices
from multinode.model.workload import JobSettings
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED, Unknown, or_none, or_unknown, reason_of, unknown_fields
from multinode.sweep.cheapest import cheapest
from multinode.sweep.figures import CellRow, CellTable, Cheapest
from multinode.sweep.prices import with_price_notes, with_prices

PRICES = Prices(
    currency="EUR",
    date="2024-02-24",
    source="a shop",
    devices={"RTX 4090": Price(hourly=0.4, purchase=2000), "A100": Price(hourly=1.5)},
    nodes={"box": Price(hourly=0.5, purchase=6000), "other": Price(hourly=0.7)},
)


def exact(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


MEASURED = CellRow(
    label="cell",
    device="NVIDIA GeForce RTX 4090",
    nodes=2,
    workers_per_node=2,
    world_size=4,
    samples_per_s=exact(10.0),
    tokens_per_s=exact(5000.0),
    whole_s=exact(7200.0),
)


def price(row: CellRow, prices: Prices | None = PRICES) -> CellRow:
    return with_prices(CellTable(run_id="run", job="job", cells=(row,)), prices).cells[0]


def noted(table: CellTable, prices: Prices | None = PRICES) -> CellTable:
    return with_price_notes(with_prices(table, prices), table, prices)


def test_what_follows_from_a_price_is_arithmetic() -> None:
    found = price(MEASURED)
    assert found.price_per_hour == pytest.approx(1.6)  # four GPUs at 0.4
    assert found.price_purchase == 8000
    assert found.whole_cost == pytest.approx(3.2)  # two hours
    assert found.samples_per_money == pytest.approx(10 * 3600 / 1.6)
    assert found.samples_per_s_per_purchase == pytest.approx(10 / 8000)
    assert found.cost_per_million_tokens == pytest.approx(1.6 / (5000 * 3600) * 1e6)
    assert found.currency == "EUR"
    assert not {"price_per_hour", "whole_cost", "samples_per_s_per_purchase"} & unknown_fields(found).keys()


@pytest.mark.parametrize(
    ("changes", "hourly", "purchase", "currency", "filed"),
    [
        # A price of the hostfile comes before the file's, in its own currency without any of the file's.
        ({"price_per_hour": 9.0}, 9.0, 8000, "EUR", ("price_purchase",)),
        ({"price_per_hour": 9.0, "currency": "CNY"}, 9.0, None, "CNY", ()),
        # A node has its own price before its GPUs.
        ({"node_names": ("box", "x")}, 0.5 + 2 * 0.4, 6000 + 2 * 2000, "EUR", ("price_per_hour", "price_purchase")),
    ],
)
def test_which_price_comes_first(
    changes: dict[str, Any], hourly: float, purchase: float | None, currency: str, filed: tuple[str, ...]
) -> None:
    found = price(msgspec.structs.replace(MEASURED, **changes))
    assert found.price_per_hour == pytest.approx(hourly)
    assert (or_none(found.price_purchase), found.currency, found.filed_prices) == (purchase, currency, filed)


def test_the_prices_of_another_file_come_in_the_place_of_the_first_ones() -> None:
    first = noted(CellTable(run_id="run", job="job", cells=(MEASURED,)))
    dollars = Prices(currency="USD", devices={"RTX 4090": Price(hourly=1.0)})
    second = noted(first, dollars)
    assert (second.cells[0].price_per_hour, second.cells[0].currency) == (4.0, "USD")
    assert isinstance(second.cells[0].price_purchase, Unknown)
    assert second.cells[0].samples_per_s_per_purchase == second.cells[0].price_purchase
    assert [note.message for note in second.notes if "Prices" in note.message] == ["Prices in the file are in USD."]
    assert noted(second, None) == second


def test_a_gpu_that_is_not_in_the_file_is_a_note_and_no_error() -> None:
    row = msgspec.structs.replace(MEASURED, device="NVIDIA H100 PCIe")
    table = noted(CellTable(run_id="run", job="job", cells=(row,)))
    assert "The prices file has no price for H100 PCIe, so cells with these devices have no price." in [
        note.message for note in table.notes
    ]
    reason = "no hourly price of H100 PCIe in the prices file, and no price= in the hostfile"
    assert {
        name: reason_of(getattr(table.cells[0], name)) for name in ("price_per_hour", "whole_cost", "samples_per_money")
    } == (dict.fromkeys(("price_per_hour", "whole_cost", "samples_per_money"), reason))


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"device": UNMEASURED}, "price_per_hour", "the device, and therefore its price, is unknown"),
        ({"world_size": UNMEASURED}, "price_per_hour", "the number of GPUs, and therefore their price, is unknown"),
        ({"device": "A100"}, "price_purchase", "no purchase price of A100 in the prices file, and no price_purchase="),
        ({"whole_s": Unknown("the job says no steps")}, "whole_cost", "the job says no steps"),
        ({"tokens_per_s": Unknown("no tokenizer")}, "cost_per_million_tokens", "no tokenizer"),
        ({"price_per_hour": 0.0}, "samples_per_money", "it costs nothing"),
        ({"price_purchase": 0.0}, "samples_per_s_per_purchase", "it costs nothing"),
    ],
)
def test_what_is_missing_has_its_reason(changes: dict[str, Any], name: str, said: str) -> None:
    found = price(msgspec.structs.replace(MEASURED, **changes))
    assert said in reason_of(getattr(found, name))


def test_without_a_file_a_row_has_what_the_hostfile_gives() -> None:
    found = price(msgspec.structs.replace(MEASURED, price_per_hour=2.0), None)
    assert found.whole_cost == pytest.approx(4.0)
    assert reason_of(found.price_purchase) == (
        "it has no price; set price_purchase= in the hostfile, or use a prices file"
    )
    assert found.currency is None


def test_a_cell_without_figures_has_prices_and_no_costs() -> None:
    row = CellRow(label="cell", state="out_of_memory", device="RTX 4090", world_size=1)
    found = price(row)
    assert (found.price_purchase, found.whole_cost, found.samples_per_money) == (2000, UNMEASURED, UNMEASURED)


_figure = st.just(UNMEASURED) | st.floats(1e-6, 1e12).map(exact)
_price = st.just(UNMEASURED) | st.floats(0, 1e12)


@given(
    st.builds(
        CellRow,
        label=st.just("cell"),
        device=st.sampled_from([UNMEASURED, "RTX 4090", "A100", ""]),
        node_names=st.sampled_from([(), ("box",), ("box", "x")]),
        world_size=st.just(UNMEASURED) | st.integers(1, 10**15),
        workers_per_node=st.just(UNMEASURED) | st.integers(1, 1024),
        samples_per_s=_figure,
        tokens_per_s=_figure,
        whole_s=_figure,
        price_per_hour=_price,
        price_purchase=_price,
    ),
    st.sampled_from([None, PRICES]),
)
def test_every_figure_is_a_number_or_has_a_reason(row: CellRow, prices: Prices | None) -> None:
    found = price(row, prices)
    for name in ("price_per_hour", "price_purchase", "whole_cost", "samples_per_money", "samples_per_s_per_purchase"):
        value = getattr(found, name)
        assert reason_of(value) if isinstance(value, Unknown) else math.isfinite(value)


MIXED = msgspec.structs.replace(
    MEASURED,
    device="3 x NVIDIA GeForce RTX 4090 + 1 x NVIDIA A100",
    node_names=("a", "b"),
    node_devices=({"NVIDIA GeForce RTX 4090": 2}, {"NVIDIA GeForce RTX 4090": 1, "NVIDIA A100": 1}),
)


def test_nodes_with_different_gpus_cost_what_each_of_them_does() -> None:
    found = price(MIXED)
    assert found.price_per_hour == pytest.approx(3 * 0.4 + 1.5)
    assert reason_of(found.price_purchase).startswith("no purchase price of A100")
    named = price(msgspec.structs.replace(MIXED, node_names=("box", "b")))
    assert named.price_per_hour == pytest.approx(0.5 + 0.4 + 1.5)


def test_a_price_without_a_currency_that_gets_the_file_s_is_noted() -> None:
    def notes(row: CellRow) -> list[str]:
        table = noted(noted(CellTable(run_id="run", job="job", cells=(row,))))
        return [note.message for note in table.notes if note.code == "assumed-currency"]

    own = msgspec.structs.replace(MEASURED, price_per_hour=2.8)
    assert len(notes(own)) == 1
    assert notes(own)[0].endswith("are taken to be in EUR.")
    assert notes(MEASURED) == notes(msgspec.structs.replace(own, currency="EUR")) == []


def test_cells_that_were_not_measured_lack_no_price() -> None:
    priced = msgspec.structs.replace(MEASURED, device="CPU", node_names=("box", "other"))
    out = CellRow(label="out", state="out_of_memory", device="CPU", world_size=4)
    table = noted(CellTable(run_id="run", job="job", cells=(priced, out)))
    assert table.cells[0].price_per_hour == pytest.approx(1.2)
    assert not [note for note in table.notes if note.code == "unpriced"]


def test_devices_without_a_price_are_those_of_the_rows_that_are_left() -> None:
    other = msgspec.structs.replace(MEASURED, label="other", device="H100")
    table = noted(CellTable(run_id="run", job="job", cells=(MEASURED, other)))
    assert any("no price for H100" in note.message for note in table.notes)
    left = noted(msgspec.structs.replace(table, cells=table.cells[:1]), None)
    assert not any("no price for" in note.message for note in left.notes)
    assert any("Prices in the file" in note.message for note in left.notes)


HOUR = 3600.0


def cell(label: str, hours: float, cost: float | None, *, late: float = 0.0, currency: str | None = "EUR") -> CellRow:
    whole_s = Estimate(value=hours * HOUR, low=hours * HOUR, high=(hours + late) * HOUR)
    return CellRow(
        label=label, whole_s=whole_s, whole_cost=or_unknown(cost), currency=currency if cost is not None else None
    )


def choose(*cells: CellRow, hours: float = 8) -> Cheapest:
    return cheapest(CellTable(run_id="run", job="job", cells=cells), hours * HOUR)


@pytest.mark.parametrize(
    ("cells", "label", "said"),
    [
        (
            [cell("slow", 10, 1.0), cell("right", 7, 2.5), cell("fast", 1, 12.0)],
            "right",
            "is the cheapest within the deadline of 8 h 00 min: the full run costs 2.50 EUR and takes 7 h 00 min.",
        ),
        ([cell("at the deadline", 8, 1.0)], "at the deadline", "takes 8 h 00 min."),
        # Of cells that cost the same the one that ends first is named first.
        (
            [cell("late", 7, 2.0), cell("early", 3, 2.0), cell("dear", 1, 3.0)],
            "early",
            "with late: each costs 2.00 EUR, and early is the fastest (3 h 00 min).",
        ),
        # A spread that reaches beyond the deadline is said with the cheapest that does not.
        (
            [cell("risky", 7, 1.0, late=2), cell("safe", 6, 1.5, late=1), cell("safest", 1, 9.0)],
            "risky",
            "may take 9 h 00 min and miss the deadline; the cheapest cell that will not miss it is safe, for 1.50 EUR.",
        ),
        ([cell("a", 7, 1.0, late=2), cell("b", 7, 2.0, late=2)], "a", "like every other cell"),
        ([cell("a", 7, 1.0, late=2)], "a", "may take 9 h 00 min and miss the deadline."),
        ([cell("a", 1, 1.0), cell("b", 1, None)], "a", "1 cell that finishes in time has no price."),
        ([msgspec.structs.replace(cell("out", 1, 0.1), state="out_of_memory"), cell("in", 2, 5.0)], "in", ""),
        ([cell("a", 1, 0.001234)], "a", "costs 0.00123 EUR"),
    ],
)
def test_the_cheapest_is_the_one_that_costs_least_of_those_in_time(cells: list[CellRow], label: str, said: str) -> None:
    found = choose(*cells)
    assert (found.label, found.deadline_s) == (label, 8 * HOUR)
    assert said in found.message


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([], "The duration of the full run is unknown for every cell: none was measured."),
        ([CellRow(label="a", whole_s=Unknown("no epochs"))], "is unknown for every cell: no epochs."),
        ([cell("a", 8.001, 1.0)], "No cell finishes within 8 h 00 min"),
        (
            [cell("a", 9, 1.0), cell("b", 20, 1.0)],
            ("No cell finishes within 8 h 00 min. The fastest, a, takes 9 h 00 min."),
        ),
        (
            [cell("a", 7, None)],
            "No cell that finishes in time has a price. Set price= in the hostfile",
        ),
        ([cell("a", 1, 1.0), cell("b", 1, 1.0, currency="CNY")], "Prices are in CNY and EUR, so the cheapest cell"),
        ([cell("a", 1, 1.0), cell("b", 1, 1.0, currency=None)], "Prices are in EUR and an unknown currency"),
    ],
)
def test_why_none_is_the_cheapest(cells: list[CellRow], said: str) -> None:
    found = choose(*cells)
    assert found.label is None
    assert said in found.message


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            JobSettings(model="70b"),
            JobSettings(model="1b"),
            "The cells differ in model, so the costs of their full runs cannot be compared",
        ),
        (JobSettings(dataset="a"), JobSettings(dataset="b"), "differ in data set"),
        (JobSettings(model="m", stage="sft"), JobSettings(model="m"), "do not all state stage"),
        (
            JobSettings(model="m"),
            JobSettings(model="n", stage="pt"),
            "differ in model and do not all state stage",
        ),
    ],
)
def test_of_different_jobs_none_is_the_cheapest(one: JobSettings, other: JobSettings, said: str) -> None:
    cells = [
        msgspec.structs.replace(cell(name, 1, cost), settings=settings)
        for name, cost, settings in (("a", 1.0, one), ("b", 2.0, other), ("c", 3.0, one))
    ]
    found = choose(*cells)
    assert found.label is None
    assert said in found.message
    assert "--where " in found.message
    assert choose(cells[0], cells[2]).label == "a"


def test_a_whole_job_of_more_samples_is_another_job() -> None:
    def with_rate(row: CellRow, rate: float) -> CellRow:
        return msgspec.structs.replace(row, samples_per_s=Estimate(value=rate, low=rate, high=rate))

    once, thrice = with_rate(cell("once", 1, 1.0), 10.0), with_rate(cell("thrice", 3, 2.0), 10.0)
    assert choose(once, thrice).label is None
    assert "train different numbers of samples" in choose(once, thrice).message
    assert choose(once, with_rate(cell("slow", 3, 2.0), 3.35)).label == "once"
