"""The tables of a bench: a row a worker and phase, best and worst below them, and every size of the products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from multinode.analyse.bench.bench_figures import BenchNode, BenchReport, BenchTest, BenchWorker, Speed
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, format_sig, percent

__all__ = ["bench_sheets"]

# Of more rows the slowest are shown.
_MOST_ROWS = 32
# Below it, digits are counted from the first one that is none.
_SMALL = 0.1
_SLOW_NOTE = "! is slow: below its like by more than the timings scatter"
_WAYS = (" forward", " forward + backward")


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in a phase."""

    node: str
    worker: BenchWorker
    phase: str


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a cell: the fastest of the tests of a kind with this dtype, or this name, or both."""

    kind: str
    dtype: str | None = None
    name: str | None = None

    def best(self, row: _Row) -> Speed | None:
        """In the row's phase."""
        speeds = [
            speed
            for test in row.worker.tests
            if test.kind == self.kind and self.dtype in {None, test.dtype} and self.name in {None, test.name}
            if (speed := test.speed(row.phase)) is not None
        ]
        return max(speeds, key=lambda speed: speed.value, default=None)


class _Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """A sheet of speeds."""

    title: str
    unit: str = ""  # Of its figures, where the title does not name it.
    columns: dict[str, tuple[_Asked, ...]]  # By title, what stands in a cell, with a stroke between them.
    shares: bool = True  # Whether each figure stands beside its share of the data sheet's.
    notes: tuple[str, ...] = ()  # A sentence each.


def bench_sheets(report: BenchReport) -> tuple[Sheet, ...]:
    """Devices; products; memory; layers, by type; products by size; what could not be measured. None of them empty."""
    sheets = [_device_sheet(report.nodes)]
    sheets += [_speed_sheet(report, wanted) for wanted in (_products(report), _memory(report), *_layers(report))]
    sheets += [_size_sheet(report), _unmeasured_sheet(report)]
    return tuple(sheet for sheet in sheets if sheet.rows)


def _products(report: BenchReport) -> _Speeds:
    dtypes = dict.fromkeys(test.dtype for test in _all_tests(report) if test.kind == "matmul")
    return _Speeds(
        title="matrix products",
        unit="TFLOP/s",
        columns={dtype: (_Asked(kind="matmul", dtype=dtype),) for dtype in dtypes},
        notes=("the fastest size of each type; % is of the data sheet's figure",),
    )


def _memory(report: BenchReport) -> _Speeds:
    moved = dict.fromkeys((test.kind, test.name) for test in _all_tests(report) if test.kind in {"memory", "bus"})
    columns: dict[str, tuple[_Asked, ...]] = {name: (_Asked(kind=kind, name=name),) for kind, name in moved}
    return _Speeds(title="memory", unit="GB/s", columns=columns)


def _layers(report: BenchReport) -> Iterator[_Speeds]:
    """One a type; shares of the data sheet would widen it, and stand in the document."""
    tests = [test for test in _all_tests(report) if test.kind == "layers"]
    for dtype in dict.fromkeys(test.dtype for test in tests):
        names = dict.fromkeys(test.name.removesuffix(_WAYS[1]).removesuffix(_WAYS[0]) for test in tests)
        yield _Speeds(
            title=f"transformer layers in {dtype}, TFLOP/s forward / forward + backward",
            columns={
                name: tuple(_Asked(kind="layers", dtype=dtype, name=name + way) for way in _WAYS) for name in names
            },
            shares=False,
        )


def _all_tests(report: BenchReport) -> Iterator[BenchTest]:
    return (test for node in report.nodes for worker in node.workers for test in worker.tests)


def _device_sheet(nodes: Sequence[BenchNode]) -> Sheet:
    rows = [_device_row(node.node, worker) for node in nodes for worker in node.workers]
    return Sheet(
        title="devices",
        columns=(
            Column("node", words=True),
            Column("worker"),
            Column("device", words=True),
            Column("threads"),
            Column("cores"),
            Column("kernels for", words=True),
            Column("torch", words=True),
        ),
        rows=tuple(rows[:_MOST_ROWS]),
        notes=(f"and {len(rows) - _MOST_ROWS} more",) if len(rows) > _MOST_ROWS else (),
    )


def _device_row(node: str, worker: BenchWorker) -> tuple[str, ...]:
    place = f"GPU {worker.gpu}" if worker.gpu is not None else worker.device
    return (
        node,
        str(worker.rank),
        f"{place}: {worker.name or 'unknown'}",
        str(worker.threads) if worker.device == "cpu" and worker.threads is not None else UNKNOWN,
        str(worker.cores) if worker.cores is not None else UNKNOWN,
        worker.capability or UNKNOWN,
        worker.torch or UNKNOWN,
    )


def _speed_sheet(report: BenchReport, wanted: _Speeds) -> Sheet:
    asked = [one for column in wanted.columns.values() for one in column]
    rows = [
        _Row(node=node.node, worker=worker, phase=phase)
        for node in report.nodes
        for worker in node.workers
        for phase in report.phases
    ]
    rows = [row for row in rows if any(one.best(row) is not None for one in asked)]
    shown = rows if len(rows) <= _MOST_ROWS else sorted(rows, key=lambda row: _standing(row, asked))[:_MOST_ROWS]
    marked = any(speed.slow for row in shown for one in asked if (speed := one.best(row)) is not None)
    left_out = (f"the slowest {len(shown)} of {len(rows)} rows",) if len(rows) > len(shown) else ()
    return Sheet(
        title=wanted.title,
        columns=(
            Column("node", words=True),
            Column("worker"),
            Column("phase", words=True),
            *(Column(name, wanted.unit) for name in wanted.columns),
        ),
        rows=(*(_speed_row(row, wanted) for row in shown), *_extremes(rows, wanted)),
        notes=((_SLOW_NOTE,) if marked else ()) + wanted.notes + left_out,
    )


def _speed_row(row: _Row, wanted: _Speeds) -> tuple[str, ...]:
    cells = (
        " / ".join(_cell(one.best(row), shares=wanted.shares) for one in column) for column in wanted.columns.values()
    )
    return (row.node, str(row.worker.rank), row.phase, *cells)


def _cell(speed: Speed | None, *, shares: bool) -> str:
    """Its value, as asked for with the share of the data sheet's figure, and a mark where it is slow."""
    if speed is None:
        return UNKNOWN
    share = f" {percent(speed.of_peak, '.0f')}" if shares and speed.of_peak is not None else ""
    return f"{_rate(speed.value)}{share}{'!' if speed.slow else ''}"


def _rate(value: float) -> str:
    """With as many digits as a reader can use; a processor makes thousandths of a TFLOP/s."""
    return format_sig(value) if value >= _SMALL else f"{value:.2g}"


def _extremes(rows: Sequence[_Row], wanted: _Speeds) -> Iterator[tuple[str, ...]]:
    """The best and the worst of each column, where there are several rows."""
    extremes: dict[str, Callable[[list[float]], float]] = {"best": max, "worst": min} if len(rows) > 1 else {}
    for name, choose in extremes.items():
        yield (name, "", "", *(_extreme(rows, column, choose) for column in wanted.columns.values()))


def _extreme(rows: Sequence[_Row], column: Sequence[_Asked], choose: Callable[[list[float]], float]) -> str:
    cells = []
    for one in column:
        values = [speed.value for row in rows if (speed := one.best(row)) is not None]
        cells.append(_rate(choose(values)) if values else UNKNOWN)
    return " / ".join(cells)


def _standing(row: _Row, asked: Sequence[_Asked]) -> float:
    """Its median share of what its like reach."""
    ratios = [speed.of_peers for one in asked if (speed := one.best(row)) and speed.of_peers is not None]
    return statistics.median(ratios) if ratios else 1.0


def _size_sheet(report: BenchReport) -> Sheet:
    """A row a type and size: the fastest, the median and the slowest worker, and how much timings scatter."""
    by_label: dict[str, list[tuple[str, BenchTest]]] = {}
    for node in report.nodes:
        for worker in node.workers:
            for test in worker.tests:
                if test.kind == "matmul":
                    by_label.setdefault(test.label, []).append((f"{node.node}/{worker.rank}", test))
    return Sheet(
        title="matrix products by type and size",
        columns=(
            Column("type", words=True),
            Column("rows"),
            Column("phase", words=True),
            Column("best", "TFLOP/s"),
            Column("whose", words=True),
            Column("median", "TFLOP/s"),
            Column("worst", "TFLOP/s"),
            Column("whose", words=True),
            Column("of sheet"),
            Column("cv"),
        ),
        rows=tuple(row for tests in by_label.values() for phase in report.phases for row in _size_row(tests, phase)),
        notes=("of sheet: the best, of the data sheet's figure; cv: of the timings, median over workers",),
    )


def _unmeasured_sheet(report: BenchReport) -> Sheet:
    """A row a test and reason, with the workers that have it."""
    whose: dict[tuple[str, str], list[str]] = {}
    for node in report.nodes:
        for worker in node.workers:
            for test in worker.tests:
                if test.error is not None:
                    whose.setdefault((test.label, test.error), []).append(f"{node.node}/{worker.rank}")
    rows = [(label, _first_of(workers), error) for (label, error), workers in whose.items()]
    return Sheet(
        title="not measured",
        columns=(Column("test", words=True), Column("whose", words=True), Column("why", words=True)),
        rows=tuple(rows[:_MOST_ROWS]),
        notes=(f"and {len(rows) - _MOST_ROWS} more",) if len(rows) > _MOST_ROWS else (),
    )


def _first_of(workers: Sequence[str]) -> str:
    return workers[0] + (f" and {len(workers) - 1} others" if len(workers) > 1 else "")


def _size_row(tests: Sequence[tuple[str, BenchTest]], phase: str) -> Iterator[tuple[str, ...]]:
    test = tests[0][1]
    timed = [(who, speed) for who, one in tests if (speed := one.speed(phase)) is not None]
    if not timed:
        return
    best, worst = (choose(timed, key=lambda one: one[1].value) for choose in (max, min))
    yield (
        test.dtype,
        test.size,
        phase,
        _rate(best[1].value),
        best[0],
        _rate(statistics.median(speed.value for _, speed in timed)),
        _rate(worst[1].value),
        worst[0],
        percent(best[1].of_peak, ".0f"),
        percent(statistics.median(speed.cv for _, speed in timed), ".1f"),
    )
