"""The words of a size scan: its verdict, the causes, odd pairs of nodes, and what NIC counters show of its path.

`size_scan` and its neighbours find codes and figures; `with_words` fills in the sentences before a report is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from multinode.network.nic_path_check import CardLoad, MessagePath, NicPathCheck, Way
from multinode.network.scan_changes import Difference, RowChange, ScanChanges, ScannedMessage
from multinode.network.scan_verdict import Cause, SizeShare, Verdict
from multinode.network.size_scan import ScanReport
from multinode.profile.cards import Carried
from multinode.traffic.algorithms import algorithms_of
from multinode.traffic.pair_speeds import Odd
from multinode.units import format_count, format_list, format_rate, format_size

_PER_CENT = 100
_MIB = 1 << 20
_SOCKETS = (
    "measure before setting: NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4; their product is at most 64, and more can "
    "be far slower"
)
_BUFFERS = "a larger MTU, a faster core, or socket buffers: sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem"
_LINKS = "cable, switch port, or other traffic of {node}; on {node}: ip -s link; tc -s qdisc"
_FAILED = "a firewall, or a node that went away: multinode check"
_CORE = "connection is limited by one CPU core, or by a cap on each flow, as clouds have"
_CAP = "connection is limited to {cap}, as AWS caps a flow, and as a bond gives it a single NIC"
_PLACEMENT = "on AWS, put the nodes into one cluster placement group"
_ONE = "one TCP connection reaches {one_gb_per_s:.3g} GB/s and several together {several_gb_per_s:.3g} GB/s: a single "


class _Words(NamedTuple):
    text: str
    hint: str


# By code: what was seen and what it means, and what to look at or to try.
_CAUSES = {
    "wrong_values": _Words(
        "{count} values were wrong ({collectives}): no speed is valid until they are right",
        "measure again; if it stays: the same version of NCCL and of the driver on all nodes, memory "
        "(nvidia-smi -q -d ECC) and the kernel's log (dmesg) on each",
    ),
    "wrong_path": _Words(
        "{path}",
        "name the interface in the hostfile (ifname=), and set no NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
    ),
    "more_nics": _Words(
        "{card_gb_per_s:.3g} GB/s through a node are {share:.0%} of what its NICs that are known carry ({link}): the "
        "data went over more NICs than the one known, or a NIC reports too low a rate",
        "which ones NCCL uses: --env NCCL_DEBUG=INFO, in its log `NET/IB : Using` and `via NET/`; which there are, and "
        "their rates: multinode check",
    ),
    "another_algorithm": _Words(
        "a ring would have passed {share:.0%} of the line rate ({link}): the backend ran its {algorithm}, which passes "
        "less through a NIC, {other:.0%} of the rate, or used more NICs than the one known; which, is unknown",
        "with a ring alone the share is certain: multinode nccl-test with --env NCCL_ALGO=Ring",
    ),
    "half_duplex": _Words(
        "the NIC of {names} runs in half duplex: it cannot send and receive at the same time",
        "NIC and switch port must both negotiate: sudo ethtool -s INTERFACE autoneg on; else the cable",
    ),
    "slower_link": _Words(
        "{by_node} where others have {link}: every collective runs at the speed of the slowest link",
        "cable or switch port: sudo ethtool INTERFACE shows what the NIC and its link partner advertise",
    ),
    "mixed_mtu": _Words(
        "the MTU of {by_node} where others have {mtu_bytes:.0f}: large packets may be lost",
        "the same MTU on every NIC and on the switch: sudo ip link set dev INTERFACE mtu 1500",
    ),
    "one_connection": _Words(f"{_ONE}connection is limited by one CPU core or by small socket buffers", _BUFFERS),
    "one_connection_fast": _Words(f"{_ONE}{_CORE}", _BUFFERS),
    "one_connection_fast_nccl": _Words(f"{_ONE}{_CORE}", _SOCKETS),
    "flow_cap": _Words(
        f"{_ONE}{_CAP}", f"{_PLACEMENT}; several workers per node, of which each has connections of its own"
    ),
    "flow_cap_nccl": _Words(f"{_ONE}{_CAP}", f"{_SOCKETS}; or {_PLACEMENT}"),
    "straggler": _Words(
        "the others wait {others:.0%} of the time, and {node} {share:.0%}: {node} is the straggler",
        "other work on {node}, or throttled CPUs or GPUs: top; nvidia-smi -q -d PERFORMANCE",
    ),
    "busy_cpus": _Words(
        "the CPUs are busy while the collectives run ({by_node}): TCP needs them too",
        "see what runs there: top; fewer workers per node, or a larger MTU, need less CPU",
    ),
    "many_sockets": _Words(
        "NCCL reaches {best_gb_per_s:.3g} GB/s at {size} and {least_gb_per_s:.3g} beyond: with so many sockets at once "
        "large messages lose packets",
        "fewer sockets: unset NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, or halve their product, and measure "
        "again; nstat -az TcpRetransSegs on each node counts what is lost",
    ),
    "few_sockets": _Words("raw TCP is OK and NCCL does not fill it: at such speeds it may need more sockets", _SOCKETS),
    "odd_round_trip": _Words(
        "a round trip from {node} to {peer} takes {round_trip_ms:.3g} ms, {usual_ms:.3g} ms is usual: small messages "
        "wait for it",
        "the path between the two, and what else uses it: on {node}, tracepath -n to {peer}'s address",
    ),
    "long_round_trip": _Words(
        "a round trip between the nodes takes {round_trip_ms:.3g} ms, far more than through a switch: small messages "
        "are latency-bound",
        "a VPN, a wireless link or a router between them, or a NIC that saves power: tracepath -n to a peer's address",
    ),
    "slow_start": _Words(
        "{collective} of {size} takes {time_ms:.3g} ms, its round trips need {needed_ms:.3g} ms: the workers wait, and "
        "not for the network",
        "CPUs shared with others or saving power: top; cpupower frequency-info",
    ),
    "tcp_limit": _Words(
        "raw TCP itself reaches {tcp_gb_per_s:.3g} of {ceiling_gb_per_s:.3g} GB/s: TCP rarely exceeds 3 to 5 GB/s on "
        "any link",
        "only RDMA (RoCE, InfiniBand) gets more out of such NICs: multinode check shows which have it",
    ),
    "slow_tcp": _Words(
        "raw TCP is slow as well, {tcp_gb_per_s:.3g} GB/s on the slowest link of the ring: the network, not the "
        "collective",
        "cables, the switch, other traffic on it: multinode check --bandwidth; on every node ip -s link",
    ),
    "slow_rdma": _Words(
        "the traffic goes over RDMA and does not fill the link: the port, its switch, or the path from GPU to NIC",
        "ibstat, and ib_write_bw between the nodes; GPUDirect: NCCL_DEBUG=INFO prints GDRDMA or not; PCIe access "
        "control (ACS) or an IOMMU sends it through the CPU: sudo lspci -vvv | grep ACSCtl; nvidia-smi topo -m",
    ),
    "slow_raw_rdma": _Words(
        "ib_write_bw reaches {rdma_gb_per_s:.3g} of {ceiling_gb_per_s:.3g} GB/s as well: the network or the NIC's "
        "slot, not NCCL",
        "the slot, the other half of a NIC and its network: multinode check; cable and switch port: ibstat; a NIC that "
        "started degraded: power both nodes off, and on again",
    ),
    "slow_over_rdma": _Words(
        "ib_write_bw reaches {rdma_gb_per_s:.3g} GB/s between the same ports, which rules out cable and switch: the "
        "path from GPU to NIC, or NCCL itself",
        "PCIe access control (ACS) and IOMMU: multinode check, as root; whether NCCL_DEBUG=INFO prints GDRDMA; which "
        "NICs NCCL uses: hca= in the hostfile; another release of NCCL",
    ),
    "no_tcp": _Words(
        "raw TCP was not measured: it would show whether the network or the collective is slow",
        "multinode check --bandwidth",
    ),
    "slow_collective": _Words(
        "raw TCP is OK, which rules out cables and switch: the collective itself is slow",
        "look at the CPUs of each node while it runs: top; NCCL's own log: --env NCCL_DEBUG=INFO",
    ),
    "odd_node": _Words(
        "{node} sends and receives no more than {best} with any peer, {measure}",
        _LINKS,
    ),
    "odd_sends": _Words(
        "{node} sends no more than {best} to any peer, {measure}, and receives at full speed",
        "a traffic shaper or other traffic on {node}; there: tc -s qdisc; ip -s link",
    ),
    "odd_receives": _Words(
        "{node} receives no more than {best} from any peer, {measure}, and sends at full speed",
        "lost packets, a policer, or other traffic to {node}; there: ip -s link; nstat -az TcpRetransSegs on its peers",
    ),
    "odd_cable": _Words(
        "between {node} and {peer} a stream reaches {best} at most, either way, {measure}",
        "cable, NIC or switch port of {node} or {peer}, or what is between; on both: ip -s link; change one cable",
    ),
    "odd_one_way": _Words(
        "from {node} to {peer} a stream reaches {best}, {measure}",
        "what {node} sends is shaped, or lost on the way to {peer}; on {node}: tc -s qdisc; on {peer}: ip -s link",
    ),
    "odd_all": _Words(
        "no stream between the nodes reaches more than {best}, {measure}",
        "the switch they share, other traffic on it, or CPUs too busy to keep up: measure on a quiet network",
    ),
    "odd_failed_all": _Words("no stream between the nodes ran: {error}", _FAILED),
    "odd_failed_node": _Words("no stream to or from {node} ran: {error}", _FAILED),
    "odd_failed_pair": _Words("the stream from {node} to {peer} did not run: {error}", _FAILED),
}
# How a node's figure is written.
_BY_NODE: dict[str, Callable[[str, float], str]] = {
    "slower_link": lambda name, link: f"{name} negotiated {format_rate(link)}",
    "mixed_mtu": lambda name, mtu: f"{name} is {mtu:.0f}",
    "busy_cpus": lambda name, used: f"{name} {used:.0f}%",
}
_FAILED_AT = ("all", "node", "pair")
_BEYOND = frozenset({"more_nics", "another_algorithm"})


def with_words(report: ScanReport) -> ScanReport:
    """The same with every sentence, from its codes and figures."""
    path = report.path
    if path is not None:
        path = msgspec.structs.replace(path, sentences=tuple(path_sentences(path, report.backend)))
    return msgspec.structs.replace(
        report,
        path=path,
        odd=tuple(odd_with_words(one) for one in report.odd),
        verdict=verdict_with_words(report.verdict, path, report.backend, report.link_gbit_per_s),
    )


def verdict_with_words(
    verdict: Verdict, path: NicPathCheck | None, backend: str, link_gbit_per_s: float | None
) -> Verdict:
    """The verdict in one line, and its causes in a sentence each.

    Args:
        verdict: by codes.
        path: with its sentences; None is not known.
        backend: `nccl` or `gloo`.
        link_gbit_per_s: of the slowest link; None is not known.
    """
    return msgspec.structs.replace(
        verdict,
        text=_verdict_text(verdict, backend, link_gbit_per_s),
        causes=tuple(_once(_cause_with_words(one, path) for one in verdict.causes)),
    )


def _once(causes: Iterable[Cause]) -> Iterator[Cause]:
    """A hint that several have stands at the first."""
    told: set[str] = set()
    for cause in causes:
        yield msgspec.structs.replace(cause, hint="" if cause.hint in told else cause.hint)
        told.add(cause.hint)


def odd_with_words(one: Odd) -> Odd:
    """The same with its sentence and what to look at."""
    text, hint = _phrase(f"odd_{one.kind.replace('-', '_')}", one.nodes, one.figures)
    return msgspec.structs.replace(one, text=text, hint=hint)


def _cause_with_words(one: Cause, path: NicPathCheck | None) -> Cause:
    said = " ".join(path.sentences).rstrip(". ") if path is not None else ""
    words = {"path": said or "the traffic did not take the NICs that it should"}
    text, hint = _phrase(one.code, one.nodes, one.figures | words, one.by_node)
    return msgspec.structs.replace(one, text=text, hint=hint)


def _phrase(
    code: str, nodes: Sequence[str], figures: Mapping[str, float | str], by_node: Mapping[str, float] | None = None
) -> tuple[str, str]:
    if code == "odd_failed":
        code = f"odd_failed_{_FAILED_AT[len(nodes)]}"
    words: dict[str, object] = {
        "error": "no reason is known",
        **figures,
        "names": format_list(nodes),
        "node": nodes[0] if nodes else "",
        "peer": nodes[-1] if nodes else "",
        "by_node": format_list([_BY_NODE[code](name, one) for name, one in (by_node or {}).items()]),
    }
    for name, one in figures.items():
        if name.endswith("_gbit_per_s"):
            words[name.removesuffix("_gbit_per_s")] = format_rate(float(one))
        if name == "size_bytes":
            words["size"] = format_size(int(one))
    words["measure"] = f"{words['due']} expected of the link" if "due" in words else f"{words.get('usual')} is usual"
    text, hint = _CAUSES[code]
    return text.format_map(words), hint.format_map(words)


def _verdict_text(verdict: Verdict, backend: str, link_gbit_per_s: float | None) -> str:
    """One line."""
    worst = verdict.worst
    if worst is None or verdict.status in {"wrong_values", "wrong_path", "empty"}:
        return {
            "wrong_values": "wrong results: values of a collective are not what they should be",
            "wrong_path": "wrong network: the traffic did not take the NICs of the data plane",
        }.get(verdict.status, "no result: no size was measured by all workers")
    several = len({share.collective for share in verdict.shares}) > 1
    what = f"{worst.collective} of {format_size(worst.size_bytes)}{', the slowest,' if several else ''}"
    if verdict.status == "one_node":
        return f"no network used: {what} reaches {worst.busbw_gb_per_s:.3g} GB/s busbw between workers of one node"
    reached = f"{what} reaches {_shares(worst, verdict, backend, link_gbit_per_s)}"
    if verdict.status == "inconclusive" and any(cause.code in _BEYOND for cause in verdict.causes):
        return f"inconclusive: {reached}, more than such a link carries"
    if verdict.status == "inconclusive":
        speed = f"{worst.card_gb_per_s:.3g} GB/s per NIC"
        return f"inconclusive: {what} reaches {speed}; neither the link rate nor raw TCP is known to compare with"
    if verdict.status == "ok":
        together = f" ({verdict.nics} NICs together)" if verdict.nics > 1 else ""
        link = f" for a link of {format_rate(link_gbit_per_s)}{together}" if link_gbit_per_s else ""
        return f"network OK{link}{', see the cause below' if verdict.causes else ''}: {reached}"
    return f"slow: {reached}"


def _shares(worst: SizeShare, verdict: Verdict, backend: str, link_gbit_per_s: float | None) -> str:
    parts = []
    if worst.share_of_ceiling is not None:
        nics = f", {verdict.nics} NICs together" if verdict.nics > 1 else ""
        rate = f" ({format_rate(link_gbit_per_s)}{nics})" if link_gbit_per_s and verdict.status != "ok" else ""
        parts.append(f"{worst.share_of_ceiling:.0%} of {'' if verdict.over_rdma else 'TCP '}line rate{rate}")
    if worst.share_of_tcp is not None:
        parts.append(f"{worst.share_of_tcp:.0%} of raw TCP")
    if worst.share_of_rdma is not None:
        parts.append(f"{worst.share_of_rdma:.0%} of raw RDMA")
    turns = ""
    if worst.usual_share < 1:
        turns = f"; {backend} sends and receives large messages in turns: {worst.usual_share:.0%} is its maximum"
    return f"{format_list(parts)}{turns}"


def path_sentences(path: NicPathCheck, backend: str) -> Iterator[str]:
    """What the counters show, the gravest first."""
    loads = [load for message in path.messages for load in message.loads]
    for way in (Way.OTHER, Way.RDMA, Way.UNSEEN, Way.DIFFERS):
        nodes: dict[str, list[str]] = {}
        for message, load in _largest(path.messages, way).values():
            nodes.setdefault(_load_words(way, message, load), []).append(load.node)
        yield from (f"{format_list(names)} {text}" for text, names in nodes.items())
    judged = [load for load in loads if load.way is not None]
    if judged and all(load.way is Way.CARD for load in judged):
        names = ", ".join(dict.fromkeys(load.ifname for load in judged if load.ifname))
        within = _PER_CENT * max(load.deviation or 0.0 for load in judged)
        yield f"NIC counters match the expected traffic ({names}, within {within:.2g} %)."
    elif not judged and loads:
        yield "Path not checked: no message was large enough for the NIC counters, or too little is known."
    if backend == "nccl":
        yield from _algorithms(path.messages)


def _largest(messages: Iterable[MessagePath], way: Way) -> dict[str, tuple[MessagePath, CardLoad]]:
    """By node, its largest message that took this way."""
    largest: dict[str, tuple[MessagePath, CardLoad]] = {}
    for message in sorted(messages, key=lambda one: one.size_bytes):
        largest.update({load.node: (message, load) for load in message.loads if load.way is way})
    return largest


def _load_words(way: Way, message: MessagePath, load: CardLoad) -> str:
    """What is to be said of a node, less its name."""
    seen, expected = load.passed or Carried(), load.expected or Carried()
    call = f"per iteration ({message.collective} of {format_size(message.size_bytes)})"
    if way is Way.DIFFERS:
        sends = load.gap.sent >= load.gap.received
        return (
            f"{'sent' if sends else 'received'} {_size(seen.one_way(sends=sends))} {call} over {load.ifname}, expected "
            f"are {_size(expected.one_way(sends=sends))}: other traffic, or another algorithm of the backend."
        )
    sends, other = load.lacks_sending, load.detour
    verb, should = "sent" if sends else "received", _size(expected.one_way(sends=sends))
    if other is None:
        return f"{verb} {should} {call}, and no counter saw it."
    text = f"{verb} {_size(load.others[other].one_way(sends=sends))} of {should} {call} over"
    if way is Way.RDMA:
        return f"{text} the RDMA port {other}: the counters of {load.ifname} do not see RDMA."
    return (
        f"{text} {other}, not over {load.ifname}: the kernel's routes to the other nodes lead there, or the backend "
        f"is set to use {other}."
    )


def _algorithms(messages: Iterable[MessagePath]) -> Iterator[str]:
    """What ran of each collective that may run in several ways, at its largest size that shows it."""
    shown = {
        message.collective: message
        for message in sorted(messages, key=lambda one: one.size_bytes)
        if message.algorithm is not None and len(algorithms_of("nccl", message.collective)) > 1
    }
    for message in shown.values():
        size = format_size(message.size_bytes)
        yield f"NCCL ran the {message.collective} of {size} as a {message.algorithm}, by the NIC counters."


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes)) if size_bytes < _MIB else f"{size_bytes / _MIB:.1f} MiB"


RULE = (
    "a speed has changed where the 95 % confidence interval of the ratio of both, by their iterations, does not "
    "contain 1, and by 5% at least; by 20% where fewer than 5 iterations were timed"
)

_WORDS = {
    "backend": "measured with {now} now, was {before}",
    "workers_per_node": "measured with {now} workers on each node now, was {before}",
    "order": "the order of the nodes is now {now}, was {before}",
    "link_gbit_per_s": "{nic} now negotiates {now}, was {before}",
    "mtu": "{nic} now has an MTU of {now}, was {before}",
    "duplex": "{nic} now runs in {now} duplex, was {before}",
    "driver": "{nic} is now of driver {now}, was {before}",
    "ifname": "{node} now uses {now}, was {before}",
    "python": "{node} now has Python {now}, was {before}",
    "torch": "{node} now has torch {now}, was {before}",
    "nccl": "{node} now has NCCL {now}, was {before}",
    "cuda": "{node} now has CUDA {now}, was {before}",
    "gpu": "{node} now has {now}, was {before}",
    "gpu_driver": "{node} now has GPU driver {now}, was {before}",
    "cores": "{node} now has {now} cores, was {before}",
}


def changes_with_words(changes: ScanChanges) -> ScanChanges:
    """The same with every sentence, from its codes and figures."""
    return msgspec.structs.replace(
        changes,
        text=_text(changes.rows, len(changes.rows) + changes.unchanged),
        environment=tuple(map(_difference, changes.differences)),
        rows=tuple(msgspec.structs.replace(row, text="; ".join(_change(row))) for row in changes.rows),
        only_before=tuple(map(_message, changes.messages_before)),
        only_now=tuple(map(_message, changes.messages_now)),
        rule=RULE,
    )


def _difference(one: Difference) -> str:
    before, now = (
        format_rate(float(value)) if one.what == "link_gbit_per_s" else str(value) for value in (one.before, one.now)
    )
    nic = "the NIC of every node" if one.node is None else f"{one.node}'s {one.ifname or 'NIC'}"
    return _WORDS[one.what].format(node=one.node or "every node", nic=nic, before=before, now=now)


def _change(row: RowChange) -> Iterator[str]:
    if row.change:
        way = "faster" if row.change > 0 else "slower"
        figures = f"{row.now_gb_per_s:.3g} GB/s, was {row.before_gb_per_s:.3g} GB/s ({row.change:+.0%})"
        yield f"{_message(row)} is {way}: {figures}"
    if None not in (row.wrong_before, row.wrong_now) and bool(row.wrong_before) != bool(row.wrong_now):
        yield f"{row.wrong_now} values of {_message(row)} are wrong now, {row.wrong_before} were"


def _message(one: ScannedMessage) -> str:
    redop = "" if one.redop in {"sum", "none"} else f" {one.redop}"
    dtype = "" if one.dtype == "float" else f" of {one.dtype}"
    return f"{one.collective}{redop} {format_size(one.size_bytes)}{dtype}"


def _text(rows: Sequence[RowChange], compared: int) -> str:
    if not compared:
        return "The two scans have no message in common."
    if not rows:
        return f"No speed changed beyond the noise of both ({format_count(compared, 'message')} compared)."
    said = [f"{len(rows)} of {compared} messages changed"]
    ways = {"slower": [one for one in rows if one.change < 0], "faster": [one for one in rows if one.change > 0]}
    for way, some in ways.items():
        if some:
            most = max(some, key=lambda one: abs(one.change))
            size = format_size(most.size_bytes)
            said.append(f"{len(some)} {way}, most: {most.collective} {size} ({most.change:+.0%})")
    wrong = len(rows) - sum(map(len, ways.values()))
    if wrong:
        said.append(f"{wrong} only in its values")
    return f"{'; '.join(said)}."
