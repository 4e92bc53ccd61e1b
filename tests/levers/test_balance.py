from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.levers.balance import Balance, deal_step, parse_balance
from multinode.levers.lever import Workers
from tests.golden import Golden, error_of

SPEEDS = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3)


def test_speeds_are_read_as_they_are_written() -> None:
    found = parse_balance("node0=1.6, node1=1")
    assert found == Balance(speeds={"node0": 1.6, "node1": 1.0})
    assert found.option == "--balance node0=1.6,node1=1"
    assert parse_balance(found.words) == found
    assert found.of_workers(Workers(nodes=("node1", "node0"), counts=(1, 2))) == (1.0, 1.6, 1.6)


def test_what_is_no_speed_is_refused(golden: Golden) -> None:
    wrong = ("", "node0", "node0=", "=1", "a=1,a=2", "a=0", "a=-1", "a=nan", "a=inf", "a=1,,b=1")
    two = Workers(nodes=("a", "b"), counts=(1, 1))
    golden.check_errors(
        "refused_speeds",
        {f"--balance {text}": error_of(parse_balance, text) for text in wrong}
        | {f"run {run}": error_of(Balance(speeds={"a": 1.0}, run_id=run).of_workers, two) for run in (None, "r1")},
    )


@given(SPEEDS, st.integers(0, 9))
def test_no_other_split_of_a_micro_batch_is_done_earlier(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    dealt = deal_step(samples, speeds)
    assert sum(dealt) == samples
    assert min(dealt) >= 1
    splits = (one for one in itertools.product(range(1, samples), repeat=len(speeds)) if sum(one) == samples)
    ends = (max(count / speed for count, speed in zip(split, speeds, strict=True)) for split in splits)
    found = max(count / speed for count, speed in zip(dealt, speeds, strict=True))
    assert found == pytest.approx(min(ends, default=found))


def test_several_micro_batches_of_a_step_come_nearer_to_the_speeds_than_one() -> None:
    assert deal_step(4, (1.6, 1.0)) == (3, 1)
    assert deal_step(4, (1.6, 1.0), 8) == (20, 12)
