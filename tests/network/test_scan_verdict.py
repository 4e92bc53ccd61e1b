from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest

from multinode.cluster.facts import Interface
from multinode.findings.finding import Finding
from multinode.network.nic_path import NicPathCheck
from multinode.network.scan_evidence import CollectiveRow, ScanEvidence
from multinode.network.scan_verdict import Verdict, judge_scan
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import bus_factor
from multinode.traffic.pair_speeds import PairSpeed, RawTcp, RoundTrip
from multinode.units import goodput_gb_per_s
from tests.golden import Golden

MIB = 1 << 20
GIGABIT = goodput_gb_per_s(1.0)
START_US = 150.0


def rows(
    gb_per_s: float, *, collective: str = "all_reduce", most: int = 64 * MIB, **changes: Any
) -> tuple[CollectiveRow, ...]:
    """A sweep of two workers from 8 B to `most`, every message with a start and a bandwidth."""
    factor = bus_factor(collective, 2)
    made = []
    size = 8
    while size <= most:
        time_us = START_US + size * factor / gb_per_s / 1000
        known: dict[str, Any] = {"time_us": time_us, "transfer_us": time_us, "num_wrong": 0} | changes
        algbw = size / known["time_us"] / 1000
        made.append(
            CollectiveRow(
                collective=collective,
                size_bytes=size,
                count=size // 4,
                iters=20,
                p95_us=known["time_us"],
                algbw_gb_per_s=algbw,
                busbw_gb_per_s=algbw * factor,
                **known | {"time_us": exactly(known["time_us"])},
            )
        )
        size *= 8
    return tuple(made)


def ring(gb_per_s: float, names: str = "ab", **slow: float) -> tuple[PairSpeed, ...]:
    """Streams around the ring, in GB/s; `slow` by sender."""
    return tuple(
        PairSpeed(source=name, target=names[(place + 1) % len(names)], gbit_per_s=8 * slow.get(name, gb_per_s))
        for place, name in enumerate(names)
    )


def trips(**us: float) -> tuple[RoundTrip, ...]:
    """Round trips around the ring, by sender."""
    names = tuple(us)
    return tuple(
        RoundTrip(source=name, target=names[(place + 1) % len(names)], median_us=us[name])
        for place, name in enumerate(names)
    )


WELL = RawTcp(one=ring(0.995 * GIGABIT), several=ring(0.995 * GIGABIT), latency=trips(a=90.0, b=95.0))


def tcp(**changes: Any) -> RawTcp:
    return msgspec.structs.replace(WELL, **changes)


def both_ways(gb_per_s: float) -> RawTcp:
    return tcp(one=ring(gb_per_s), several=ring(gb_per_s))


def nics(names: str = "ab", b: dict[str, Any] | None = None, **all_of_them: Any) -> dict[str, Interface]:
    """NICs at 1 Gbit/s that are well, but for what a test changes of them, or of b's alone."""
    well: dict[str, Any] = {"name": "ens1f0", "speed_gbit_per_s": 1.0, "mtu": 1500, "duplex": "full"} | all_of_them
    return {name: Interface(**(well | (b or {} if name == "b" else {}))) for name in names}


def judged(gb_per_s: float = 0.99 * GIGABIT, **changes: Any) -> Verdict:
    """The verdict on two nodes at 1 Gbit/s that are well, but for what a test changes."""
    everything: dict[str, Any] = {
        "rows": rows(gb_per_s),
        "backend": "gloo",
        "tcp": WELL,
        "path": NicPathCheck(ok=True),
        "wait_share_by_node": {"a": 0.02, "b": 0.03},
        "busy_percent_by_node": {"a": 30.0, "b": 35.0},
        "nics": nics(),
    }
    return judge_scan(ScanEvidence(**(everything | changes)))


SLOW = 0.3 * GIGABIT
TEN = goodput_gb_per_s(10.0)


def at_ten(gb_per_s: float, raw: float = 0.95 * TEN, **changes: Any) -> Verdict:
    everything = {"backend": "nccl", "nics": nics(speed_gbit_per_s=10.0), "tcp": both_ways(raw)}
    return judged(gb_per_s, **(everything | changes))


def test_a_network_that_is_used_in_full_needs_no_action() -> None:
    verdict = judged()
    assert verdict.message == (
        "network OK for a link of 1 Gbit/s: all_reduce of 16 MiB reaches 99% of the TCP line rate and 99% of raw TCP"
    )
    assert (verdict.nodes, verdict.causes) == ((), ())


def test_the_shares_are_of_the_large_sizes_each() -> None:
    shares = judged().shares
    assert [share.size_bytes for share in shares] == [2 * MIB, 16 * MIB]
    assert shares[-1].share_of_ceiling == pytest.approx(0.99, abs=0.003)
    assert shares[-1].share_of_tcp == pytest.approx(0.99 / 0.995, abs=0.003)


def test_a_sweep_of_small_sizes_alone_is_not_called_slow_for_its_latency() -> None:
    verdict = judged(rows=rows(0.99 * GIGABIT, most=4096 * 8))
    assert [share.size_bytes for share in verdict.shares] == [32768]
    assert verdict.shares[0].share_of_ceiling == pytest.approx(0.64, abs=0.03)
    assert verdict.code == "ok"


def test_wrong_values_come_before_everything() -> None:
    verdict = judged(
        rows=rows(SLOW, num_wrong=2), path=NicPathCheck(ok=False, findings=(Finding(message="a sent over eth0."),))
    )
    assert (verdict.code, verdict.causes[0].code) == ("wrong_values", "wrong_values")
    assert judged(SLOW).code == "slow"


def test_without_rows_or_without_anything_to_hold_them_against_there_is_no_judgement() -> None:
    assert judged(rows=()).message == "no result: no size was measured by all workers"
    assert judge_scan(ScanEvidence(rows=rows(5.0))).causes == ()


def test_raw_tcp_alone_is_enough_to_judge_by() -> None:
    unknown = nics(speed_gbit_per_s=None)
    assert judged(nics=unknown).message.endswith(": all_reduce of 16 MiB reaches 99% of raw TCP")
    slow = judged(SLOW, nics=unknown)
    assert (slow.code, len(slow.causes)) == ("slow", 1)


def test_the_worst_of_several_collectives_is_what_is_told() -> None:
    several = rows(0.99 * GIGABIT) + rows(0.4 * GIGABIT, collective="all_gather")
    assert judged(rows=several, backend="nccl").message.startswith("slow: all_gather of 16 MiB, the slowest, ")


def test_what_the_backend_really_sends_is_what_fills_the_nic() -> None:
    # A reduce-scatter that all-reduces inside sends S where busbw counts half of it.
    half = rows(0.495 * GIGABIT, collective="reduce_scatter")
    assert judged(rows=half, backend="gloo").causes == ()
    assert judged(rows=half, backend="nccl").causes != ()


SLOW_TO_A = ring(0.99 * GIGABIT, b=0.2 * GIGABIT)
ALL_BUT_B = tuple(
    PairSpeed(source=one, target=other, gbit_per_s=0.094 if "b" in (one, other) else 0.94)
    for one, other in permutations("abc", 2)
)
# What shows each cause, and the nodes that it names.
CAUSES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another NIC": (
        {"path": NicPathCheck(ok=False, findings=(Finding(message="b sent 31 MiB over eth0, not over ens1f0."),))},
        (),
    ),
    "half duplex": ({"nics": nics(b={"duplex": "half"})}, ("b",)),
    "another MTU": ({"nics": nics(mtu=9000, b={"mtu": 1500})}, ("b",)),
    "a slower link": ({"nics": nics(speed_gbit_per_s=10.0, b={"speed_gbit_per_s": 1.0})}, ("b",)),
    "a slow stream": ({"tcp": tcp(one=SLOW_TO_A, several=SLOW_TO_A)}, ("b", "a")),
    "a slow node": ({"tcp": tcp(pairs=ALL_BUT_B)}, ("b",)),
    "one slow connection": ({"tcp": tcp(one=ring(0.3 * GIGABIT))}, ()),
    "a late node": ({"wait_share_by_node": {"a": 0.4, "b": 0.02}}, ("b",)),
    "busy CPUs": ({"busy_percent_by_node": {"a": 97.0, "b": 30.0}}, ("a",)),
}


def test_a_slow_sweep_is_explained_by_what_was_seen(golden: Golden) -> None:
    found = {case: judged(SLOW, **seen) for case, (seen, _) in CAUSES.items()}
    assert {case: verdict.nodes for case, verdict in found.items()} == {
        case: nodes for case, (_, nodes) in CAUSES.items()
    }
    # Without it nothing of the kind is said.
    (usual,) = {cause.code for cause in judged(SLOW).causes}
    assert usual not in {verdict.causes[0].code for verdict in found.values()}
    golden.check_findings("slow_scans", {case: (verdict, *verdict.causes) for case, verdict in found.items()})


@pytest.mark.parametrize("case", ["half duplex", "another MTU", "one slow connection", "a late node", "busy CPUs"])
def test_what_may_explain_slowness_is_not_told_of_a_sweep_that_is_well(case: str) -> None:
    verdict = judged(**CAUSES[case][0])
    assert (verdict.code, verdict.causes) == ("ok", ())


def test_a_constant_wait_is_no_excuse_for_a_large_message() -> None:
    # 100 ms before every message, small ones too: one node is late each time.
    waiting = tuple(
        msgspec.structs.replace(
            row,
            time_us=exactly(row.time_us.value + 100_000),
            algbw_gb_per_s=row.algbw_gb_per_s * row.time_us.value / (row.time_us.value + 100_000),
        )
        for row in rows(0.99 * GIGABIT)
    )
    verdict = judged(rows=waiting, tcp=tcp(latency=()), wait_share_by_node={"a": 0.4, "b": 0.0})
    assert verdict.nodes == ("b",)


@pytest.mark.parametrize("case", ["another NIC", "a slower link", "a slow node"])
def test_what_is_wrong_in_itself_is_told_of_any_sweep(case: str) -> None:
    assert len(judged(**CAUSES[case][0]).causes) == 1


def test_each_cause_is_a_finding(golden: Golden) -> None:
    fast = nics(speed_gbit_per_s=100.0)
    late = msgspec.structs.replace(rows(GIGABIT)[0], time_us=exactly(40_000.0))
    streams = ring(0.99 * GIGABIT, "abcd", b=0.1 * GIGABIT, c=0.1 * GIGABIT)
    cases = {
        "nothing else": judged(SLOW),
        "wrong values": judged(rows=rows(SLOW, num_wrong=2)),
        "raw TCP as slow": judged(0.74 * GIGABIT, tcp=both_ways(0.75 * GIGABIT)),
        "no raw TCP": judged(SLOW, tcp=RawTcp()),
        "neither link nor raw TCP": judge_scan(ScanEvidence(rows=rows(5.0))),
        "slow to and from a node": judged(0.1 * GIGABIT, tcp=RawTcp(several=streams), nics=nics("abcd")),
        "few sockets": at_ten(0.3 * TEN),
        "one connection that a core bounds": at_ten(
            0.35 * TEN, tcp=RawTcp(one=ring(0.4 * TEN), several=ring(0.95 * TEN))
        ),
        # By the link of 100 Gbit/s alone the streams would be odd.
        "TCP on a very fast link": at_ten(5.9, raw=6.0, nics=fast),
        "a long way": judged(tcp=tcp(latency=trips(a=12_000.0, b=12_500.0))),
        "a long way from one node": judged(tcp=tcp(latency=trips(a=100.0, b=110.0, c=2500.0))),
        "small messages that wait": judged(rows=(late, *rows(0.99 * GIGABIT)[1:])),
    }
    golden.check_findings("scan_causes", {case: (verdict, *verdict.causes) for case, verdict in cases.items()})
    assert cases["slow to and from a node"].nodes == ("c",)
    assert cases["a long way from one node"].nodes == ("c", "a")


def test_sockets_are_for_nccl_on_fast_links_whose_tcp_is_fine() -> None:
    others = (
        at_ten(0.94 * TEN),
        at_ten(0.3 * TEN, backend="gloo"),
        at_ten(0.3 * TEN, raw=0.31 * TEN),
        judged(SLOW, backend="nccl"),
    )
    assert not any("NCCL_SOCKET_NTHREADS" in (cause.hint or "") for verdict in others for cause in verdict.causes)


def test_tcp_that_leaves_half_of_a_very_fast_link_is_a_limit_and_no_fault() -> None:
    for other in (at_ten(0.94 * TEN), at_ten(0.9, raw=1.0, nics=nics(speed_gbit_per_s=100.0))):
        assert "tcp_limit" not in {cause.code for cause in other.causes}


def test_the_verdict_is_a_json_document() -> None:
    document = msgspec.json.decode(msgspec.json.encode(judged(SLOW)))
    assert set(document) == {*Finding.__struct_fields__, "over_rdma", "worst", "nics", "nodes", "causes", "shares"}
    assert set(document["causes"][0]) == {"code", "figures", "message", "hint", "node", "nodes"}
    assert msgspec.json.decode(msgspec.json.encode(judged(SLOW)), type=Verdict) == judged(SLOW)


def test_half_of_the_link_is_normal_where_the_backend_takes_turns() -> None:
    half = rows(0.49 * GIGABIT, collective="sendrecv")
    assert judged(rows=half, backend="nccl").causes
    verdict = judged(rows=half, backend="gloo")
    assert verdict.causes == ()
    assert verdict.code == "ok"
    assert verdict.message.endswith(
        "; gloo cannot reach more than 50% because it alternates between sending and receiving large messages"
    )


def test_what_one_connection_fills_is_well_whatever_several_make_of_it() -> None:
    verdict = judged(tcp=tcp(several=ring(0.99 * GIGABIT, b=0.3 * GIGABIT)))
    assert verdict.causes == ()


def test_what_is_odd_beside_a_sweep_that_is_well_is_told_as_such() -> None:
    verdict = judged(tcp=tcp(pairs=ALL_BUT_B))
    assert verdict.message.startswith("network OK for a link of ")
    assert verdict.causes[0].message.startswith("a stream between b and any peer")
