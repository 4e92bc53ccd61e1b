"""The tables of a bench, for terminal, page and Markdown: devices, speeds of workers, sizes, unmeasured tests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from multinode.bench.figures import (
    BEST,
    CAPABILITY,
    CORES,
    CV,
    DEVICE,
    DTYPE,
    LABEL,
    MATRIX_ROWS,
    MEDIAN,
    MEMORY_RATE,
    OF_SHEET,
    PHASE,
    SENSORS,
    SLOW_BELOW,
    TFLOPS,
    THREADS,
    TORCH,
    WHOSE,
    WHOSE_BEST,
    WHOSE_WORST,
    WHY,
    WORKER,
    WORST,
    BenchReport,
    BenchTest,
    BenchWorker,
    DeviceSpeed,
    Speeds,
    speed_in,
)
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.profile.machine_use import NODE_NAME
from multinode.records.benchmark import LAUNCH_US
from multinode.render.sheet import Sheet
from multinode.stats.estimate import known_median

# Above this number, only the slowest rows are shown.
_MOST_ROWS = 32
_MOST_SMALL = 16
_SLOW = f"! slow: below {SLOW_BELOW:.0%} of the speed of its peers"
_SLOW_NOTE = f"{_SLOW}; the 95% confidence interval of its relative speed excludes 1"
_LAUNCH_NOTE = f"~ lower bound: a call takes less time than launching it from Python ({LAUNCH_US:.0f} us)"
_WAYS = (" forward", " forward + backward")
_WHERE = (NODE_NAME, WORKER, PHASE)

# The tests that a column joins: of each the fastest.
_Picks = tuple[Callable[[BenchTest], bool], ...]
_Columns = Mapping[Figure[Speeds], _Picks]


class WorkerSpeeds(msgspec.Struct, frozen=True):
    """A worker in a phase, with its speeds by column; not all are unknown."""

    node: str
    rank: int
    phase: str
    by_column: dict[Figure[Speeds], Speeds]

    @property
    def speeds(self) -> list[DeviceSpeed]:
        """All that were measured."""
        return [speed for speeds in self.by_column.values() for speed in speeds if speed is not None]

    @property
    def standing(self) -> float:
        """Its median share of the peers' speed."""
        ratios = [speed.of_peers for speed in self.speeds if speed.of_peers is not None]
        return statistics.median(ratios) if ratios else 1.0


def main_speeds(report: BenchReport) -> tuple[list[Figure[Speeds]], list[WorkerSpeeds]]:
    """The deciding columns, the fastest matrix product and the copy, and their rows."""
    tests = [test for worker in report.workers for test in worker.tests]
    products = [test for test in tests if test.kind == "matmul" and test.speeds]
    fastest = max(products, key=lambda test: max(speed.value.value for speed in test.speeds), default=None)
    columns: dict[Figure[Speeds], _Picks] = {}
    if fastest is not None:
        product = speed_in(TFLOPS.as_form("interval"), f"matmul {fastest.dtype}")
        columns[product] = (_of(kind="matmul", dtype=fastest.dtype),)
    columns[speed_in(MEMORY_RATE.as_form("interval"), "copy")] = (_of(kind="memory", name="copy"),)
    return [*columns], _worker_speeds(report, columns)


def small_sheet(report: BenchReport) -> Sheet:
    """The deciding columns; of many workers the slowest."""
    columns, rows = main_speeds(report)
    shown, notes = _slowest(rows, _MOST_SMALL)
    marked = (_SLOW.replace(" slow:", ""),) if any(speed.slow for row in shown for speed in row.speeds) else ()
    return Frame(rows=tuple(map(_row, shown)), figures=(*_WHERE, *columns)).sheet(notes=(*marked, *notes))


def bench_sheets(report: BenchReport) -> tuple[Sheet, ...]:
    """Non-empty sheets: devices, products, memory, layers by type, products by size, unmeasured tests."""
    tests = [test for worker in report.workers for test in worker.tests]
    dtypes = dict.fromkeys(test.dtype for test in tests if test.kind == "matmul")
    products = {speed_in(TFLOPS, dtype): (_of(kind="matmul", dtype=dtype),) for dtype in dtypes}
    moved = dict.fromkeys((test.kind, test.name) for test in tests if test.kind in {"memory", "bus"})
    memory = {speed_in(MEMORY_RATE, name): (_of(kind=kind, name=name),) for kind, name in moved}
    of_sheet = "speed at the fastest size of each type; %: share of the data sheet's figure"
    sheets = [
        _device_sheet(report),
        _speed_sheet(report, "matrix products", products, of_sheet),
        _speed_sheet(report, "memory", memory),
    ]
    layers = [test for test in tests if test.kind == "layers"]
    # Two speeds in a cell leave no room for a share; the title has their unit.
    speed = msgspec.structs.replace(TFLOPS, unit="")
    for dtype in dict.fromkeys(test.dtype for test in layers):
        names = dict.fromkeys(test.name.removesuffix(_WAYS[1]).removesuffix(_WAYS[0]) for test in layers)
        columns = {
            speed_in(speed, name): tuple(_of(kind="layers", dtype=dtype, name=name + way) for way in _WAYS)
            for name in names
        }
        title = f"transformer layers in {dtype}, {TFLOPS.unit} {' /'.join(_WAYS).strip()}"
        sheets.append(_speed_sheet(report, title, columns))
    sheets += [_size_sheet(report), _unmeasured_sheet(report)]
    return tuple(sheet for sheet in sheets if sheet.rows)


def _of(**wanted: str) -> Callable[[BenchTest], bool]:
    return lambda test: all(getattr(test, name) == value for name, value in wanted.items())


def _worker_speeds(report: BenchReport, columns: _Columns) -> list[WorkerSpeeds]:
    rows = (
        WorkerSpeeds(
            node.node,
            worker.rank,
            phase,
            {column: _fastest(worker, phase, picks) for column, picks in columns.items()},
        )
        for node in report.nodes
        for worker in node.workers
        for phase in report.phases
    )
    return [row for row in rows if row.speeds]


def _fastest(worker: BenchWorker, phase: str, picks: _Picks) -> Speeds:
    speeds = [[speed for test in worker.tests if pick(test) and (speed := test.speed(phase))] for pick in picks]
    return tuple(max(some, key=_value, default=None) for some in speeds)


def _value(speed: DeviceSpeed) -> float:
    return speed.value.value


def _slowest(rows: Sequence[WorkerSpeeds], most: int) -> tuple[Sequence[WorkerSpeeds], tuple[str, ...]]:
    if len(rows) <= most:
        return rows, ()
    return sorted(rows, key=lambda row: row.standing)[:most], (f"the slowest {most} of {len(rows)} rows",)


def _row(worker: WorkerSpeeds) -> Row:
    where = {NODE_NAME: worker.node, WORKER: worker.rank, PHASE: worker.phase}
    return _of_figures(worker, where | worker.by_column | {SENSORS: _sensors(worker.speeds)})


def _of_figures(item: object, values: Mapping[Figure[Any], Any]) -> Row:
    return Row(item, {figure.name: value for figure, value in values.items()})


def _sensors(speeds: Sequence[DeviceSpeed]) -> tuple[float | None, ...]:
    """Clock and power while they were timed, medians."""
    return tuple(known_median(getattr(speed, name) for speed in speeds) for name in ("clock_mhz", "power_w"))


def _sensed(speeds: Iterable[DeviceSpeed]) -> tuple[Figure[Any], ...]:
    """The column of sensors, where there are any."""
    return (SENSORS,) if any(speed.clock_mhz is not None for speed in speeds) else ()


def _speed_sheet(report: BenchReport, title: str, columns: _Columns, note: str = "") -> Sheet:
    rows = _worker_speeds(report, columns)
    shown, left_out = _slowest(rows, _MOST_ROWS)
    speeds = [speed for row in shown for speed in row.speeds]
    marked = _SLOW_NOTE if any(speed.slow for speed in speeds) else ""
    bound = _LAUNCH_NOTE if any(speed.launch_bound for speed in speeds) else ""
    return Frame(
        title=title,
        rows=(*map(_row, shown), *(_extremes(rows, columns) if len(rows) > 1 else ())),
        figures=(*_WHERE, *columns, *_sensed(speed for row in rows for speed in row.speeds)),
    ).sheet(notes=(*filter(None, (marked, bound, note)), *left_out))


def _extremes(rows: Sequence[WorkerSpeeds], columns: Iterable[Figure[Speeds]]) -> Iterator[Row]:
    """The best and the worst of each column, without marks."""
    every = {column: [*zip(*(row.by_column[column] for row in rows), strict=True)] for column in columns}
    for extreme, choose in ((BEST, max), (WORST, min)):
        chosen = {
            column: tuple(_bare(choose(filter(None, some), key=_value, default=None)) for some in speeds)
            for column, speeds in every.items()
        }
        yield _of_figures(None, {NODE_NAME: extreme.title, WORKER: "", PHASE: "", **chosen, SENSORS: ()})


def _bare(speed: DeviceSpeed | None) -> DeviceSpeed | None:
    return speed and msgspec.structs.replace(speed, of_peak=None, slow=False, launch_bound=False)


def _device_sheet(report: BenchReport) -> Sheet:
    figures = (NODE_NAME, WORKER, DEVICE, THREADS, CORES, CAPABILITY, TORCH)
    return _cut(
        "devices", figures, [_device_row(node.node, worker) for node in report.nodes for worker in node.workers]
    )


def _cut(title: str, figures: tuple[Figure[Any], ...], rows: Sequence[Row]) -> Sheet:
    notes = (f"and {len(rows) - _MOST_ROWS} more",) if len(rows) > _MOST_ROWS else ()
    return Frame(title=title, figures=figures, rows=tuple(rows[:_MOST_ROWS])).sheet(notes=notes)


def _device_row(node: str, worker: BenchWorker) -> Row:
    return _of_figures(
        worker,
        {
            NODE_NAME: node,
            WORKER: worker.rank,
            DEVICE: worker.name,
            THREADS: worker.threads if worker.device == "cpu" else None,
            CORES: worker.cores,
            CAPABILITY: worker.capability or None,
            TORCH: worker.torch or None,
        },
    )


def _size_sheet(report: BenchReport) -> Sheet:
    by_label: dict[str, list[tuple[str, BenchTest]]] = {}
    for whose, test in _named_tests(report):
        if test.kind == "matmul":
            by_label.setdefault(test.label, []).append((whose, test))
    speeds = [speed for tests in by_label.values() for _, test in tests for speed in test.speeds]
    sensed = _sensed(speeds)
    return Frame(
        title="matrix products by type and size",
        rows=tuple(row for tests in by_label.values() for phase in report.phases for row in _size_row(tests, phase)),
        figures=(
            *(DTYPE, MATRIX_ROWS, PHASE, BEST, WHOSE_BEST, MEDIAN, WORST, WHOSE_WORST, OF_SHEET, CV),
            *sensed,
        ),
    ).sheet(
        notes=(
            *((_LAUNCH_NOTE,) if any(speed.launch_bound for speed in speeds) else ()),
            "; ".join(f"{figure.title}: {figure.about}" for figure in (OF_SHEET, CV)),
            *(f"{figure.title}: {figure.about}" for figure in sensed),
        )
    )


def _size_row(tests: Sequence[tuple[str, BenchTest]], phase: str) -> Iterator[Row]:
    test = tests[0][1]
    timed = [(who, speed) for who, test in tests if (speed := test.speed(phase)) is not None]
    if not timed:
        return
    (best_of, best), (worst_of, worst) = (choose(timed, key=lambda entry: _value(entry[1])) for choose in (max, min))
    yield _of_figures(
        test,
        {
            DTYPE: test.dtype,
            MATRIX_ROWS: test.size,
            PHASE: phase,
            BEST: best,
            WHOSE_BEST: best_of,
            MEDIAN: statistics.median(_value(speed) for _, speed in timed),
            WORST: worst,
            WHOSE_WORST: worst_of,
            OF_SHEET: best.of_peak,
            CV: statistics.median(speed.cv for _, speed in timed),
            SENSORS: _sensors([best]),
        },
    )


def _unmeasured_sheet(report: BenchReport) -> Sheet:
    workers: dict[tuple[str, str], list[str]] = {}
    for whose, test in _named_tests(report):
        if test.error is not None:
            workers.setdefault((test.label, str(test.error.figures[WHY.name])), []).append(whose)
    rows = [
        _of_figures(names, {LABEL: label, WHOSE: _first_of(names), WHY: error})
        for (label, error), names in workers.items()
    ]
    return _cut("not measured", (LABEL, WHOSE, WHY), rows)


def _named_tests(report: BenchReport) -> Iterator[tuple[str, BenchTest]]:
    for node in report.nodes:
        for worker in node.workers:
            yield from ((f"{node.node}/{worker.rank}", test) for test in worker.tests)


def _first_of(workers: Sequence[str]) -> str:
    return workers[0] + (f" and {len(workers) - 1} others" if len(workers) > 1 else "")
