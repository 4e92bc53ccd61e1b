"""Judge a size scan: whether it is what the network allows, and otherwise the nodes or causes to look at.

Wrong values take precedence over speeds. Every cause needs its own evidence and is one small function; a good scan only
has causes that are errors in themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from multinode.network.scan_evidence import (
    MORE_THAN_A_LINK,
    SMALL_BYTES,
    ScanEvidence,
    SizeShare,
    nic_ceilings,
)
from multinode.traffic.algorithms import (
    algorithms_of,
    message_steps,
    nic_factor,
    steps_us,
)
from multinode.traffic.pair_speeds import (
    NetworkFinding,
    find_odd_in_ring,
    slowest_gb_per_s,
)
from multinode.units import BITS_PER_BYTE, format_figure, format_list, format_ms, format_rate, format_size

# AWS caps a flow at 5 Gbit/s, and at 10 within a cluster placement group ("Amazon EC2 instance network bandwidth").
_FLOW_CAPS_GBIT, _NEAR_A_CAP = (5.0, 10.0), (0.9, 1.02)
# One GPU's PCIe slot with 16 lanes, by generation, in Gbit/s. Half of it and more is beyond the generation before.
_GPU_SLOTS_GBIT, _NEAR_A_SLOT = {"4.0": 252.0, "5.0": 504.0, "6.0": 968.0}, 0.5
# Any CPU core receives this much.
_CORE_LEAST_GBIT = 5.0
# A lost segment in ten thousand limits a TCP connection below 10 Gbit/s at a round trip of 0.1 ms (Mathis et al.,
# "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997).
_LOSS_NOTICED = 1e-4
# Larger sizes at half the speed of smaller ones indicate lost packets.
_FALLEN, _LEAST_FALLEN = 0.6, 2
_BUSY_PERCENT = 90.0
_WAIT_NOTICED = 0.2
_ONE_OF_MANY = 0.7
# TCP itself is the limit, which is no fault.
_TCP_LIMIT_LINK_GBIT = 25.0
_TCP_LIMIT_SHARE = 0.7
# A switch needs a tenth of this.
_LAN_ROUND_TRIP_US = 1000.0
_ODD_ROUND_TRIP_US = 500.0
_ODD_ROUND_TRIPS = 5.0
_ODD_NEEDS = 3
# A small message may take ten times its wire time in software. Beyond that, workers are waiting.
_SMALL_FACTOR = 10.0
_SMALL_LEAST_US = 5000.0
_SOCKETS = (
    "try NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4 and measure again; their product must be at most 64, and "
    "more can be far slower"
)
_BUFFERS = "use a larger MTU, a faster core, or larger socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem"
_PERCENT = 0.01
_PLACEMENT = "on AWS, put the nodes into one cluster placement group"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a size scan."""

    # `ok`, `slow`, `wrong_values`, `wrong_path` (other interfaces carried it), `one_node`, `alone` (each process was
    # the only worker of a test of its own), `inconclusive` or `empty` (nothing was measured by all workers)
    status: str = ""
    text: str = ""  # one line
    over_rdma: bool = False  # whether the collectives used RDMA
    # of the largest size of each collective, the one that fills the network least; one above the link rate takes
    # precedence
    worst: SizeShare | None = None
    nics: int = 1  # number of NICs of a node in the link's rate
    nodes: tuple[str, ...] = ()  # nodes to look at, the likeliest first
    # likewise; empty if there is nothing to fix; one whose hint an earlier one has has none
    causes: tuple[NetworkFinding, ...] = ()
    shares: tuple[SizeShare, ...] = ()  # network use of every large message

    @property
    def is_failure(self) -> bool:
        """Whether no speed was measured, or its values are wrong."""
        return self.status in {"wrong_values", "alone", "empty"}


def judge_scan(seen: ScanEvidence) -> Verdict:
    """Compare the largest size of each collective with raw TCP and the link."""
    status, causes = _status(seen), tuple(_find_causes(seen))
    hints = [cause.hint for cause in causes]
    causes = tuple(
        msgspec.structs.replace(cause, hint=None) if cause.hint in hints[:number] else cause
        for number, cause in enumerate(causes)
    )
    nics = len(min(seen.nics_gbit_per_s.values(), key=sum, default=(0,)))
    return Verdict(
        status=status,
        text=_verdict_text(status, seen, causes, nics),
        over_rdma=bool(seen.over_rdma),
        worst=seen.worst,
        nics=nics,
        nodes=tuple(dict.fromkeys(name for cause in causes for name in cause.nodes)),
        causes=causes,
        shares=seen.shares,
    )


def _verdict_text(status: str, seen: ScanEvidence, causes: Sequence[NetworkFinding], nics: int) -> str:
    worst, link = seen.worst, seen.link_gbit_per_s
    if status in {"wrong_values", "wrong_path", "alone", "empty"}:
        return _failure_text(status, seen)
    if seen.is_raw_only or worst is None:
        return _raw_text(status, seen, causes)
    several = len({share.collective for share in seen.shares}) > 1
    subject = f"{worst.collective} of {format_size(worst.size_bytes)}{', the slowest,' if several else ''}"
    if status == "one_node":
        return (
            f"no network used: {subject} reaches {format_figure(worst.busbw_gb_per_s)} GB/s busbw "
            "between workers of one node"
        )
    if status == "inconclusive" and seen.beyond is None:
        return f"inconclusive: {_unknown_text(subject, seen, worst)}"
    reached = f"{subject} reaches {_shares(status, seen, worst, nics)}"
    if status == "ok":
        together = f" ({nics} NICs together)" if nics > 1 else ""
        rate = f" for a link of {format_rate(link)}{together}" if link else ""
        return f"network OK{rate}{', see the cause below' if causes else ''}: {reached}"
    return f"inconclusive: {reached}, more than this link can carry" if status == "inconclusive" else f"slow: {reached}"


def _unknown_text(subject: str, seen: ScanEvidence, worst: SizeShare) -> str:
    """Why a speed cannot be judged."""
    if seen.is_latency:
        return f"{subject} mostly measures latency: measure larger messages, -e 64M and more"
    speed = f"{format_figure(worst.nic_gb_per_s)} GB/s per node"
    return f"{subject} reaches {speed}; neither the link rate nor raw TCP is known for comparison"


def _failure_text(status: str, seen: ScanEvidence) -> str:
    one = "the test had one worker"
    return {
        "wrong_values": "wrong results: a collective returned incorrect values",
        "wrong_path": "wrong network: the traffic did not use the data plane's NICs",
        "alone": f"no result: {'the processes did not run one test together' if seen.processes_alone > 1 else one}",
        "empty": "no result: no size was measured by all workers",
    }[status]


def _raw_text(status: str, seen: ScanEvidence, causes: Sequence[NetworkFinding]) -> str:
    """Of raw streams without a collective."""
    link, ceiling = seen.link_gbit_per_s, seen.ceiling_gb_per_s
    name, speed = seen.rdma_program if seen.over_rdma else "raw TCP", seen.raw_gb_per_s or 0.0
    reached = f"{name} reaches {format_figure(speed)} GB/s ({format_rate(speed * BITS_PER_BYTE)})"
    if link is None or ceiling is None:
        return f"inconclusive: {reached}; the link rate is not known for comparison"
    digits = 0 if speed >= _PERCENT * ceiling else 1
    share = f"{speed / ceiling:.{digits}%} of the {'' if seen.over_rdma else 'TCP '}line rate"
    if status == "ok":
        beside = ", see the cause below" if causes else ""
        return f"network OK for a link of {format_rate(link)}{beside}: {reached}, {share}"
    if status == "inconclusive":
        return f"inconclusive: {reached}, {share} of a link of {format_rate(link)}, more than this link can carry"
    return f"slow: {reached}, {share} of a link of {format_rate(link)}"


def _shares(status: str, seen: ScanEvidence, worst: SizeShare, nics: int) -> str:
    parts, link = [], seen.link_gbit_per_s
    if worst.share_of_ceiling is not None:
        together = f", {nics} NICs together" if nics > 1 else ""
        rate = f" of a link of {format_rate(link)}{together}" if link and status != "ok" else ""
        parts.append(f"{worst.share_of_ceiling:.0%} of the {'TCP ' if seen.over_rdma is False else ''}line rate{rate}")
    if worst.share_of_tcp is not None:
        parts.append(f"{worst.share_of_tcp:.0%} of raw TCP")
    if worst.share_of_rdma is not None:
        parts.append(f"{worst.share_of_rdma:.0%} of raw RDMA")
    turns = ""
    if worst.usual_share < 1:
        turns = (
            f"; {seen.backend} alternates between sending and receiving large messages: {worst.usual_share:.0%} is its "
            "maximum"
        )
    return f"{format_list(parts)}{turns}"


def _status(seen: ScanEvidence) -> str:
    failures = {
        "wrong_values": bool(seen.num_wrong),
        "wrong_path": seen.path.ok is False,
        "alone": seen.layout.workers == 1,
    }
    failed = next((name for name, is_so in failures.items() if is_so), None)
    if failed is not None:
        return failed
    if seen.worst is None:
        return _raw_status(seen) if seen.is_raw_only else "empty"
    if seen.layout.nodes == 1:
        return "one_node"
    if seen.is_well:
        return "ok"
    return "inconclusive" if seen.collective_is_slow is None else "slow"


def _raw_status(seen: ScanEvidence) -> str:
    if seen.raw_gb_per_s is None:
        return "empty"
    if seen.raw_is_slow is None or seen.raw_gb_per_s > MORE_THAN_A_LINK * (seen.ceiling_gb_per_s or 0.0):
        return "inconclusive"
    return "slow" if seen.raw_is_slow else "ok"


def _find_causes(seen: ScanEvidence) -> list[NetworkFinding]:
    causes = [cause for find in _IN_ORDER if not (seen.over_rdma and find in _OF_TCP) for cause in find(seen)]
    return causes or [cause for find in _IF_NOTHING_ELSE for cause in find(seen)]


def _bond(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    if seen.bonds and not seen.is_well:
        names = format_list(seen.bonds)
        yield NetworkFinding(
            code="bond",
            figures={"names": names},
            message=f"the traffic uses the bond {names}: a bond sends each connection over one of its NICs, so that "
            "few connections fill only one",
            hint="give NCCL the NICs instead of the bond: remove the bond and name both (hca= in the hostfile, or "
            "NCCL_IB_HCA); with a bond, try more queue pairs: NCCL_IB_QPS_PER_CONNECTION=4",
        )


def _slow_raw_rdma(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """RDMA itself, and the collective against it; each with its own message."""
    raw, ceiling = seen.rdma_gb_per_s, seen.ceiling_gb_per_s or 0.0
    if raw is None or seen.is_well or (seen.collective_is_slow is None and not seen.is_raw_only):
        return
    figures: dict[str, float | str] = {"rdma_gb_per_s": raw, "ceiling_gb_per_s": ceiling}
    if seen.collective_is_slow:
        reaches = f"{seen.rdma_program} reaches {format_figure(raw)} GB/s between the same ports"
        share = seen.worst.share_of_rdma if seen.worst is not None else None
        yield NetworkFinding(
            code="slow_over_rdma",
            figures=figures,
            message=f"{reaches}, and the collective {share or 0.0:.0%} of it: whatever limits raw RDMA, most of the "
            "time is lost on the path from GPU to NIC, or in NCCL itself"
            if seen.rdma_is_slow
            else f"{reaches}, which rules out cable and switch: the cause is the path from GPU to NIC, or NCCL itself",
            hint="check PCIe access control (ACS) and IOMMU: multinode check, as root; see whether NCCL_DEBUG=INFO "
            "prints GDRDMA; name the NICs for NCCL: hca= in the hostfile; try another release of NCCL",
        )
    if seen.rdma_is_slow:
        also, rest = " also", ", not NCCL"
        if seen.collective_is_slow or seen.is_raw_only:
            also, rest = "", ""
        yield NetworkFinding(
            code="slow_raw_rdma",
            figures=figures,
            message=f"{seen.rdma_program}{also} reaches only {format_figure(raw)} of "
            f"{format_figure(ceiling)} GB/s: the network or the NIC's "
            f"slot is the cause{' of that' if seen.collective_is_slow else rest}",
            hint="check the slot, the second half of a two-part NIC and its network: multinode check; cable and switch "
            "port: ibstat; if a NIC started degraded, power-cycle both nodes",
        )


def _slow(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """What is slow, if nothing says why."""
    if seen.tcp_is_slow and seen.is_raw_only:
        yield NetworkFinding(
            code="slow_tcp",
            figures={"tcp_gb_per_s": seen.tcp_gb_per_s or 0.0},
            message="raw TCP itself is slow: the cause is the network, or a CPU that is too slow for this rate",
            hint="check cables, the switch, other traffic and busy CPUs: multinode check --bandwidth; on every node "
            "ip -s link; top",
        )
    elif seen.tcp_is_slow:
        tcp = seen.tcp_gb_per_s or 0.0
        yield NetworkFinding(
            code="slow_tcp",
            figures={"tcp_gb_per_s": tcp},
            message=f"raw TCP is slow too, {format_figure(tcp)} GB/s on the slowest link of the ring: "
            "the network is the cause, "
            "not the collective",
            hint="check cables, the switch and other traffic: multinode check --bandwidth; on every node ip -s link",
        )
    elif not seen.collective_is_slow or seen.rdma_gb_per_s is not None:
        return
    elif seen.over_rdma:
        yield NetworkFinding(
            code="slow_rdma",
            message="the traffic uses RDMA but does not fill the link: the cause is the port, its switch, or the path "
            "from GPU to NIC",
            hint="run ibstat, and ib_write_bw between the nodes; NCCL_DEBUG=INFO prints GDRDMA if GPUDirect is used; "
            "PCIe access control (ACS) or an IOMMU sends it through the CPU: sudo lspci -vvv | grep ACSCtl; "
            "nvidia-smi topo -m",
        )
    elif seen.over_rdma is None and (seen.link_gbit_per_s or 0.0) >= _TCP_LIMIT_LINK_GBIT:
        yield NetworkFinding(
            code="unknown_network",
            message="it is unknown whether NCCL used RDMA or sockets, which are far slower on such a link",
            hint="run it again with NCCL_DEBUG=INFO: its log has NET/IB for RDMA and NET/Socket for TCP; if it should "
            "be RDMA, unset NCCL_IB_DISABLE and check that the ports are active: ibstat",
        )
    elif seen.tcp_gb_per_s is None:
        yield NetworkFinding(
            code="no_tcp",
            message="raw TCP was not measured, so it is unknown whether the network or the collective is slow",
            hint="multinode check --bandwidth",
        )
    else:
        yield NetworkFinding(
            code="slow_collective",
            message="raw TCP is OK, so cables and switch are not the cause; the collective itself is slow",
            hint="run top on each node during the test: a CPU core that is always busy slows the collective"
            + ("; enable NCCL's log: --env NCCL_DEBUG=INFO" if seen.backend == "nccl" else ""),
        )


def _wrong(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    count = seen.num_wrong
    if count:
        rows = [row for row in seen.rows if row.num_wrong] or seen.rows
        where = ", ".join(dict.fromkeys(f"{row.collective} of {row.dtype}" for row in rows)) or "all sizes together"
        yield NetworkFinding(
            code="wrong_values",
            figures={"count": count, "collectives": where},
            message=f"{count} values were wrong ({where}): speeds are invalid until they are correct",
            hint="measure again; if it persists, install the same NCCL and driver version on all nodes, and check GPU "
            "memory (nvidia-smi -q -d ECC) and the kernel log (dmesg) on each",
        )
    if seen.path.ok is False:
        text = " ".join(seen.path.sentences).rstrip(". ")
        yield NetworkFinding(
            code="wrong_path",
            message=text or "the traffic did not use the expected NICs",
            hint="name the interface in the hostfile (ifname=), and unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        )


def _alone(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    if seen.layout.workers > 1:
        return
    build = "make MPI=1 MPI_HOME=DIR, with DIR of the mpirun that starts it"
    if seen.processes_alone > 1:
        yield NetworkFinding(
            code="alone",
            figures={"processes": seen.processes_alone},
            message=f"{seen.processes_alone} processes ran a test each, with only their own GPUs (busbw is 0 with "
            "one): the program was built without MPI, or its MPI is not that of the launcher",
            hint=f"build nccl-tests with MPI: {build}; or measure without MPI: multinode nccl-test --hosts HOSTFILE",
        )
    else:
        yield NetworkFinding(
            code="one_rank",
            message="busbw is 0 because the test had one rank, which has nobody to send to",
            hint="start at least two ranks (mpirun -np 2, or -g 2 on one node); if you did, nccl-tests was built "
            f"without MPI: {build}",
        )


def _one_gpu(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """One worker per node cannot fill several NICs: its GPU has one PCIe slot."""
    worst, link = seen.worst, seen.link_gbit_per_s
    nics = min((len(rates) for rates in seen.nics_gbit_per_s.values()), default=1)
    if not seen.collective_is_slow or worst is None or link is None or nics == 1 or max(seen.layout.counts) > 1:
        return
    speed_gbit = worst.nic_gb_per_s * BITS_PER_BYTE
    slots = {name: rate for name, rate in _GPU_SLOTS_GBIT.items() if _NEAR_A_SLOT * rate <= speed_gbit <= rate < link}
    if slots:
        name, slot = next(iter(slots.items()))
        yield NetworkFinding(
            code="one_gpu",
            figures={"nic_gb_per_s": worst.nic_gb_per_s, "slot_gbit_per_s": slot, "nics": nics},
            message=f"one GPU per node drives {nics} NICs, and its PCIe {name} x16 slot carries at most "
            f"{format_figure(slot / BITS_PER_BYTE)} GB/s: the GPU's slot is the limit, not the NICs",
            hint="measure with all GPUs of each node: multinode nccl-test --workers-per-node 8; with nccl-tests, start "
            "one rank per GPU",
        )


def _beyond(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    share = seen.beyond
    if share is None:
        return
    of_link, link = share.share_of_ceiling or 0.0, format_rate(seen.link_gbit_per_s or 0.0)
    figures: dict[str, float | str] = {
        "nic_gb_per_s": share.nic_gb_per_s,
        "share": of_link,
        "link_gbit_per_s": seen.link_gbit_per_s or 0.0,
        "collective": share.collective,
    }
    case = (seen.backend, share.collective, seen.layout)
    others = [
        (nic_factor(*case, algorithm.name), algorithm.name)
        for algorithm in algorithms_of(seen.backend, share.collective)
    ]
    least, name = min(others, default=(math.inf, ""))
    other = of_link * least / nic_factor(*case)
    if other <= MORE_THAN_A_LINK:
        yield NetworkFinding(
            code="another_algorithm",
            figures={**figures, "algorithm": name, "other": other},
            message=f"a ring would have needed {of_link:.0%} of the line rate ({link}): the backend used its {name}, "
            f"which sends less through a NIC ({other:.0%} of the rate), or more NICs than the known one",
            hint="to be certain, measure with a ring only: multinode nccl-test with --env NCCL_ALGO=Ring",
        )
    else:
        yield NetworkFinding(
            code="more_nics",
            figures=figures,
            message=f"{format_figure(share.nic_gb_per_s)} GB/s through a node is {of_link:.0%} of the "
            "rate of its known NICs "
            f"({link}): the data used more NICs, or a NIC reports too low a rate",
            hint="see which NICs NCCL uses: --env NCCL_DEBUG=INFO, in its log `NET/IB : Using` and `via NET/`; list "
            "the NICs and their rates: multinode check",
        )


def _half_duplex(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    half = tuple(name for name, nic in seen.nics.items() if nic.duplex == "half")
    if half and not seen.is_well:
        yield NetworkFinding(
            code="half_duplex",
            nodes=half,
            message=f"the NIC of {format_list(half)} runs in half duplex: it cannot send and receive at the same time",
            hint="enable autonegotiation on NIC and switch port: sudo ethtool -s INTERFACE autoneg on; or replace the "
            "cable",
        )


def _odd_pairs(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    # One stream has no other to be compared with, not even the way back.
    if len(seen.tcp.ring) > 1:
        yield from seen.odd or find_odd_in_ring(seen.tcp.ring, nic_ceilings(seen.nics))


def _slower_link(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    links = {name: nic.speed_gbit_per_s for name, nic in seen.nics.items() if nic.speed_gbit_per_s}
    most = max(links.values(), default=0.0)
    slow = {name: link for name, link in links.items() if link < most}
    if slow and len(slow) <= len(links) / 2:
        each = format_list([f"{name} negotiated {format_rate(link)}" for name, link in slow.items()])
        yield NetworkFinding(
            code="slower_link",
            figures={"link_gbit_per_s": most, **slow},
            nodes=tuple(slow),
            message=f"{each} while others have {format_rate(most)}: every collective runs at the speed of the slowest "
            "link",
            hint="check the cable and switch port: sudo ethtool INTERFACE shows what the NIC and its link partner "
            "advertise",
        )


def _mixed_mtu(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    mtus = {name: float(nic.mtu) for name, nic in seen.nics.items() if nic.mtu}
    most = max(mtus.values(), default=0.0)
    small = {name: mtu for name, mtu in mtus.items() if mtu < most}
    if small and not seen.is_well:
        each = format_list([f"{name} is {mtu:.0f}" for name, mtu in small.items()])
        yield NetworkFinding(
            code="mixed_mtu",
            figures={"mtu_bytes": most, **small},
            nodes=tuple(small),
            message=f"the MTU of {each} while others have {most:.0f}: large packets may be lost",
            hint="set the same MTU on every NIC and on the switch: sudo ip link set dev INTERFACE mtu 1500",
        )


def _one_connection(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    one_stream, many = slowest_gb_per_s(seen.tcp.one), slowest_gb_per_s(seen.tcp.several)
    if not one_stream or not many or one_stream >= _ONE_OF_MANY * many or seen.collective_is_slow is False:
        return
    code, hint = "one_connection_fast" if seen.is_fast_link else "one_connection", _BUFFERS
    limit = "by one CPU core, or by a cloud's cap on each flow"
    if not seen.is_fast_link:
        limit = "by one CPU core or by small socket buffers"
    figures: dict[str, float | str] = {"one_gb_per_s": one_stream, "several_gb_per_s": many}
    low, high = _NEAR_A_CAP
    cap = next((cap for cap in _FLOW_CAPS_GBIT if low * cap <= one_stream * BITS_PER_BYTE <= high * cap), None)
    if seen.is_fast_link and cap is not None and many * BITS_PER_BYTE > cap:
        code, figures = "flow_cap", {**figures, "cap_gbit_per_s": cap}
        limit = f"to {format_rate(cap)}: AWS caps each flow at this rate, and a bond sends a flow over one NIC"
        hint = f"{_PLACEMENT}; use several workers per node, as each has its own connections"
    if seen.backend == "nccl" and seen.is_fast_link:
        hint = f"{_SOCKETS}; or {_PLACEMENT}" if code == "flow_cap" else _SOCKETS
        code = f"{code}_nccl"
    yield NetworkFinding(
        code=code,
        figures=figures,
        message=f"one TCP connection reaches {format_figure(one_stream)} GB/s, several together "
        f"{format_figure(many)} GB/s: "
        f"a single connection is limited {limit}",
        hint=hint,
    )


def _straggler(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    waits = seen.wait_share_by_node
    if len(waits) < 2 or seen.is_well:  # noqa: PLR2004 - somebody, and others who wait
        return
    last = min(waits, key=lambda name: waits[name])
    others = statistics.median(share for name, share in waits.items() if name != last)
    if others - waits[last] >= _WAIT_NOTICED:
        yield NetworkFinding(
            code="straggler",
            figures={"others": others, "share": waits[last]},
            nodes=(last,),
            message=f"the others wait {others:.0%} of the time, and {last} {waits[last]:.0%}: {last} is the straggler",
            hint=f"look for other work on {last}, or throttled CPUs or GPUs: top; nvidia-smi -q -d PERFORMANCE",
        )


def _busy(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    busy = {name: used for name, used in seen.busy_percent_by_node.items() if used >= _BUSY_PERCENT}
    if busy and not seen.is_well:
        each = format_list([f"{name} {used:.0f}%" for name, used in busy.items()])
        yield NetworkFinding(
            code="busy_cpus",
            figures={**busy},
            nodes=tuple(busy),
            message=f"the CPUs are busy during the collectives ({each}), and TCP needs them too",
            hint="see what runs there: top; fewer workers per node or a larger MTU need less CPU",
        )


def _sockets(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    fine = seen.tcp_gb_per_s is not None and not seen.tcp_is_slow
    is_slow = seen.backend == "nccl" and seen.is_fast_link and fine and seen.collective_is_slow
    if is_slow and _fall(seen) is None:
        yield NetworkFinding(
            code="few_sockets",
            message="raw TCP is OK, but NCCL does not reach it: at this speed it may need more sockets",
            hint=_SOCKETS,
        )


def _fallen(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    fall = _fall(seen)
    if fall is None:
        return
    best, least = fall
    figures: dict[str, float | str] = {
        "best_gb_per_s": best.nic_gb_per_s,
        "size_bytes": best.size_bytes,
        "least_gb_per_s": least,
    }
    reaches = (
        f"NCCL reaches {format_figure(best.nic_gb_per_s)} GB/s at {format_size(best.size_bytes)} and "
        f"{format_figure(least)} above: "
    )
    if seen.over_rdma:
        yield NetworkFinding(
            code="drops_over_roce",
            figures=figures,
            message=f"{reaches}large messages fill the switch's buffers, and RoCE loses packets there unless the "
            "network is lossless",
            hint="make the network lossless: the same flow control (PFC) and ECN (DCQCN) on every NIC and switch port, "
            "for the traffic class that NCCL uses (NCCL_IB_TC); ethtool -S INTERFACE | grep -E 'pause|discard|"
            "out_of_sequence' before and after counts pauses and lost packets",
        )
    else:
        yield NetworkFinding(
            code="many_sockets",
            figures=figures,
            message=f"{reaches}with this many sockets large messages lose packets",
            hint="fewer sockets: unset NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, or halve their product, and "
            "measure again; nstat -az TcpRetransSegs on each node counts lost packets",
        )


def _fall(seen: ScanEvidence) -> tuple[SizeShare, float] | None:
    """The best size, and the least speed of the larger ones if all of them are far slower.

    InfiniBand does not drop packets.
    """
    is_asked = seen.backend == "nccl" and seen.is_fast_link and seen.collective_is_slow
    if not is_asked or seen.worst is None or (seen.over_rdma and seen.link_layer == "InfiniBand"):
        return None
    mine = [share for share in seen.shares if share.collective == seen.worst.collective]
    best = max(mine, key=lambda share: share.nic_gb_per_s)
    larger = [share for share in mine if share.size_bytes > best.size_bytes]
    if len(larger) < _LEAST_FALLEN or max(share.nic_gb_per_s for share in larger) > _FALLEN * best.nic_gb_per_s:
        return None
    return best, min(share.nic_gb_per_s for share in larger)


def _lost_segments(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    lost = seen.lost_share
    if lost is not None and lost >= _LOSS_NOTICED and not seen.is_well:
        yield NetworkFinding(
            code="lost_segments",
            figures={"lost_share": lost},
            message=f"TCP sent {lost:.2%} of its segments again: packets are lost on the way, and every loss slows a "
            "connection",
            hint="find the port that drops them: ip -s link; ethtool -S INTERFACE; the counters of the switch; check "
            "that MTU and flow control are the same on all of them",
        )


def _one_core(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """Raw TCP that was limited by how it was measured."""
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    is_short = tcp is not None and ceiling is not None and tcp < _TCP_LIMIT_SHARE * ceiling
    if not is_short or (seen.link_gbit_per_s or 0.0) < _TCP_LIMIT_LINK_GBIT:
        return
    if not seen.tcp.several and (tcp or 0.0) * BITS_PER_BYTE >= _CORE_LEAST_GBIT:
        yield NetworkFinding(
            code="one_stream",
            message="only one connection was measured: one CPU core limits it at such speeds, rather than the network",
            hint="measure with several: iperf3 -P 8, version 3.16 or later",
        )
    elif seen.tcp.several and seen.tcp_in_one_thread:
        yield NetworkFinding(
            code="one_thread",
            figures={"connections": seen.tcp.connections},
            message=f"this iperf3 runs its {seen.tcp.connections} connections in one thread: at this speed one CPU "
            "core is the limit, not the network",
            hint="measure with iperf3 3.16 or later, or with one iperf3 process per connection, each with its own port "
            "(-p)",
        )


def _far_apart(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    trips, usual = seen.tcp.round_trips_us, seen.tcp.round_trip_us
    if usual is None:
        return
    for (source, target), trip in trips.items():
        if len(trips) >= _ODD_NEEDS and trip >= max(_ODD_ROUND_TRIP_US, _ODD_ROUND_TRIPS * usual):
            yield NetworkFinding(
                code="odd_round_trip",
                figures={"round_trip_ms": trip / 1000, "usual_ms": usual / 1000},
                nodes=(source, target),
                message=f"a round trip from {source} to {target} takes {format_ms(trip / 1000)} instead of the usual "
                f"{format_ms(usual / 1000)}: small messages wait for it",
                hint=f"look at the path between the two and what else uses it: on {source}, tracepath -n to {target}'s "
                "address",
            )
    if usual > _LAN_ROUND_TRIP_US:
        yield NetworkFinding(
            code="long_round_trip",
            figures={"round_trip_ms": usual / 1000},
            message=f"a round trip between the nodes takes {format_ms(usual / 1000)}, far longer than "
            "through a switch: "
            "small messages are latency-bound",
            hint="look for a VPN, a wireless link, a router, or a NIC in power-saving mode: tracepath -n to a peer's "
            "address",
        )


def _slow_start(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    small = [row for row in seen.rows if row.size_bytes <= SMALL_BYTES]
    trip_us = seen.tcp.round_trip_us
    if not small or trip_us is None or trip_us > _LAN_ROUND_TRIP_US:
        return
    row = min(small, key=lambda row: row.size_bytes)
    needed_us = steps_us(seen.backend, message_steps(seen.backend, row.collective, seen.layout), trip_us / 2)
    if row.time_us.value >= max(_SMALL_FACTOR * needed_us, _SMALL_LEAST_US):
        yield NetworkFinding(
            code="slow_start",
            figures={
                "collective": row.collective,
                "size_bytes": row.size_bytes,
                "time_ms": row.time_us.value / 1000,
                "needed_ms": needed_us / 1000,
            },
            message=f"{row.collective} of {format_size(row.size_bytes)} takes {format_ms(row.time_us.value / 1000)}, "
            "but its "
            f"round trips need only {format_ms(needed_us / 1000)}: the workers wait for "
            "something other than the network",
            hint="look for shared CPUs or power saving: top; cpupower frequency-info",
        )


def _tcp_limit(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    link = seen.link_gbit_per_s or 0.0
    if not tcp or not ceiling or seen.tcp_is_slow or tcp >= _TCP_LIMIT_SHARE * ceiling:
        return
    if link >= _TCP_LIMIT_LINK_GBIT and seen.tcp.several:
        yield NetworkFinding(
            code="tcp_limit",
            figures={"tcp_gb_per_s": tcp, "ceiling_gb_per_s": ceiling},
            message=f"raw TCP reaches only {format_figure(tcp)} of {format_figure(ceiling)} GB/s: TCP "
            "rarely exceeds 3 to 5 GB/s on any link",
            hint="use RDMA (RoCE, InfiniBand), which is faster on such NICs: multinode check shows which support it",
        )


_OF_TCP = frozenset({_odd_pairs, _mixed_mtu, _one_connection, _lost_segments, _one_core, _sockets, _tcp_limit})
"""Causes that explain only TCP."""

_IN_ORDER: tuple[Callable[[ScanEvidence], Iterator[NetworkFinding]], ...] = (
    _wrong,
    _alone,
    _beyond,
    _half_duplex,
    _odd_pairs,
    _slower_link,
    _mixed_mtu,
    _one_connection,
    _lost_segments,
    _one_core,
    _straggler,
    _busy,
    _one_gpu,
    _fallen,
    _sockets,
    _far_apart,
    _slow_start,
    _tcp_limit,
)

_IF_NOTHING_ELSE = (_slow, _slow_raw_rdma, _bond)
