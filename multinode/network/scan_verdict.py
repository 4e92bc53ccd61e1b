"""Judge a size scan: whether it is what the network allows, and otherwise the nodes or causes to look at.

Wrong values take precedence over speeds. Every cause needs its own evidence and is one small function; a good scan only
has causes that are errors in themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
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
    NetworkRules,
    find_odd_in_ring,
    slowest_gb_per_s,
)
from multinode.units import BITS_PER_BYTE, format_figure, format_link, format_list, format_ms, format_rate, format_size

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
    "set NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4 and measure again; their product must be at most 64, and more "
    "sockets can be far slower"
)
_BUFFERS = "use a larger MTU, a faster core, or larger socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem"
_PERCENT = 0.01
_PLACEMENT = "on AWS, put the nodes in one cluster placement group"


class Verdict(Finding, frozen=True, kw_only=True):
    """The judgement of a size scan in one line; its hint is that of the likeliest cause."""

    over_rdma: bool = False  # whether the collectives used RDMA
    # of the largest size of each collective, the one that fills the network least; one above the link rate takes
    # precedence
    worst: SizeShare | None = None
    nics: int = 1  # number of NICs of a node in the link's rate
    nodes: tuple[str, ...] = ()  # nodes to look at, the likeliest first
    # the likeliest first; empty if there is nothing to fix; one whose hint an earlier one has has none
    causes: tuple[NetworkFinding, ...] = ()
    shares: tuple[SizeShare, ...] = ()  # network use of every large message

    @property
    def is_failure(self) -> bool:
        """Whether no speed was measured, or its values are wrong."""
        return self.code in {rule.code for rule in (_WRONG_RESULTS, _RAN_ALONE, _EMPTY)}


VERDICTS = RuleGroup("Verdict of nccl-test")
_OK = VERDICTS.rule("ok", about="the network is as fast as its links", message="network OK{rate}{cause}: {reached}")
_SLOW = VERDICTS.rule("slow", about="the network is slower than its links", message="slow: {reached}")
_INCONCLUSIVE = VERDICTS.rule(
    "inconclusive",
    about="it is unknown whether the network is slow, or the speed exceeds the link rate",
    message="inconclusive: {reached}",
)
_ONE_NODE = VERDICTS.rule("one_node", about="all workers on one node", message="no network used: {reached}")
_WRONG_RESULTS = VERDICTS.rule(
    "wrong_values",
    about="a collective that returned wrong values",
    message="wrong results: a collective returned wrong values",
)
_OTHER_NICS = VERDICTS.rule(
    "wrong_path",
    about="traffic over NICs that do not belong to the data plane",
    message="wrong network: the traffic did not use the data plane's NICs",
)
_RAN_ALONE = VERDICTS.rule(
    "alone",
    about="a test with only one worker, or processes that did not run a common test",
    message="no result: {why}",
)
_EMPTY = VERDICTS.rule("empty", about="nothing was measured", message="no result: no size was measured by all workers")


def judge_scan(seen: ScanEvidence) -> Verdict:
    """Compare the largest size of each collective with raw TCP and the link."""
    rule, causes = _rule(seen), tuple(_find_causes(seen))
    hints = [cause.hint for cause in causes]
    causes = tuple(
        msgspec.structs.replace(cause, hint=None) if cause.hint in hints[:number] else cause
        for number, cause in enumerate(causes)
    )
    nics = seen.link_nics
    fields = rule.fields(None, _values(rule, seen, nics, has_causes=bool(causes)))
    return Verdict(
        **fields | {"hint": causes[0].hint if causes else None},
        over_rdma=bool(seen.over_rdma),
        worst=seen.worst,
        nics=nics,
        nodes=tuple(dict.fromkeys(name for cause in causes for name in cause.nodes)),
        causes=causes,
        shares=seen.shares,
    )


def _values(rule: Rule, seen: ScanEvidence, nics: int, *, has_causes: bool) -> dict[str, object]:
    """What the words of a verdict refer to."""
    one = "the test had one worker"
    rate = f" for a link of {format_rate(seen.link_gbit_per_s)}" if seen.link_gbit_per_s else ""
    return {
        "why": "the processes did not run a common test" if seen.processes_alone > 1 else one,
        "rate": f"{rate} ({nics} NICs together)" if rate and nics > 1 and not seen.is_raw_only else rate,
        "cause": ", see the cause below" if has_causes else "",
        "reached": _reached(rule, seen, nics),
    }


def _reached(rule: Rule, seen: ScanEvidence, nics: int) -> str:
    worst = seen.worst
    if seen.is_raw_only or worst is None:
        return _raw_text(rule, seen) if seen.is_raw_only else ""
    several = len({share.collective for share in seen.shares}) > 1
    subject = f"{worst.collective} of {format_size(worst.size_bytes)}{', the slowest,' if several else ''}"
    if rule is _ONE_NODE:
        return f"{subject} reaches {format_figure(worst.busbw_gb_per_s)} GB/s busbw between workers of one node"
    if rule is _INCONCLUSIVE and seen.beyond is None:
        return _unknown_text(subject, seen, worst)
    reached = f"{subject} reaches {_shares(rule, seen, worst, nics)}"
    return f"{reached}, more than this link can carry" if rule is _INCONCLUSIVE else reached


def _unknown_text(subject: str, seen: ScanEvidence, worst: SizeShare) -> str:
    """Why a speed cannot be judged."""
    if seen.is_latency:
        return f"{subject} mostly measures latency: measure larger messages, -e 64M and more"
    speed = f"{format_figure(worst.nic_gb_per_s)} GB/s per node"
    return f"{subject} reaches {speed}; neither the link rate nor raw TCP is known for comparison"


def _raw_text(rule: Rule, seen: ScanEvidence) -> str:
    """Of raw streams without a collective."""
    link, ceiling = seen.link_gbit_per_s, seen.ceiling_gb_per_s
    name, speed = seen.rdma_program if seen.over_rdma else "raw TCP", seen.raw_gb_per_s or 0.0
    reached = f"{name} reaches {format_figure(speed)} GB/s ({format_rate(speed * BITS_PER_BYTE)})"
    if link is None or ceiling is None:
        return f"{reached}; the link rate is not known for comparison"
    digits = 0 if speed >= _PERCENT * ceiling else 1
    share = f"{speed / ceiling:.{digits}%} of the {'' if seen.over_rdma else 'TCP '}line rate"
    if rule is _OK:
        return f"{reached}, {share}"
    more = ", more than this link can carry" if rule is _INCONCLUSIVE else ""
    return f"{reached}, {share} of {format_link(link)}{more}"


def _shares(rule: Rule, seen: ScanEvidence, worst: SizeShare, nics: int) -> str:
    parts, link = [], seen.link_gbit_per_s
    if worst.share_of_ceiling is not None:
        rate = ""
        if link and rule is not _OK:
            rate = f" of {nics} NICs together ({format_rate(link)})" if nics > 1 else f" of {format_link(link)}"
        parts.append(f"{worst.share_of_ceiling:.0%} of the {'TCP ' if seen.over_rdma is False else ''}line rate{rate}")
    if worst.share_of_tcp is not None:
        parts.append(f"{worst.share_of_tcp:.0%} of raw TCP")
    if worst.share_of_rdma is not None:
        parts.append(f"{worst.share_of_rdma:.0%} of raw RDMA")
    turns = ""
    if worst.usual_share < 1:
        turns = (
            f"; {seen.backend} cannot reach more than {worst.usual_share:.0%} because it alternates between sending "
            "and receiving large messages"
        )
    return f"{format_list(parts)}{turns}"


def _rule(seen: ScanEvidence) -> Rule:
    if seen.num_wrong or seen.path.ok is False:
        return _WRONG_RESULTS if seen.num_wrong else _OTHER_NICS
    if seen.layout.workers == 1:
        return _RAN_ALONE
    if seen.worst is None:
        return _raw_rule(seen) if seen.is_raw_only else _EMPTY
    if seen.layout.nodes == 1:
        return _ONE_NODE
    if seen.is_well:
        return _OK
    return _INCONCLUSIVE if seen.collective_is_slow is None else _SLOW


def _raw_rule(seen: ScanEvidence) -> Rule:
    if seen.raw_gb_per_s is None:
        return _EMPTY
    if seen.raw_is_slow is None or seen.raw_gb_per_s > MORE_THAN_A_LINK * (seen.ceiling_gb_per_s or 0.0):
        return _INCONCLUSIVE
    return _SLOW if seen.raw_is_slow else _OK


CAUSES = NetworkRules("Causes of a slow network")


def _find_causes(seen: ScanEvidence) -> list[NetworkFinding]:
    causes = [cause for find in _IN_ORDER if not (seen.over_rdma and find in _OF_TCP) for cause in find(seen)]
    return causes or [cause for find in _IF_NOTHING_ELSE for cause in find(seen)]


_BOND = CAUSES.cause(
    "bond",
    about="a bond, where a few connections may all use the same NIC",
    message="the traffic uses the bond {names}: a bond sends each connection over one of its NICs, so a few "
    "connections may all use the same NIC",
    hint="remove the bond and name its NICs for NCCL (hca= in the hostfile, or NCCL_IB_HCA); or keep the bond and use "
    "more queue pairs: NCCL_IB_QPS_PER_CONNECTION=4",
    figures=("names",),
)


def _bond(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    if seen.bonds and not seen.is_well:
        yield _BOND.found(None, names=format_list(seen.bonds))


_SLOW_OVER_RDMA = CAUSES.cause(
    "slow_over_rdma",
    about="a collective that is slower than raw RDMA",
    message="{program} reaches {raw} GB/s between the same ports, {so}",
    hint="as root, run multinode check, which checks PCIe access control (ACS) and the IOMMU. Set NCCL_DEBUG=INFO and "
    "look for GDRDMA in the log. Name the NICs for NCCL (hca= in the hostfile), or try another version of NCCL",
    figures=("rdma_gb_per_s", "ceiling_gb_per_s"),
)
_SLOW_RAW_RDMA = CAUSES.cause(
    "slow_raw_rdma",
    about="raw RDMA that is slower than the link",
    message=(
        "{program}{also} reaches only {raw} of {ceiling} GB/s: the network or the NIC's PCIe slot is the cause{rest}"
    ),
    hint="run multinode check, which checks the NIC's PCIe slot, the networks of the ports, and whether hca= names all "
    "PCIe connections of a port. Check cable and switch port with ibstat. If a NIC came up with a reduced rate, "
    "power-cycle both nodes",
    figures=("rdma_gb_per_s", "ceiling_gb_per_s"),
)


def _slow_raw_rdma(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """RDMA itself, and the collective against it; each with its own message."""
    raw, ceiling = seen.rdma_gb_per_s, seen.ceiling_gb_per_s or 0.0
    if raw is None or seen.is_well or (seen.collective_is_slow is None and not seen.is_raw_only):
        return
    values: dict[str, object] = {
        "program": seen.rdma_program,
        "raw": format_figure(raw),
        "ceiling": format_figure(ceiling),
        "rdma_gb_per_s": raw,
        "ceiling_gb_per_s": ceiling,
    }
    if seen.collective_is_slow:
        share = seen.worst.share_of_rdma if seen.worst is not None else None
        so = (
            f"but the collective reaches only {share or 0.0:.0%} of that: most of the time is lost between GPU and "
            "NIC, or in NCCL itself"
            if seen.rdma_is_slow
            else "so cable and switch are not the cause; the cause is the path from GPU to NIC, or NCCL itself"
        )
        yield _SLOW_OVER_RDMA.found(None, so=so, **values)
    if seen.rdma_is_slow:
        is_cause = seen.collective_is_slow or seen.is_raw_only
        rest = " of that" if seen.collective_is_slow else "" if seen.is_raw_only else ", not NCCL"
        yield _SLOW_RAW_RDMA.found(None, also="" if is_cause else " also", rest=rest, **values)


_SLOW_RAW_TCP = CAUSES.cause(
    "slow_raw_tcp",
    about="raw TCP that is slower than the link, if no collective was measured",
    message="raw TCP is slow: the cause is the network, or a CPU that is too slow for this link",
    hint="check cables, the switch, other traffic and busy CPUs: run multinode check --bandwidth; on every node, run "
    "ip -s link and top",
    figures=("tcp_gb_per_s",),
)
_SLOW_TCP = CAUSES.cause(
    "slow_tcp",
    about="a slow collective, if raw TCP is also slower than the link",
    message="raw TCP is slow too ({tcp} GB/s on the slowest link of the ring), so the cause is the network and not "
    "the collective",
    hint="check cables, the switch and other traffic: run multinode check --bandwidth; on every node, run ip -s link",
    figures=("tcp_gb_per_s",),
)
_SLOW_RDMA = CAUSES.cause(
    "slow_rdma",
    about="a collective over RDMA that is slower than the link, if raw RDMA was not measured",
    message="the traffic uses RDMA but is slower than the link: the cause is the port, its switch, or the path from "
    "GPU to NIC",
    hint="run ibstat on each node and ib_write_bw between the nodes. Set NCCL_DEBUG=INFO: NCCL's log contains GDRDMA "
    "if NCCL uses GPUDirect RDMA. PCIe access control (ACS) or an IOMMU sends GPUDirect traffic through the CPU; to "
    "check this: sudo lspci -vvv | grep ACSCtl; nvidia-smi topo -m",
)
_UNKNOWN_NETWORK = CAUSES.cause(
    "unknown_network",
    about="a slow collective on a fast link, if it is unknown whether NCCL used RDMA",
    message="it is unknown whether NCCL used RDMA or sockets; on such a fast link, sockets are far slower",
    hint="measure again with NCCL_DEBUG=INFO: NCCL's log contains NET/IB for RDMA and NET/Socket for TCP. If NCCL "
    "should use RDMA, unset NCCL_IB_DISABLE and check with ibstat that the ports are active",
)
_NO_TCP = CAUSES.cause(
    "no_tcp",
    about="a slow collective, if raw TCP was not measured",
    message="raw TCP was not measured, so it is unknown whether the network or the collective is slow",
    hint="measure raw TCP: multinode check --bandwidth",
)
_SLOW_COLLECTIVE = CAUSES.cause(
    "slow_collective",
    about="a slow collective, although raw TCP is fast",
    message="raw TCP is fast, so cables and switch are not the cause; the collective itself is slow",
    hint="run top on each node during the test; a CPU core that is always busy slows the collective{log!s}",
)


def _slow(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """What is slow, if nothing says why."""
    tcp = seen.tcp_gb_per_s or 0.0
    if seen.tcp_is_slow:
        rule = _SLOW_RAW_TCP if seen.is_raw_only else _SLOW_TCP
        yield rule.found(None, tcp=format_figure(tcp), tcp_gb_per_s=tcp)
    elif not seen.collective_is_slow or seen.rdma_gb_per_s is not None:
        return
    elif seen.over_rdma:
        yield _SLOW_RDMA.found(None)
    elif seen.over_rdma is None and (seen.link_gbit_per_s or 0.0) >= _TCP_LIMIT_LINK_GBIT:
        yield _UNKNOWN_NETWORK.found(None)
    elif seen.tcp_gb_per_s is None:
        yield _NO_TCP.found(None)
    else:
        log = "; enable NCCL's log: --env NCCL_DEBUG=INFO" if seen.backend == "nccl" else ""
        yield _SLOW_COLLECTIVE.found(None, log=log)


_WRONG_VALUES = CAUSES.cause(
    "wrong_values",
    about="a collective that returned wrong values",
    message="{count} values were wrong ({collectives}), so the measured speeds are not valid",
    hint="measure again; if values are still wrong, install the same versions of NCCL and the driver on all nodes, "
    "and check the GPU memory (nvidia-smi -q -d ECC) and the kernel log (dmesg) of each node",
    figures=("count", "collectives"),
)
_WRONG_PATH = CAUSES.cause(
    "wrong_path",
    about="traffic over NICs that do not belong to the data plane",
    message="{carried}",
    hint="name the interface in the hostfile (ifname=), and unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
)


def _wrong(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    count = seen.num_wrong
    if count:
        rows = [row for row in seen.rows if row.num_wrong] or seen.rows
        where = ", ".join(dict.fromkeys(f"{row.collective} of {row.dtype}" for row in rows)) or "all sizes together"
        yield _WRONG_VALUES.found(None, count=count, collectives=where)
    if seen.path.ok is False:
        carried = " ".join(finding.message for finding in seen.path.findings).rstrip(". ")
        yield _WRONG_PATH.found(None, carried=carried or "the traffic did not use the expected NICs")


_WITH_MPI = "make MPI=1 MPI_HOME=DIR, where DIR is the MPI installation whose mpirun starts the test"
_ALONE = CAUSES.cause(
    "alone",
    about="processes of nccl-tests that each ran their own test",
    message="each of the {processes} processes ran its own test with only its own GPUs (with one GPU, busbw is 0): "
    "the program was built without MPI, or with a different MPI than the launcher's",
    hint=f"build nccl-tests with MPI: {_WITH_MPI}. Or measure without MPI: multinode nccl-test --hosts HOSTFILE",
    figures=("processes",),
)
_ONE_RANK = CAUSES.cause(
    "one_rank",
    about="a test of one rank",
    message="busbw is 0 because the test had only one rank",
    hint="start at least two ranks (mpirun -np 2, or -g 2 on one node). If you did, nccl-tests was built without MPI; "
    f"rebuild it: {_WITH_MPI}",
)


def _alone(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    if seen.layout.workers > 1:
        return
    if seen.processes_alone > 1:
        yield _ALONE.found(None, processes=seen.processes_alone)
    else:
        yield _ONE_RANK.found(None)


_ONE_GPU = CAUSES.cause(
    "one_gpu",
    about="one GPU per node that uses several NICs",
    message="one GPU per node uses {nics} NICs, but its PCIe {generation} x16 slot carries at most {slot} GB/s: the "
    "limit is the GPU's slot, not the NICs",
    hint="measure with all GPUs of each node: multinode nccl-test --workers-per-node 8; with nccl-tests, start one "
    "rank per GPU",
    figures=("nic_gb_per_s", "slot_gbit_per_s", "nics"),
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
        yield _ONE_GPU.found(
            None,
            nics=nics,
            generation=name,
            slot=format_figure(slot / BITS_PER_BYTE),
            nic_gb_per_s=worst.nic_gb_per_s,
            slot_gbit_per_s=slot,
        )


_BEYOND_FIGURES = ("nic_gb_per_s", "share", "link_gbit_per_s", "collective")
_ANOTHER_ALGORITHM = CAUSES.cause(
    "another_algorithm",
    about="a speed that a ring cannot reach on this link, but another algorithm can",
    message="a ring would need {share:.0%} of the line rate ({link}), so the backend used either its {algorithm} "
    "algorithm, which needs only {other:.0%} of the line rate, or more NICs than multinode knows of",
    hint="to find out which, allow only rings: run multinode nccl-test with --env NCCL_ALGO=Ring",
    figures=(*_BEYOND_FIGURES, "algorithm", "other"),
)
_MORE_NICS = CAUSES.cause(
    "more_nics",
    about="a speed that no algorithm can reach on this link",
    message="{speed} GB/s per node is {share:.0%} of the line rate of the node's known NICs ({link}): the traffic used "
    "more NICs, or a NIC reports a rate that is too low",
    hint="to see which NICs NCCL uses, add --env NCCL_DEBUG=INFO and look for `NET/IB : Using` and `via NET/` in its "
    "log; to list the NICs and their rates: multinode check",
    figures=_BEYOND_FIGURES,
)


def _beyond(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    share = seen.beyond
    if share is None:
        return
    of_link = share.share_of_ceiling or 0.0
    values: dict[str, object] = {
        "nic_gb_per_s": share.nic_gb_per_s,
        "share": of_link,
        "link_gbit_per_s": seen.link_gbit_per_s or 0.0,
        "collective": share.collective,
        "link": format_rate(seen.link_gbit_per_s or 0.0),
        "speed": format_figure(share.nic_gb_per_s),
    }
    case = (seen.backend, share.collective, seen.layout)
    others = [
        (nic_factor(*case, algorithm.name), algorithm.name)
        for algorithm in algorithms_of(seen.backend, share.collective)
    ]
    least, name = min(others, default=(math.inf, ""))
    other = of_link * least / nic_factor(*case)
    if other <= MORE_THAN_A_LINK:
        yield _ANOTHER_ALGORITHM.found(None, algorithm=name, other=other, **values)
    else:
        yield _MORE_NICS.found(None, **values)


_HALF_DUPLEX = CAUSES.cause(
    "half_duplex",
    about="a NIC that cannot send and receive at the same time",
    message="the NIC of {names} runs in half duplex: it cannot send and receive at the same time",
    hint="enable autonegotiation on NIC and switch port (sudo ethtool -s INTERFACE autoneg on), or replace the cable",
)


def _half_duplex(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    half = tuple(name for name, nic in seen.nics.items() if nic.duplex == "half")
    if half and not seen.is_well:
        yield _HALF_DUPLEX.found(None, at=half, names=format_list(half))


def _odd_pairs(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    # One stream has no other to be compared with, not even the way back.
    if len(seen.tcp.ring) > 1:
        yield from seen.odd or find_odd_in_ring(seen.tcp.ring, nic_ceilings(seen.nics))


_SLOWER_LINK = CAUSES.cause(
    "slower_link",
    about="a link that negotiated a lower rate than the others",
    message="{each}, but other nodes negotiated {most}: every collective runs at the speed of the slowest link",
    hint=(
        "check the cable and switch port; to see which rates the NIC and its link partner advertise: sudo ethtool "
        "INTERFACE"
    ),
    figures=("link_gbit_per_s",),
)


def _slower_link(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    links = {name: nic.speed_gbit_per_s for name, nic in seen.nics.items() if nic.speed_gbit_per_s}
    most = max(links.values(), default=0.0)
    slow = {name: link for name, link in links.items() if link < most}
    if slow and len(slow) <= len(links) / 2:
        each = format_list([f"{name} negotiated {format_rate(link)}" for name, link in slow.items()])
        yield _SLOWER_LINK.found(
            None, at=tuple(slow), each=each, most=format_rate(most), link_gbit_per_s=most, by_node=slow
        )


_MIXED_MTU = CAUSES.cause(
    "mixed_mtu",
    about="different MTUs",
    message="the MTU of {each}, but other nodes have {mtu_bytes:.0f}: large packets may be lost",
    hint="set the same MTU on every NIC and on the switch: sudo ip link set dev INTERFACE mtu 1500",
    figures=("mtu_bytes",),
)


def _mixed_mtu(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    mtus = {name: float(nic.mtu) for name, nic in seen.nics.items() if nic.mtu}
    most = max(mtus.values(), default=0.0)
    small = {name: mtu for name, mtu in mtus.items() if mtu < most}
    if small and not seen.is_well:
        each = format_list([f"{name} is {mtu:.0f}" for name, mtu in small.items()])
        yield _MIXED_MTU.found(None, at=tuple(small), each=each, mtu_bytes=most, by_node=small)


_FLOW_CAP = "to {cap}, which is either the rate at which AWS caps each flow, or the rate of one NIC in a bond"
_LIMITED = {
    code: CAUSES.cause(
        code,
        about=about,
        message="one TCP connection reaches {one} GB/s, and several together reach {several} GB/s: a single "
        "connection is "
        f"limited {limit}",
        hint=hint,
        figures=("one_gb_per_s", "several_gb_per_s", *more),
    )
    for code, about, limit, hint, *more in (
        ("one_connection", "a per-connection limit", "by one CPU core, or by small socket buffers", _BUFFERS),
        (
            "one_connection_fast",
            "a per-connection limit on a fast link",
            "by one CPU core, or by a cloud's cap on each flow",
            _BUFFERS,
        ),
        (
            "one_connection_fast_nccl",
            "a per-connection limit when NCCL uses a fast link",
            "by one CPU core, or by a cloud's cap on each flow",
            _SOCKETS,
        ),
        (
            "flow_cap",
            "a cloud's cap on each connection",
            _FLOW_CAP,
            f"{_PLACEMENT}; use several workers per node, because each worker has its own connections",
            "cap_gbit_per_s",
        ),
        (
            "flow_cap_nccl",
            "a cloud's cap on each connection, with NCCL",
            _FLOW_CAP,
            f"{_SOCKETS}. Or {_PLACEMENT}",
            "cap_gbit_per_s",
        ),
    )
}


def _one_connection(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    one_stream, many = slowest_gb_per_s(seen.tcp.one), slowest_gb_per_s(seen.tcp.several)
    if not one_stream or not many or one_stream >= _ONE_OF_MANY * many or seen.collective_is_slow is False:
        return
    low, high = _NEAR_A_CAP
    cap = next((cap for cap in _FLOW_CAPS_GBIT if low * cap <= one_stream * BITS_PER_BYTE <= high * cap), None)
    is_capped = seen.is_fast_link and cap is not None and many * BITS_PER_BYTE > cap
    code = "flow_cap" if is_capped else "one_connection_fast" if seen.is_fast_link else "one_connection"
    yield _LIMITED[f"{code}_nccl" if seen.backend == "nccl" and seen.is_fast_link else code].found(
        None,
        one=format_figure(one_stream),
        several=format_figure(many),
        cap=format_rate(cap or 0.0),
        one_gb_per_s=one_stream,
        several_gb_per_s=many,
        cap_gbit_per_s=cap,
    )


_STRAGGLER = CAUSES.cause(
    "straggler",
    about="a node that the others wait for",
    message="{node} is the straggler: it waits {share:.0%} of the time, but the other nodes wait {others:.0%} of the "
    "time",
    hint="look for other processes and for throttled CPUs or GPUs on {node!s}: top; nvidia-smi -q -d PERFORMANCE",
    figures=("others", "share"),
)


def _straggler(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    waits = seen.wait_share_by_node
    if len(waits) < 2 or seen.is_well:  # noqa: PLR2004 - somebody, and others who wait
        return
    last = min(waits, key=lambda name: waits[name])
    others = statistics.median(share for name, share in waits.items() if name != last)
    if others - waits[last] >= _WAIT_NOTICED:
        yield _STRAGGLER.found(last, at=(last,), others=others, share=waits[last])


_BUSY_CPUS = CAUSES.cause(
    "busy_cpus",
    about="CPUs that are busy during the collectives",
    message="the CPUs are busy during the collectives ({each}), but TCP needs CPU time too",
    hint="run top to see what uses the CPUs; with fewer workers per node or a larger MTU, TCP needs less CPU time",
)


def _busy(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    busy = {name: used for name, used in seen.busy_percent_by_node.items() if used >= _BUSY_PERCENT}
    if busy and not seen.is_well:
        each = format_list([f"{name} {used:.0f}%" for name, used in busy.items()])
        yield _BUSY_CPUS.found(None, at=tuple(busy), each=each, by_node=busy)


_FEW_SOCKETS = CAUSES.cause(
    "few_sockets",
    about="NCCL that is slower than raw TCP on a fast link",
    message="raw TCP is fast, but NCCL is slower: on such a fast link, NCCL may need more sockets",
    hint=_SOCKETS,
)


def _sockets(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    fine = seen.tcp_gb_per_s is not None and not seen.tcp_is_slow
    is_slow = seen.backend == "nccl" and seen.is_fast_link and fine and seen.collective_is_slow
    if is_slow and _fall(seen) is None:
        yield _FEW_SOCKETS.found(None)


_FALL = "NCCL reaches {best} GB/s at {size}, but only {least} GB/s with larger messages: "
_FALL_FIGURES = ("best_gb_per_s", "size_bytes", "least_gb_per_s")
_DROPS_OVER_ROCE = CAUSES.cause(
    "drops_over_roce",
    about="over RoCE, far lower bandwidth for large messages than for smaller ones",
    message=_FALL + "large messages fill the switch's buffers, where RoCE loses packets unless the network is lossless",
    hint="make the network lossless: configure the same flow control (PFC) and ECN (DCQCN) on every NIC and switch "
    "port, for the traffic class that NCCL uses (NCCL_IB_TC); to count pauses and lost packets, run this before and "
    "after a test: ethtool -S INTERFACE | grep -E 'pause|discard|out_of_sequence'",
    figures=_FALL_FIGURES,
)
_MANY_SOCKETS = CAUSES.cause(
    "many_sockets",
    about="over sockets, far lower bandwidth for large messages than for smaller ones",
    message=_FALL + "with so many sockets, packets of large messages are lost",
    hint="use fewer sockets: unset NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, or halve their product, and "
    "measure again; to count lost packets on a node: nstat -az TcpRetransSegs",
    figures=_FALL_FIGURES,
)


def _fallen(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    fall = _fall(seen)
    if fall is None:
        return
    best, least = fall
    yield (_DROPS_OVER_ROCE if seen.over_rdma else _MANY_SOCKETS).found(
        None,
        best=format_figure(best.nic_gb_per_s),
        size=format_size(best.size_bytes),
        least=format_figure(least),
        best_gb_per_s=best.nic_gb_per_s,
        size_bytes=best.size_bytes,
        least_gb_per_s=least,
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


_LOST_SEGMENTS = CAUSES.cause(
    "lost_segments",
    about="packets that the network loses",
    message="TCP retransmitted {lost_share:.2%} of its segments: the network loses packets, and each loss slows down "
    "a connection",
    hint="find the port that drops them (ip -s link; ethtool -S INTERFACE; the counters of the switch), and check "
    "that MTU and flow control are the same on all ports",
    figures=("lost_share",),
)


def _lost_segments(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    lost = seen.lost_share
    if lost is not None and lost >= _LOSS_NOTICED and not seen.is_well:
        yield _LOST_SEGMENTS.found(None, lost_share=lost)


_ONE_STREAM = CAUSES.cause(
    "one_stream",
    about="raw TCP over one connection that is limited by one CPU core",
    message="only one connection was measured; at this speed, it is limited by one CPU core, not by the network",
    hint="measure several connections: iperf3 -P 8, with version 3.16 or later",
)
_ONE_THREAD = CAUSES.cause(
    "one_thread",
    about="raw TCP measured by an iperf3 that runs all connections in one thread",
    message="this iperf3 runs its {connections} connections in one thread; at this speed the limit is one CPU core, "
    "not the network",
    hint="measure with iperf3 3.16 or later, or with one iperf3 process per connection, each with its own port (-p)",
    figures=("connections",),
)


def _one_core(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    """Raw TCP that was limited by how it was measured."""
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    is_short = tcp is not None and ceiling is not None and tcp < _TCP_LIMIT_SHARE * ceiling
    if not is_short or (seen.link_gbit_per_s or 0.0) < _TCP_LIMIT_LINK_GBIT:
        return
    if not seen.tcp.several and (tcp or 0.0) * BITS_PER_BYTE >= _CORE_LEAST_GBIT:
        yield _ONE_STREAM.found(None)
    elif seen.tcp.several and seen.tcp_in_one_thread:
        yield _ONE_THREAD.found(None, connections=seen.tcp.connections)


_ODD_ROUND_TRIP = CAUSES.cause(
    "odd_round_trip",
    about="a pair of nodes with a far longer round trip than the others",
    message="a round trip from {source} to {target} takes {trip} instead of the usual {usual}, which delays small "
    "messages",
    hint="check the path between the two nodes and other traffic on it: on {source!s}, run tracepath -n with "
    "{target!s}'s address",
    figures=("round_trip_ms", "usual_ms"),
)
_LONG_ROUND_TRIP = CAUSES.cause(
    "long_round_trip",
    about="round trips that take longer than those through a switch",
    message="a round trip between the nodes takes {trip}, far longer than through a switch, so small messages are "
    "latency-bound",
    hint=(
        "look for a VPN, a wireless link, a router, or a NIC in power-saving mode: run tracepath -n with a peer's "
        "address"
    ),
    figures=("round_trip_ms",),
)


def _far_apart(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    trips, usual = seen.tcp.round_trips_us, seen.tcp.round_trip_us
    if usual is None:
        return
    for (source, target), trip in trips.items():
        if len(trips) >= _ODD_NEEDS and trip >= max(_ODD_ROUND_TRIP_US, _ODD_ROUND_TRIPS * usual):
            yield _ODD_ROUND_TRIP.found(
                None,
                at=(source, target),
                source=source,
                target=target,
                trip=format_ms(trip / 1000),
                usual=format_ms(usual / 1000),
                round_trip_ms=trip / 1000,
                usual_ms=usual / 1000,
            )
    if usual > _LAN_ROUND_TRIP_US:
        yield _LONG_ROUND_TRIP.found(None, trip=format_ms(usual / 1000), round_trip_ms=usual / 1000)


_SLOW_START = CAUSES.cause(
    "slow_start",
    about="small messages that take far longer than their round trips",
    message="{collective} of {size} takes {time}, but its round trips need only {needed}: the workers wait for "
    "something other than the network",
    hint="look for shared CPUs or power saving: top; cpupower frequency-info",
    figures=("collective", "size_bytes", "time_ms", "needed_ms"),
)


def _slow_start(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    small = [row for row in seen.rows if row.size_bytes <= SMALL_BYTES]
    trip_us = seen.tcp.round_trip_us
    if not small or trip_us is None or trip_us > _LAN_ROUND_TRIP_US:
        return
    row = min(small, key=lambda row: row.size_bytes)
    needed_us = steps_us(seen.backend, message_steps(seen.backend, row.collective, seen.layout), trip_us / 2)
    if row.time_us.value >= max(_SMALL_FACTOR * needed_us, _SMALL_LEAST_US):
        time_ms = row.time_us.value / 1000
        yield _SLOW_START.found(
            None,
            collective=row.collective,
            size=format_size(row.size_bytes),
            time=format_ms(time_ms),
            needed=format_ms(needed_us / 1000),
            size_bytes=row.size_bytes,
            time_ms=time_ms,
            needed_ms=needed_us / 1000,
        )


_TCP_LIMIT = CAUSES.cause(
    "tcp_limit",
    about="a link that is faster than TCP",
    message="raw TCP reaches only {tcp} of {ceiling} GB/s; on any link, TCP rarely exceeds 3 to 5 GB/s",
    hint="use RDMA (RoCE, InfiniBand), which is faster on such NICs; to see which NICs support it: multinode check",
    figures=("tcp_gb_per_s", "ceiling_gb_per_s"),
)


def _tcp_limit(seen: ScanEvidence) -> Iterator[NetworkFinding]:
    tcp, ceiling = seen.tcp_gb_per_s, seen.ceiling_gb_per_s
    link = seen.link_gbit_per_s or 0.0
    if not tcp or not ceiling or seen.tcp_is_slow or tcp >= _TCP_LIMIT_SHARE * ceiling:
        return
    if link >= _TCP_LIMIT_LINK_GBIT and seen.tcp.several:
        yield _TCP_LIMIT.found(
            None,
            tcp=format_figure(tcp),
            ceiling=format_figure(ceiling),
            tcp_gb_per_s=tcp,
            ceiling_gb_per_s=ceiling,
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
