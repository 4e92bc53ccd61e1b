from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from multinode.check.connectivity import ConnectivityResult
from multinode.check.link import check_streams, least_speeds
from multinode.check.rule import CheckFinding, Inspection
from multinode.traffic.pair_speeds import PairSpeed

from .inspecting import expect, inspection, only, silent
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


def test_a_node_that_is_slow_both_ways_is_blamed_and_nobody_else() -> None:
    expect(
        findings("abcd", lambda source, target: 0.09 if "c" in source + target else 0.93),
        "warning",
        "c",
        "eth0 sends and receives no more than 90 Mbit/s of 941 Mbit/s",
    )


def test_a_node_that_is_slow_one_way_is_told_which() -> None:
    sender = only(findings("abc", lambda source, _target: 0.09 if source == "c" else 0.93))
    assert (sender.node, "sends no more than 90 Mbit/s" in sender.message) == ("c", True)
    receiver = only(findings("abc", lambda _source, target: 0.09 if target == "b" else 0.93))
    assert (receiver.node, "receives no more than 90 Mbit/s" in receiver.message) == ("b", True)


def test_a_pair_that_is_slow_is_told_as_a_pair() -> None:
    expect(
        findings("abcd", lambda source, target: 0.2 if (source, target) == ("a", "d") else 0.93),
        "warning",
        "a",
        "a stream from a to d reaches 200 Mbit/s",
    )


def test_of_two_nodes_each_slow_direction_is_told() -> None:
    one = only(findings("ab", lambda source, _target: 0.2 if source == "b" else 0.93))
    assert "from b to a" in one.message
    (both,) = findings("ab", lambda _source, _target: 0.2)
    assert (both.node, both.severity) == (None, "warning")
    assert "between a and b" in both.message


def test_a_network_that_is_slow_everywhere_is_noted_once() -> None:
    expect(findings("abcd", lambda _source, _target: 0.4), "note", None)


def test_at_ten_gigabit_one_connection_may_be_slow_and_is_only_noted() -> None:
    expect(
        findings("ab", lambda _source, _target: 4.0, 10.0),
        "note",
        None,
        ("one TCP connection reaches at most 4 Gbit/s"),
    )
    assert findings("ab", lambda _source, _target: 9.0, 10.0) == []
    slow = findings("abc", lambda source, target: 0.9 if "b" in source + target else 7.0, 10.0)
    assert [(one.severity, one.node) for one in slow] == [("warning", "b")]


def test_the_slower_of_two_links_is_what_counts() -> None:
    known = linked(
        streamed("abc", lambda source, target: 0.09 if "b" in source + target else 0.93), "b", speed_gbit_per_s=0.1
    )
    silent(check_streams(known))


def test_what_stayed_slow_is_told_with_both_tries() -> None:
    streams = (
        PairSpeed(source="a", target="b", gbit_per_s=0.292, worse_gbit_per_s=0.21),
        PairSpeed(source="b", target="a", gbit_per_s=0.93),
    )
    message = only(check_streams(inspection("ab", connectivity=ConnectivityResult(streams=streams)))).message
    assert (
        "a stream from a to b reaches 292 Mbit/s (the better of two measurements; the other: 210 Mbit/s) of"
    ) in message


@pytest.mark.parametrize("link_gbit_per_s", [0.1, 1.0, 2.5, 10.0, 100.0])
@pytest.mark.parametrize(("factor", "is_slow"), [(0.99, True), (1.01, False)])
def test_what_is_found_slow_is_what_would_be_tried_again(
    link_gbit_per_s: float, factor: float, *, is_slow: bool
) -> None:
    least = least_speeds(streamed("abc", lambda _source, _target: None, link_gbit_per_s))
    assert len(least) == 6
    found = findings("abc", lambda source, target: least[source, target] * factor, link_gbit_per_s)
    assert any("no stream between the nodes" in one.message for one in found) is is_slow


def test_without_a_speed_nothing_is_tried_again() -> None:
    assert least_speeds(streamed("ab", lambda _source, _target: 0.9, None)) == {}
