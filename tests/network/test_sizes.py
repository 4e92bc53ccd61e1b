"""The sizes and collectives of a scan, as the command line gives them."""

from __future__ import annotations

import msgspec

from multinode.network.measure import check_reduction, in_turns, scan_messages, scan_sizes
from multinode.records.benchmark import CollectiveTest, describe_benchmark
from tests.golden import Golden, error_of

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


def test_what_cannot_be_scanned_is_refused(golden: Golden) -> None:
    ranges: tuple[tuple[int, int, int, int | None], ...] = (
        (0, 8, 2, None),
        (16, 8, 2, None),
        (8, 1 << 40, 2, None),
        (8, 16, 1, None),
        (8, 16, 2, 0),
        (8, 1 << 30, 2, 1),
    )
    golden.check_errors(
        "refused_sizes",
        {
            f"{begin} to {end}, factor {factor}, step {step}": error_of(
                scan_sizes, begin, end, factor=factor, step_bytes=step
            )
            for begin, end, factor, step in ranges
        }
        | {
            "allreduce": error_of(scan_messages, ["allreduce"], (8,)),
            "avg of uint8": error_of(check_reduction, "avg", "uint8"),
        },
    )


def test_a_sweep_has_every_size_of_every_collective_once() -> None:
    messages = scan_messages(["all_reduce", "broadcast", "all_reduce"], (8, 16))
    assert [(one.collective, one.size_bytes) for one in messages] == [
        ("all_reduce", 8),
        ("all_reduce", 16),
        ("broadcast", 8),
        ("broadcast", 16),
    ]
    assert describe_benchmark(CollectiveTest(messages=messages)) == "nccl-test all_reduce broadcast"


def test_there_is_no_average_of_integers() -> None:
    check_reduction("avg", "bfloat16")
    check_reduction("sum", "int8")
