from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from multinode.check.connectivity import ConnectivityResult
from multinode.check.link import check_streams, least_speeds
from multinode.check.rule import CheckFinding, Inspection
from multinode.traffic.pair_speeds import PairSpeed
from tests.golden import Golden

from .inspecting import check_cases, inspection, silent
from .test_link import linked

Speed = Callable[[str, str], float | None]


def streamed(names: str, speed: Speed, link_gbit_per_s: float | None = 1.0) -> Inspection:
    """Nodes that stream to each other as fast as `speed` says, over links of one rate."""
    streams = tuple(
        PairSpeed(source=source, target=target, gbit_per_s=speed(source, target))
        for source, target in permutations(names, 2)
    )
    known = inspection(names, connectivity=ConnectivityResult(streams=streams))
    for name in names:
        known = linked(known, name, speed_gbit_per_s=link_gbit_per_s)
    return known


def findings(names: str, speed: Speed, link_gbit_per_s: float | None = 1.0) -> list[CheckFinding]:
    return list(check_streams(streamed(names, speed, link_gbit_per_s)))


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_streams_that_fill_the_link_have_no_finding(names: str) -> None:
    # A gigabit link carries 0.941 Gbit/s of payload, and a short stream a little less.
    assert findings(names, lambda _source, _target: 0.90) == []
    silent(check_streams(inspection(names)))


def test_without_a_speed_there_is_no_judgement() -> None:
    assert findings("ab", lambda _source, _target: 0.01, None) == []
    assert findings("ab", lambda _source, _target: None) == []


def test_a_slow_stream_is_blamed_on_a_node_a_pair_or_the_network(golden: Golden) -> None:
    streams = (
        PairSpeed(source="a", target="b", gbit_per_s=0.292, worse_gbit_per_s=0.21),
        PairSpeed(source="b", target="a", gbit_per_s=0.93),
    )
    again = inspection("ab", connectivity=ConnectivityResult(streams=streams))
    check_cases(
        golden,
        "streams",
        {
            "c is slow both ways": findings("abcd", lambda source, target: 0.09 if "c" in source + target else 0.93),
            "c sends slowly": findings("abc", lambda source, _target: 0.09 if source == "c" else 0.93),
            "b receives slowly": findings("abc", lambda _source, target: 0.09 if target == "b" else 0.93),
            "a to d is slow": findings("abcd", lambda source, target: 0.2 if (source, target) == ("a", "d") else 0.93),
            "b to a is slow, of two nodes": findings("ab", lambda source, _target: 0.2 if source == "b" else 0.93),
            "two nodes, slow both ways": findings("ab", lambda _source, _target: 0.2),
            "all are slow": findings("abcd", lambda _source, _target: 0.4),
            "all reach 4 of 10 Gbit/s": findings("ab", lambda _source, _target: 4.0, 10.0),
            "b is slow at 10 Gbit/s": findings(
                "abc", lambda source, target: 0.9 if "b" in source + target else 7.0, 10.0
            ),
            "a to b stayed slow in a second try": check_streams(again),
        },
    )


def test_at_ten_gigabit_one_connection_that_fills_the_link_has_no_finding() -> None:
    assert findings("ab", lambda _source, _target: 9.0, 10.0) == []


def test_the_slower_of_two_links_is_what_counts() -> None:
    known = linked(
        streamed("abc", lambda source, target: 0.09 if "b" in source + target else 0.93), "b", speed_gbit_per_s=0.1
    )
    silent(check_streams(known))


@pytest.mark.parametrize("link_gbit_per_s", [0.1, 1.0, 2.5, 10.0, 100.0])
@pytest.mark.parametrize(("factor", "is_slow"), [(0.99, True), (1.01, False)])
def test_what_is_found_slow_is_what_would_be_tried_again(
    link_gbit_per_s: float, factor: float, *, is_slow: bool
) -> None:
    least = least_speeds(streamed("abc", lambda _source, _target: None, link_gbit_per_s))
    assert len(least) == 6
    found = findings("abc", lambda source, target: least[source, target] * factor, link_gbit_per_s)
    assert any("exceeds" in one.message for one in found) is is_slow


def test_without_a_speed_nothing_is_tried_again() -> None:
    assert least_speeds(streamed("ab", lambda _source, _target: 0.9, None)) == {}
