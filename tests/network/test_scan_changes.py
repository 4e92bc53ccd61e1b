from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.network.scan_evidence import CollectiveRow
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import NodeState, ScanReport, compare_scans
from multinode.records.benchmark import CollectiveTest, Message
from multinode.stats.estimate import Estimate

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
    assert (changes.before, changes.now, changes.unchanged) == ("r1", "r2", 1)
    assert changes.text == "No speed changed beyond noise (1 message compared)."
    assert (changes.environment, changes.came, changes.gone, changes.rows) == ((), (), (), ())
    assert (changes.only_before, changes.only_now) == ((), ())


def test_a_speed_that_changed_is_told_with_both_figures() -> None:
    changes = compare_scans(record(row(1000.0)), record(row(2000.0)))
    (change,) = changes.rows
    assert (change.code, change.figures["size_bytes"]) == ("slower", MIB)
    assert change.figures["change"] == pytest.approx(-0.5)
    assert change.message == "all_reduce 1 MiB is slower: 0.524 GB/s, was 1.05 GB/s (-50%)"
    assert changes.text == "1 of 1 messages changed; 1 slower, most: all_reduce 1 MiB (-50%)."
    (back,) = compare_scans(record(row(2000.0)), record(row(1000.0))).rows
    assert "is faster" in back.message


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        pytest.param(row(1000), row(1040), False, id="run to run"),
        pytest.param(row(1000), row(1080), True, id="steady, so 8% shows"),
        pytest.param(
            row(1000, time_us=around(1000, 940, 1060)),
            row(1080, time_us=around(1080, 1020, 1150)),
            False,
            id="unsteady",
        ),
        pytest.param(row(1000, cv=0.9), row(1200, cv=0.9), True, id="one slow iteration swells the cv alone"),
        pytest.param(row(1000, iters=3), row(1150, iters=3), False, id="few iterations"),
        pytest.param(row(1000, iters=3), row(1300, iters=3), True, id="few, and a great change"),
    ],
)
def test_a_change_is_what_exceeds_the_noise_of_both(
    before: CollectiveRow, now: CollectiveRow, *, changed: bool
) -> None:
    assert bool(compare_scans(record(before), record(now)).rows) is changed
    assert bool(compare_scans(record(now), record(before)).rows) is changed


def test_values_that_became_wrong_are_told_at_the_same_speed() -> None:
    (change,) = compare_scans(record(row()), record(row(num_wrong=3))).rows
    assert (change.message, change.code) == ("3 values of all_reduce 1 MiB are wrong, 0 before", "wrong_values")
    assert compare_scans(record(row(num_wrong=None)), record(row(num_wrong=3))).rows == ()


def test_messages_that_only_one_has_are_named_and_not_compared() -> None:
    changes = compare_scans(
        record(row(), row(collective="broadcast")), record(row(), row(size_bytes=2 * MIB), row(9000, dtype="half"))
    )
    assert changes.only_before == ("broadcast 1 MiB",)
    assert changes.only_now == ("all_reduce 2 MiB", "all_reduce 1 MiB of half")
    assert (changes.rows, changes.unchanged) == ((), 1)
    assert compare_scans(record(row()), record()).text == "The two scans have no message in common."


def test_a_size_that_was_rounded_for_other_workers_is_the_same_message() -> None:
    changes = compare_scans(record(row(size_bytes=64 * MIB)), record(row(size_bytes=64 * MIB - 4)))
    assert (changes.only_before, changes.only_now, changes.unchanged) == ((), (), 1)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"link_gbit_per_s": 1.0}, "node3's ens1f0 now negotiates 1 Gbit/s, was 10 Gbit/s"),
        ({"mtu": 1500}, "node3's ens1f0 now has an MTU of 1500, was 9000"),
        ({"duplex": "half"}, "node3's ens1f0 now runs in half duplex, was full"),
        ({"ifname": "eth0"}, "node3 now uses eth0, was ens1f0"),
        ({"torch": "2.8.0"}, "node3 now has torch 2.8.0, was 2.7.1"),
    ],
)
def test_a_change_of_a_node_is_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    after = record(row(), nodes=(OTHER, msgspec.structs.replace(BOX, **changed)))
    assert environment(record(row()), after) == [sentence]


def test_what_changed_on_every_node_alike_is_said_once() -> None:
    after = tuple(msgspec.structs.replace(node, torch="2.8.0", mtu=1500) for node in (OTHER, BOX))
    assert environment(record(), record(nodes=after)) == [
        "the NIC of every node now has an MTU of 1500, was 9000",
        "every node now has torch 2.8.0, was 2.7.1",
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
    assert swapped == ["the order of the nodes is now node3, node1, was node1, node3"]


def test_changes_are_a_json_document() -> None:
    changes = compare_scans(record(row(1000)), record(row(2000)))
    assert msgspec.json.decode(msgspec.json.encode(changes))["rows"][0]["figures"]["collective"] == "all_reduce"


def test_another_backend_or_other_workers_are_told_before_the_speeds() -> None:
    before, now = record(), record(backend="gloo", workers=(2, 1))
    assert environment(before, now) == [
        "measured with gloo now, was nccl",
        "measured with 2 + 1 workers now, was 1 worker per node",
    ]
    assert environment(before, before) == []
