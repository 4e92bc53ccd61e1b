from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.traffic.pair_speeds import NetworkFinding, PairSpeed, fastest_of, find_odd, least_of_pairs

GIGABIT = 0.941
LETTERS = "abcdefghijklmnop"
ALL_OF_FOUR = list(permutations("abcd", 2))


def measured(names: Sequence[str], speed: Callable[[str, str], float | None]) -> tuple[PairSpeed, ...]:
    """Every ordered pair, as fast as `speed` says; None is a stream that was refused."""
    found = (((a, b), speed(a, b)) for a, b in permutations(names, 2))
    return tuple(
        PairSpeed(source=a, target=b, gbit_per_s=gbit, error=None if gbit else "refused") for (a, b), gbit in found
    )


def blamed(odd: Sequence[NetworkFinding]) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.code, one.nodes) for one in odd]


def links(names: Sequence[str], gbit_per_s: float = GIGABIT) -> dict[str, float]:
    return dict.fromkeys(names, gbit_per_s)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 16])
def test_pairs_that_are_alike_have_nothing_odd(count: int) -> None:
    names = LETTERS[:count]
    # Short streams scatter by a few percent.
    pairs = measured(names, lambda a, b: 0.93 + 0.01 * ((ord(a) + ord(b)) % 3 - 1))
    assert find_odd(pairs) == ()
    assert find_odd(pairs, links(names)) == ()


# Of four nodes: which streams are slow, who is blamed, and in which words.
BLAMED: list[tuple[Callable[[str, str], bool], tuple[str, tuple[str, ...]], str]] = [
    (lambda a, b: "c" in a + b, ("odd_node", ("c",)), "a stream between c and any peer reaches at most 94 Mbit/s"),
    (lambda a, _: a == "b", ("odd_sends", ("b",)), "b sends at most 94 Mbit/s"),
    (lambda _, b: b == "b", ("odd_receives", ("b",)), "b receives at most 94 Mbit/s"),
    (
        lambda a, b: {a, b} == {"a", "d"},
        ("odd_cable", ("a", "d")),
        "a stream between a and d reaches at most",
    ),
    (lambda a, b: (a, b) == ("d", "a"), ("odd_one_way", ("d", "a")), "a stream from d to a reaches 94 Mbit/s"),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("is_slow", "who", "words"), BLAMED, ids=[who[0] for _, who, _ in BLAMED])
def test_who_is_slow_is_the_only_one_told(
    is_slow: Callable[[str, str], bool], who: tuple[str, tuple[str, ...]], words: str, *, known: bool
) -> None:
    pairs = measured("abcd", lambda a, b: 0.094 if is_slow(a, b) else 0.93 if a < b else 0.935)
    (odd,) = find_odd(pairs, links("abcd") if known else None)
    assert (odd.code, odd.nodes) == who
    assert words in odd.message
    assert ("the expected 941 Mbit/s" in odd.message) is known
    assert odd.figures["best_gbit_per_s"] == 0.094
    assert odd.figures["usual_gbit_per_s"] == pytest.approx(0.93, abs=0.01)
    assert odd.hint


def test_two_nodes_are_a_pair() -> None:
    assert blamed(find_odd(measured("ab", lambda a, _: 0.2 if a == "b" else 0.93))) == [("odd_one_way", ("b", "a"))]
    slow = measured("ab", lambda _a, _b: 0.2)
    # Slow both ways, and nothing to hold it against but the links.
    assert find_odd(slow) == ()
    (odd,) = find_odd(slow, links("ab"))
    assert (odd.code, odd.figures["usual_gbit_per_s"]) == ("odd_cable", GIGABIT)


@given(count=st.integers(3, 16), data=st.data())
def test_half_of_the_nodes_can_be_slow_without_setting_the_standard(count: int, data: st.DataObject) -> None:
    names = LETTERS[:count]
    slow = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=count // 2))
    odd = find_odd(measured(names, lambda a, b: 0.1 if slow & {a, b} else 0.93))
    assert blamed(odd) == [("odd_node", (name,)) for name in names if name in slow]


def test_two_nodes_that_are_faster_between_themselves_make_the_others_no_culprits() -> None:
    assert find_odd(measured("abcdef", lambda a, b: 9.0 if {a, b} == {"a", "b"} else 0.93)) == ()


def test_a_network_that_is_slow_everywhere_is_told_once_and_the_worst_node_beside_it() -> None:
    names = "abcd"
    assert blamed(find_odd(measured(names, lambda _a, _b: 0.4), links(names))) == [("odd_all", ())]
    worst = find_odd(measured(names, lambda a, b: 0.04 if "c" in a + b else 0.4), links(names))
    assert blamed(worst) == [("odd_all", ()), ("odd_node", ("c",))]


def test_how_full_a_link_is_counts_and_not_how_fast_it_is() -> None:
    # One node has a slower NIC, and fills it.
    pairs = measured("abcd", lambda a, b: 0.93 if "c" in a + b else 9.0)
    assert find_odd(pairs, links("abcd", 9.41) | {"c": GIGABIT}) == ()
    assert blamed(find_odd(pairs)) == [("odd_node", ("c",))]
    # A link that does not tell its rate leaves the comparison with the others.
    assert blamed(find_odd(pairs, links("abd", 9.41))) == [("odd_node", ("c",))]


def test_streams_that_a_processor_bounds_may_differ_and_a_tenth_is_still_told() -> None:
    scattered = measured("abc", lambda a, _: {"a": 9.0, "b": 6.0, "c": 5.0}[a])
    assert find_odd(scattered, links("abc", 9.41)) == ()
    assert find_odd(scattered) == ()
    slow = measured("abc", lambda a, b: 0.9 if "b" in a + b else 7.0)
    assert blamed(find_odd(slow, links("abc", 9.41))) == [("odd_node", ("b",))]


def test_a_stream_that_did_not_run_is_told_with_its_reason() -> None:
    odd = find_odd(measured("abc", lambda a, b: None if (a, b) == ("a", "c") else 0.93))
    assert blamed(odd) == [("odd_failed", ("a", "c"))]
    assert "from a to c did not run: refused" in odd[0].message
    assert "best_gbit_per_s" not in odd[0].figures


def test_a_node_to_which_nothing_runs_is_told_once() -> None:
    node = find_odd(measured("abcd", lambda a, b: None if "b" in a + b else 0.93))
    assert blamed(node) == [("odd_failed", ("b",))]
    everything = find_odd(measured("abcd", lambda _a, _b: None))
    assert blamed(everything) == [("odd_failed", ())]
    assert "no stream between the nodes ran: refused" in everything[0].message


@pytest.mark.parametrize(
    ("kind", "nodes", "covered"),
    [
        ("odd_node", ("a",), 6),
        ("odd_sends", ("a",), 3),
        ("odd_receives", ("a",), 3),
        ("odd_cable", ("a", "b"), 2),
        ("odd_one_way", ("a", "b"), 1),
        ("odd_all", (), 12),
        ("odd_failed", ("a", "b"), 1),
    ],
)
def test_what_is_odd_knows_its_streams(kind: str, nodes: tuple[str, ...], covered: int) -> None:
    odd = NetworkFinding(code=kind, nodes=nodes, message="")
    assert sum(odd.covers(*pair) for pair in ALL_OF_FOUR) == covered


def test_of_several_tries_the_fastest_of_each_pair_counts() -> None:
    slow = PairSpeed(source="a", target="b", gbit_per_s=0.3)
    fast = PairSpeed(source="a", target="b", gbit_per_s=0.9)
    failed = PairSpeed(source="b", target="a", error="timed out")
    assert fastest_of([slow, failed], [fast]) == (fast, failed)
    assert fastest_of([fast], [slow]) == (fast,)
    assert fastest_of() == ()


@given(
    speeds=st.lists(st.floats(0.05, 30.0), min_size=12, max_size=12),
    link=st.sampled_from([None, 0.941, 2.35, 9.41, 23.5]),
)
def test_who_is_blamed_is_who_missed_the_least(speeds: list[float], link: float | None) -> None:
    pairs = [PairSpeed(source=a, target=b, gbit_per_s=speed) for (a, b), speed in zip(ALL_OF_FOUR, speeds, strict=True)]
    ceilings = links("abcd", link) if link is not None else None
    least = least_of_pairs(pairs, ceilings)
    slow = {(one.source, one.target) for one in pairs if (one.gbit_per_s or 0.0) < least[one.source, one.target]}
    odd = find_odd(pairs, ceilings)
    assert {pair for pair in ALL_OF_FOUR if any(one.covers(*pair) for one in odd)} == slow


def test_a_stream_that_failed_has_nothing_to_reach() -> None:
    assert least_of_pairs(measured("abc", lambda a, b: None if a + b == "ab" else 0.9)).keys() == {
        *permutations("abc", 2)
    } - {("a", "b")}
