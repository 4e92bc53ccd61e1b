"""Export records as flat CSV files, one per kind, with units in the column names. Raw values without averages.

Cells that a spreadsheet would treat as formulas are marked as text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from multinode.profile.nics import nic_rates
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.progress import BLOCKED
from multinode.records.samples import (
    CgroupSample,
    CollectiveSample,
    CpuSample,
    DdpSample,
    DeviceWaitSample,
    GpuSample,
    GroupSample,
    LossSample,
    NicSample,
    StepSample,
    TcpSample,
    TrafficSample,
)
from multinode.render.csv_text import harmless

_Row = dict[str, Any]
_Columns = tuple[str, ...]

_PHASES = ("data", "forward", "backward", "optimizer", *BLOCKED)
_NODE = ("run_id", "node", "node_rank")
_STEP = (
    *("rank", "step", "total_steps", "time_s", "mono_ns", "step_time_us", "samples", "micro_steps", "tokens"),
    *("effective_tokens", "peak_memory_bytes", "peak_reserved_bytes", "traffic"),
)
_NIC = (
    *("time_s", "mono_ns", "ifname", "rx_bytes", "tx_bytes", "rx_packets", "tx_packets"),
    *("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
)
_RATES = ("in_gbit_per_s", "out_gbit_per_s")
_DDP = ("forward_us", "backward_us", "comm_us", "overlap_us")
_TCP = ("sent_segments", "retransmitted_segments")
_CGROUP = ("quota_cores", "throttled_us", "periods", "throttled_periods")
_COLLECTIVE = ("rank", "local_rank", "index", "collective", "dtype", "redop", "size_bytes", "count", "num_wrong")
_CALL = ("op", "group", "size_bytes", "count", "source")


def _fields(sample: object, names: Iterable[str], prefix: str = "") -> _Row:
    return {prefix + name: getattr(sample, name) for name in names} if sample is not None else {}


def _named(prefix: str, names: Iterable[str]) -> _Columns:
    return tuple(prefix + name for name in names)


def _steps(observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    counted = set(observed.counted)
    ddp = {(sample.rank, sample.step): sample for sample in node.of(DdpSample)}
    waits = {(sample.rank, sample.step): sample.wait_us for sample in node.of(DeviceWaitSample)}
    losses = {(sample.rank, sample.step): sample.loss for sample in node.of(LossSample)}
    for sample in node.of(StepSample):
        key = sample.rank, sample.step
        yield {
            **_fields(sample, _STEP),
            "counted": int(sample.step in counted),
            **{f"phase_{phase}_us": (sample.phases_us or {}).get(phase) for phase in _PHASES},
            **_fields(ddp.get(key), _DDP, "ddp_"),
            "device_wait_us": waits.get(key),
            "loss": losses.get(key),
        }


def _network(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    rates = {
        (ifname, rate.sample.mono_ns): rate for ifname, taken in nic_rates(node.of(NicSample)).items() for rate in taken
    }
    for sample in node.of(NicSample):
        yield {
            **_fields(sample, _NIC),
            **_fields(rates.get((sample.ifname, sample.mono_ns)), _RATES),
            "link_gbit_per_s": node.link_gbit_per_s if sample.ifname == node.ifname else None,
        }


def _gpus(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    for sample in node.of(GpuSample):
        yield {**_fields(sample, sample.__struct_fields__), "throttle": " ".join(sample.throttle)}


def _cpu(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    tcp = {sample.mono_ns: sample for sample in node.of(TcpSample)}
    cgroups = {sample.mono_ns: sample for sample in node.of(CgroupSample)}
    for sample in node.of(CpuSample):
        yield {
            **_fields(sample, sample.__struct_fields__),
            **_fields(tcp.get(sample.mono_ns), _TCP, "tcp_"),
            **_fields(cgroups.get(sample.mono_ns), _CGROUP, "cgroup_"),
        }


def _collectives(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    for sample in node.of(CollectiveSample):
        for iteration, time_us in enumerate(sample.times_us, 1):
            yield {**_fields(sample, _COLLECTIVE), "iteration": iteration, "time_us": time_us}


def _calls(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    """One row per kind of call in a step; `traffic` refers to steps.csv."""
    groups = {(sample.rank, sample.group): sample for sample in node.of(GroupSample)}
    for sample in node.of(TrafficSample):
        for call in sample.calls:
            group = groups.get((sample.rank, call.group))
            yield {
                **_fields(sample, ("rank", "traffic")),
                **_fields(call, _CALL),
                **_fields(group, ("backend",)),
                "group_ranks": " ".join(map(str, group.ranks)) if group else None,
            }


_Rows = Callable[[Observed, ObservedNode], Iterator[_Row]]
_KINDS: dict[str, tuple[_Rows, _Columns]] = {
    "steps.csv": (
        _steps,
        (
            *(*_STEP, "counted", *(f"phase_{phase}_us" for phase in _PHASES)),
            *(*_named("ddp_", _DDP), "device_wait_us", "loss"),
        ),
    ),
    "network.csv": (_network, (*_NIC, *_RATES, "link_gbit_per_s")),
    "gpus.csv": (_gpus, GpuSample.__struct_fields__),
    "cpu.csv": (_cpu, (*CpuSample.__struct_fields__, *_named("tcp_", _TCP), *_named("cgroup_", _CGROUP))),
    "collectives.csv": (_collectives, (*_COLLECTIVE, "iteration", "time_us")),
    "calls.csv": (_calls, ("rank", "traffic", *_CALL, "backend", "group_ranks")),
}
FILES = tuple(_KINDS)


def csv_files(runs: Iterable[Observed]) -> dict[str, str]:
    """The files by name; runs are consecutive, with a `run_id` column.

    Every file has its header, even without rows.
    """
    runs = list(runs)
    return {name: _file(runs, rows, columns) for name, (rows, columns) in _KINDS.items()}


def sample_tables(observed: Observed) -> dict[str, tuple[tuple[str, ...], Iterator[_Row]]]:
    """Columns and rows of each kind by name (`steps` and so on), as values."""
    return {
        name.removesuffix(".csv"): ((*_NODE, *columns), _placed(observed, rows))
        for name, (rows, columns) in _KINDS.items()
    }


def _placed(observed: Observed, rows: _Rows) -> Iterator[_Row]:
    for node in observed.nodes:
        place = {"run_id": observed.run_id, "node": node.name, "node_rank": node.node_rank}
        for row in rows(observed, node):
            yield place | row


def _file(runs: Iterable[Observed], rows: _Rows, columns: tuple[str, ...]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=(*_NODE, *columns), lineterminator="\n")
    writer.writeheader()
    for observed in runs:
        for row in _placed(observed, rows):
            writer.writerow({name: harmless(value) for name, value in row.items()})
    return text.getvalue()
