"""ReadScan: what others' programs printed about a network, judged by the rules of our own scan.

The text is untrusted: names in it are cleaned before they are shown. What it lacks comes from options, or is assumed
and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from multinode.cluster.facts import Interface
from multinode.decoding import parse_option
from multinode.diagnose.log_line import parse_line
from multinode.errors import UsageError
from multinode.network.nccl_tests_output import (
    PrintedLayout,
    PrintedTable,
    collective_rows,
    find_collective,
    find_layout,
    parse_tables,
)
from multinode.network.nic_path import NcclPath, parse_nccl_log
from multinode.network.scan_evidence import MORE_THAN_A_LINK, CollectiveRow, ScanEvidence
from multinode.network.scan_verdict import Verdict, judge_scan
from multinode.network.stream_output import RdmaRun, TcpRun, parse_iperf, parse_perftest
from multinode.records.benchmark import COLLECTIVES, check_choice
from multinode.records.log import clean_log
from multinode.traffic.algorithms import Layout
from multinode.traffic.pair_speeds import Pair, PairSpeed, RawTcp, fastest_of, slowest_gb_per_s
from multinode.units import format_count, format_figure, format_size, parse_nics

# Faster than TCP is on any NIC.
_BEYOND_TCP_GB_PER_S = 5.0
# No RDMA NIC is slower.
_RDMA_LEAST_GBIT = 10.0
_MOST_LINES = 200_000


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """What a text may lack, as options give it; None and empty are not given."""

    collective: str | None = None
    nics_gbit_per_s: tuple[float, ...] = ()  # rates of the NICs of one node
    nodes: int | None = None
    workers_per_node: int | None = None
    over_rdma: bool | None = None


def read_missing(
    collectives: Sequence[str],
    link: str | None,
    nodes: int | None,
    workers_per_node: int | None,
    *,
    over_rdma: bool | None,
) -> Missing:
    """What is said beside a text; `link` is `[Nx]RATE`.

    Raises:
        UsageError: several collectives, an unknown one, or no rate.
    """
    if len(collectives) > 1:
        raise UsageError("--read takes at most one collective")
    return Missing(
        collective=check_choice("collective", collectives[0], COLLECTIVES) if collectives else None,
        nics_gbit_per_s=parse_option("--link", link, parse_nics) if link is not None else (),
        nodes=nodes,
        workers_per_node=workers_per_node,
        over_rdma=over_rdma,
    )


class ReadScan(msgspec.Struct, frozen=True, kw_only=True):
    """One table of a text, or its raw streams, and the judgement."""

    programs: tuple[str, ...]  # that printed it: `nccl-tests`, `iperf3`, `ib_write_bw`, ..
    collective: str | None = None  # None for raw streams
    layout: Layout | None = None  # None for raw streams
    link_gbit_per_s: float | None = None  # of all NICs of a node
    ceiling_gb_per_s: float | None = None  # payload that it carries
    rows: tuple[CollectiveRow, ...] = ()
    tcp: RawTcp = RawTcp()
    rdma: tuple[PairSpeed, ...] = ()
    nccl: NcclPath | None = None  # by NCCL's log, if the text has it
    assumed: tuple[str, ...] = ()  # what the text does not say, how it was taken, and which option says it
    verdict: Verdict

    @property
    def title(self) -> str:
        """`all_reduce, 3 nodes with 8 workers each`."""
        if self.collective is None or self.layout is None:
            return ", ".join(self.programs)
        return f"{self.collective}, {PrintedLayout(layout=self.layout).sentence}"

    @property
    def levels(self) -> dict[str, float]:
        """Bounds of busbw in GB/s, by name: what the NICs carry, as busbw of the largest message."""
        share = max(self.verdict.shares, key=lambda share: share.size_bytes, default=None)
        # Workers share a NIC, and a collective may send more through it than its busbw says.
        scale = share.busbw_gb_per_s / share.nic_gb_per_s if share is not None and share.nic_gb_per_s else 1.0
        raw = {"raw TCP": slowest_gb_per_s(self.tcp.ring), "raw RDMA": slowest_gb_per_s(self.rdma)}
        levels = {"line rate": self.ceiling_gb_per_s} | raw
        return {name: scale * level for name, level in levels.items() if level is not None}


class ReadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `nccl-test --read --json`."""

    schema: str = "multinode.nccl-test-read/2"
    files: tuple[str, ...]
    scans: tuple[ReadScan, ...]


def read_scans(texts: Sequence[tuple[str, str]], missing: Missing | None = None) -> ReadReport:
    """Judge the outputs in these texts, each a name and its content; raw streams count for all tables.

    Raises:
        UsageError: no output of a known program was found.
    """
    told = missing or Missing()
    lines = [_clean(line) for _, text in texts for line in text.splitlines()[:_MOST_LINES]]
    tables, tcp, rdma = parse_tables(lines), parse_iperf(lines), parse_perftest(lines)
    files = tuple(name for name, _ in texts)
    small = [run for run in rdma if not run.is_large]
    nccl = parse_nccl_log(lines)
    if not tables and not any(run.is_large for run in rdma) and not any(not run.is_udp for run in tcp):
        raise _nothing(lines, files, tcp, small)
    streams = _Streams(tcp, rdma, told.nics_gbit_per_s)
    scans = [_table_scan(table, streams, nccl, told) for table in tables] or list(_raw_scans(streams, told))
    return ReadReport(files=files, scans=tuple(scans))


def _clean(line: str) -> str:
    """A line without quotation marks of a thread, marks of a launcher, and control characters."""
    return parse_line(clean_log(line.replace("**", "")).strip("`> ")).text


def _nothing(lines: Sequence[str], files: Sequence[str], tcp: Sequence[TcpRun], small: Sequence[RdmaRun]) -> UsageError:
    names = ", ".join(files)
    if small:
        return UsageError(
            f"{names}: {small[0].program} sent messages of {format_size(small[0].size_bytes)}, which measure the "
            "message rate and not the bandwidth",
            hint=f"measure large messages: {small[0].program} -s 1048576",
        )
    if tcp:
        return UsageError(
            f"{names}: iperf3 measured UDP, which sends at the rate of -b", hint="measure TCP: iperf3 without -u"
        )
    if any("Avg bus bandwidth" in line or "Out of bounds values" in line for line in lines):
        return UsageError(
            f"{names}: the rows of nccl-tests are missing; an average over all sizes says nothing about the network",
            hint="pass the whole output, with the rows of each size",
        )
    return UsageError(
        f"{names}: no output of nccl-tests, iperf3 or ib_write_bw was found",
        hint="pass the output as it was printed; for the log of a run that failed: multinode explain FILE",
    )


class _Streams:
    """Raw TCP and RDMA of a text."""

    def __init__(self, tcp: Sequence[TcpRun], rdma: Sequence[RdmaRun], nics: Sequence[float]) -> None:
        runs = [run for run in tcp if not run.is_udp]
        several = [run for run in runs if run.connections > 1]
        usual = next((run.pair for run in runs if run.pair is not None), ("client", "server"))
        self.tcp = RawTcp(
            one=fastest_of(_speeds((run for run in runs if run.connections == 1), usual)),
            several=fastest_of(_speeds(several, usual)),
            connections=max((run.connections for run in runs), default=0),
        )
        self.lost_share = max((run.lost_share for run in runs if run.lost_share is not None), default=None)
        self.in_one_thread = bool(several) and all(run.in_one_thread for run in several)
        self.assumed = list[str]()
        if any(not run.is_large for run in rdma):
            self.assumed.append("the RDMA runs with messages below 64 KiB are ignored: they measure the message rate")
        rdma = [run for run in rdma if run.is_large]
        if len(runs) < len(tcp):
            self.assumed.append("the UDP runs of iperf3 are ignored: UDP sends at the rate of -b")
        self.runs = tuple(rdma)
        self.rdma_gbit_per_s = self._rdma(rdma, nics)
        layers = {run.link_layer for run in rdma if run.link_layer is not None}
        self.link_layer = layers.pop() if len(layers) == 1 else None
        self.devices = tuple(dict.fromkeys(run.device for run in rdma if run.device is not None))
        self.rdma_program = rdma[0].program if rdma else "ib_write_bw"
        self.programs = (*(("iperf3",) if runs else ()), *dict.fromkeys(run.program for run in rdma))

    def _rdma(self, runs: Sequence[RdmaRun], nics: Sequence[float]) -> float | None:
        """Of all NICs of a node: the best run of each device, together, if they can have run at once."""
        best: dict[str | None, float] = {}
        for run in runs:
            best[run.device] = max(run.gbit_per_s, best.get(run.device, 0.0))
        if not best:
            return None
        total, devices = sum(best.values()), len(best)
        if nics and total > MORE_THAN_A_LINK * sum(nics):
            return max(best.values())
        if devices < len(nics) and total <= MORE_THAN_A_LINK * sum(nics[:devices]):
            measured = format_count(devices, "NIC")
            self.assumed.append(
                f"raw RDMA was measured over {measured} of {len(nics)}: the others are assumed to be equal"
            )
            return total * len(nics) / devices
        return total

    def rdma(self, names: Sequence[str]) -> tuple[PairSpeed, ...]:
        if self.rdma_gbit_per_s is None:
            return ()
        first, last = names[0], names[-1]
        return (PairSpeed(source=first, target=last, gbit_per_s=self.rdma_gbit_per_s),)


def _speeds(runs: Iterable[TcpRun], usual: Pair) -> list[PairSpeed]:
    pairs = ((run, run.pair or usual) for run in runs)
    return [
        PairSpeed(source=source, target=target, gbit_per_s=run.gbit_per_s, error=run.error)
        for run, (source, target) in pairs
    ]


def _table_scan(table: PrintedTable, streams: _Streams, nccl: NcclPath | None, told: Missing) -> ReadScan:
    collective, is_certain = find_collective(table)
    if not is_certain and told.collective is not None:
        collective, is_certain = told.collective, True
    found = find_layout(table, collective, told.nodes)
    layout, assumed = found.layout, list(streams.assumed)
    if told.workers_per_node is not None and layout.workers > 1 and not found.hosts:
        layout = Layout(nodes=layout.nodes, workers_per_node=told.workers_per_node)
    is_alone = table.is_alone
    if not is_certain and not is_alone:
        assumed.append(
            f"the text does not name the collective, so {collective} is assumed; if that is wrong, name it: multinode "
            f"nccl-test COLLECTIVE --read FILE"
        )
    if found.is_assumed and not is_alone:
        assumed.append(
            f"the text does not say which ranks ran where, so {found.sentence} are assumed; if that is wrong: --nodes "
            f"K, --workers-per-node N"
        )
    rows = collective_rows(table, collective, layout.workers)
    names = found.hosts or tuple(f"node{number}" for number in range(layout.nodes))
    evidence = replace(
        _evidence(streams, told, names if layout.nodes > 1 else (), nccl),
        rows=rows,
        layout=layout,
        backend="gloo" if any(device == "cpu" for _, _, device in table.ranks) else "nccl",
        over_rdma=_over_rdma(rows, streams, nccl, told),
        wrong_beside_rows=table.wrong,
        processes_alone=table.processes_alone,
    )
    fastest, raw = max((share.nic_gb_per_s for share in evidence.shares), default=0.0), evidence.raw_gb_per_s
    if layout.nodes > 1 and raw is not None and fastest > MORE_THAN_A_LINK * raw:
        # It is no bound of the collective then.
        evidence = replace(evidence, tcp=RawTcp(), rdma=())
        assumed.append(
            "the raw streams are ignored, because the collective is faster "
            f"({format_figure(fastest)} against {format_figure(raw)} GB/s): "
            "they used fewer NICs or connections, or another network"
        )
    verdict = judge_scan(evidence)
    if evidence.link_gbit_per_s is None and layout.nodes > 1 and not verdict.is_failure:
        assumed.append(_NO_LINK)
    return ReadScan(
        programs=("nccl-tests", *streams.programs),
        collective=collective,
        layout=layout,
        link_gbit_per_s=evidence.link_gbit_per_s,
        ceiling_gb_per_s=evidence.ceiling_gb_per_s,
        rows=rows,
        tcp=evidence.tcp,
        rdma=evidence.rdma,
        nccl=nccl,
        assumed=tuple(assumed),
        verdict=verdict,
    )


_NO_LINK = "the text does not state the rate of the NICs: add --link RATE, or --link 4x200gbit with several NICs"


def _raw_scans(streams: _Streams, told: Missing) -> Iterator[ReadScan]:
    for over_rdma in (False, True):
        names = _endpoints(streams) or ("node0", "node1")
        if not (streams.rdma(names) if over_rdma else streams.tcp.ring):
            continue
        evidence = replace(
            _evidence(streams, told, names, None), is_raw_only=True, backend="unknown", over_rdma=over_rdma
        )
        yield ReadScan(
            programs=streams.programs[1:] if over_rdma and streams.tcp.ring else streams.programs[:1],
            link_gbit_per_s=evidence.link_gbit_per_s,
            ceiling_gb_per_s=evidence.ceiling_gb_per_s,
            tcp=RawTcp() if over_rdma else streams.tcp,
            rdma=evidence.rdma if over_rdma else (),
            assumed=tuple(streams.assumed) + (() if evidence.link_gbit_per_s else (_NO_LINK,)),
            verdict=judge_scan(evidence),
        )


def _endpoints(streams: _Streams) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for pair in streams.tcp.ring for name in (pair.source, pair.target)))


def _evidence(streams: _Streams, told: Missing, names: Sequence[str], nccl: NcclPath | None) -> ScanEvidence:
    """What the text has beside a table; `names` are of the nodes, none for a single one."""
    nics, link = told.nics_gbit_per_s, sum(told.nics_gbit_per_s) or None
    devices = [*streams.devices, *((nccl.used or nccl.nics) if nccl is not None else ())]
    everyone = dict.fromkeys([*names, *_endpoints(streams)]) if names else {}
    layers = {kind for kind in ("IB", "RoCE") if any(name.endswith(f"/{kind}") for name in devices)}
    return ScanEvidence(
        rows=(),
        nics={name: Interface(name="eth0", speed_gbit_per_s=link) for name in everyone} if link else {},
        nics_gbit_per_s=dict.fromkeys(everyone, nics) if nics else {},
        tcp=streams.tcp,
        rdma=streams.rdma(names) if names else (),
        link_layer=streams.link_layer or ("InfiniBand" if layers == {"IB"} else None),
        bonds=tuple(dict.fromkeys(name.partition(":")[0] for name in devices if "bond" in name)),
        rdma_program=streams.rdma_program,
        lost_share=streams.lost_share,
        tcp_in_one_thread=streams.in_one_thread,
    )


def _over_rdma(rows: Sequence[CollectiveRow], streams: _Streams, nccl: NcclPath | None, told: Missing) -> bool | None:
    """By option or NCCL's log; else by what was measured beside it, or what TCP cannot reach. None is unknown."""
    if told.over_rdma is not None:
        return told.over_rdma
    if nccl is not None and (nccl.network is not None or nccl.nics):
        # RDMA NICs are listed with their kind: `mlx5_0:1/RoCE`.
        return nccl.over_rdma or (nccl.network is None and all("/" in name for name in nccl.nics))
    best = max((row.algbw_gb_per_s for row in rows), default=0.0)
    if streams.runs or best > _BEYOND_TCP_GB_PER_S:
        return True
    nics = told.nics_gbit_per_s
    if nics and max(nics) < _RDMA_LEAST_GBIT:
        return False
    return False if slowest_gb_per_s(streams.tcp.ring) is not None else None
