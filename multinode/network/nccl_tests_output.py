"""Tables that nccl-tests (or rccl-tests) printed: sizes, layout and wrong values, as far as a pasted text has them."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from multinode.diagnose.benchmark_line import TABLE_ROW
from multinode.network.scan_evidence import CollectiveRow
from multinode.records.benchmark import DTYPE_BYTES
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import Layout, bus_factor
from multinode.units import format_count

# Names of the programs, without `_perf`, that differ from torch.distributed's.
_NAMES = {"alltoall": "all_to_all", "alltoallv": "all_to_all"}
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "alltoallv",
    "alltoall",
    "sendrecv",
    "gather",
    "scatter",
    "hypercube",
)
# What people write above a table.
_WORDS = re.compile(r"\b(?P<to>all[-_ ]?to[-_ ]?all|a2a)\b|\b(?P<gather>all[-_ ]?gather)\b", re.IGNORECASE)
_PROGRAM = re.compile(rf"\b(?P<name>{'|'.join(_COLLECTIVES)})_perf\b|# Collective test: (?P<ours>\w{{1,32}})")
# A thread without a code block shows `# nThread` as a title, and its text has no mark.
_HEAD = re.compile(r"(?:# ?)?(?:nThread \d|Collective test\b|nccl-tests version|\s*size\s+count\s+type\b)")
_RANK = re.compile(
    r"(?:#\s*)?Rank\s+(?P<rank>\d{1,6})\s(?:.{0,60}?\s)?on\s+(?P<host>[\w.:-]{1,255})\s+device\s+(?P<device>\S{1,16})"
)
_WRONG = re.compile(r"\bOut of bounds values *: *(?P<count>\d{1,12})(?: +(?P<end>\w+))?")
_GPUS = re.compile(r"nThread (?P<threads>\d{1,4}) nGpus (?P<gpus>\d{1,4})")
# Numbers of a row: time, algbw, busbw, #wrong.
_A_WAY = 4
# Figures have two digits after the point.
_ROUNDED = 0.0051
_MOST_RANKS = 4096
_USUAL_GPUS = 8
_MOST_ROWS = 4096
# A rank alone copies to itself; its algbw is far above this.
_NOTHING_GB_PER_S = 0.05


class PrintedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a table."""

    size_bytes: int
    count: int
    dtype: str
    redop: str  # `none` without a reduction
    root: int  # -1 without a root
    # time in microseconds, algbw and busbw in GB/s, wrong values; out of place, then in place
    ways: tuple[tuple[float, float, float, int | None], ...]

    @property
    def best(self) -> tuple[float, float, float, int | None]:
        """The faster way: what slows only one is no network."""
        return min(self.ways)


class PrintedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one test."""

    name: str | None = None  # the collective, if the text names it
    rows: tuple[PrintedRow, ...] = ()
    ranks: tuple[tuple[int, str, str], ...] = ()  # rank, host and device of each `# Rank` line
    words: str | None = None  # the collective that the text above it speaks of
    wrong: int = 0  # wrong values by its last line
    ends: int = 0  # its last lines: one per test
    gpus_per_process: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether every process ran a test of its own: with one rank, which makes busbw 0, or all tests in turns."""
        speeds = [(algbw, busbw) for row in self.rows for _, algbw, busbw, _ in row.ways]
        sent_none = bool(speeds) and all(busbw == 0 for _, busbw in speeds)
        if sent_none and max(algbw for algbw, _ in speeds) > _NOTHING_GB_PER_S:
            return True
        # Processes that start a test together print each of its sizes together.
        runs = [len(list(rows)) for _, rows in itertools.groupby(self.rows, lambda row: row.size_bytes)]
        several = sum(rank == 0 for rank, _, _ in self.ranks) > 1 or (not self.rows and self.ends > 1)
        return several or (len(runs) > 1 and statistics.median(runs) > 1)

    @property
    def processes_alone(self) -> int:
        """How many of such tests wrote to this text, at least."""
        sizes = Counter(row.size_bytes for row in self.rows)
        return max(self.ends, sum(rank == 0 for rank, _, _ in self.ranks), *sizes.values(), 0)

    @property
    def parts(self) -> int:
        """Into how many parts a collective splits the buffer, by size and count: the number of ranks, or 1."""
        parts = [
            row.size_bytes / (row.count * width)
            for row in self.rows
            if (width := DTYPE_BYTES.get(row.dtype)) is not None
        ]
        whole = Counter(round(part) for part in parts if round(part) >= 1 and math.isclose(part, round(part)))
        return whole.most_common(1)[0][0] if whole else 1


def parse_tables(lines: Iterable[str]) -> tuple[PrintedTable, ...]:
    """All tables of a text, whose lines have no marks of launchers; tests with a single rank count as one."""
    reader = _TableReader()
    for line in lines:
        reader.take(line.strip())
    return tuple(_joined(table for table in reader.tables() if table.rows or table.wrong or table.is_alone))


class _TableReader:
    """Cuts a text into tables: a row is followed by rows and last lines of the same test, anything else begins one."""

    def __init__(self) -> None:
        self._done = list[PrintedTable]()
        self._table = PrintedTable()
        self._name: str | None = None
        self._words: str | None = None

    def tables(self) -> list[PrintedTable]:
        return [*self._done, self._table]

    def take(self, text: str) -> None:
        program = _PROGRAM.search(text)
        if program is not None:
            self._name = _NAMES.get(program["name"], program["name"]) or program["ours"]
        elif (said := _WORDS.search(text)) is not None:
            self._words = "all_to_all" if said["to"] else "all_gather"
        if _HEAD.match(text) is not None or (program is not None and not text.startswith("#")):
            self._begin()
        if (gpus := _GPUS.search(text)) is not None:
            self._table = replace(self._table, gpus_per_process=int(gpus["threads"]) * int(gpus["gpus"]))
        if (rank := _RANK.match(text)) is not None:
            self._begin()
            known = (int(rank["rank"]), rank["host"], rank["device"])
            self._table = replace(self._table, ranks=(*self._table.ranks, known)[:_MOST_ROWS])
        elif (wrong := _WRONG.search(text)) is not None:
            failed = max(self._table.wrong, int(wrong["count"]), int(wrong["end"] == "FAILED"))
            self._table = replace(self._table, wrong=failed, ends=self._table.ends + 1)
        elif (row := _parse_row(text)) is not None:
            if len(self._table.rows) >= _MOST_ROWS:
                self._begin()
            name = self._table.name or self._name
            self._table = replace(self._table, name=name, words=self._words, rows=(*self._table.rows, row))

    def _begin(self) -> None:
        """Another table, unless this one has no rows and no last line yet."""
        if self._table.rows or self._table.ends:
            self._done.append(self._table)
            self._table = PrintedTable()


def _parse_row(text: str) -> PrintedRow | None:
    match = TABLE_ROW.match(text)
    if match is None:
        return None
    figures = match["figures"].split()
    has_root = len(figures) % _A_WAY == 1
    ways = figures[1:] if has_root else figures
    if len(ways) % _A_WAY or int(match["count"]) == 0:
        return None
    read = [_parse_way(ways[start : start + _A_WAY]) for start in range(0, len(ways), _A_WAY)]
    known = tuple(way for way in read if way is not None)
    if not known:
        return None
    return PrintedRow(
        size_bytes=int(match["size"]),
        count=int(match["count"]),
        dtype=match["dtype"],
        redop=match["redop"] or "none",
        root=int(figures[0]) if has_root and re.fullmatch(r"-?\d+", figures[0]) else -1,
        ways=known,
    )


def _parse_way(words: Sequence[str]) -> tuple[float, float, float, int | None] | None:
    if "N/A" in words[:3]:
        return None
    time_us, algbw, busbw = map(float, words[:3])
    # Before 2.13 the last column is the greatest error, which the program judges itself.
    wrong = int(words[3]) if words[3].isdecimal() else None
    return (time_us, algbw, busbw, wrong) if math.isfinite(time_us) and time_us > 0 else None


def _joined(tables: Iterable[PrintedTable]) -> Iterable[PrintedTable]:
    alone: PrintedTable | None = None
    for table in tables:
        if not table.is_alone:
            yield table
        elif alone is None:
            alone = table
        else:
            alone = replace(
                alone,
                rows=alone.rows + table.rows,
                ranks=alone.ranks + table.ranks,
                wrong=max(alone.wrong, table.wrong),
            )
    if alone is not None:
        yield alone


def find_collective(table: PrintedTable) -> tuple[str, bool]:
    """The collective, and whether it is certain: the text's name, else what the form of the rows allows."""
    row = max(table.rows, key=lambda row: row.size_bytes, default=None)
    if table.name is not None or row is None:
        return table.name or "all_reduce", True
    is_reduction, is_split = row.redop != "none", table.parts > 1
    if row.root >= 0:
        return ("reduce" if is_reduction else "broadcast"), True
    if is_reduction:
        return ("reduce_scatter" if is_split else "all_reduce"), True
    if not is_split:
        return "sendrecv", False
    return table.words or "all_gather", table.words is not None


class PrintedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a table."""

    layout: Layout
    hosts: tuple[str, ...] = ()  # names of the nodes, if the text has all
    is_assumed: bool = False  # whether the number of nodes is neither in the text nor given

    @property
    def sentence(self) -> str:
        """`3 nodes with 8 workers each`."""
        nodes = format_count(self.layout.nodes, "node")
        if self.layout.unequal:
            return f"{nodes} with {' + '.join(map(str, self.layout.counts))} workers"
        return f"{nodes} with {format_count(self.layout.workers_per_node, 'worker')} each"


def find_layout(table: PrintedTable, collective: str, nodes: int | None) -> PrintedLayout:
    """From the `# Rank` lines; else from `nodes` and the ratio of busbw to algbw, which depends on the ranks."""
    if table.is_alone:
        return PrintedLayout(layout=Layout(nodes=1, workers_per_node=1))
    if not table.rows and not table.ranks:
        return PrintedLayout(layout=Layout(nodes=nodes or 2), is_assumed=nodes is None)
    hosts = Counter(host for _, host, _ in dict.fromkeys(table.ranks))
    named = len({rank for rank, _, _ in table.ranks})
    candidates = _rank_counts(table, collective)
    if named > 1 and sum(hosts.values()) == named and (not candidates or named in candidates):
        counted = Layout.of(list(hosts.values()))
        if nodes in {None, counted.nodes}:
            return PrintedLayout(layout=counted, hosts=tuple(hosts))
        candidates = (named,)
    is_assumed = nodes is None
    if nodes is None:
        most = candidates[-1] if candidates else len(hosts)
        nodes = max(2, len(hosts), -(-candidates[0] // _USUAL_GPUS) if candidates and most > _USUAL_GPUS else 0)
    workers = _likely_ranks(candidates, nodes, table.gpus_per_process)
    return PrintedLayout(layout=Layout(nodes=nodes, workers_per_node=max(1, workers // nodes)), is_assumed=is_assumed)


def _rank_counts(table: PrintedTable, collective: str) -> tuple[int, ...]:
    """Numbers of ranks that agree with the counts or speeds of all rows; empty if neither depends on them."""
    if table.parts > 1:
        return (table.parts,)
    if not table.rows or bus_factor(collective, 2) == bus_factor(collective, 3):
        return ()
    speeds = [(algbw, busbw) for row in table.rows for _, algbw, busbw, _ in row.ways]
    large = sorted(speeds, reverse=True)[: max(1, len(speeds) // 2)]
    return tuple(
        ranks
        for ranks in range(2, _MOST_RANKS)
        for factor in (bus_factor(collective, ranks),)
        if all(abs(busbw - factor * algbw) <= _ROUNDED * (1 + factor) for algbw, busbw in large)
    )


def _likely_ranks(candidates: Sequence[int], nodes: int, gpus_per_process: int) -> int:
    """Of several possible numbers, one with equal nodes, as many GPUs as usual, and the processes' GPUs."""
    fitting = [ranks for ranks in candidates if ranks % nodes == 0 and ranks >= nodes]
    unit = nodes * gpus_per_process
    if not fitting:
        return candidates[0] if candidates else unit
    return min(
        fitting,
        key=lambda ranks: (
            ranks % unit != 0,
            ranks // nodes > _USUAL_GPUS,
            -math.gcd(ranks // nodes, _USUAL_GPUS),
            ranks,
        ),
    )


def collective_rows(table: PrintedTable, collective: str, ranks: int) -> tuple[CollectiveRow, ...]:
    """The rows as a scan has them: one per size, of the faster way, with the wrong values of all ways."""
    best: dict[int, tuple[PrintedRow, int | None]] = {}
    for row in table.rows:
        counted = [way[3] for way in row.ways if way[3] is not None]
        fastest, wrong = best.get(row.size_bytes, (row, None))
        if counted:
            wrong = sum(counted) + (wrong or 0)
        best[row.size_bytes] = (min(row, fastest, key=lambda each: each.best), wrong)
    return tuple(_row(row, collective, ranks, wrong) for row, wrong in best.values())


def _row(row: PrintedRow, collective: str, ranks: int, wrong: int | None) -> CollectiveRow:
    time_us, algbw, busbw, _ = row.best
    algbw = _unrounded(algbw, row.size_bytes / time_us / 1000)
    return CollectiveRow(
        collective=collective,
        dtype=row.dtype,
        redop=row.redop,
        size_bytes=row.size_bytes,
        count=row.count,
        iters=0,
        time_us=exactly(time_us),
        p95_us=time_us,
        transfer_us=time_us,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=_unrounded(busbw, algbw * bus_factor(collective, ranks)),
        num_wrong=wrong,
    )


def _unrounded(printed: float, computed: float) -> float:
    """What the printed figure was before it was rounded, if the computed one is that."""
    return computed if abs(computed - printed) <= _ROUNDED + 0.001 * printed else printed
