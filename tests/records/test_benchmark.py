from __future__ import annotations

import pytest

from multinode.records.benchmark import REDOPS, CollectiveTest, Message, check_choice, time_left_s
from tests.golden import Golden, error_of

MIB = 1 << 20


def test_a_collective_that_is_given_for_the_reduction_is_told_where_it_belongs(golden: Golden) -> None:
    assert check_choice("op", "avg", REDOPS) == "avg"
    refused = {f"--op {name}": error_of(check_choice, "op", name, REDOPS) for name in ("all_gather", "mean")}
    golden.check_errors("refused_op", refused)


def test_the_time_left_grows_with_what_is_left_and_with_its_size() -> None:
    test = CollectiveTest(
        messages=(Message(size_bytes=MIB), Message(size_bytes=2 * MIB)), iters=7, warmup_iters=1, check=1
    )
    # Twice the size, twice the time: 0.2 s for each of 7 iterations, one to warm up, one that is verified, one more.
    assert time_left_s(test, 1, 100_000.0) == pytest.approx(0.2 * 10)
    assert time_left_s(test, 2, 100_000.0) == 0
    # Where iterations are long there are fewer.
    assert time_left_s(test, 1, 1e6) == pytest.approx(2.0 * (test.min_iters + 3))
