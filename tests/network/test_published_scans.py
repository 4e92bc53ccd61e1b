"""What the verdict makes of nccl-tests and iperf3 figures that others published; each case names its source."""

from __future__ import annotations

from typing import Any

import pytest

from multinode.cluster.facts import Interface, RdmaPort, carried_gbit_per_s
from multinode.network.nic_path import MessagePath, NicPathCheck
from multinode.network.scan_evidence import CollectiveRow, ScanEvidence
from multinode.network.scan_verdict import Verdict, judge_scan
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import Layout, bus_factor
from multinode.traffic.pair_speeds import PairSpeed, RawTcp
from tests.golden import Golden

MIB = 1 << 20
TWO, BOXES = Layout(nodes=2), Layout(nodes=2, workers_per_node=8)


def row(busbw_gb_per_s: float, layout: Layout, size_bytes: int = 512 * MIB) -> CollectiveRow:
    factor = bus_factor("all_reduce", layout.workers)
    algbw = busbw_gb_per_s / factor
    time_us = size_bytes / algbw / 1000
    return CollectiveRow(
        collective="all_reduce",
        size_bytes=size_bytes,
        count=size_bytes // 4,
        iters=20,
        time_us=exactly(time_us),
        p95_us=time_us,
        transfer_us=time_us,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw_gb_per_s,
        num_wrong=0,
    )


def streams(gbit_per_s: float) -> tuple[PairSpeed, ...]:
    return tuple(PairSpeed(source=one, target=other, gbit_per_s=gbit_per_s) for one, other in ("ab", "ba"))


def judged(
    busbw_gb_per_s: float | dict[int, float],
    link: float,
    *,
    layout: Layout = TWO,
    one: float | None = None,
    several: float | None = None,
    mtu: int = 1500,
    **changes: Any,
) -> Verdict:
    """By the busbw of an all-reduce, the NIC's rate, and Gbit/s of raw TCP over one connection and over several."""
    by_size = busbw_gb_per_s if isinstance(busbw_gb_per_s, dict) else {512 * MIB: busbw_gb_per_s}
    several = several or one
    evidence = ScanEvidence(
        rows=tuple(row(speed, layout, size) for size, speed in by_size.items()),
        layout=layout,
        nics={name: Interface(name="eth0", speed_gbit_per_s=link, mtu=mtu) for name in "ab"},
        tcp=RawTcp(one=streams(one) if one else (), several=streams(several) if several else (), connections=4),
        **({"backend": "nccl"} | changes),
    )
    return judge_scan(evidence)


def codes(verdict: Verdict) -> list[str]:
    return [cause.code for cause in verdict.causes]


RDMA: dict[str, Any] = {"layout": BOXES, "over_rdma": True}


def raw_rdma(gbit_per_s: float) -> dict[str, Any]:
    return {**RDMA, "rdma": streams(gbit_per_s)}


def halves(gbit_per_s: float | None) -> dict[str, Any]:
    """Of a Spark: each half tells the 200 Gbit/s of the whole, and its slot carries 126."""
    places = {"rocep1s0f0": "0000:01:00.0", "roceP2p1s0f0": "0002:01:00.0"}
    ports = [
        RdmaPort(device=name, port=1, rate_gbit_per_s=200, pcie_gbit_per_s=126, board="NVD0000000087", pci=place)
        for name, place in places.items()
    ]
    rates = {"nics_gbit_per_s": dict.fromkeys("ab", carried_gbit_per_s(ports))}
    return {"over_rdma": True, "rdma": streams(gbit_per_s) if gbit_per_s else (), **rates}


def several_nics(count: int, rate: float) -> dict[str, Any]:
    return {**RDMA, "nics_gbit_per_s": dict.fromkeys("ab", (rate,) * count)}


@pytest.mark.parametrize(
    ("verdict", "status", "cause"),
    [
        # nccl#209: GCP, 32 Gbit/s; with one GPU a node and with eight.
        pytest.param(judged(31 / 8, 32, one=31), "ok", [], id="gcp-2x1"),
        pytest.param(judged(14.8 / 8, 32, layout=BOXES, one=30), "slow", ["few_sockets"], id="gcp-2x8"),
        # nccl#700: RoCE of 200 Gbit/s, PCIe access control on.
        pytest.param(judged(9.84, 200, **RDMA), "slow", ["slow_rdma"], id="roce-acs"),
        # The same with ib_write_bw's 180 Gbit/s; nccl#2409: 392 of 400.
        pytest.param(judged(9.84, 200, **raw_rdma(180)), "slow", ["slow_over_rdma"], id="roce-acs-raw"),
        pytest.param(
            judged(216.5, 400, **several_nics(8, 400) | raw_rdma(8 * 392)), "slow", ["slow_over_rdma"], id="8x400-raw"
        ),
        # dgx-spark-playbooks#103: two halves on slots of 126 Gbit/s; NCCL of a development branch, and of a release.
        pytest.param(judged(3.04, 200, layout=TWO, **halves(97.28 + 92.57)), "slow", ["slow_over_rdma"], id="spark-3"),
        pytest.param(judged(23.74, 200, layout=TWO, **halves(97.28 + 92.57)), "ok", [], id="spark-24"),
        # #102: the same without a figure of ib_write_bw; #108: a NIC that started degraded.
        pytest.param(judged(3, 200, layout=TWO, **halves(None)), "slow", ["slow_rdma"], id="spark-102"),
        pytest.param(judged(1.6, 200, layout=TWO, **halves(13.23)), "slow", ["slow_raw_rdma"], id="spark-108"),
        # #25: one cable, which both halves share.
        pytest.param(judged(20.95, 200, layout=TWO, **halves(None)), "ok", [], id="spark-25"),
        # nccl-tests#154: a bond of two NICs of 25 Gbit/s; raw RDMA is slow, and NCCL far slower.
        pytest.param(
            judged(0.6, 50, layout=TWO, over_rdma=True, rdma=streams(23), bonds=("mlx5_bond_0",)),
            "slow",
            ["slow_over_rdma", "slow_raw_rdma", "bond"],
            id="bond-2x25",
        ),
        # nccl-tests#265: raw 395 of 400 Gbit/s, NCCL 240.
        pytest.param(
            judged(30, 400, over_rdma=True, rdma=streams(395), bonds=("mlx5_bond_0",)),
            "slow",
            ["slow_over_rdma", "bond"],
            id="bond-2x200",
        ),
        # nccl-tests#232: one GPU per node and four NICs.
        pytest.param(judged(50, 200, **several_nics(4, 200) | {"layout": TWO}), "slow", ["one_gpu"], id="one-gpu"),
        # DLPerf: what its BERT implies of EDR.
        pytest.param(judged(6.07, 100, **RDMA), "slow", ["slow_rdma"], id="edr"),
        # nccl#1048: four NICs of 200 Gbit/s; nccl#2409: eight of 400.
        pytest.param(judged(86, 200, **several_nics(4, 200)), "ok", [], id="4x200"),
        pytest.param(judged(216.5, 400, **several_nics(8, 400)), "slow", ["slow_rdma"], id="8x400"),
        # The same where nothing names the NICs that were used.
        pytest.param(judged(86, 200, **RDMA), "inconclusive", ["more_nics"], id="4x200-unknown"),
        pytest.param(judged(216.5, 400, **RDMA), "inconclusive", ["more_nics"], id="8x400-unknown"),
        # nccl-tests#22: EFA, 100 Gbit/s: a tree of two nodes sends 8/15 of what a ring does.
        pytest.param(judged(125 / 8, 100, **RDMA), "inconclusive", ["another_algorithm"], id="efa-tree"),
        # AWS, 25 Gbit/s: a flow is capped at 5.
        pytest.param(judged(0.62, 25, one=4.96, several=23.2), "slow", ["flow_cap_nccl", "few_sockets"], id="aws-cap"),
        pytest.param(judged(1.2, 100, one=9.6, several=70), "slow", ["flow_cap_nccl", "few_sockets"], id="aws-cap-10"),
        # byteps#29: one connection 13.7, four 21.1, NCCL 10 of 25 Gbit/s.
        pytest.param(judged(10 / 8, 25, one=13.7, several=21.1), "slow", ["one_connection_fast_nccl", "few_sockets"]),
        # DeepSpeed#5766: Thunderbolt, 40 Gbit/s.
        pytest.param(judged(1.9, 40, one=16.2), "slow", ["slow_tcp"], id="thunderbolt"),
        # iperf#286: 100 Gbit/s, one connection 35, several 96.
        pytest.param(
            judged(4.0, 100, one=35, several=96, mtu=9000),
            "slow",
            ["one_connection_fast_nccl", "few_sockets"],
            id="100g-one-core",
        ),
        # iperf#408: 40 Gbit/s, 4.18 either way.
        pytest.param(judged(0.5, 40, one=4.18), "slow", ["odd_cable"], id="40g-cable"),
        # iperf#474: 82599, 10 Gbit/s: 5.5 of the 9.4 that it carries.
        pytest.param(judged(5.4 / 8, 10, one=5.5), "slow", ["slow_tcp"], id="82599"),
        # speechbrain#1096: 625 Mbit/s of 1 Gbit/s.
        pytest.param(judged(0.075, 1, one=0.625), "slow", ["odd_cable"], id="gigabit-cable"),
        pytest.param(judged(0.117, 1, one=0.94), "ok", [], id="1g"),
        pytest.param(judged(1.1, 10, one=9.4), "ok", [], id="10g"),
    ],
)
def test_published_figures_are_judged_as_those_who_met_them_found(
    verdict: Verdict, status: str, cause: list[str]
) -> None:
    assert (verdict.code, codes(verdict)) == (status, cause)
    assert verdict.message.startswith({"ok": "network OK"}.get(status, status))
    # The first hint is there, and none stands twice.
    hints = [one.hint for one in verdict.causes if one.hint]
    assert len(set(hints)) == len(hints)
    assert bool(hints) == bool(cause)


def test_raw_rdma_is_told_beside_the_busbw_and_what_it_rules_out(golden: Golden) -> None:
    slow = judged(9.84, 200, **raw_rdma(180))
    degraded = judged(1.6, 200, layout=TWO, **halves(13.23))
    cases = {"slow": slow, "slow ib_write_bw": degraded}
    golden.check_findings("scans_raw_rdma", {case: (found, *found.causes) for case, found in cases.items()})
    # Where the collective went over sockets, it says nothing.
    assert "RDMA" not in judged(1.1, 10, one=9.4, rdma=streams(180)).message


def test_sockets_that_are_too_many_are_told_where_large_messages_fall_behind(golden: Golden) -> None:
    """nccl#450: 100 Gbit/s, GB/s at 8 MiB and from there on doubled."""
    sizes = dict(zip((8, 16, 32, 64, 128), (4.52, 5.21, 1.48, 1.12, 1.40), strict=True))
    verdict = judged({size * MIB: speed for size, speed in sizes.items()}, 100, one=70)
    assert (verdict.code, codes(verdict)) == ("slow", ["many_sockets"])
    golden.check_findings("scan_many_sockets", {"nccl#450": (verdict, *verdict.causes)})
    # One size that is slow by chance, or a sweep that only stops growing, is not that.
    for speeds in ((4.52, 5.21, 1.48, 5.1, 5.0), (1.0, 1.4, 1.3, 1.2, 1.3), (5.0, 4.0, 3.9, 3.6, 1.2)):
        steady = judged(dict(zip((MIB << shift for shift in range(3, 8)), speeds, strict=True)), 100, one=40)
        assert "many_sockets" not in codes(steady)


def test_large_messages_that_fall_over_roce_need_a_lossless_network(golden: Golden) -> None:
    """nccl#1453: three nodes in two racks, eight NICs of 200 Gbit/s."""
    sizes = dict(zip((16, 32, 64, 128, 256, 512), (24.09, 29.5, 5.27, 5.22, 4.09, 5.31), strict=True))
    rates = dict.fromkeys("abc", (200.0,) * 8)
    case: dict[str, Any] = {"layout": Layout(nodes=3, workers_per_node=8), "over_rdma": True, "nics_gbit_per_s": rates}
    speeds = {size * MIB: speed for size, speed in sizes.items()}
    verdict = judged(speeds, 200, **case)
    assert codes(verdict) == ["drops_over_roce"]
    golden.check_findings("scan_over_roce", {"nccl#1453": (verdict, *verdict.causes)})
    # InfiniBand is lossless; a speed that stops growing is no fall.
    assert codes(judged(speeds, 200, link_layer="InfiniBand", **case)) == ["slow_rdma"]
    flat = dict(zip(speeds, (24.0, 29.5, 28.0, 20.0, 25.0, 29.0), strict=True))
    assert codes(judged(flat, 200, **case)) == ["slow_rdma"]


def test_the_rate_of_several_nics_is_their_sum_and_said(golden: Golden) -> None:
    eight, four = judged(216.5, 400, **several_nics(8, 400)), judged(86, 200, **several_nics(4, 200))
    # Of two nodes the slower counts.
    uneven = judged(86, 200, **{**RDMA, "nics_gbit_per_s": {"a": (200.0,) * 4, "b": (200.0,) * 3}})
    assert uneven.code == "inconclusive"
    # A NIC that is not known is not left out.
    one = judged(86, 200, **{**RDMA, "nics_gbit_per_s": {"a": (200.0,) * 4}})
    assert (one.code, codes(one)) == ("inconclusive", ["more_nics"])
    # Where nodes have different numbers of NICs, the rate is of the fewest.
    fewest = judged(45, 100, **{**RDMA, "nics_gbit_per_s": {"a": (100.0,) * 8, "b": (100.0,) * 4}})
    cases = {"eight NICs": eight, "four": four, "four and three": uneven, "one known": one, "eight and four": fewest}
    golden.check_findings("scans_several_nics", {case: (found, *found.causes) for case, found in cases.items()})


@pytest.mark.parametrize("busbw", [26.3, 30, 100, 1000])
@pytest.mark.parametrize("over_rdma", [False, True])
def test_more_than_a_link_carries_is_never_ok(busbw: float, *, over_rdma: bool) -> None:
    verdict = judged(busbw, 200, layout=Layout(nodes=4), over_rdma=over_rdma)
    assert (verdict.code, codes(verdict)) == ("inconclusive", ["more_nics"])
    assert judged(25, 200, layout=Layout(nodes=4), over_rdma=True).code == "ok"


def test_what_counters_say_of_the_algorithm_is_what_passed_the_nic() -> None:
    """Two nodes of eight: the same busbw is 53 % of what a ring would have passed."""
    path = NicPathCheck(
        ok=True, messages=(MessagePath(collective="all_reduce", size_bytes=512 * MIB, algorithm="tree"),)
    )
    of_tree: dict[str, Any] = {"path": path}
    tree, ring = (
        judged(11.0, 100, layout=BOXES, one=94, mtu=9000, **more)
        for more in (of_tree, of_tree | {"path": NicPathCheck(ok=True)})
    )
    assert ring.worst is not None
    assert tree.worst is not None
    assert tree.worst.nic_gb_per_s == pytest.approx(ring.worst.nic_gb_per_s * 8 / 15)
    assert (ring.code, tree.code) == ("ok", "slow")
    certain = judged(125 / 8, 100, path=path, **RDMA)
    assert certain.worst is not None
    assert certain.worst.share_of_ceiling == pytest.approx(2 / 3)


def test_a_flow_that_a_cloud_caps_is_not_a_core(golden: Golden) -> None:
    capped = judged(0.62, 25, one=4.96, several=23.2)
    gloo = judged(0.62, 25, one=4.96, several=23.2, backend="gloo")
    assert codes(gloo)[0] == "flow_cap"
    assert "NCCL" not in (gloo.causes[0].hint or "")
    # A link of 10 Gbit/s of which one core makes 4.9 and the wire no more than 9.4 may be either.
    either = judged(0.9, 25, one=7.2, several=23)
    bond = judged(1.1, 20, one=9.4, several=18.6)
    assert codes(bond)[0] == "flow_cap_nccl"
    cases = {"a cap, NCCL": capped, "a cap, gloo": gloo, "a cap or a core": either, "a bond": bond}
    golden.check_findings("scans_capped", {case: (found, *found.causes) for case, found in cases.items()})
