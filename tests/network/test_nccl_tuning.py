from __future__ import annotations

import msgspec
import pytest

from multinode.network.measure import scan_messages
from multinode.network.nccl_tuning import (
    AXES,
    TunedSetting,
    TuneReport,
    candidates,
    choose,
    measured_us,
    tuned,
    with_mtu,
)
from multinode.network.tuning_screen import show
from multinode.records.benchmark import CollectiveTest
from multinode.render.table import screen_text
from multinode.render.terminal import block_parts
from multinode.stats.estimate import Estimate, of_repeats, ratio
from multinode.stats.unknown import Unknown
from tests.golden import Golden, raised
from tests.network.test_size_scan import measured, plan, report

REPORT = TuneReport(
    run_id="r", backend="nccl", nodes=("a", "b"), test=CollectiveTest(messages=scan_messages(["all_reduce"], [8]))
)


@pytest.mark.parametrize("version", ["2.20.5", "2.24.3", None])
def test_what_is_tried_is_within_the_limits_of_nccl(version: str | None) -> None:
    """Threads 1 to 16, threads times sockets 64 at most, powers of two, and no LL128: "Environment Variables", 2.30."""
    tried = candidates(version, over_sockets=True)
    for setting in tried:
        assert set(setting.env) == set(AXES[setting.axis])
        threads, sockets = (int(setting.env.get(name, "1")) for name in AXES["sockets"])
        assert 1 <= threads <= 16
        assert 1 < threads * sockets <= 64 or setting.axis != "sockets"
        assert int(setting.env.get("NCCL_BUFFSIZE", "1")).bit_count() == 1
        assert "128" not in setting.env.get("NCCL_PROTO", "")
    assert len({setting.text for setting in tried}) == len(tried)


@pytest.mark.parametrize(
    ("version", "tree"), [("2.20.5", "Tree"), ("2.24.3", "allreduce:tree"), ("2.30.7", "allreduce:tree")]
)
def test_a_tree_is_asked_for_where_it_cannot_fail_the_other_collectives(version: str, tree: str) -> None:
    """From 2.24 on NCCL no longer falls back to a ring where the algorithm is not one of the collective's."""
    algorithms = [
        setting.env["NCCL_ALGO"] for setting in candidates(version, over_sockets=False) if "NCCL_ALGO" in setting.env
    ]
    assert algorithms == ["Ring", tree]


def test_the_gain_is_that_of_estimates_turn_by_turn() -> None:
    default, own = [100.0, 140.0, 120.0], [80.0, 112.0, 96.0]
    found = tuned(TunedSetting(axis="buffer", env={}), default, own)
    assert found.gain == ratio(of_repeats(default), of_repeats(own))
    assert isinstance(found.gain, Estimate)
    # Each turn was as much faster, however much the turns differ.
    assert found.gain.value == pytest.approx(1.25)
    assert found.gain.low == pytest.approx(1.25)
    assert found.is_faster
    assert not tuned(TunedSetting(axis="buffer", env={}), [100, 100, 100], [99, 104, 90]).is_faster


def test_of_each_axis_the_best_is_chosen_if_it_is_faster() -> None:
    def setting(axis: str, env: dict[str, str], own_us: float) -> TunedSetting:
        return tuned(TunedSetting(axis=axis, env=env), [100.0, 101.0, 99.0], [own_us, own_us * 1.01, own_us * 0.99])

    tried = [
        setting("buffer", {"NCCL_BUFFSIZE": "1"}, 90),
        setting("buffer", {"NCCL_BUFFSIZE": "2"}, 80),
        setting("protocol", {"NCCL_PROTO": "LL"}, 120),
        TunedSetting(axis="algorithm", env={"NCCL_ALGO": "Ring"}, gain=Unknown("it failed")),
    ]
    assert choose(tried) == {"NCCL_BUFFSIZE": "2"}


def test_messages_that_came_out_wrong_are_no_time(golden: Golden) -> None:
    said = report(plan(), measured(plan()))
    assert measured_us(said) == pytest.approx(sum(row.time_us.value for row in said.rows))
    wrong = msgspec.structs.replace(said, rows=(msgspec.structs.replace(said.rows[0], num_wrong=2), *said.rows[1:]))
    errors = {
        "two values are wrong": raised(ValueError, measured_us, wrong),
        "no rows": raised(ValueError, measured_us, msgspec.structs.replace(said, rows=())),
    }
    golden.check_errors("messages_without_a_time", errors)


@pytest.mark.parametrize(("mtu", "said"), [(1500, True), (9000, False)])
def test_larger_frames_are_a_hint_where_they_are_not_in_use(mtu: int, *, said: bool) -> None:
    scan = report(plan(), measured(plan()), mtu=mtu)
    text = " ".join(screen_text(block_parts(show(with_mtu(REPORT, scan)))).split())
    # 8948 of 9038 bytes against 1448 of 1538.
    assert ("MTU now 1500. At 1 Gbit/s, frames of 9000 bytes carry 5.2% more payload" in text) is said
