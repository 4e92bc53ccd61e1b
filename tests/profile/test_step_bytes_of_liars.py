"""Nodes are not trusted: calls, groups and counters that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from multinode.profile.step_bytes import SeenTraffic
from multinode.records.samples import CallCount, NicBytes, StepSample
from tests.profile.seen_trainings import DDP, S, call, ddp, figures, see, seen
from tests.reasons import reasons


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (call("all_reduce", S, group="elsewhere"), "a group that was not recorded"),
        (call("conquer\x1b[2J" + "x" * 10_000, S), "unknown kind, 'conquer\\x1b[2Jx"),
    ],
)
def test_a_worker_that_lies_is_passed_over_and_named_where_all_do(bad: CallCount, reason: str) -> None:
    one = seen(DDP, calls=lambda rank: [*ddp(rank), bad] if rank else ddp(rank))
    assert figures(one) == pytest.approx([S, S, S], rel=0.01)
    every = seen(DDP, calls=lambda rank: [*ddp(rank), bad])
    assert reason in reasons(every.bytes_per_step)["calls"]
    assert len(reasons(every.bytes_per_step)["calls"]) < 120


def test_what_is_left_of_a_liars_calls_does_not_pull_down_those_of_its_group() -> None:
    def calls(rank: int) -> list[CallCount]:
        return [call("all_reduce", S / 2, 2)] if rank == 0 else [call("all_reduce", S / 2), call("conquer", S)]

    assert seen(DDP, calls=calls).bytes_per_step.expected == pytest.approx(S)


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 1, 7), (-1, 0), tuple(range(100_000))])
def test_a_group_that_cannot_be_is_as_if_it_was_not_recorded(ranks: tuple[int, ...]) -> None:
    traffic = seen(DDP, groups=lambda _rank: {"0": ranks})
    assert "a group that was not recorded" in reasons(traffic.bytes_per_step)["calls"]


def test_a_nic_that_came_anew_in_the_window_gives_no_figure() -> None:
    def spoilt(change: Callable[[StepSample], NicBytes]) -> SeenTraffic:
        observed = DDP.observed()
        for workers in observed.steps.values():
            for rank, sample in workers.items():
                workers[rank] = msgspec.structs.replace(sample, nics={"ens1f0": change(sample)})
        return see(observed)

    anew = spoilt(lambda one: NicBytes(tx_bytes=one.step % 10 * S, rx_bytes=one.step * S))
    assert "was re-created during training" in reasons(anew.bytes_per_step)["nic"]
    still = spoilt(lambda one: NicBytes(tx_bytes=one.step * S, rx_bytes=0, tx_packets=one.step * S))
    assert still.bytes_per_step.nic == 0


def test_as_many_kinds_of_calls_as_a_node_cares_to_invent_are_summed_and_few_are_listed() -> None:
    invented = [call("all_reduce", 4096 + index) for index in range(100_000)]
    traffic = seen(DDP, calls=lambda _rank: invented)
    assert traffic.bytes_per_step.calls == pytest.approx(sum(one.size_bytes for one in invented))
    assert len(traffic.calls) == 64
