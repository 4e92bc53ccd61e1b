"""The early verdict on a run by its own records: compute, exposed communication and memory of one node."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.predict.early_verdict import judge, verdict_line
from multinode.profile.summary import summarise
from multinode.profile.throughput import measure_throughput
from multinode.records.run import EarlyVerdict
from multinode.stats.unknown import known
from multinode.traffic.step_calls import Strategy
from tests.golden import Golden
from tests.profile.made_up_steps import MadeUp, always
from tests.profile.running import TOTAL_STEPS, Recorded, keep_running, recorded

# Of one node: compute, data, optimizer and host of MadeUp.
ALONE_MS = 100 + 2 + 5 + 1
SLOW = MadeUp(steps=15, transfer_ms=always(1000.0))


def codes(verdict: EarlyVerdict) -> list[str]:
    return [finding.code for finding in verdict.findings]


def test_what_is_said_of_a_verdict(golden: Golden, tmp_path: Path) -> None:
    fast = MadeUp(steps=15, transfer_ms=always(5.0))
    shared = MadeUp(steps=15, transfer_ms=always(1000.0), told_by="host")
    cases = {
        "one node is faster": judged(tmp_path / "slow", SLOW),
        "two nodes are faster": judged(tmp_path / "fast", fast, link_gbit_per_s=10.0),
        "waits for cores": judged(tmp_path / "busy", msgspec.structs.replace(SLOW, core_wait_ms=always(10.0, r1=30.0))),
        "sharded": judged(tmp_path / "sharded", shared, strategy=Strategy.ZERO3),
        "unknown": judged(tmp_path / "unknown", MadeUp(steps=15, told_by="nothing", device="cuda")),
    }
    golden.check_findings("early_verdict", {name: verdict.findings for name, verdict in cases.items()})


def judged(root: Path, made_up: MadeUp | Recorded, **kept: object) -> EarlyVerdict:
    found = judge(keep_running(root, made_up, **kept))  # type: ignore[arg-type]  # what keep_running takes
    assert found.verdict is not None
    return found.verdict


def test_after_15_steps_over_a_slow_link_one_node_is_faster_and_what_is_left_is_told(tmp_path: Path) -> None:
    verdict = judged(tmp_path, SLOW)
    assert verdict.now is not None
    assert verdict.one_node is not None
    assert (verdict.step, verdict.recorded, verdict.measured) == (15, 15, 10)
    speedup = (ALONE_MS + 1000) / ALONE_MS / 2
    assert verdict.one_node.speedup.value == pytest.approx(speedup, rel=0.01)
    low, high = verdict.one_node.speedup.bounds
    assert 0.9 * speedup < low < speedup < high < 1.1 * speedup
    left_s = (TOTAL_STEPS - 15) * 1.108
    assert verdict.now.left_s is not None
    assert verdict.now.left_s.value == pytest.approx(left_s, rel=0.01)
    assert verdict.one_node.left_s is not None
    assert verdict.one_node.left_s.value == pytest.approx(left_s / verdict.one_node.speedup.value, rel=0.01)
    assert (verdict.memory, verdict.favours_one_node, verdict.is_certain) == ("fits", True, False)
    assert verdict.best is not None
    assert verdict.best.speedup.value > 2
    assert codes(verdict) == ["one-node-faster", "time-left"]
    assert verdict.findings[0].figures == pytest.approx({"speedup": speedup, "low": low, "high": high}, rel=0.01)
    left = {"left_s": left_s, "one_node_left_s": left_s / speedup}
    assert verdict.findings[1].figures == pytest.approx(left, rel=0.02)
    assert ". Best change: " in verdict_line(verdict, TOTAL_STEPS)
    assert "Left" not in verdict_line(verdict, TOTAL_STEPS)


def test_a_verdict_may_end_a_run_from_120_measured_steps_on(tmp_path: Path) -> None:
    lacking = {}
    for steps in (15, 124, 125):
        found = judge(keep_running(tmp_path / str(steps), msgspec.structs.replace(SLOW, steps=steps)))
        assert found.verdict is not None
        assert found.verdict.favours_one_node
        lacking[steps] = found.lacking, found.verdict.is_certain
    assert lacking == {15: (110, False), 124: (1, False), 125: (0, True)}


@pytest.mark.parametrize(
    "kept",
    [pytest.param({"link_gbit_per_s": None}, id="link rate"), pytest.param({"counts_samples": False}, id="samples")],
)
def test_neither_the_rate_of_the_link_nor_the_samples_need_to_be_known(tmp_path: Path, kept: dict[str, object]) -> None:
    verdict = judged(tmp_path, SLOW, **kept)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.value == pytest.approx((ALONE_MS + 1000) / ALONE_MS / 2, rel=0.01)
    assert verdict.best is not None


@pytest.mark.parametrize(
    ("together", "alone"),
    [
        ("two nodes, 100 Mbit/s", "one node"),
        # Other processes had most of the cores; the second node trained alone beside the first.
        ("two nodes, 100 Mbit/s, busy", "one node, busy"),
    ],
)
def test_15_recorded_steps_foretell_what_one_node_then_gave(tmp_path: Path, together: str, alone: str) -> None:
    rates = (measure_throughput(recorded(name).observed()).samples_per_s for name in (together, alone))
    several, one = (known(rate).value for rate in rates)
    verdict = judged(tmp_path, recorded(together).first(15), trainable=3_691_776)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.value == pytest.approx(one / several, rel=0.15)
    low, high = verdict.one_node.speedup.bounds
    assert low < one / several < high


def test_what_recorded_work_took_but_for_the_wait_for_cores_is_the_same_on_one_node_and_on_two() -> None:
    net_ms = {}
    for name in ("one node, busy", "two nodes, 100 Mbit/s, busy"):
        mean = summarise(recorded(name).observed()).split.workers[0]
        assert mean.core_wait_ms is not None
        net_ms[name] = mean.step_ms - known(mean.exposed_ms) - known(mean.wait_ms) - mean.core_wait_ms
        assert mean.core_wait_ms > 1.5 * net_ms[name]
    one, two = net_ms.values()
    assert one == pytest.approx(two, rel=0.15)


def test_over_a_fast_link_two_nodes_are_faster_and_nothing_is_stopped(tmp_path: Path) -> None:
    verdict = judged(tmp_path, MadeUp(steps=15, transfer_ms=always(5.0)), link_gbit_per_s=10.0)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.value == pytest.approx((ALONE_MS + 5) / ALONE_MS / 2, rel=0.01)
    assert not verdict.is_certain
    assert codes(verdict)[0] == "all-nodes-faster"


def test_a_slow_second_node_is_not_slow_compute_of_the_first(tmp_path: Path) -> None:
    made_up = MadeUp(steps=15, compute_ms=always(100.0, r1=400.0))
    verdict = judged(tmp_path, made_up, link_gbit_per_s=1.0)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.value == pytest.approx((ALONE_MS + 300 + 10) / ALONE_MS / 2, rel=0.02)


def test_the_slower_of_the_workers_of_the_first_node_is_waited_for_there_too(tmp_path: Path) -> None:
    made_up = MadeUp(nodes=((0, 1), (2, 3)), steps=15, compute_ms=always(100.0, r1=150.0), transfer_ms=always(1000.0))
    verdict = judged(tmp_path, made_up, trainable=1000)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.value == pytest.approx((ALONE_MS + 1050) / (ALONE_MS + 50) / 2, rel=0.02)


def test_what_the_workers_of_one_node_exchange_is_not_free(tmp_path: Path) -> None:
    nodes = ((0, 1), (2, 3))
    small, large = (
        judged(tmp_path / name, MadeUp(nodes=nodes, steps=15, transfer_ms=always(9000.0)), trainable=count)
        for name, count in (("small", 1000), ("large", 200_000_000))
    )
    assert small.one_node is not None
    assert large.one_node is not None
    free = (ALONE_MS + 9000) / ALONE_MS / 2
    assert small.one_node.speedup.value == pytest.approx(free, rel=0.01)
    # 800 MB pass at 0.25 to 2.5 GB/s, and no more than the compute of a step beside which they may is saved of it.
    low, high = large.one_node.speedup.bounds
    assert low == pytest.approx((ALONE_MS + 9000) / (ALONE_MS + 3200 - 67) / 2, rel=0.03)
    assert large.one_node.speedup.value < 0.25 * free
    assert high < 0.5 * free


def test_work_that_waited_for_a_core_may_take_less_on_one_node(tmp_path: Path) -> None:
    usual, disturbed = (
        judged(tmp_path / name, msgspec.structs.replace(SLOW, core_wait_ms=waited))
        for name, waited in (("usual", always(0.5)), ("disturbed", always(10.0, r1=30.0)))
    )
    assert usual.one_node is not None
    assert disturbed.one_node is not None
    assert disturbed.one_node.speedup.value == usual.one_node.speedup.value
    # A quarter of the forward pass, the optimizer and the host, hence of the backward pass: of 106 ms, and 2 of data.
    assert usual.core_wait_ms is None
    assert disturbed.core_wait_ms == pytest.approx(106 * 10 / (100 / 3 + 6))
    assert codes(usual) == ["one-node-faster", "time-left"]
    assert codes(disturbed) == ["one-node-faster", "time-left", "core-wait"]
    assert disturbed.findings[2].figures == {"core_wait_ms": disturbed.core_wait_ms}
    low, high = disturbed.one_node.speedup.bounds
    assert low == pytest.approx(usual.one_node.speedup.low, rel=0.02)
    assert 1.2 < high / usual.one_node.speedup.high < 108 / (108 - 26.9)


def test_where_exposed_communication_is_unknown_that_is_said_and_nothing_is_certain(tmp_path: Path) -> None:
    verdict = judged(tmp_path, MadeUp(steps=15, told_by="nothing", device="cuda"))
    assert (verdict.one_node, verdict.is_certain) == (None, False)
    (found,) = verdict.findings
    assert found.code == "unknown"
    assert str(found.figures["reason"]).startswith("exposed communication is unknown: ")


def test_where_nodes_average_now_and_then_the_first_steps_say_nothing(tmp_path: Path) -> None:
    verdict = judged(tmp_path, SLOW, levers=Levers(averaging=Averaging(every=16)))
    assert (verdict.one_node, verdict.is_certain) == (None, False)
    assert str(verdict.findings[0].figures["reason"]).startswith("nodes average every 16 steps")


def test_where_sharding_leaves_the_memory_of_one_node_unknown_nothing_is_certain(tmp_path: Path) -> None:
    made_up = MadeUp(steps=15, transfer_ms=always(1000.0), told_by="host")
    verdict = judged(tmp_path, made_up, strategy=Strategy.ZERO3)
    assert verdict.one_node is not None
    assert verdict.one_node.speedup.low > 1
    assert (verdict.memory, verdict.is_certain) == ("unknown", False)
    assert codes(verdict)[-1] == "memory-unknown"


def test_before_15_steps_of_all_workers_there_is_none(tmp_path: Path) -> None:
    lost = frozenset({(1, 15), (1, 14)})
    found = judge(keep_running(tmp_path, msgspec.structs.replace(SLOW, lost=lost)))
    assert (found.verdict, found.lacking) == (None, 2)


def test_a_run_on_one_node_has_none_ever(tmp_path: Path) -> None:
    found = judge(keep_running(tmp_path, MadeUp(nodes=((0, 1),), steps=15)))
    assert (found.verdict, found.lacking) == (None, 0)
