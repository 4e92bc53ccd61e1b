from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.bench.measure import make_device_test
from multinode.errors import UsageError
from multinode.network.measure import check_reduction, in_turns, scan_messages, scan_sizes
from multinode.records.benchmark import (
    REDOPS,
    CollectiveTest,
    DeviceTest,
    check_choice,
    describe_benchmark,
    time_left_s,
)

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
    assert check_choice("op", "avg", REDOPS) == "avg"


def test_a_collective_that_is_given_for_the_reduction_is_told_where_it_belongs() -> None:
    with pytest.raises(UsageError, match="unknown op 'all_gather'") as caught:
        check_choice("op", "all_gather", REDOPS)
    assert "multinode nccl-test all_gather" in str(caught.value.hint)


def test_the_time_left_grows_with_what_is_left_and_with_its_size() -> None:
    test = CollectiveTest(messages=scan_messages(["all_reduce"], (MIB, 2 * MIB)), iters=7, warmup_iters=1, check=1)
    # Twice the size, twice the time: 0.2 s for each of 7 iterations, one to warm up, one that is verified, one more.
    assert time_left_s(test, 1, 100_000.0) == pytest.approx(0.2 * 10)
    assert time_left_s(test, 2, 100_000.0) == 0
    # Where iterations are long there are fewer.
    assert time_left_s(test, 1, 1e6) == pytest.approx(2.0 * (test.min_iters + 3))


def test_there_is_no_average_of_integers() -> None:
    check_reduction("avg", "bfloat16")
    check_reduction("sum", "int8")
    with pytest.raises(UsageError, match="avg is not defined for uint8"):
        check_reduction("avg", "uint8")


def make(**asked: Any) -> DeviceTest:
    defaults: dict[str, Any] = {"kinds": (), "dtypes": (), "sizes": (), "seconds": 1.0, "repeats": 1}
    return make_device_test(**(defaults | asked))


def test_nothing_asked_for_is_everything_that_the_device_has() -> None:
    assert make() == DeviceTest()
    assert describe_benchmark(make()) == "bench matmul memory layers"


def test_what_is_asked_for_twice_is_measured_once_and_small_matrices_come_first() -> None:
    test = make(kinds=("memory", "matmul", "memory"), dtypes=("bf16", "bf16"), sizes=(4096, 512, 4096))
    assert (test.kinds, test.dtypes, test.sizes) == (("memory", "matmul"), ("bf16",), (512, 4096))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kinds": ("matmuls",)}, "unknown test 'matmuls'"),
        ({"dtypes": ("fp8",)}, "unknown dtype 'fp8'"),
        ({"sizes": (0,)}, "--size 0: matrices have from 1 to 65536 rows"),
        ({"sizes": (1 << 20,)}, "--size 1048576: matrices have"),
        ({"seconds": 0.0}, "--seconds 0: each test takes from 0.05 to 600 s"),
        ({"seconds": float("nan")}, "--seconds nan: each test takes"),
        ({"repeats": 0}, "--repeats 0: from 1 to 1000"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**asked)
    assert said in caught.value.message
