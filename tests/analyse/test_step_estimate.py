from __future__ import annotations

import pytest

from multinode.analyse.job.step_estimate import estimate_step_us, messages_to_test
from multinode.analyse.job.step_messages import StepMessage, StepMessages
from multinode.core.measure.benchmark import Message


def step(*calls: tuple[str, int, int]) -> StepMessages:
    found = (
        StepMessage(collective=name, size_bytes=size, times=times, what="gradients") for name, size, times in calls
    )
    return StepMessages(training="DDP with LoRA", messages=tuple(found))


def chosen(sent: StepMessages, *, most: int = 10, **named: int) -> list[tuple[str, int]]:
    return [(one.collective, one.size_bytes) for one in messages_to_test(sent, most=most, **named)]


def test_alike_sizes_of_a_collective_are_measured_once_at_the_commonest() -> None:
    sent = step(("all_reduce", 1000, 2), ("all_reduce", 1040, 9), ("all_reduce", 2000, 1), ("all_gather", 1000, 1))
    assert chosen(sent) == [("all_reduce", 1040), ("all_reduce", 2000), ("all_gather", 1000)]


def test_too_many_leave_those_that_carry_most_in_all() -> None:
    sent = step(("all_reduce", 100, 1000), ("all_reduce", 50_000, 1), ("all_gather", 99_000, 1))
    assert chosen(sent, most=2) == [("all_reduce", 100), ("all_gather", 99_000)]
    assert messages_to_test(sent, most=2)[0] == Message(collective="all_reduce", size_bytes=100)


def test_no_collective_is_left_without_a_message_while_another_has_two() -> None:
    sent = step(("all_gather", 9000, 9), ("all_gather", 5000, 9), ("reduce_scatter", 100, 1), ("reduce_scatter", 50, 1))
    assert chosen(sent, most=2) == [("all_gather", 9000), ("reduce_scatter", 100)]
    assert chosen(sent, most=3) == [("all_gather", 5000), ("all_gather", 9000), ("reduce_scatter", 100)]


def test_a_gather_of_a_whole_model_is_measured_at_a_size_that_a_node_holds() -> None:
    sent = step(("all_gather", 32_000_000_000, 1), ("all_gather", 16_000_000_000, 1))
    assert chosen(sent) == [("all_gather", 1 << 30)]
    assert chosen(sent, largest_bytes=1 << 20) == [("all_gather", 1 << 20)]


def test_sizes_are_rounded_up_to_what_divides_among_the_workers() -> None:
    assert chosen(step(("all_gather", 1001, 1)), multiple=12) == [("all_gather", 1008)]


def test_the_estimate_counts_every_call_at_its_own_size() -> None:
    sent = step(("all_reduce", 1000, 3), ("all_gather", 500, 2))
    assert estimate_step_us(sent, lambda name, size: size / 10 + (5 if name == "all_gather" else 0)) == pytest.approx(
        3 * 100 + 2 * 55
    )


def test_one_time_that_nobody_knows_leaves_no_estimate() -> None:
    sent = step(("all_reduce", 1000, 3), ("all_gather", 500, 2))
    assert estimate_step_us(sent, lambda name, _: 1.0 if name == "all_reduce" else None) is None
