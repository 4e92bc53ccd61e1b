"""What the nodes of a made-up training recorded, for the tests of what was seen of its communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from multinode.profile.calls import read_calls
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.step_bytes import SeenTraffic, see_traffic
from multinode.records.samples import (
    CallCount,
    GroupSample,
    ModelSample,
    NicBytes,
    Sample,
    StepSample,
    TrafficSample,
    WorkerSample,
)
from multinode.stats.unknown import or_none

# The tiny model of scripts/make_tiny.py, trained in full in fp32.
PARAMETERS = 3_691_776
S = 4 * PARAMETERS
BUCKET = 4 << 20
STEPS = 20
WARM_UP = 5
STEP_NS = 100_000_000
BEGUN_NS = 5_000_000_000

Passed = Mapping[str, tuple[float, float]]
"""Payload that each NIC sent and received in a step."""


def see(observed: Observed) -> SeenTraffic:
    return see_traffic(observed, read_calls(observed))


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded: by each worker its calls, by each node what its NICs counted."""

    nodes: int = 2
    workers: int = 1
    unequal: tuple[int, ...] = ()  # workers of each node, where these differ
    backend: str = "gloo"
    calls: Callable[[int], Sequence[CallCount]] | None = None  # of a rank in each step
    # the groups of a rank, by name; the world without
    groups: Callable[[int], Mapping[str, tuple[int, ...]]] | None = None
    nics: Callable[[int, int], Passed] | None = None  # of a node in a step
    model: Mapping[str, Any] | None = None
    ifname: str | None = "ens1f0"
    ifnames: tuple[str, ...] = ()
    more: Callable[[int], Sequence[Sample]] | None = None
    micro_steps: int | None = None  # of a step

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Of each node."""
        ends = itertools.accumulate(self.unequal or (self.workers,) * self.nodes, initial=0)
        return tuple(tuple(range(first, end)) for first, end in itertools.pairwise(ends))

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(itertools.chain(*self.ranks))

    def observed(self) -> Observed:
        """As the analysis gets it."""
        return observe("r1", [self._node(node) for node in range(self.nodes)])

    def _node(self, node: int) -> ObservedNode:
        ranks = self.ranks[node]
        samples = [sample for rank in ranks for sample in self._worker(node, rank)]
        return ObservedNode(
            name=f"node-{node}",
            node_rank=node,
            ranks=ranks,
            ifname=self.ifname,
            ifnames=self.ifnames,
            samples=(*samples, *(self.more(node) if self.more else ())),
        )

    def _worker(self, node: int, rank: int) -> list[Sample]:
        groups = self.groups(rank) if self.groups else {"0": self.world}
        samples: list[Sample] = [
            WorkerSample(
                rank=rank,
                local_rank=self.ranks[node].index(rank),
                world_size=len(self.world),
                time_s=0.0,
                source="trainer",
                begun_mono_ns=BEGUN_NS,
            ),
            *(GroupSample(rank=rank, group=name, ranks=ranks, backend=self.backend) for name, ranks in groups.items()),
        ]
        if self.model is not None:
            samples.append(ModelSample(rank=rank, **self.model))
        if self.calls is not None:
            samples.append(TrafficSample(rank=rank, traffic=0, calls=tuple(self.calls(rank))))
        counters = self._counters(node) if rank == self.ranks[node][0] else [None] * STEPS
        samples.extend(
            StepSample(
                rank=rank,
                step=step,
                time_s=float(step),
                mono_ns=end_ns(step),
                step_time_us=STEP_NS / 1000,
                traffic=None if self.calls is None else 0,
                micro_steps=self.micro_steps,
                nics=nics,
            )
            for step, nics in enumerate(counters, 1)
        )
        return samples

    def _counters(self, node: int) -> list[dict[str, NicBytes] | None]:
        if self.nics is None:
            return [None] * STEPS
        totals: dict[str, NicBytes] = {}
        counters: list[dict[str, NicBytes] | None] = []
        for step in range(1, STEPS + 1):
            # The warm-up carries other things than the measured steps, which must not show.
            more = 3 if step <= WARM_UP else 1
            for name, (sent, received) in self.nics(node, step).items():
                totals[name] = _sum(totals.get(name), counted(more * sent, more * received, packets="/" not in name))
            counters.append(dict(totals))
        return counters


def end_ns(step: int) -> int:
    """When a step ended, by the node's monotonic clock."""
    return BEGUN_NS + 1_000_000_000 + step * STEP_NS


def counted(sent: float, received: float, *, packets: bool = True) -> NicBytes:
    """What a NIC counts for a payload: 66 bytes a packet more, and bare acknowledgements; RDMA ports count payload."""
    tx, rx = round(sent), round(received)
    if not packets:
        return NicBytes(tx_bytes=tx, rx_bytes=rx)
    tx_packets, rx_packets = tx // 1448 + rx // 2896, rx // 1448 + tx // 2896
    return NicBytes(
        tx_bytes=tx + 66 * tx_packets, rx_bytes=rx + 66 * rx_packets, tx_packets=tx_packets, rx_packets=rx_packets
    )


def _sum(one: NicBytes | None, other: NicBytes) -> NicBytes:
    if one is None:
        one = NicBytes(tx_bytes=10**9, rx_bytes=2 * 10**9, tx_packets=None if other.tx_packets is None else 10**6)
    return NicBytes(
        tx_bytes=one.tx_bytes + other.tx_bytes,
        rx_bytes=one.rx_bytes + other.rx_bytes,
        tx_packets=None if other.tx_packets is None else (one.tx_packets or 0) + other.tx_packets,
        rx_packets=None if other.rx_packets is None else (one.rx_packets or 0) + other.rx_packets,
    )


def call(op: str, size_bytes: float, count: int = 1, *, group: str = "0", source: str = "call") -> CallCount:
    return CallCount(op=op, group=group, size_bytes=size_bytes, count=count, source=source)


def ddp(_rank: int) -> list[CallCount]:
    """DDP's buckets: S in all."""
    return [
        call("all_reduce", BUCKET, 3, source="ddp"),
        call("all_reduce", S - 3 * BUCKET, source="ddp"),
        call("all_reduce", 4),
    ]


def zero2(accumulation: int) -> Callable[[int], list[CallCount]]:
    """DeepSpeed's ZeRO-2: all-reduces each micro-batch."""
    return lambda _rank: [call("all_reduce", S / 4, 4 * accumulation), call("all_gather", S), call("all_reduce", 8)]


def fsdp(_rank: int) -> list[CallCount]:
    """FSDP2, full shard: five units, of which all but the outermost are gathered twice."""
    unit = S / 9
    return [
        call("all_gather", 5 * unit),
        call("all_gather", unit, 8),
        call("reduce_scatter", 5 * unit),
        call("reduce_scatter", unit, 4),
    ]


def model(
    wrapper: str, *, stage: int | None = None, accumulation: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Fields of a ModelSample of the tiny model."""
    return {
        "wrapper": wrapper,
        "zero_stage": stage,
        "parameters": PARAMETERS,
        "trainable": PARAMETERS,
        "dtypes": {"float32": PARAMETERS},
        "trainable_dtypes": {"float32": PARAMETERS},
        "accumulation": accumulation,
        "device": "cpu",
        "settings": settings,
    }


def both_ways(size_bytes: float, name: str = "ens1f0") -> Callable[[int, int], Passed]:
    """Every NIC sends and receives so much per step."""
    return lambda _node, _step: {name: (size_bytes, size_bytes), "eth0": (2000, 3000), "docker0": (0, 0)}


DDP = Training(calls=ddp, model=model("ddp"), nics=both_ways(S))


def seen(training: Training, **changes: object) -> SeenTraffic:
    """The traffic of a training with these changes."""
    return see(msgspec.structs.replace(training, **changes).observed())


def figures(traffic: SeenTraffic) -> list[float | None]:
    """Bytes per step by the calls, by the backend's algorithm and by the NIC."""
    three = traffic.bytes_per_step
    return [or_none(size) for size in (three.calls, three.expected, three.nic)]


def hybrid_groups(rank: int) -> dict[str, tuple[int, ...]]:
    """Groups of two nodes with two workers each: of the workers of a node, and of those with one local rank."""
    first = rank // 2 * 2
    return {"inside": (first, first + 1), "across": (rank % 2, rank % 2 + 2)}


def hybrid_calls(_rank: int) -> list[CallCount]:
    """Hybrid sharding in them: shared inside a node, and each share all-reduced across."""
    return [
        call("all_gather", S, 2, group="inside"),
        call("reduce_scatter", S, group="inside"),
        call("all_reduce", S / 2, group="across"),
    ]
