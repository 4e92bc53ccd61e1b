from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.predict.evidence import work_of_calls
from multinode.profile.calls import SeenCall
from multinode.profile.summary import Comm, Summary
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import GroupScope, Strategy
from tests import make

LAYOUT = Layout(nodes=2, workers_per_node=2)
MIB = 1 << 20


def call(op: str, size_bytes: float = MIB, **changes: Any) -> SeenCall:
    usual = SeenCall(op=op, ranks=4, nodes=2, backend="nccl", size_bytes=size_bytes, count=1.0)
    return msgspec.structs.replace(usual, **changes)


def summary(*calls: SeenCall, **changes: Any) -> Summary:
    return make.summary(comm=Comm(calls=calls), **changes)


def test_what_ddp_sends_does_not_grow_with_accumulation() -> None:
    seen = summary(call("all_reduce", 4 * MIB, source="ddp"), recognised=Strategy.DDP, trainable=MIB, micro_steps=4.0)
    work = work_of_calls(seen, LAYOUT)
    assert work is not None
    (known,) = work.calls[Strategy.DDP]
    assert (known.times, known.per_micro_batch, known.reach) == (1.0, False, GroupScope.WORLD)
    assert work.load.gradient_bytes == 4


@pytest.mark.parametrize("trainable", [MIB, None])
def test_gradients_that_a_hook_sent_as_half_are_as_wide_without_it(trainable: int | None) -> None:
    seen = summary(call("all_reduce", 2 * MIB, source="ddp"), recognised=Strategy.DDP, trainable=trainable)
    work = work_of_calls(seen, LAYOUT, compressed=True)
    assert work is not None
    (known,) = work.calls[Strategy.DDP]
    assert (known.size_bytes, work.load.gradient_bytes, work.load.trainable) == (4 * MIB, 4, MIB)


def test_what_zero_2_reduces_does_and_what_it_gathers_follows_the_optimizer() -> None:
    seen = summary(
        call("all_reduce", 2 * MIB, count=4.0),
        call("all_gather"),
        recognised=Strategy.ZERO2,
        trainable=MIB,
        micro_steps=4.0,
    )
    work = work_of_calls(seen, LAYOUT)
    assert work is not None
    reduced, gathered = work.calls[Strategy.ZERO2]
    assert (reduced.times, reduced.per_micro_batch, reduced.hideable) == (1.0, True, True)
    assert (gathered.times, gathered.per_micro_batch, gathered.hideable) == (1.0, False, False)
    assert work.load.gradient_bytes == 2


def test_whom_a_call_joins_is_told_by_its_group() -> None:
    seen = summary(call("reduce_scatter", ranks=2, nodes=1), call("all_reduce", ranks=2, nodes=2), call("all_gather"))
    work = work_of_calls(seen, LAYOUT)
    assert work is not None
    assert [one.reach for one in work.calls[Strategy.FSDP]] == [GroupScope.NODE, GroupScope.ACROSS, GroupScope.WORLD]


@pytest.mark.parametrize(
    "odd",
    [call("barrier"), call("send"), call("all_reduce", 8), call("all_reduce", ranks=1), call("all_reduce", count=0.0)],
)
def test_what_tells_nothing_of_the_traffic_is_left_out(odd: SeenCall) -> None:
    assert work_of_calls(summary(odd), LAYOUT) is None


def test_the_strategy_is_that_of_the_calls_and_not_of_their_words() -> None:
    unsharded = summary(call("all_reduce", 4 * MIB), strategy="FSDP (NO_SHARD, as DDP)", recognised=Strategy.DDP)
    work = work_of_calls(unsharded, LAYOUT)
    assert work is not None
    assert work.strategy is Strategy.DDP
