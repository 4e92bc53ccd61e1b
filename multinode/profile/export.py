"""Export records as flat CSV files, one per kind, with units in the column names. Raw values without averages.

Cells that a spreadsheet would treat as formulas are marked as text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure
from multinode.profile.nics import nic_rates
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.progress import BLOCKED
from multinode.records.sample_figures import (
    CALL,
    CGROUP,
    COLLECTIVE,
    CPU,
    DDP,
    GPU,
    NIC,
    RANK,
    STEP,
    TCP,
    TRAFFIC,
)
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
_Rows = Callable[[Observed, ObservedNode], Iterator[_Row]]
_Figures = tuple[Figure[Any], ...]


class SampleTable(msgspec.Struct, frozen=True):
    """One kind of samples as a table; a file of its name."""

    name: str
    about: str  # what a row is
    figures: _Figures  # the columns
    rows: _Rows


def _fields(sample: object, figures: Iterable[Figure[Any]], prefix: str = "") -> _Row:
    """The fields of a sample by column; the prefix of a column says which of several samples has it."""
    if sample is None:
        return {}
    return {figure.name: getattr(sample, figure.name.removeprefix(prefix)) for figure in figures}


def _steps(observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    counted = set(observed.counted)
    ddp = {(sample.rank, sample.step): sample for sample in node.of(DdpSample)}
    waits = {(sample.rank, sample.step): sample.wait_us for sample in node.of(DeviceWaitSample)}
    losses = {(sample.rank, sample.step): sample.loss for sample in node.of(LossSample)}
    for sample in node.of(StepSample):
        key = sample.rank, sample.step
        yield {
            **_fields(sample, STEP),
            _COUNTED.name: int(sample.step in counted),
            **{figure.name: (sample.phases_us or {}).get(phase) for phase, figure in _PHASES.items()},
            **_fields(ddp.get(key), DDP, "ddp_"),
            _DEVICE_WAIT.name: waits.get(key),
            _LOSS.name: losses.get(key),
        }


def _network(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    rates = {
        (ifname, rate.sample.mono_ns): rate for ifname, taken in nic_rates(node.of(NicSample)).items() for rate in taken
    }
    for sample in node.of(NicSample):
        yield {
            **_fields(sample, NIC),
            **_fields(rates.get((sample.ifname, sample.mono_ns)), _RATES),
            _LINK.name: node.link_gbit_per_s if sample.ifname == node.ifname else None,
        }


def _gpus(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    for sample in node.of(GpuSample):
        yield {**_fields(sample, GPU), "throttle": " ".join(sample.throttle)}


def _cpu(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    tcp = {sample.mono_ns: sample for sample in node.of(TcpSample)}
    cgroups = {sample.mono_ns: sample for sample in node.of(CgroupSample)}
    for sample in node.of(CpuSample):
        yield {
            **_fields(sample, CPU),
            **_fields(tcp.get(sample.mono_ns), TCP, "tcp_"),
            **_fields(cgroups.get(sample.mono_ns), CGROUP, "cgroup_"),
        }


def _collectives(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    for sample in node.of(CollectiveSample):
        for iteration, time_us in enumerate(sample.times_us, 1):
            yield {**_fields(sample, COLLECTIVE), _ITERATION.name: iteration, _TIME.name: time_us}


def _calls(_observed: Observed, node: ObservedNode) -> Iterator[_Row]:
    groups = {(sample.rank, sample.group): sample for sample in node.of(GroupSample)}
    for sample in node.of(TrafficSample):
        for call in sample.calls:
            group = groups.get((sample.rank, call.group))
            yield {
                **_fields(sample, (RANK, TRAFFIC)),
                **_fields(call, CALL),
                **_fields(group, (_BACKEND,)),
                _GROUP_RANKS.name: " ".join(map(str, group.ranks)) if group else None,
            }


_RUN = Figure[str]("run_id", about="id of the run")
_NODE = Figure[str]("node", about="name of the node")
_NODE_RANK = Figure[int]("node_rank", about="rank of the node")
_PLACE: _Figures = (_RUN, _NODE, _NODE_RANK)
_COUNTED = Figure[int]("counted", about="1 for measured steps, 0 for others")
_PHASES = {
    phase: Figure[float](f"phase_{phase}_us", about=f"time that the host spent in the phase `{phase}`")
    for phase in ("data", "forward", "backward", "optimizer", *BLOCKED)
}
_DEVICE_WAIT = Figure[float]("device_wait_us", about="time that the GPU's compute stream waited for collectives")
_LOSS = Figure[float]("loss", about="logged loss")
_RATES: _Figures = (
    Figure("in_gbit_per_s", about="receive rate since the previous sample"),
    Figure("out_gbit_per_s", about="send rate since the previous sample"),
)
_LINK = Figure[float]("link_gbit_per_s", about="negotiated rate of the data-plane NIC")
_ITERATION = Figure[int]("iteration", about="timed iteration, counted from 1")
_TIME = Figure[float]("time_us", about="time of the iteration")
_BACKEND = Figure[str]("backend", about="backend of the process group")
_GROUP_RANKS = Figure[str]("group_ranks", about="global ranks of the process group")

SAMPLE_TABLES = (
    SampleTable(
        "steps",
        "one step of one worker",
        (*STEP, _COUNTED, *_PHASES.values(), *DDP, _DEVICE_WAIT, _LOSS),
        _steps,
    ),
    SampleTable("network", "the counters of one NIC at one point in time", (*NIC, *_RATES, _LINK), _network),
    SampleTable("gpus", "one GPU at one point in time, as reported by NVML", GPU, _gpus),
    SampleTable("cpu", "the CPUs and memory of one node at one point in time", (*CPU, *TCP, *CGROUP), _cpu),
    SampleTable(
        "collectives",
        "one iteration of nccl-test on one worker",
        (*COLLECTIVE, _ITERATION, _TIME),
        _collectives,
    ),
    SampleTable(
        "calls",
        "one kind of call in the steps that have this `traffic` key",
        (RANK, TRAFFIC, *CALL, _BACKEND, _GROUP_RANKS),
        _calls,
    ),
)
FILES = tuple(f"{table.name}.csv" for table in SAMPLE_TABLES)


def csv_files(runs: Iterable[Observed]) -> dict[str, str]:
    """The files by name; runs are consecutive, with a `run_id` column.

    Every file has its header, even without rows.
    """
    runs = list(runs)
    return {name: _file(runs, table) for name, table in zip(FILES, SAMPLE_TABLES, strict=True)}


def sample_tables(observed: Observed) -> dict[str, tuple[tuple[str, ...], Iterator[_Row]]]:
    """Columns and rows of each kind by name (`steps` and so on), as values."""
    return {table.name: (columns_of(table), _placed(observed, table)) for table in SAMPLE_TABLES}


def columns_of(table: SampleTable) -> tuple[str, ...]:
    """The columns of its file."""
    return tuple(figure.name for figure in figures_of(table))


def figures_of(table: SampleTable) -> Sequence[Figure[Any]]:
    """Its figures, behind those of the run and the node."""
    return (*_PLACE, *table.figures)


def _placed(observed: Observed, table: SampleTable) -> Iterator[_Row]:
    for node in observed.nodes:
        place = {_RUN.name: observed.run_id, _NODE.name: node.name, _NODE_RANK.name: node.node_rank}
        for row in table.rows(observed, node):
            yield place | row


def _file(runs: Iterable[Observed], table: SampleTable) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns_of(table), lineterminator="\n")
    writer.writeheader()
    for observed in runs:
        for row in _placed(observed, table):
            writer.writerow({name: harmless(value) for name, value in row.items()})
    return text.getvalue()
