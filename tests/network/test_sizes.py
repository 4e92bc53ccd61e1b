"""The sizes and collectives of a scan, as the command line gives them."""

from __future__ import annotations

import msgspec
import pytest

from multinode.errors import UsageError
from multinode.network.measure import check_reduction, in_turns, scan_messages, scan_sizes
from multinode.records.benchmark import CollectiveTest, describe_benchmark

MIB = 1 << 20


def test_the_largest_message_of_each_collective_takes_turns_with_raw_tcp() -> None:
    messages = scan_messages(["all_reduce", "broadcast"], (8, MIB, 64))
    assert [(one.collective, one.size_bytes) for one in in_turns(messages) if one.turns] == [
        ("all_reduce", MIB),
        ("broadcast", MIB),
    ]
    assert [msgspec.structs.replace(one, turns=0) for one in in_turns(messages)] == list(messages)


def test_sizes_go_from_begin_to_end_by_the_factor_or_by_the_step() -> None:
    assert scan_sizes(8, 128, factor=2) == (8, 16, 32, 64, 128)
    assert scan_sizes(8, 100, factor=4) == (8, 32)
    assert scan_sizes(64, 64) == (64,)
    assert scan_sizes(10, 30, step_bytes=10) == (10, 20, 30)


@pytest.mark.parametrize(
    ("begin", "end", "factor", "step", "said"),
    [
        (0, 8, 2, None, "must be positive"),
        (16, 8, 2, None, "smaller than the smallest"),
        (8, 1 << 40, 2, None, "above 16 GiB"),
        (8, 16, 1, None, "2 or more"),
        (8, 16, 2, 0, r"step \(-i\) must be positive"),
        (8, 1 << 30, 2, 1, "more than 1000 sizes"),
    ],
)
def test_a_range_that_is_none(begin: int, end: int, factor: int, step: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        scan_sizes(begin, end, factor=factor, step_bytes=step)


def test_a_sweep_has_every_size_of_every_collective_once() -> None:
    messages = scan_messages(["all_reduce", "broadcast", "all_reduce"], (8, 16))
    assert [(one.collective, one.size_bytes) for one in messages] == [
        ("all_reduce", 8),
        ("all_reduce", 16),
        ("broadcast", 8),
        ("broadcast", 16),
    ]
    assert describe_benchmark(CollectiveTest(messages=messages)) == "nccl-test all_reduce broadcast"


def test_what_is_unknown_is_told_with_what_is_known() -> None:
    with pytest.raises(UsageError, match="unknown collective 'allreduce'") as caught:
        scan_messages(["allreduce"], (8,))
    assert "all_reduce" in str(caught.value.hint)


def test_there_is_no_average_of_integers() -> None:
    check_reduction("avg", "bfloat16")
    check_reduction("sum", "int8")
    with pytest.raises(UsageError, match="avg is not defined for uint8"):
        check_reduction("avg", "uint8")
