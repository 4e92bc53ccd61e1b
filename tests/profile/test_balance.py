from __future__ import annotations

import msgspec
import pytest

from multinode.profile.balance import find_balance
from multinode.profile.exposure import find_exposure
from multinode.profile.figures import BalanceOutlook
from multinode.profile.step_split import split_steps
from multinode.profile.summary import Summary, summarise
from multinode.profile.summary_sheets import verdict_sheet
from multinode.records.samples import Sample, StepSample
from tests.profile.made_up_steps import MadeUp, always, changed

SLOW = MadeUp(compute_ms=always(100.0, r1=300.0))


def outlook(made_up: MadeUp) -> BalanceOutlook | None:
    observed = made_up.observed()
    exposure = find_exposure(observed)
    return find_balance(observed, exposure, split_steps(exposure))


@pytest.mark.parametrize("told_by", ["ddp", "device", "host"])
def test_samples_by_speed_take_as_long_on_both_nodes(told_by: str) -> None:
    """8 samples on each node: 102 and 302 ms for them, and 6 ms for the rest; the exchange takes 10 ms."""
    found = outlook(msgspec.structs.replace(SLOW, told_by=told_by, device="cuda" if told_by == "device" else "cpu"))
    assert found is not None
    fast, slow = found.nodes
    assert (fast.node, fast.samples, slow.node, slow.speed) == ("node0", 8.0, "node1", 1.0)
    assert [fast.own_ms, slow.own_ms] == pytest.approx([108.0, 308.0])
    assert (fast.balanced_samples, slow.balanced_samples) == (12.0, 4.0)
    low, high = found.gain.bounds
    assert low < found.gain.value < high
    if told_by != "device":
        assert fast.speed == pytest.approx(302 / 102)
        # The fast one's 12 samples: 6 + 12 * 102 / 8.
        assert found.gain.value == pytest.approx(318 / (6 + 153 + 10))


def test_equal_nodes_gain_nothing() -> None:
    found = outlook(MadeUp())
    assert found is not None
    assert found.gain.value == pytest.approx(1.0)
    assert {node.speed for node in found.nodes} == {1.0}


def test_a_node_with_several_workers_is_as_fast_as_they_are() -> None:
    found = outlook(MadeUp(nodes=((0, 1), (2,)), compute_ms=always(100.0, r2=200.0)))
    assert found is not None
    assert [node.balanced_samples for node in found.nodes] == [9.5, 5.0]
    assert found.balance.words == "node0=1.98,node1=1"


def test_a_node_that_already_gets_fewer_samples_is_as_slow_as_it_is() -> None:
    def fewer(sample: Sample) -> Sample:
        if isinstance(sample, StepSample):
            return msgspec.structs.replace(sample, samples=12 if sample.rank == 0 else 4)
        return sample

    observed = changed(MadeUp(compute_ms=always(150.0)).observed(), fewer)
    exposure = find_exposure(observed)
    found = find_balance(observed, exposure, split_steps(exposure))
    assert found is not None
    assert found.gain.value == pytest.approx(1.0)
    assert found.nodes[0].speed == pytest.approx(3.0)


@pytest.mark.parametrize(
    "made_up",
    [
        MadeUp(nodes=((0,),)),
        MadeUp(nodes=((0, 1),)),
        msgspec.structs.replace(SLOW, told_by="nothing", device="cuda"),
        msgspec.structs.replace(SLOW, steps=3),
    ],
)
def test_where_nothing_is_known_nothing_is_said(made_up: MadeUp) -> None:
    assert outlook(made_up) is None


def summary(made_up: MadeUp) -> Summary:
    return summarise(made_up.observed())


def test_the_screen_says_what_waiting_for_a_slow_node_costs() -> None:
    found = summary(SLOW)
    (late,) = found.stragglers
    assert late.slower == pytest.approx(308 / 108)
    assert late.message == "node1 is 2.9x slower: node0 waited 63% of the time"
    (row,) = (row for row in verdict_sheet(found).rows if row[0] == "straggler")
    assert late.message in row[1]
    assert found.balance is not None


def test_a_node_with_more_work_is_not_called_slow() -> None:
    more = msgspec.structs.replace(SLOW, tokens=lambda rank: 1000 if rank == 0 else 3000)
    (late,) = summary(more).stragglers
    assert (late.code, late.cause, late.slower) == ("waited-for", "work", None)
