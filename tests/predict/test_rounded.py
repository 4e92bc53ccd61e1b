from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.predict.rounded import parse_count, parse_rounded, round_number
from multinode.stats.estimate import Estimate, exactly


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0.085", 0.0845, 0.0855),
        ("2.51", 2.505, 2.515),
        ("2.510", 2.5095, 2.5105),
        ("1684", 1683.5, 1684.5),
        ("5.", 4.5, 5.5),
        ("1.5e3", 1450, 1550),
        ("1", 0.5, 1.5),
    ],
)
def test_the_digits_of_a_figure_tell_how_far_it_may_be_off(text: str, low: float, high: float) -> None:
    found = parse_rounded(text)
    assert (found.value, found.low, found.high) == pytest.approx((float(text), low, high))


@pytest.mark.parametrize(
    ("number", "low", "high"),
    [(200, 150, 250), (200.0, 199.95, 200.05), (0.5, 0.45, 0.55), (1684, 1683.5, 1684.5), (90000, 85000, 95000)],
)
def test_zeros_at_the_end_of_a_whole_number_are_no_digits(number: float, low: float, high: float) -> None:
    found = round_number(number)
    assert (found.value, found.low, found.high) == pytest.approx((number, low, high))


def test_a_unit_scales_a_figure_and_its_bounds() -> None:
    assert parse_rounded("1.5", scale=60.0) == Estimate(value=90.0, low=87.0, high=93.0)


def test_products_and_quotients_carry_the_bounds_along() -> None:
    speed, time = parse_rounded("0.085"), parse_rounded("12920")
    product = speed * time
    assert product.low == pytest.approx(0.0845 * 12919.5)
    assert product.high == pytest.approx(0.0855 * 12920.5)
    quotient = exactly(1100) / time
    assert quotient.low < quotient.value < quotient.high
    assert quotient.high == pytest.approx(1100 / 12919.5)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.0", "-1", "+1", "1,100", "1 100", "1e99", "1e-99", "nan", "inf", "0x10", "1_0", "=1+1", "9" * 50],
)
def test_what_cannot_be_a_figure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=" is not a "):
        parse_rounded(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "1,100", "", "two", "\N{ARABIC-INDIC DIGIT TWO}", "9" * 40])
def test_what_cannot_be_a_number_of_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=" is not a "):
        parse_count(text)


def test_a_spreadsheet_may_write_a_number_of_things_with_a_point() -> None:
    assert parse_count("64.0") == exactly(64)


@given(st.floats(1e-9, 1e12).map(lambda value: f"{value:.6g}"))
def test_a_figure_lies_between_its_bounds_above_zero(text: str) -> None:
    found = parse_rounded(text)
    assert 0 < found.low < found.value < found.high


@given(st.text())
def test_any_text_is_a_figure_or_one_error(text: str) -> None:
    for parse in (parse_rounded, parse_count):
        try:
            found = parse(text)
        except ValueError:
            continue
        assert found.value > 0
