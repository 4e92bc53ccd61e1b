from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.network.scan_changes import compare_scans
from multinode.network.scan_evidence import CollectiveRow
from multinode.network.scan_verdict import Verdict
from multinode.network.screen import show
from multinode.network.size_scan import NodeState, ScanChanges, ScanReport
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.estimate import Estimate, exactly
from tests.golden import Golden, screen_of

MIB = 1 << 20
BOX = NodeState(name="node3", ifname="ens1f0", link_gbit_per_s=10.0, mtu=9000, duplex="full", torch="2.7.1", cores=8)
OTHER = msgspec.structs.replace(BOX, name="node1")


def around(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=value, low=low, high=high)


def row(took_us: float = 1000.0, **changes: Any) -> CollectiveRow:
    everything: dict[str, Any] = {
        "size_bytes": MIB,
        "count": MIB // 4,
        "iters": 20,
        "p95_us": 1.01 * took_us,
        "cv": 0.01,
        "time_us": Estimate(value=took_us, low=0.99 * took_us, high=1.01 * took_us),
        "transfer_us": took_us,
        "num_wrong": 0,
    }
    everything |= changes
    speed = everything["size_bytes"] / took_us / 1000
    return CollectiveRow(algbw_gb_per_s=speed, busbw_gb_per_s=speed, **everything)


def record(*rows: CollectiveRow, nodes: tuple[NodeState, ...] = (OTHER, BOX), **changes: Any) -> ScanReport:
    everything = {"run_id": "r1", "backend": "nccl", "workers": (1, 1)} | changes
    return ScanReport(
        rows=rows,
        states=nodes,
        nodes=tuple(node.name for node in nodes),
        world_size=2,
        test=CollectiveTest(messages=(Message(size_bytes=MIB),)),
        verdict=Verdict(message=""),
        directory="",
        **everything,
    )


def environment(before: ScanReport, now: ScanReport) -> list[str]:
    return [finding.message for finding in compare_scans(before, now).environment]


def test_a_sweep_has_not_changed_from_itself() -> None:
    changes = compare_scans(record(row()), record(row(), run_id="r2"))
    assert (changes.before, changes.now) == ("r1", "r2")
    assert changes.verdict.message == "No speed changed by more than its confidence interval (1 message compared)."
    assert (changes.environment, changes.came, changes.gone, changes.wrong) == ((), (), (), ())
    assert [one.changed for one in changes.rows] == [False]
    assert (changes.only_before, changes.only_now) == ((), ())


def test_a_speed_that_changed_is_told_with_both_figures_and_their_ratio() -> None:
    changes = compare_scans(record(row(1000.0)), record(row(2000.0)))
    (change,) = changes.rows
    assert (change.name, change.changed) == ("all_reduce 1 MiB", True)
    # Busbw is inverse to the time, and so is its interval.
    assert change.first.value == pytest.approx(1.048576)
    assert change.first.bounds == pytest.approx((1.048576 / 1.01, 1.048576 / 0.99))
    assert isinstance(change.ratio, Estimate)
    assert change.ratio.value == pytest.approx(0.5)
    assert (
        changes.verdict.message
        == "The speed of 1 of 1 message changed; 1 slower, largest change: all_reduce 1 MiB (-50%)."
    )
    back = compare_scans(record(row(2000.0)), record(row(1000.0)))
    assert "1 faster, largest change: all_reduce 1 MiB (+100%)" in back.verdict.message


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        # Both to within 1%: the ratio to within 1.4%.
        pytest.param(row(1000), row(1010), False, id="run to run"),
        pytest.param(row(1000), row(1020), True, id="steady, so 2% shows"),
        pytest.param(
            row(1000, time_us=around(1000, 940, 1060)),
            row(1080, time_us=around(1080, 1020, 1150)),
            False,
            id="unsteady",
        ),
        pytest.param(row(1000, cv=0.9), row(1200, cv=0.9), True, id="one slow iteration swells the cv alone"),
        # Whoever measured few iterations has a wide interval.
        pytest.param(row(1000, iters=3), row(1150, iters=3), True, id="few iterations"),
        pytest.param(
            row(1000, time_us=exactly(1000.0)), row(2000, time_us=exactly(2000.0)), None, id="without intervals"
        ),
    ],
)
def test_the_interval_of_the_ratio_decides_what_changed(
    before: CollectiveRow, now: CollectiveRow, *, changed: bool | None
) -> None:
    for first, second in ((before, now), (now, before)):
        (change,) = compare_scans(record(first), record(second)).rows
        assert change.changed is changed


def test_a_speed_without_an_interval_is_shown_and_not_judged() -> None:
    before, now = record(row(1000, time_us=exactly(1000.0))), record(row(2000, time_us=exactly(2000.0)), run_id="r2")
    changes = compare_scans(before, now)
    assert changes.verdict.message == "1 message could not be compared, because confidence intervals are missing."
    shown = screen_of(show(msgspec.structs.replace(now, changes=changes)))
    assert ["all_reduce 1 MiB", "1.049", "0.5243", "0.5x"] in [
        [cell.strip() for cell in line.split("  ") if cell] for line in shown.splitlines()
    ]


def test_values_that_became_wrong_are_told_at_the_same_speed() -> None:
    changes = compare_scans(record(row()), record(row(num_wrong=3)))
    (change,) = changes.wrong
    assert (change.message, change.code) == ("all_reduce 1 MiB has 3 wrong values; it had 0 before", "wrong_values")
    assert changes.verdict.message.endswith("; 1 message changed between correct and wrong values.")
    assert compare_scans(record(row(num_wrong=None)), record(row(num_wrong=3))).wrong == ()


def test_messages_that_only_one_has_are_named_and_not_compared() -> None:
    before = record(row(), row(collective="broadcast"))
    now = record(row(), row(size_bytes=2 * MIB), row(9000, dtype="half"), run_id="r2")
    changes = compare_scans(before, now)
    assert changes.only_before == ("broadcast 1 MiB",)
    assert changes.only_now == ("all_reduce 2 MiB", "all_reduce 1 MiB of half")
    assert [one.changed for one in changes.rows] == [False]
    shown = screen_of(show(msgspec.structs.replace(now, changes=changes)))
    assert "only in run r1: broadcast 1 MiB\n" in shown
    assert "only in run r2: all_reduce 2 MiB, all_reduce 1 MiB of half\n" in shown
    assert compare_scans(record(row()), record()).verdict.message == "The two tests have no message in common."


def test_a_size_that_was_rounded_for_other_workers_is_another_message() -> None:
    changes = compare_scans(record(row(size_bytes=64 * MIB)), record(row(size_bytes=64 * MIB - 4)))
    assert (changes.only_before, changes.only_now) == (("all_reduce 64 MiB",), ("all_reduce 67,108,860 B",))
    assert changes.rows == ()


def test_the_screen_has_both_speeds_of_what_changed_and_in_detail_of_every_message(golden: Golden) -> None:
    before = record(row(1000), row(3000, size_bytes=4 * MIB), row(collective="broadcast"), run_id="20260101-aa")
    slower = row(4000, size_bytes=4 * MIB, num_wrong=2)
    now = record(row(1001), slower, nodes=(OTHER, msgspec.structs.replace(BOX, mtu=1500)), run_id="20260102-bb")
    compared = msgspec.structs.replace(now, changes=compare_scans(before, now))
    for name, details in (("nccl_test_changes", False), ("nccl_test_changes_details", True)):
        golden.check_answer(name, show(compared), details=details)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"link_gbit_per_s": 1.0}, "node3's ens1f0 now negotiates 1 Gbit/s (previously 10 Gbit/s)"),
        ({"mtu": 1500}, "node3's ens1f0 now has an MTU of 1500 (previously 9000)"),
        ({"duplex": "half"}, "node3's ens1f0 now runs in half duplex (previously full)"),
        ({"ifname": "eth0"}, "node3 now uses eth0 (previously ens1f0)"),
        ({"torch": "2.8.0"}, "node3 now has torch 2.8.0 (previously 2.7.1)"),
    ],
)
def test_a_change_of_a_node_is_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    after = record(row(), nodes=(OTHER, msgspec.structs.replace(BOX, **changed)))
    assert environment(record(row()), after) == [sentence]


def test_what_changed_on_every_node_alike_is_said_once() -> None:
    after = tuple(msgspec.structs.replace(node, torch="2.8.0", mtu=1500) for node in (OTHER, BOX))
    assert environment(record(), record(nodes=after)) == [
        "the NIC of every node now has an MTU of 1500 (previously 9000)",
        "every node now has torch 2.8.0 (previously 2.7.1)",
    ]


def test_what_one_of_the_two_did_not_tell_has_not_changed() -> None:
    silent = NodeState(name="node3")
    assert environment(record(nodes=(BOX,)), record(nodes=(silent,))) == []
    assert environment(record(nodes=(silent,)), record(nodes=(BOX,))) == []


def test_nodes_that_came_went_or_changed_places() -> None:
    new = msgspec.structs.replace(BOX, name="node9")
    changes = compare_scans(record(nodes=(OTHER, BOX)), record(nodes=(OTHER, new)))
    assert (changes.came, changes.gone, changes.environment) == (("node9",), ("node3",), ())
    swapped = environment(record(nodes=(OTHER, BOX)), record(nodes=(BOX, OTHER)))
    assert swapped == ["the order of the nodes is now node3, node1 (previously node1, node3)"]


def test_changes_are_a_json_document() -> None:
    changes = compare_scans(record(row(1000)), record(row(2000)))
    assert msgspec.json.decode(msgspec.json.encode(changes), type=ScanChanges) == changes


def test_another_backend_or_other_workers_are_told_before_the_speeds() -> None:
    before, now = record(), record(backend="gloo", workers=(2, 1))
    assert environment(before, now) == [
        "now measured with gloo (previously nccl)",
        "now measured with 2 + 1 workers (previously 1 worker per node)",
    ]
    assert environment(before, before) == []
