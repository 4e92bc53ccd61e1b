"""The ScanReport of an nccl-test, from samples, plan and facts, with raw TCP and RDMA."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.cluster.facts import Interface, NodeFacts, carried_gbit_per_s
from multinode.figures.compared import ComparedFigure
from multinode.findings.finding import Finding
from multinode.model.engine_calls import StepMessages, estimate_step_us
from multinode.network.nic_path import NcclPath, NicPathCheck, check_nic_path, parse_nccl_log
from multinode.network.scan_evidence import CollectiveRow, ScanEvidence, collective_rows, with_shares
from multinode.network.scan_verdict import Verdict, judge_scan
from multinode.records.benchmark import DTYPE_BYTES, REDOPS, CollectiveTest
from multinode.records.log import clean_log
from multinode.records.plan import LaunchPlan, Place
from multinode.records.samples import (
    BenchmarkSample,
    CollectiveSample,
    CpuSample,
    NcclSample,
    PingSample,
    Sample,
    StreamSample,
)
from multinode.stats.estimate import spread_of
from multinode.stats.unknown import entries, or_empty, or_none
from multinode.traffic.algorithms import Layout
from multinode.traffic.pair_speeds import (
    NetworkFinding,
    Pair,
    PairSpeed,
    RawTcp,
    RoundTrip,
    slowest_gb_per_s,
    stream_speed,
)
from multinode.traffic.step_calls import ScanCurves, SizeCurve, fit_curve
from multinode.units import format_count


def read_ring(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]], index: int | None = None) -> RawTcp:
    """Medians over the rounds, for each node and the next.

    `index` is of the message whose rounds count; None uses all.
    """
    names = [place.node for place in plan.places]
    one_stream, several, latency = list[PairSpeed](), list[PairSpeed](), list[RoundTrip]()
    connections = 0
    for place, peer in zip(plan.places, names[1:] + names[:1], strict=True):
        pair, mine = (place.node, peer), samples.get(place.node_rank, ())
        streams = _streams(place, mine, "tcp")
        if index is not None:
            streams = [sample for sample in streams if sample.index == index]
        connections = max([connections, *(len(sample.results) for sample in streams)])
        one_stream += _speed(pair, (sample for sample in streams if len(sample.results) == 1))
        several += _speed(pair, (sample for sample in streams if len(sample.results) > 1))
        pings = [sample for sample in mine if isinstance(sample, PingSample) and sample.rank in place.ranks]
        for ping in pings[:1]:
            failed = ping.error if ping.error is not None or ping.times_us else "no round trip was measured"
            spread = spread_of(ping.times_us) if failed is None else None
            median, p95 = (spread.median, spread.p95) if spread is not None else (None, None)
            latency.append(RoundTrip(source=place.node, target=peer, median_us=median, p95_us=p95, error=failed))
    return RawTcp(one=tuple(one_stream), several=tuple(several), connections=connections, latency=tuple(latency))


def read_rdma(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]]) -> tuple[PairSpeed, ...]:
    """Combined RDMA write rate of all used ports, for each node and the next; empty if not measured."""
    names = [place.node for place in plan.places]
    return tuple(
        speed
        for place, peer in zip(plan.places, names[1:] + names[:1], strict=True)
        for speed in _speed((place.node, peer), _streams(place, samples.get(place.node_rank, ()), "rdma"))
    )


def _streams(place: Place, mine: Iterable[Sample], network: str) -> list[StreamSample]:
    return [
        sample
        for sample in mine
        if isinstance(sample, StreamSample) and sample.rank in place.ranks and sample.network == network
    ]


def _speed(pair: Pair, streams: Iterable[StreamSample]) -> list[PairSpeed]:
    speeds = [stream_speed(*pair, sample.results) for sample in streams]
    reached = [speed.gbit_per_s for speed in speeds if speed.gbit_per_s is not None]
    if not reached:
        return speeds[-1:]
    return [PairSpeed(source=pair[0], target=pair[1], gbit_per_s=statistics.median(reached))]


_LARGEST_ELEMENT_BYTES = max(DTYPE_BYTES.values())
# Minimum sizes of a curve.
_LEAST_SIZES = 2


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a node that affect its speed; None if unknown."""

    name: str
    ifname: str | None = None  # its data-plane interface
    link_gbit_per_s: float | None = None  # negotiated rate
    mtu: int | None = None  # in bytes
    duplex: str | None = None  # `full` or `half`
    driver: str | None = None  # of a virtual interface
    python: str | None = None  # version of the job's interpreter; also `torch`, `nccl`, `cuda`
    torch: str | None = None
    nccl: str | None = None
    cuda: str | None = None
    gpu: str | None = None  # its GPUs, `2 x NVIDIA GeForce RTX 4090`; also `gpu_driver`, the version
    gpu_driver: str | None = None
    cores: int | None = None  # processors available to a job


class ScanChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes from one scan to the next."""

    before: str  # its run id; also `now`
    now: str
    verdict: Finding  # of the speeds, in a sentence
    # of common nodes, named in `code` by the field of NodeState; of the measurement
    environment: tuple[Finding, ...] = ()
    came: tuple[str, ...] = ()  # nodes only in the later one; also `gone`, only in the earlier
    gone: tuple[str, ...] = ()
    rows: tuple[ComparedFigure, ...] = ()  # busbw in GB/s of every common message: the same operation and size
    wrong: tuple[Finding, ...] = ()  # common messages whose values are wrong in one of the two
    only_before: tuple[str, ...] = ()  # messages only in the earlier one; also `only_now`
    only_now: tuple[str, ...] = ()


class StepEstimate(StepMessages, frozen=True, kw_only=True):
    """Messages of one optimizer step, and their time according to the size scan."""

    step_us: float | None  # in sequence, without overlap; None if a time is unknown


class ScanReport(ScanCurves, frozen=True, kw_only=True):
    """The document that `nccl-test --json` prints. It is stored as `nccl-test.json` in the directory of the run."""

    schema: str = "multinode.nccl-test/3"
    backend: str  # `nccl` or `gloo`, as chosen by the workers
    timer: str = "clock"  # `cuda` (CUDA events) or `clock`
    workers: tuple[int, ...]  # of each node
    devices: tuple[str, ...] = ()  # a line for each worker, in the order of ranks
    test: CollectiveTest  # what was asked for
    mtu: int | None = None  # the smallest of the NICs, in bytes; None if one is unknown, or for one node
    ceiling_gb_per_s: float | None = None  # payload that TCP carries over such a link at best
    # raw TCP at the slowest place of the ring of nodes, each pair over as many connections as were best; None if it was
    # not tried
    tcp_gb_per_s: float | None = None
    # ib_write_bw around the same ring, over all RDMA ports that the collectives used; empty if they used none, or it is
    # not installed on every node. `rdma_gb_per_s` is its slowest place.
    rdma: tuple[PairSpeed, ...] = ()
    rdma_gb_per_s: float | None = None
    rows: tuple[CollectiveRow, ...]  # a row a message
    tcp: RawTcp = RawTcp()
    odd: tuple[NetworkFinding, ...] = ()
    path: NicPathCheck | None = None
    nccl: NcclPath | None = None  # how NCCL connected, by its own log; None with gloo
    like: StepEstimate | None = None  # the training whose messages were measured; None if sizes were given
    verdict: Verdict
    changes: ScanChanges | None = None  # since the earlier scan that it was compared with
    states: tuple[NodeState, ...] = ()  # what of each node bears on its speed, for later comparisons
    directory: str

    @property
    def title(self) -> str:
        """The workers and nodes, in a few words."""
        nodes = format_count(len(self.nodes), "node")
        return f"{self.backend}, {self.world_size} workers on {nodes}"

    @property
    def workers_in_words(self) -> str:
        """`2 workers per node`, `2 + 1 workers`."""
        if len(set(self.workers)) == 1:
            return f"{format_count(self.workers[0], 'worker')} per node"
        return f"{' + '.join(map(str, self.workers))} workers"

    @property
    def levels(self) -> dict[str, float]:
        """Bounds of busbw in GB/s, by name."""
        levels = {"TCP line rate": self.ceiling_gb_per_s, "raw TCP": self.tcp_gb_per_s, "raw RDMA": self.rdma_gb_per_s}
        return {name: level for name, level in levels.items() if level is not None}


def nics_of(places: Sequence[Place], facts: Mapping[str, NodeFacts]) -> dict[str, Interface]:
    """The data-plane NIC of each node, if known."""
    return {
        place.node: nic
        for place in places
        if place.node in facts
        for nic in or_empty(facts[place.node].interfaces)
        if nic.name == place.endpoint.ifname
    }


def summarise_scan(
    plan: LaunchPlan,
    facts: Mapping[str, NodeFacts],
    tcp: RawTcp,
    samples: Mapping[int, Sequence[Sample]],
    directory: str,
) -> ScanReport:
    """The report of a finished collective test."""
    if not isinstance(plan.test, CollectiveTest):
        raise TypeError(f"run {plan.run_id} is not a collective test")
    layout = Layout.of(plan.workers)
    measured = list(_measured(plan, samples))
    workers = [sample for each in samples.values() for sample in each if isinstance(sample, BenchmarkSample)]
    backend = next((worker.backend for worker in workers), "unknown")
    nccl = _nccl(samples.values())
    nics_by_node = {
        place.node: logged.used if (logged := _nccl([samples.get(place.node_rank, ())])) else ()
        for place in plan.places
    }
    indices = {sample.index for sample in measured}
    in_turns_gb_per_s = {index: slowest_gb_per_s(read_ring(plan, samples, index).ring) for index in indices}
    rows = collective_rows(measured, plan.world_size, in_turns_gb_per_s)
    path = check_nic_path(
        measured,
        nics={
            place.node_rank: tuple(
                dict.fromkeys([place.endpoint.ifname, *(used if place.endpoint.ifname in used else ())])
            )
            for place in plan.places
            if place.endpoint.ifname is not None
            for used in (nics_by_node[place.node],)
        },
        layout=layout,
        backend=backend,
        node_names=[place.node for place in plan.places],
    )
    rdma = read_rdma(plan, samples)
    evidence = ScanEvidence(
        rows=rows,
        layout=layout,
        backend=backend,
        nics=nics_of(plan.places, facts) if layout.nodes > 1 else {},
        nics_gbit_per_s=_nics(facts, nics_by_node, path) if layout.nodes > 1 else {},
        tcp=tcp,
        rdma=rdma,
        path=path,
        over_rdma=path.over_rdma or (nccl is not None and nccl.over_rdma),
        link_layer=_link_layer(facts, nics_by_node, path),
        bonds=_bonds(facts, plan.places, nics_by_node, path),
        wait_share_by_node=_wait_shares(plan, measured),
        busy_percent_by_node=_busy(plan, samples),
    )
    ceiling_gb_per_s, tcp_gb_per_s = evidence.goodput_gb_per_s, slowest_gb_per_s(tcp.ring)
    if path.ok is not False and not evidence.over_rdma:
        # Bytes on another path do not count.
        rows = with_shares(rows, ceiling_gb_per_s, tcp_gb_per_s)
    return ScanReport(
        run_id=plan.run_id,
        backend=backend,
        timer=next((worker.timer for worker in workers), "clock"),
        world_size=plan.world_size,
        nodes=tuple(place.node for place in plan.places),
        workers=plan.workers,
        devices=_devices(plan, workers),
        test=plan.test,
        link_gbit_per_s=evidence.link_gbit_per_s,
        mtu=evidence.mtu,
        ceiling_gb_per_s=ceiling_gb_per_s,
        tcp_gb_per_s=tcp_gb_per_s,
        rdma=rdma,
        rdma_gb_per_s=slowest_gb_per_s(rdma),
        rows=rows,
        curves=_curves(rows),
        tcp=tcp,
        odd=evidence.odd,
        path=path,
        nccl=nccl,
        verdict=judge_scan(evidence),
        states=tuple(
            _node_state(facts[place.node], place.endpoint.ifname) for place in plan.places if place.node in facts
        ),
        directory=directory,
    )


def _node_state(facts: NodeFacts, ifname: str | None) -> NodeState:
    interfaces, gpus = or_empty(facts.interfaces), or_empty(facts.gpus)
    nic = next((interface for interface in interfaces if interface.name == ifname), Interface(name=""))
    models = Counter(gpu.name for gpu in gpus)
    return NodeState(
        name=facts.node,
        ifname=ifname,
        link_gbit_per_s=nic.speed_gbit_per_s,
        mtu=nic.mtu,
        duplex=nic.duplex,
        driver=nic.driver,
        python=or_none(facts.python_version),
        torch=entries(facts.packages).get("torch"),
        nccl=or_none(facts.nccl_version),
        cuda=or_none(facts.cuda_version),
        gpu=", ".join(f"{count} x {name}" for name, count in models.items()) or None,
        gpu_driver=next((gpu.driver for gpu in gpus if gpu.driver), None),
        cores=or_none(facts.cores),
    )


def estimate_step(step: StepMessages, rows: Iterable[CollectiveRow], curves: Mapping[str, SizeCurve]) -> StepEstimate:
    """Time of the messages of a step, from the curve of each collective, or its only size."""
    single = {row.collective: row for row in rows}

    def time_of(collective: str, size_bytes: float) -> float | None:
        if collective in curves:
            return curves[collective].predict_us(size_bytes)
        row = single.get(collective)
        # With one size, larger ones scale, and smaller ones take no longer.
        return row.time_us.value * max(1.0, size_bytes / row.size_bytes) if row is not None else None

    return StepEstimate(**msgspec.structs.asdict(step), step_us=estimate_step_us(step, time_of))


def _measured(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]]) -> Iterator[CollectiveSample]:
    messages = plan.test.messages if isinstance(plan.test, CollectiveTest) else ()
    seen: set[tuple[int, int]] = set()
    for place in plan.places:
        for sample in samples.get(place.node_rank, ()):
            if not isinstance(sample, CollectiveSample) or sample.rank not in place.ranks:
                continue
            message = messages[sample.index] if 0 <= sample.index < len(messages) else None
            if message is None or message.collective != sample.collective or (sample.rank, sample.index) in seen:
                continue
            # Rounded to the number of workers, at least one element each.
            most = max(message.size_bytes, plan.world_size * _LARGEST_ELEMENT_BYTES)
            is_known = sample.dtype in DTYPE_BYTES and sample.redop in {*REDOPS, "none"}
            if (
                is_known
                and 0 < sample.size_bytes <= most
                and all(0 < time_us < math.inf for time_us in sample.times_us)
            ):
                seen.add((sample.rank, sample.index))
                yield sample


def _nics(
    facts: Mapping[str, NodeFacts], by_node: Mapping[str, tuple[str, ...]], path: NicPathCheck
) -> dict[str, tuple[float, ...]]:
    rates_of = {}
    for node, used in by_node.items():
        ports = [name.replace("/", ":") for name in path.rdma_ports(node)]
        names = [name.split("/")[0] for name in used] or ports
        facts_of_node = facts.get(node) or NodeFacts(node=node)
        rates: dict[str, float | None] = {nic.name: nic.speed_gbit_per_s for nic in or_empty(facts_of_node.interfaces)}
        used_ports = [port for port in facts_of_node.rdma if f"{port.device}:{port.port}" in names]
        carried = carried_gbit_per_s(used_ports)
        rates |= {f"{port.device}:{port.port}": rate for port, rate in zip(used_ports, carried, strict=True)}
        each = tuple(rate for name in dict.fromkeys(names) if (rate := rates.get(name)))
        if each and len(each) == len(dict.fromkeys(names)):
            rates_of[node] = each
    return rates_of


def _ports_used(node: str, by_node: Mapping[str, tuple[str, ...]], path: NicPathCheck) -> set[str]:
    """`device:port` of RDMA NICs, and interface names."""
    return {name.split("/")[0] for name in by_node.get(node, ())} | {
        name.replace("/", ":") for name in path.rdma_ports(node)
    }


def _link_layer(
    facts: Mapping[str, NodeFacts], by_node: Mapping[str, tuple[str, ...]], path: NicPathCheck
) -> str | None:
    layers = {
        port.link_layer
        for node, known in facts.items()
        for used in (_ports_used(node, by_node, path),)
        for port in known.rdma
        if f"{port.device}:{port.port}" in used
    }
    return layers.pop() if len(layers) == 1 else None


def _bonds(
    facts: Mapping[str, NodeFacts],
    places: Sequence[Place],
    by_node: Mapping[str, tuple[str, ...]],
    path: NicPathCheck,
) -> tuple[str, ...]:
    """An RDMA device is a bond if its interface is one."""
    names = [
        name
        for place in places
        for known in (facts.get(place.node) or NodeFacts(node=place.node),)
        for used in (_ports_used(place.node, by_node, path),)
        for bond in or_empty(known.interfaces)
        if bond.driver == "bond"
        for name in (
            *((bond.name,) if bond.name in used else ()),
            *(port.device for port in known.rdma if port.ifname == bond.name and f"{port.device}:{port.port}" in used),
        )
    ]
    return tuple(dict.fromkeys(names))


def _curves(rows: Sequence[CollectiveRow]) -> dict[str, SizeCurve]:
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        points.setdefault(row.collective, {})[row.size_bytes] = row.time_us.value
    curves = {name: fit_curve(sorted(mine.items())) for name, mine in points.items() if len(mine) >= _LEAST_SIZES}
    # Of times that do not grow, any larger message would be free.
    return {name: curve for name, curve in curves.items() if curve.bandwidth_gb_per_s is not None}


def _wait_shares(plan: LaunchPlan, samples: Iterable[CollectiveSample]) -> dict[str, float]:
    by_message: dict[int, dict[int, CollectiveSample]] = {}
    for sample in samples:
        # A root never waits, so its time says nothing.
        if sample.collective != "broadcast":
            by_message.setdefault(sample.index, {})[sample.rank] = sample
    shares: dict[int, list[float]] = {}
    for workers in by_message.values():
        if len(workers) == plan.world_size:
            for iteration in zip(*(worker.times_us for worker in workers.values()), strict=False):
                fastest, slowest = min(iteration), max(iteration)
                for rank, time_us in zip(workers, iteration, strict=True):
                    if slowest > 0:
                        shares.setdefault(rank, []).append((time_us - fastest) / slowest)
    return {
        place.node: min(statistics.median(shares[rank]) for rank in place.ranks)
        for place in plan.places
        if all(rank in shares for rank in place.ranks)
    }


def _busy(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]]) -> dict[str, float]:
    busy = {
        place.node: [
            sample.busy_percent
            for sample in samples.get(place.node_rank, ())
            if isinstance(sample, CpuSample) and sample.busy_percent is not None
        ]
        for place in plan.places
    }
    return {name: statistics.median(values) for name, values in busy.items() if values}


def _devices(plan: LaunchPlan, workers: Iterable[BenchmarkSample]) -> tuple[str, ...]:
    names = {rank: place.node for place in plan.places for rank in place.ranks}
    return tuple(
        clean_log(f"Rank {worker.rank:2d} on {names.get(worker.rank, '?')} device {worker.device or 'cpu'}")
        for worker in sorted(workers, key=lambda worker: worker.rank)
    )


def _nccl(samples: Iterable[Sequence[Sample]]) -> NcclPath | None:
    return parse_nccl_log(
        clean_log(line)
        for each in samples
        for sample in each
        if isinstance(sample, NcclSample)
        for line in sample.lines
    )
