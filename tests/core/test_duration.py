from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.core.text.duration import parse_clock, parse_duration


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
    with pytest.raises(ValueError, match="write it as 8h, 90m, 1h30m or 2d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3:35:20", 12920), ("28:04", 1684), ("07:01", 421), ("00:09.5", 9.5), ("90:00", 5400), ("100:00:00", 360000)],
)
def test_a_clock_shows_hours_where_it_has_three_parts_and_else_minutes(text: str, seconds: float) -> None:
    assert parse_clock(text) == seconds


@pytest.mark.parametrize("text", ["", "28", "28:4", "28:60", "1:60:00", ":30", "1:2:3:4", "a:bc", "-1:00", "1:00 h"])
def test_what_no_clock_shows_is_told_what_one_does(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 3:35:20"):
        parse_clock(text)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_a_clock_is_read_as_it_was_printed(hours: int, minutes: int, seconds: int) -> None:
    assert parse_clock(f"{hours}:{minutes:02d}:{seconds:02d}") == hours * 3600 + minutes * 60 + seconds
