"""What a bench shows: slow devices with causes and fixes, then charts, and tables with best and worst."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.bench.figures import Anomaly, BenchReport, BenchTest, BenchWorker, DeviceSpeed
from multinode.records.benchmark import LAUNCH_US
from multinode.render.sheet import (
    Block,
    Chart,
    Charts,
    Column,
    Command,
    Labels,
    Prose,
    Sheet,
    Tiles,
    figure,
    percent,
)
from multinode.render.table import footer
from multinode.stats.estimate import known_median
from multinode.units import UNKNOWN, format_sig

# Above this number, only the slowest rows are shown.
_MOST_ROWS = 32
_MOST_SMALL = 16
# Below it, digits count from the first non-zero one.
_SMALL = 0.1
_SLOW_NOTE = "! slow: below 90% of its peers, and the 95% confidence interval of that share excludes 1"
_LAUNCH_NOTE = f"~ lower bound: a call takes less than {LAUNCH_US:.0f} us, the time to launch it from Python"
_WAYS = (" forward", " forward + backward")
_SENSORS = (Column("at", "MHz/W"),)
_WHERE = (Column("node", words=True), Column("worker"), Column("phase", words=True))

# Columns: the fastest of the tests that each includes, separated by a slash.
_Picks = tuple[Callable[[BenchTest], bool], ...]


class _Row(msgspec.Struct, frozen=True):
    """A worker in a phase, with a tuple of speeds per column."""

    node: str
    rank: int
    phase: str
    cells: tuple[tuple[DeviceSpeed | None, ...], ...]

    @property
    def speeds(self) -> list[DeviceSpeed]:
        return [speed for cell in self.cells for speed in cell if speed is not None]

    @property
    def standing(self) -> float:
        """Its median share of the peers' speed."""
        ratios = [speed.of_peers for speed in self.speeds if speed.of_peers is not None]
        return statistics.median(ratios) if ratios else 1.0


def show(report: BenchReport) -> Iterator[Block]:
    """The verdict, a small table, causes with their fixes; then charts and every table."""
    headline, *others = _findings(report)
    yield Prose(headline[0], "lead", tone="bad" if report.anomalies else "")
    yield Tiles(tuple(_key_figures(report)))
    yield _small_sheet(report)
    yield from headline[1]
    for text, causes in others:
        yield Labels((("Also", text),))
        yield from causes
    yield Charts(lambda: _charts(report))
    yield from (msgspec.structs.replace(sheet, detail="full") for sheet in bench_sheets(report))
    yield from (Prose(note, "note", detail="full") for note in report.notes)
    yield Command("Details", f"multinode show {report.run_id} --details", detail="brief")


def _charts(report: BenchReport) -> Iterable[Chart]:
    from multinode.bench.charts import bench_charts  # noqa: PLC0415 - plotly is an extra

    return bench_charts(report)


def next_step(report: BenchReport, given: str) -> str:
    """The next command; `given` are the options as typed."""
    if report.anomalies:
        return footer("Next", f"fix that, then: multinode bench{given}")
    return footer("Next", f"multinode {'nccl-test' if len(report.nodes) > 1 else 'check'}{given}")


_Causes = tuple[Labels, ...]


def _findings(report: BenchReport) -> list[tuple[str, _Causes]]:
    explained: set[str] = set()
    found: list[tuple[str, _Causes]] = [(part.message, ()) for part in report.unmeasured]
    for anomaly in report.anomalies:
        found.append((anomaly.message, tuple(_cause_rows(anomaly, again=anomaly.cause in explained))))
        explained.add(anomaly.cause)
    return [*found, *([(report.outcome.message, ())] if report.outcome is not None else [])]


def _cause_rows(anomaly: Anomaly, *, again: bool) -> Iterator[Labels]:
    """The likely causes; all but the first, and those of a cause that was shown, are details."""
    if not anomaly.causes and not again:
        yield Labels((("Cause", "unknown: no recorded data explains it"),))
    for number, cause in enumerate(anomaly.causes):
        label = "Also likely" if number else "Cause"
        fix = ("Fix", cause.hint or "")
        yield Labels(((label, cause.message), fix), detail="full" if number or again else "always")


def _key_figures(report: BenchReport) -> Iterator[tuple[str, str]]:
    columns, rows = _small_rows(report)
    for number, (name, (unit, _)) in enumerate(columns.items()):
        speeds = sorted((speed for row in rows for speed in row.cells[number] if speed), key=_value)
        if len(speeds) > 1:
            yield f"{name}, best ({unit})", format_sig(_value(speeds[-1]))
            yield f"{name}, worst ({unit})", format_sig(_value(speeds[0]))
        elif speeds:
            yield f"{name} ({unit})", format_sig(_value(speeds[0]))


def _value(speed: DeviceSpeed) -> float:
    return speed.value.value


def _small_rows(report: BenchReport) -> tuple[dict[str, tuple[str, _Picks]], list[_Row]]:
    tests = [test for worker in report.workers for test in worker.tests]
    products = [test for test in tests if test.kind == "matmul" and test.speeds]
    fastest = max(products, key=lambda test: max(map(_value, test.speeds)), default=None)
    columns: dict[str, tuple[str, _Picks]] = {}
    if fastest is not None:
        columns[f"matmul {fastest.dtype}"] = ("TFLOP/s", (_of(kind="matmul", dtype=fastest.dtype),))
    columns["copy"] = ("GB/s", (_of(kind="memory", name="copy"),))
    rows = [
        _Row(node.node, worker.rank, phase, tuple(_fastest(worker, phase, picks) for _, picks in columns.values()))
        for node in report.nodes
        for worker in node.workers
        for phase in report.phases
    ]
    return columns, [row for row in rows if row.speeds]


def _small_sheet(report: BenchReport) -> Sheet:
    columns, rows = _small_rows(report)
    shown = rows if len(rows) <= _MOST_SMALL else sorted(rows, key=lambda row: row.standing)[:_MOST_SMALL]
    marked = any(speed.slow for row in shown for speed in row.speeds)
    left_out = f"the slowest {len(shown)} of {len(rows)} rows" if len(rows) > len(shown) else ""
    return Sheet(
        title="",
        columns=(*_WHERE, *(Column(name, unit) for name, (unit, _) in columns.items())),
        rows=tuple(
            (row.node, str(row.rank), row.phase, *(_measured(speed) for (speed,) in row.cells)) for row in shown
        ),
        notes=tuple(filter(None, ("! below 90% of its peers" if marked else "", left_out))),
    )


def _measured(speed: DeviceSpeed | None) -> str:
    if speed is None:
        return UNKNOWN
    return f"{speed.value.text()}{'!' if speed.slow else ''}"


def bench_sheets(report: BenchReport) -> tuple[Sheet, ...]:
    """Non-empty sheets: devices, products, memory, layers by type, products by size, unmeasured tests."""
    tests = [test for worker in report.workers for test in worker.tests]
    products = {test.dtype: (_of(kind="matmul", dtype=test.dtype),) for test in tests if test.kind == "matmul"}
    memory = {test.name: (_of(kind=test.kind, name=test.name),) for test in tests if test.kind in {"memory", "bus"}}
    sheets = [
        _device_sheet(report),
        _speed_sheet(
            report,
            "matrix products",
            products,
            "TFLOP/s",
            "fastest size of each type; % of the data sheet's figure",
        ),
        _speed_sheet(report, "memory", memory, "GB/s"),
    ]
    layers = [test for test in tests if test.kind == "layers"]
    for dtype in dict.fromkeys(test.dtype for test in layers):
        names = dict.fromkeys(test.name.removesuffix(_WAYS[1]).removesuffix(_WAYS[0]) for test in layers)
        columns = {name: tuple(_of(kind="layers", dtype=dtype, name=name + way) for way in _WAYS) for name in names}
        title = f"transformer layers in {dtype}, TFLOP/s forward / forward + backward"
        sheets.append(_speed_sheet(report, title, columns))
    sheets += [_size_sheet(report), _unmeasured_sheet(report)]
    return tuple(sheet for sheet in sheets if sheet.rows)


def _of(**wanted: str) -> Callable[[BenchTest], bool]:
    return lambda test: all(getattr(test, name) == value for name, value in wanted.items())


def _device_sheet(report: BenchReport) -> Sheet:
    columns = (
        Column("node", words=True),
        Column("worker"),
        Column("device", words=True),
        Column("threads"),
        Column("cores"),
        Column("kernels for", words=True),
        Column("torch", words=True),
    )
    return _cut(
        "devices", columns, [_device_row(node.node, worker) for node in report.nodes for worker in node.workers]
    )


def _cut(title: str, columns: tuple[Column, ...], rows: Sequence[tuple[str, ...]]) -> Sheet:
    notes = (f"and {len(rows) - _MOST_ROWS} more",) if len(rows) > _MOST_ROWS else ()
    return Sheet(title=title, columns=columns, rows=tuple(rows[:_MOST_ROWS]), notes=notes)


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


def _speed_sheet(
    report: BenchReport, title: str, columns: Mapping[str, _Picks], unit: str = "", note: str = ""
) -> Sheet:
    """Speeds, with their share of the data sheet's figure if `unit` is not empty; otherwise the title has it."""
    rows = [
        _Row(node.node, worker.rank, phase, tuple(_fastest(worker, phase, picks) for picks in columns.values()))
        for node in report.nodes
        for worker in node.workers
        for phase in report.phases
    ]
    rows = [row for row in rows if row.speeds]
    shown = rows if len(rows) <= _MOST_ROWS else sorted(rows, key=lambda row: row.standing)[:_MOST_ROWS]
    marked = any(speed.slow for row in shown for speed in row.speeds)
    bound = any(speed.launch_bound for row in shown for speed in row.speeds)
    left_out = f"the slowest {len(shown)} of {len(rows)} rows" if len(rows) > len(shown) else ""
    sensed = any(speed.clock_mhz is not None for row in rows for speed in row.speeds)
    cells = [
        (
            row.node,
            str(row.rank),
            row.phase,
            *(" / ".join(_cell(estimate, shares=bool(unit)) for estimate in cell) for cell in row.cells),
            *(_sensor_cells(row.speeds) if sensed else ()),
        )
        for row in shown
    ]
    extremes: dict[str, Callable[[list[float]], float]] = {"best": max, "worst": min} if len(rows) > 1 else {}
    return Sheet(
        title=title,
        columns=(*_WHERE, *(Column(name, unit) for name in columns), *(_SENSORS if sensed else ())),
        rows=(
            *cells,
            *((name, "", "", *_extreme(rows, choose), *(("",) if sensed else ())) for name, choose in extremes.items()),
        ),
        notes=tuple(filter(None, (_SLOW_NOTE if marked else "", _LAUNCH_NOTE if bound else "", note, left_out))),
    )


def _fastest(worker: BenchWorker, phase: str, picks: _Picks) -> tuple[DeviceSpeed | None, ...]:
    speeds = [[speed for test in worker.tests if pick(test) and (speed := test.speed(phase))] for pick in picks]
    return tuple(max(some, key=lambda speed: speed.value.value, default=None) for some in speeds)


def _extreme(rows: Sequence[_Row], choose: Callable[[list[float]], float]) -> Iterator[str]:
    for column in zip(*(row.cells for row in rows), strict=True):
        values = [[speed.value.value for speed in row if speed is not None] for row in zip(*column, strict=True)]
        yield " / ".join(format_sig(choose(some)) if some else UNKNOWN for some in values)


def _cell(speed: DeviceSpeed | None, *, shares: bool) -> str:
    if speed is None:
        return UNKNOWN
    share = f" {percent(speed.of_peak, '.0f')}" if shares and speed.of_peak is not None else ""
    return f"{format_sig(speed.value.value)}{_bound(speed)}{share}{'!' if speed.slow else ''}"


def _bound(speed: DeviceSpeed) -> str:
    return "~" if speed.launch_bound else ""


def _size_sheet(report: BenchReport) -> Sheet:
    by_label: dict[str, list[tuple[str, BenchTest]]] = {}
    for whose, test in _named_tests(report):
        if test.kind == "matmul":
            by_label.setdefault(test.label, []).append((whose, test))
    bound = any(speed.launch_bound for tests in by_label.values() for _, test in tests for speed in test.speeds)
    sensed = any(
        speed.clock_mhz is not None for tests in by_label.values() for _, test in tests for speed in test.speeds
    )
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
            *(_SENSORS if sensed else ()),
        ),
        rows=tuple(
            (*row, *(sensors if sensed else ()))
            for tests in by_label.values()
            for phase in report.phases
            for row, sensors in _size_row(tests, phase)
        ),
        notes=(
            *((_LAUNCH_NOTE,) if bound else ()),
            "of sheet: best, as a share of the data sheet's figure; cv: of the timings, median over workers",
            *(("at: clock and power of the GPU while it was timed, medians",) if sensed else ()),
        ),
    )


def _unmeasured_sheet(report: BenchReport) -> Sheet:
    workers: dict[tuple[str, str], list[str]] = {}
    for whose, test in _named_tests(report):
        if test.error is not None:
            workers.setdefault((test.label, test.error), []).append(whose)
    columns = (Column("test", words=True), Column("whose", words=True), Column("why", words=True))
    return _cut(
        "not measured", columns, [(label, _first_of(names), error) for (label, error), names in workers.items()]
    )


def _named_tests(report: BenchReport) -> Iterator[tuple[str, BenchTest]]:
    for node in report.nodes:
        for worker in node.workers:
            yield from ((f"{node.node}/{worker.rank}", test) for test in worker.tests)


def _first_of(workers: Sequence[str]) -> str:
    return workers[0] + (f" and {len(workers) - 1} others" if len(workers) > 1 else "")


def _size_row(tests: Sequence[tuple[str, BenchTest]], phase: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The cells, and those of the sensors of the best."""
    test = tests[0][1]
    timed = [(who, speed) for who, test in tests if (speed := test.speed(phase)) is not None]
    if not timed:
        return
    best, worst = (choose(timed, key=lambda entry: entry[1].value.value) for choose in (max, min))
    row = (
        test.dtype,
        test.size,
        phase,
        format_sig(best[1].value.value) + _bound(best[1]),
        best[0],
        format_sig(statistics.median(speed.value.value for _, speed in timed)),
        format_sig(worst[1].value.value) + _bound(worst[1]),
        worst[0],
        percent(best[1].of_peak, ".0f"),
        percent(statistics.median(speed.cv for _, speed in timed), ".1f"),
    )
    yield row, _sensor_cells([best[1]])


def _sensor_cells(speeds: Sequence[DeviceSpeed]) -> tuple[str, ...]:
    """Clock and power while they were timed, medians, in one cell."""
    both = (known_median(getattr(speed, name) for speed in speeds) for name in ("clock_mhz", "power_w"))
    return ("/".join(figure(value, ".0f") for value in both),)
