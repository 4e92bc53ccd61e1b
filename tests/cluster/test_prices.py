from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.prices import Price, Prices, parse_prices
from multinode.errors import UsageError
from tests.golden import Golden, error_of

SAMPLE = """\
currency: CNY
date: 2024-02-24
source: second-hand market
devices:
  RTX 4090: {purchase: 15000}
  A100: {purchase: 80000, hourly: 9.3}
nodes:
  node1: {hourly: 2.80}
"""


def test_a_file_has_prices_of_devices_and_of_nodes() -> None:
    assert parse_prices(SAMPLE) == Prices(
        currency="CNY",
        date="2024-02-24",
        source="second-hand market",
        devices={"RTX 4090": Price(purchase=15000), "A100": Price(hourly=9.3, purchase=80000)},
        nodes={"node1": Price(hourly=2.8)},
    )


@pytest.mark.parametrize(
    ("name", "purchase"),
    [("NVIDIA GeForce RTX 4090", 15000), ("rtx 4090", 15000), ("NVIDIA A100", 80000)],
)
def test_a_device_has_its_price_under_each_of_its_names(name: str, purchase: float) -> None:
    price = parse_prices(SAMPLE).of_device(name)
    assert price is not None
    assert price.purchase == purchase


@pytest.mark.parametrize("name", ["RTX 4090 D", "A100 80GB PCIe", "NVIDIA A100-SXM4-80GB", "RTX 3090", "", "CPU"])
def test_a_device_that_only_sounds_alike_has_none(name: str) -> None:
    assert parse_prices(SAMPLE).of_device(name) is None


def test_a_wrong_line_is_an_error_with_its_place(golden: Golden) -> None:
    changes = (
        ("currency: CNY", "currency: 7"),
        ("currency: CNY\n", ""),
        ("currency: CNY", "currency: Chinese yuan"),
        ("currency: CNY", 'currency: "\\e[2J"'),
        ("2024-02-24", "last week"),
        ("second-hand market", '"a\\nb"'),
        ("{purchase: 15000}", "{purchase: 15,000}"),
        ("{purchase: 15000}", "15000"),
        ("{purchase: 15000}", "{purchase: -1}"),
        ("{purchase: 15000}", "{purchase: .nan}"),
        ("{purchase: 15000}", "{purchase: 1e300}"),
        ("{purchase: 15000}", "{price: 1}"),
        ("{purchase: 15000}", "{}"),
        ("  A100:", "  GeForce RTX 4090:"),
        ("  A100:", '  "":'),
        ("  A100:", "  RTX 4090:"),
        ("nodes:", "node:"),
        ("  node1: {hourly: 2.80}", "- node1"),
    )
    assert [old for old, _ in changes if old not in SAMPLE] == []
    golden.check_errors(
        "prices",
        {f"{old} -> {new}": error_of(parse_prices, SAMPLE.replace(old, new), "prices.yaml") for old, new in changes},
    )


def test_what_is_no_yaml_is_an_error_with_its_place() -> None:
    """The words are the parser's."""
    text = SAMPLE.replace("{hourly: 2.80}", "{hourly: [")
    assert error_of(parse_prices, text, "prices.yaml").message.startswith("prices.yaml:9: ")


@pytest.mark.parametrize("text", ["", "[]", "seven", "7"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"prices\.yaml:1: Expected `object`"):
        parse_prices(text, "prices.yaml")


_words = st.sampled_from(
    [
        "currency: EUR\n",
        "devices:\n",
        "nodes:\n",
        "  A: ",
        "{hourly: 1}",
        "{purchase: x}",
        "- ",
        "&a ",
        "*a",
        "\t",
        "~",
        ":",
    ]
)


@given(st.text() | st.lists(_words | st.text(max_size=3), max_size=10).map("".join))
def test_any_text_is_a_file_of_prices_or_one_error_with_its_line(text: str) -> None:
    try:
        found = parse_prices(text, "prices.yaml")
    except UsageError as error:
        assert error.message.startswith("prices.yaml:")  # noqa: PT017 - an error is one of two right answers
        assert "\n" not in error.message  # noqa: PT017 - as above
    else:
        assert found.currency
