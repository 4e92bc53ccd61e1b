from __future__ import annotations

import pytest

from multinode.lab.network import parse_lab_rate, rate_text, shape_lines
from tests.golden import raised


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 1.0), ("100mbit", 0.1), ("2.5gbit", 2.5), ("none", None), ("0", None)]
)
def test_rates_are_read_and_written_alike(text: str, rate: float | None) -> None:
    assert parse_lab_rate(text) == rate
    assert parse_lab_rate(rate_text(rate)) == rate


def test_what_is_no_rate_is_an_error() -> None:
    told = "'1 GB/s' is not a link rate; write it as 100mbit, 1gbit or 2.5gbit"
    assert str(raised(ValueError, parse_lab_rate, "1 GB/s")) == told


def test_the_bucket_leaves_room_for_the_framing_that_tbf_does_not_count() -> None:
    assert shape_lines("ens1f0", 1.0) == [
        "qdisc replace dev ens1f0 root tbf rate 984395319bit burst 131072b latency 50ms"
    ]


def test_a_fast_link_has_a_bucket_of_a_millisecond() -> None:
    assert "burst 3125000b" in shape_lines("ens1f0", 25.0)[0]


def test_unshaping_works_whether_or_not_there_was_a_bucket() -> None:
    assert shape_lines("ens1f0", None) == ["qdisc replace dev ens1f0 root pfifo", "qdisc del dev ens1f0 root"]
