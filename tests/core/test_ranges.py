from __future__ import annotations

import pytest

from multinode.core.cluster.ranges import expand_ranges


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("gpu[1,3,5-7].lan", ["gpu1.lan", "gpu3.lan", "gpu5.lan", "gpu6.lan", "gpu7.lan"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[7]", ["n7"]),
    ],
)
def test_a_pattern_stands_for_these_names_in_this_order(pattern: str, names: list[str]) -> None:
    assert expand_ranges(pattern, 100) == names


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("node[1-", "'node[1-': a bracket has no partner"),
        ("node1]", "'node1]': a bracket has no partner"),
        ("node[]", "'node[]': '' is not a number or a range of numbers"),
        ("node[a-c]", "'node[a-c]': 'a-c' is not a number or a range of numbers"),
        ("node[1-2-3]", "'node[1-2-3]': '1-2-3' is not a number or a range of numbers"),
        ("node[\N{ARABIC-INDIC DIGIT ONE}]", "is not a number or a range of numbers"),
        ("node[3-1]", "'node[3-1]': the range '3-1' ends before it begins"),
    ],
)
def test_a_wrong_pattern_is_told_with_the_part_that_is_wrong(pattern: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^'node") as caught:
        expand_ranges(pattern, 100)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("pattern", ["n[1-101]", "n[1-60,1-60]", "n[1-20][1-20]", "n[0-999999999]", "n" + "[1-9]" * 40])
def test_too_many_names_are_refused_before_they_are_made(pattern: str) -> None:
    with pytest.raises(ValueError, match="stands for more than 100 names"):
        expand_ranges(pattern, 100)


def test_the_limit_itself_is_allowed() -> None:
    assert len(expand_ranges("n[1-100]", 100)) == 100
