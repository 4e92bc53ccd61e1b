"""What `nccl-test --read` makes of outputs in public threads, trimmed, with the names of hosts replaced.

Each file of `pasted` is named after its thread: `nccl-tests-119` is NVIDIA/nccl-tests#119, `iperf-55` esnet/iperf#55,
`perftest-273` linux-rdma/perftest#273, `aws-ofi-nccl-65` aws/aws-ofi-nccl#65, `iperf3-win-builds-2`
ar51an/iperf3-win-builds#2, `calico-4961` projectcalico/calico#4961. `nccl-1453` (NVIDIA/nccl) has the figures of its
thread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multinode.errors import UsageError
from multinode.network.read_scan import Missing, ReadScan, read_scans
from multinode.network.scan_evidence import CollectiveRow
from multinode.network.screen import nccl_tests_text, show_read
from multinode.records.benchmark import CollectiveTest, Message
from multinode.render.sheet import Sheet
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import Layout, bus_factor
from multinode.units import parse_nics
from tests.golden import Golden, error_of, screen_of

PASTED = Path(__file__).parent / "pasted"
MIB = 1 << 20


def told(link: str | None = None, **rest: Any) -> Missing:
    return Missing(nics_gbit_per_s=parse_nics(link) if link else (), **rest)


def read(text: str, missing: Missing | None = None) -> ReadScan:
    (scan,) = read_scans([("log", text)], missing).scans
    return scan


def pasted(name: str) -> str:
    return (PASTED / f"{name}.txt").read_text()


def codes(scan: ReadScan) -> list[str]:
    return [cause.code for cause in scan.verdict.causes]


# What each thread concluded, as it was noted before the text was read.
THREADS: dict[str, tuple[Missing, str, list[str]]] = {
    # "from my perspective it's perfect"; "looks great".
    "nccl-tests-119": (told("4x200gbit", nodes=3), "ok", []),
    "nccl-tests-252": (told("4x200gbit", nodes=2), "ok", []),
    # NVIDIA asks whether nccl-tests was built with MPI.
    "nccl-tests-294": (told(), "alone", ["alone"]),
    "nccl-tests-182": (told("200gbit", nodes=2), "alone", ["alone"]),
    "nccl-tests-27": (told("10gbit"), "alone", ["alone"]),
    "nccl-tests-107": (told("10gbit"), "alone", ["alone"]),
    # One GPU per node, which expected four NICs.
    "nccl-tests-232": (told("4x400gbit", nodes=2), "slow", ["one_gpu"]),
    # Three nodes in two racks; RoCE without flow control.
    "nccl-1453": (told("8x200gbit", nodes=3, over_rdma=True), "slow", ["drops_over_roce"]),
    # A drop from 64 MiB on, which larger sizes make up for.
    "aws-ofi-nccl-65": (told("4x100gbit", nodes=2), "ok", []),
    # Wrong values.
    "nccl-tests-131": (told(), "wrong_values", ["wrong_values"]),
    "nccl-tests-7": (told("100gbit"), "wrong_values", ["wrong_values"]),
    # The same on eight streams; iperf 2 fills the link; a core; retransmits that cost nothing; no packets arrive.
    "iperf-408": (told("40gbit"), "slow", ["slow_raw_tcp"]),
    "iperf-286": (told("100gbit"), "ok", []),
    "iperf-1664": (told("100gbit"), "ok", []),
    "iperf-55": (told("100gbit"), "slow", ["one_stream"]),
    "iperf-1088": (told("25gbit"), "slow", ["one_stream"]),
    "iperf3-win-builds-2": (told("25gbit"), "slow", ["one_stream"]),
    "iperf-394": (told("10gbit"), "ok", []),
    "iperf-703": (told("10gbit"), "slow", ["lost_segments"]),
    # Pods on two nodes, over a tunnel; and a node to a pod.
    "calico-4961": (told("10gbit"), "slow", ["lost_segments"]),
    "calico-2192": (told("10gbit"), "slow", ["lost_segments"]),
    "calico-8756": (told("10gbit"), "ok", []),
}


@pytest.mark.parametrize("name", THREADS)
def test_outputs_in_public_threads_are_judged_as_the_threads_concluded(name: str) -> None:
    missing, status, causes = THREADS[name]
    scan = read(pasted(name), missing)
    assert (scan.verdict.code, codes(scan)) == (status, causes)
    assert all(cause.hint for cause in scan.verdict.causes)


def test_two_tables_of_a_text_are_judged_each() -> None:
    """Eight nodes of eight V100 with InfiniBand of 100 Gbit/s."""
    both = read_scans([("log", pasted("nccl-tests-78"))], told("100gbit", nodes=8)).scans
    assert [scan.collective for scan in both] == ["all_reduce", "all_to_all"]
    assert {scan.layout for scan in both} == {Layout(nodes=8, workers_per_node=8)}
    assert [(scan.verdict.code, codes(scan)) for scan in both] == [("slow", ["unknown_network"])] * 2


@pytest.mark.parametrize(
    "name", ["nccl-tests-119", "nccl-tests-294", "nccl-1453", "nccl-tests-78", "nccl-tests-131", "iperf-55"]
)
def test_the_screen(golden: Golden, name: str) -> None:
    missing = THREADS.get(name, (told("100gbit", nodes=8),))[0]
    golden.check_answer(f"read_{name}", show_read(read_scans([(name, pasted(name))], missing)))


PERFTEST = """\
                    RDMA_Write {both}BW Test
 Dual-port       : OFF          Device         : {device}
 Link type       : Ethernet
 #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]
 65536      5000             0.00               {speed}   0.176530
"""


def perftest(speed: float, device: str = "mlx5_0", unit: str = "Gb", both: str = "") -> str:
    return PERFTEST.format(speed=speed, device=device, unit=unit, both=both)


@pytest.mark.parametrize(
    ("text", "gbit_per_s"),
    [
        (perftest(180.0), 180.0),
        # Of 2**20 bytes.
        (perftest(11033.14, unit="MB"), 92.55),
        (perftest(11033.14, unit="MiB"), 92.55),
        (perftest(180.0, both="Bidirectional "), 90.0),
        # Two halves of a NIC, the better run of each; one of four NICs stands for all.
        (perftest(60.0) + perftest(97.0) + perftest(92.0, "mlx5_1"), 189.0),
    ],
)
def test_raw_rdma_is_read_in_every_unit(text: str, gbit_per_s: float) -> None:
    scan = read(text, told("2x100gbit") if "mlx5_1" in text else told("200gbit"))
    assert scan.rdma[0].gbit_per_s == pytest.approx(gbit_per_s, rel=1e-3)


def test_one_measured_nic_stands_for_all_and_that_is_said() -> None:
    scan = read(perftest(190.0), told("4x200gbit"))
    assert scan.verdict.message.startswith(
        "network OK for a link of 800 Gbit/s: ib_write_bw reaches 95 GB/s (760 Gbit/s)"
    )
    assert scan.assumed == ("raw RDMA was measured over 1 NIC of 4: the others are assumed to be equal",)
    slow = read(perftest(23.0, "mlx5_bond_0"), told("50gbit"))
    assert (slow.verdict.code, codes(slow)) == ("slow", ["slow_raw_rdma", "bond"])


def test_a_table_and_raw_rdma_are_compared() -> None:
    text = perftest(395.0, "mlx5_bond_0") + table(30.0, Layout(nodes=2))
    scan = read(text, told("400gbit"))
    assert (scan.verdict.code, codes(scan)) == ("slow", ["slow_over_rdma", "bond"])
    assert scan.programs == ("nccl-tests", "ib_write_bw")
    # A stream that is slower than the collective was of something else.
    other = read(perftest(90.0) + table(45.0, Layout(nodes=2)), told("400gbit"))
    assert (other.verdict.code, other.rdma) == ("ok", ())
    assert "the raw streams are ignored, because the collective is faster" in other.assumed[-1]


def row(collective: str, busbw: float, ranks: int, size_bytes: int = 64 * MIB, **changes: Any) -> CollectiveRow:
    algbw = busbw / bus_factor(collective, ranks)
    time_us = size_bytes / algbw / 1000
    split = collective in {"all_gather", "reduce_scatter", "all_to_all"}
    values: dict[str, Any] = {
        "collective": collective,
        "redop": "sum" if "reduce" in collective else "none",
        "size_bytes": size_bytes,
        "count": size_bytes // 4 // (ranks if split else 1),
        "iters": 20,
        "time_us": exactly(time_us),
        "p95_us": time_us,
        "transfer_us": time_us,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": busbw,
        "num_wrong": 0,
    }
    return CollectiveRow(**(values | changes))


def table(busbw: float, layout: Layout, collective: str = "all_reduce", **changes: Any) -> str:
    """As `--format nccl-tests` prints it."""
    rows = [row(collective, busbw, layout.workers, **changes)]
    devices = [
        f"Rank {rank:2d} on node{node} device {rank - ranks.start}"
        for node, ranks in enumerate(layout.ranks)
        for rank in ranks
    ]
    test = CollectiveTest(messages=(Message(collective=collective, size_bytes=64 * MIB),))
    return nccl_tests_text(rows, test, devices) + "\n"


@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv"]
)
def test_our_own_output_is_read_as_it_was(collective: str) -> None:
    layout = Layout(nodes=2, workers_per_node=4)
    scan = read(table(11.0, layout, collective), told("100gbit"))
    (found,) = scan.rows
    assert (scan.collective, scan.layout) == (collective, layout)
    assert found.busbw_gb_per_s == pytest.approx(11.0, abs=0.006)
    assert found.num_wrong == 0
    assert scan.assumed == ()


@pytest.mark.parametrize("mark", ["[1,0]<stdout>:", "node1: ", "0: ", "> ", "worker-0: "])
def test_marks_of_launchers_and_threads_are_no_part_of_a_row(mark: str) -> None:
    text = "".join(f"{mark}{line}\n" for line in table(11.0, Layout(nodes=2)).splitlines())
    assert read(text, told("100gbit")).verdict.code == "ok"


@pytest.mark.parametrize("ranks", [2, 3, 6, 16, 24])
def test_the_number_of_ranks_follows_from_the_speeds(ranks: int) -> None:
    lines = [line for line in table(95.8, Layout(nodes=ranks)).splitlines() if "Rank" not in line]
    given = read("\n".join(lines), told("800gbit", nodes=2 if ranks % 2 == 0 else 3))
    assert given.layout is not None
    assert given.layout.workers == ranks
    assumed = read("\n".join(lines), told("800gbit"))
    assert assumed.assumed[0].startswith("the text does not say which ranks ran where, so ")


def test_what_the_text_lacks_is_said_with_the_option_that_tells_it() -> None:
    scan = read(table(11.0, Layout(nodes=2)))
    assert scan.verdict.code == "inconclusive"
    assert scan.assumed[-1].startswith("the text does not state the rate of the NICs: add --link RATE")
    unnamed = table(11.0, Layout(nodes=2), "all_gather").replace("Collective test: all_gather", "")
    assert "all_gather is assumed" in read(unnamed, told("100gbit")).assumed[0]
    named = read(unnamed, told("100gbit", collective="all_to_all"))
    assert (named.collective, named.assumed) == ("all_to_all", ())


def test_small_messages_say_nothing_of_the_bandwidth() -> None:
    small = read(table(0.3, Layout(nodes=2), size_bytes=4096), told("100gbit"))
    assert (small.verdict.code, codes(small)) == ("inconclusive", [])
    assert "all_reduce of 4 KiB mostly measures latency: measure larger messages" in small.verdict.message
    lines = table(2.6, Layout(nodes=2), size_bytes=65536).splitlines()
    lines.insert(-3, "  8  2  float  sum  -1  20.0  0.00  0.00  0  20.0  0.00  0.00  0")
    assert read("\n".join(lines), told("100gbit")).verdict.code == "inconclusive"


def test_one_node_and_one_rank_use_no_network() -> None:
    assert read(table(200.0, Layout(nodes=1, workers_per_node=8)), told("100gbit")).verdict.code == "one_node"
    alone = read(
        "nThread 1 nGpus 1 minBytes 8\n"
        "   16777216  4194304  float  sum  -1  60.1  279.1  0.00  0  0.3  50000.1  0.00  0\n"
    )
    assert (alone.verdict.code, codes(alone)) == ("alone", ["one_rank"])
    assert alone.verdict.is_failure


def test_wrong_values_of_a_row_come_before_its_speed() -> None:
    scan = read(table(11.0, Layout(nodes=2), num_wrong=3), told("100gbit"))
    assert (scan.verdict.code, scan.verdict.is_failure) == ("wrong_values", True)
    assert scan.verdict.causes[0].message.startswith("3 values were wrong (all_reduce of float)")


@pytest.mark.parametrize(
    ("used", "network", "cause"),
    [
        ("NET/Socket : Using [0]eth0:10.0.0.1<0>", "Socket", "no_tcp"),
        ("NET/IB : Using [0]mlx5_0:1/RoCE", "IB", "slow_rdma"),
    ],
)
def test_the_log_of_nccl_beside_a_table_tells_the_network(used: str, network: str, cause: str) -> None:
    log = f"n:1:2 [0] NCCL INFO {used}\nn:1:2 [0] NCCL INFO Using network {network}\n"
    assert codes(read(log + table(3.0, Layout(nodes=2)), told("100gbit"))) == [cause]


def iperf_json(gbit: float, *, streams: int = 1, **start: Any) -> str:
    document = {
        "start": {
            "connected": [{"local_host": "10.0.0.1", "remote_host": "10.0.0.2"}],
            "version": "iperf 3.9",
            "test_start": {"protocol": "TCP", "num_streams": streams, "reverse": 0} | start,
        },
        "end": {
            "sum_sent": {"bits_per_second": gbit * 1e9, "bytes": gbit * 1.25e9, "retransmits": 12},
            "sum_received": {"bits_per_second": gbit * 0.99e9},
        },
    }
    return f"$ iperf3 -J\n{json.dumps(document, indent=2)}\n"


def test_iperf3_as_json() -> None:
    scan = read(iperf_json(9.4) + iperf_json(9.3, reverse=1), told("10gbit"))
    assert scan.verdict.code == "ok"
    assert [(pair.source, pair.target) for pair in scan.tcp.one] == [("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")]
    assert scan.tcp.one[0].gbit_per_s == pytest.approx(9.306)
    # Releases before 3.16 run all connections in one thread.
    many = read(iperf_json(30.0, streams=8), told("100gbit"))
    assert (many.verdict.code, codes(many)[0]) == ("slow", "one_thread")


def test_a_document_that_was_cut_still_has_its_sum() -> None:
    cut = iperf_json(9.4).partition('"end"')[2].replace("}\n}", "}\n  ...")
    assert read(cut, told("10gbit")).verdict.code == "ok"


def test_names_in_a_document_cannot_move_the_cursor() -> None:
    text = iperf_json(1.0).replace("10.0.0.1", "\\u001b[2Ja") + iperf_json(9.4, reverse=1)
    shown = screen_of(show_read(read_scans([("log", text)], told("10gbit"))))
    assert "\x1b" not in shown
    scan = read(text, told("10gbit"))
    assert all("\x1b" not in pair.source + pair.target for pair in scan.tcp.one)


def test_a_share_is_titled_after_the_raw_stream_that_it_is_of() -> None:
    text = perftest(92.0) + iperf_json(90.0) + table(4.0, Layout(nodes=2))
    for over_rdma, title, other in ((True, "of raw RDMA", "of raw TCP"), (False, "of raw TCP", "of raw RDMA")):
        found = read_scans([("log", text)], told("100gbit", over_rdma=over_rdma))
        heads = {column.name for block in show_read(found) if isinstance(block, Sheet) for column in block.columns}
        assert title in heads
        assert other not in heads


def test_the_chart_has_the_line_rate_that_the_share_is_of() -> None:
    for scan in read_scans([("log", pasted("nccl-tests-78"))], told("100gbit", nodes=8)).scans:
        largest = max(scan.verdict.shares, key=lambda share: share.size_bytes)
        assert largest.share_of_ceiling == pytest.approx(largest.busbw_gb_per_s / scan.levels["line rate"])


def test_a_long_log_is_read_in_time() -> None:
    streams = "".join(f"[{n % 8:>3}] {n}.00-{n + 1}.00  sec  1.09 GBytes  9.40 Gbits/sec\n" for n in range(20_000))
    rows = "   1048576  262144  float  sum  -1  105.9  9.90  17.33  0  105.7  9.92  17.37  0\n" * 5_000
    digits = "1" * 400 + " 1 float " + "1" * 400 + "x\n"
    assert read_scans([("log", streams + rows + digits * 200 + "{" * 5000)], told("100gbit")).scans


def test_streams_in_parallel_are_summed_and_bidirectional_ones_are_two() -> None:
    lines = [
        f"[{name:>3}][{way}-C]   0.00-10.00  sec  25.0 GBytes  {rate} Gbits/sec{end}"
        for way, rate, total in (("TX", 9.0, 18.0), ("RX", 8.0, 16.0))
        for name, rate in ((5, rate), (7, rate), ("SUM", total))
        for end in ("    0             sender", "                  receiver")
    ]
    begin = "Connecting to host 10.0.0.2, port 5201\n[  5] local 10.0.0.1 port 40000 connected to 10.0.0.2 port 5201\n"
    scan = read(begin + "\n".join(lines), told("25gbit"))
    speeds = {(pair.source, pair.target): pair.gbit_per_s for pair in scan.tcp.several}
    assert speeds == {("10.0.0.1", "10.0.0.2"): 18.0, ("10.0.0.2", "10.0.0.1"): 16.0}
    assert scan.tcp.connections == 2


def test_what_measures_no_bandwidth_is_refused(golden: Golden) -> None:
    texts = {
        "perftest-273": (pasted("perftest-273"), "100gbit"),
        "perftest-65": (pasted("perftest-65"), "100gbit"),
        "UDP": (iperf_json(1.0, protocol="UDP"), "10gbit"),
    }
    golden.check_errors(
        "refused_read",
        {case: error_of(read, text, told(link)) for case, (text, link) in texts.items()}
        | {
            "a traceback": error_of(read, "Traceback (most recent call last):\n"),
            "an average alone": error_of(read, "# Avg bus bandwidth    : 84.8\n"),
        },
    )


PIECES = st.sampled_from(
    [line for path in sorted(PASTED.glob("*.txt")) for line in path.read_text().splitlines()]
    + ['{"end": {"sum_sent": ']
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES | st.text(max_size=60), max_size=25))
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    try:
        report = read_scans([("log", "\n".join(lines))], told("4x100gbit"))
    except UsageError:
        return
    for scan in report.scans:
        assert scan.verdict.code
        assert screen_of(show_read(report))
