from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.prices import Price, Prices, parse_prices
from multinode.errors import UsageError

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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("currency: CNY", "currency: 7", "prices.yaml:1: 'currency': Expected `str`"),
        ("currency: CNY\n", "", "missing required field `currency`"),
        ("currency: CNY", "currency: Chinese yuan", "prices.yaml:1: 'currency': expected one word"),
        ("currency: CNY", 'currency: "\\e[2J"', "prices.yaml:1: 'currency': expected one word"),
        ("2024-02-24", "last week", "prices.yaml:2: 'date': expected a date"),
        ("second-hand market", '"a\\nb"', "prices.yaml:3: 'source': expected one line"),
        ("{purchase: 15000}", "{purchase: 15,000}", "prices.yaml:5: 'devices': 'RTX 4090': Expected `str` - at `key`"),
        ("{purchase: 15000}", "15000", "prices.yaml:5: 'devices': 'RTX 4090': Expected `object`, got `int`"),
        (
            "{purchase: 15000}",
            "{purchase: -1}",
            "prices.yaml:5: 'devices': 'RTX 4090': 'purchase': Expected `float` >= 0.0",
        ),
        (
            "{purchase: 15000}",
            "{purchase: .nan}",
            "prices.yaml:5: 'devices': 'RTX 4090': 'purchase': Expected `float` >= 0.0",
        ),
        (
            "{purchase: 15000}",
            "{purchase: 1e300}",
            "prices.yaml:5: 'devices': 'RTX 4090': 'purchase': Expected `float` <=",
        ),
        (
            "{purchase: 15000}",
            "{price: 1}",
            "prices.yaml:5: 'devices': 'RTX 4090': 'price': Object contains unknown field `price`",
        ),
        ("{purchase: 15000}", "{}", "prices.yaml:5: 'devices': 'RTX 4090': it has no price"),
        ("  A100:", "  GeForce RTX 4090:", "prices.yaml:6: 'devices': 'GeForce RTX 4090': it is the same device as"),
        ("  A100:", '  "":', "prices.yaml:6: 'devices': '': it is not a device name"),
        ("  A100:", "  RTX 4090:", "prices.yaml:6: duplicate key 'RTX 4090' (line 5)"),
        ("nodes:", "node:", "prices.yaml:7: 'node': Object contains unknown field `node`"),
        ("  node1: {hourly: 2.80}", "- node1", "prices.yaml:7: 'nodes': Expected `object`, got `array`"),
        ("{hourly: 2.80}", "{hourly: [", "prices.yaml:9: "),
    ],
)
def test_a_wrong_line_is_an_error_with_its_place(old: str, new: str, said: str) -> None:
    assert old in SAMPLE
    with pytest.raises(UsageError) as refused:
        parse_prices(SAMPLE.replace(old, new), "prices.yaml")
    assert said in refused.value.message
    assert "gpu_prices.yaml" in (refused.value.hint or "")


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
