from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.units import (
    format_duration,
    format_figure,
    format_link,
    format_ms,
    format_rate,
    format_sig,
    format_size,
    goodput_gb_per_s,
    parse_clock,
    parse_duration,
    parse_nics,
    parse_rate,
    parse_size,
    times,
)
from tests.golden import raised


@pytest.mark.parametrize(
    ("text", "gbit_per_s"),
    [
        ("1gbit", 1.0),
        ("2.5gbit", 2.5),
        ("100mbit", 0.1),
        ("64kbit", 64e-6),
        ("1tbit", 1000.0),
        ("8bit", 8e-9),
        ("10GBIT", 10.0),
        (" 10 Gbit ", 10.0),
        ("0.1", 0.1),
    ],
)
def test_rates_are_read_as_tc_reads_them(text: str, gbit_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(gbit_per_s)


@pytest.mark.parametrize("text", ["", "0", "gbit", "0gbit", "0.0mbit", "-1gbit", "1gbps", "1GB", "1e3mbit", "1,5gbit"])
def test_what_is_no_rate_is_told_how_to_write_one(text: str) -> None:
    told = f"{text!r} is not a link rate; write it as 100mbit, 1gbit or 2.5gbit"
    assert str(raised(ValueError, parse_rate, text)) == told


@pytest.mark.parametrize(
    ("text", "nics"),
    [("100gbit", (100.0,)), ("4x200gbit", (200.0,) * 4), ("8X400", (400.0,) * 8), (" 2x25gbit ", (25.0, 25.0))],
)
def test_the_nics_of_a_node_are_a_number_and_a_rate(text: str, nics: tuple[float, ...]) -> None:
    assert parse_nics(text) == nics


@pytest.mark.parametrize("text", ["0x100gbit", "65x1gbit", "-1x100gbit", "1.5x100gbit", "fourx100gbit"])
def test_what_is_no_number_of_nics_is_told_how_to_write_one(text: str) -> None:
    told = f"{text!r} is not a NIC rate; write it as 100gbit or 4x200gbit"
    assert str(raised(ValueError, parse_nics, text)) == told


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8", 8), ("64K", 65536), ("64k", 65536), ("64KiB", 65536), ("128M", 128 << 20), ("1G", 1 << 30), (" 0 ", 0)],
)
def test_sizes_are_read_as_nccl_tests_reads_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "1T", "1 M M", "8bits"])
def test_what_is_no_size_is_told_how_to_write_one(text: str) -> None:
    told = f"{text!r} is not a size; write it as 8, 64K, 128M or 1G"
    assert str(raised(ValueError, parse_size, text)) == told


@pytest.mark.parametrize(
    ("link_gbit_per_s", "mtu", "gb_per_s"),
    [(1, 1500, 0.1177), (10, 1500, 1.177), (25, 1500, 2.94), (100, 1500, 11.77), (100, 9000, 12.5 * 0.99)],
)
def test_what_tcp_gets_through_a_link(link_gbit_per_s: float, mtu: int, gb_per_s: float) -> None:
    assert goodput_gb_per_s(link_gbit_per_s, mtu) == pytest.approx(gb_per_s, rel=2e-3)


@pytest.mark.parametrize(
    ("gbit_per_s", "text"),
    [
        (0.1, "100 Mbit/s"),
        (1, "1 Gbit/s"),
        (2.5, "2.5 Gbit/s"),
        (100, "100 Gbit/s"),
        (1000, "1,000 Gbit/s"),
        (1e6, "1,000,000 Gbit/s"),
    ],
)
def test_rates_are_written_for_people(gbit_per_s: float, text: str) -> None:
    assert format_rate(gbit_per_s) == text


@pytest.mark.parametrize(
    ("gbit_per_s", "text"),
    [
        (0.8, "an 800 Mbit/s link"),
        (1, "a 1 Gbit/s link"),
        (11, "an 11 Gbit/s link"),
        (18.5, "an 18.5 Gbit/s link"),
        (100, "a 100 Gbit/s link"),
        (112, "a 112 Gbit/s link"),
        (1600, "a 1,600 Gbit/s link"),
    ],
)
def test_links_have_their_article(gbit_per_s: float, text: str) -> None:
    assert format_link(gbit_per_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5 TiB"),
        (12345 << 40, "12,345 TiB"),
    ],
)
def test_sizes_are_written_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-1e-12, "0"),
        (0.00001234, "0.0000123"),
        (0.0724, "0.0724"),
        (0.5123, "0.512"),
        (2.5, "2.5"),
        (24.12, "24.1"),
        (99.96, "100"),
        (-42.0, "-42"),
        (999.6, "1,000"),
        (1342.4, "1,342"),
        (123456789.0, "123,456,789"),
        (1e300, "over 1,000,000,000,000,000"),
        (-1e300, "under -1,000,000,000,000,000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_figure_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert format_figure(value) == text
    assert format_ms(value) == f"{text} ms"


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(2.71828, 4, "2.718"), (1023.4, 4, "1,023"), (0.01234, 2, "0.012"), (123.4, 2, "123")]
)
def test_a_figure_has_the_digits_asked_for_and_all_before_the_point(value: float, digits: int, text: str) -> None:
    assert format_figure(value, digits) == text


@given(st.floats())
def test_no_figure_has_an_exponent(value: float) -> None:
    assert "e" not in format_figure(value).removeprefix("over").removeprefix("under")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (245.9, "4 min 05 s"),
        (3599.9, "59 min 59 s"),
        (7380, "2 h 03 min"),
        (-7380, "-2 h 03 min"),
        (1e9, "277777 h 46 min"),
        (1e10, "over 100 years"),
        (math.inf, "over 100 years"),
        (math.nan, "unknown"),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 1 << 20), st.sampled_from("KMG"))
def test_a_size_in_a_unit_is_that_many_of_it(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * parse_size(f"1{unit}")


@given(st.text())
def test_what_is_no_rate_and_no_size_is_a_value_error_and_nothing_else(text: str) -> None:
    for parse in (parse_rate, parse_size):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            assert "write it as" in str(error)  # noqa: PT017 - an error is one of two right answers


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8h", 28800),
        ("90m", 5400),
        ("90min", 5400),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("2d", 172800),
        ("1.5H", 5400),
        ("1d2h3m4s", 93784),
        (" 45s ", 45),
    ],
)
def test_a_time_is_written_in_days_hours_minutes_and_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "8", "h", "0h", "-1h", "1h-30m", "30m1h", "1e3h", "inf", "1:30", "1h\x00"])
def test_what_is_no_time_is_told_how_to_write_one(text: str) -> None:
    told = f"{text!r} is not a time; write it as 8h, 90m, 1h30m or 2d"
    assert str(raised(ValueError, parse_duration, text)) == told


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3:35:20", 12920), ("28:04", 1684), ("07:01", 421), ("00:09.5", 9.5), ("90:00", 5400), ("100:00:00", 360000)],
)
def test_a_clock_shows_hours_where_it_has_three_parts_and_else_minutes(text: str, seconds: float) -> None:
    assert parse_clock(text) == seconds


@pytest.mark.parametrize("text", ["", "28", "28:4", "28:60", "1:60:00", ":30", "1:2:3:4", "a:bc", "-1:00", "1:00 h"])
def test_what_no_clock_shows_is_told_what_one_does(text: str) -> None:
    told = f"{text!r} is not a time; write it as 3:35:20 (hours), 28:04 (minutes) or in seconds"
    assert str(raised(ValueError, parse_clock, text)) == told


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_a_clock_is_read_as_it_was_printed(hours: int, minutes: int, seconds: int) -> None:
    assert parse_clock(f"{hours}:{minutes:02d}:{seconds:02d}") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0724, "0.0724"),
        (0.00001234, "0.0000123"),
        (0.02, "0.0200"),
        (0.99951, "1.00"),
        (2.984, "2.98"),
        (24.13, "24.1"),
        (999.96, "1,000"),
        (13420.4, "13,420"),
        (1e300, "over 1,000,000,000,000,000"),
        (-0.5, "-0.500"),
    ],
)
def test_a_figure_has_three_or_four_digits(value: float | None, told: str) -> None:
    assert format_sig(value) == told


@pytest.mark.parametrize(
    ("factor", "told"), [(0.04, "0.04x"), (1.776, "1.78x"), (1.996, "2.0x"), (6.71, "6.7x"), (1234.4, "1,234x")]
)
def test_a_ratio_of_speeds_has_as_many_digits_as_matter(factor: float, told: str) -> None:
    assert times(factor) == told
