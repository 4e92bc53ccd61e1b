"""Raw streams that iperf3 (text or JSON), iperf 2, or perftest's ib_write_bw, ib_read_bw and ib_send_bw printed."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from multinode.diagnose.benchmark_line import INTERVAL, PERFTEST_HEAD, PERFTEST_TITLE
from multinode.records.log import clean_log
from multinode.traffic.pair_speeds import Pair
from multinode.units import BITS_PER_BYTE

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
_LOCAL = re.compile(
    r"\[ *\d{1,6}\](?:\[[TR]X-[CS]\])? local (?P<local>[\w.:%-]{1,64}) port (?P<port>\d{1,5}) connected (?:to|with) "
    r"(?P<remote>[\w.:%-]{1,64}) port \d{1,5}"
)
_BEGIN = re.compile(r"Connecting to host|Accepted connection from|Client connecting to|Server listening on|iperf 3\.\d")
_COMMAND = re.compile(r"\biperf3?(?:\.exe)? .{0,200}?-(?:c|-client|s|-server)\b.{0,200}")
_CONNECTIONS = re.compile(r" -(?:P|-parallel) ?=?(\d{1,3})\b")
_VERSION = re.compile(r"iperf (?P<major>\d{1,2})\.(?P<minor>\d{1,3})")
_SERVER_PORT = 5201
_RETRANSMITS = re.compile(r"\s+(\d{1,12})(?=\s|$)(?!\s+ms)")
_UDP = re.compile(r"\bms +\d+/\s*\d+ +\(")
# From 3.16 on, each connection has a thread of its own (release notes of iperf 3.16).
_THREADS_SINCE = (3, 16)
_SEGMENT_BYTES = 1448
# A document of iperf3 --json begins a line; what was cut out of one has its sums.
_OBJECT = re.compile(r"^\{", re.MULTILINE)
_SUM = re.compile(r'"(sum_received)"\s*:\s*(\{[^{}]{0,2000}\})')
_HOSTS = ("local_host", "remote_host")
_MOST_DOCUMENTS, _MOST_NAME, _MOST_ERROR = 200, 64, 300
# An interval of the whole test, where no role marks it: it begins at 0 and is longer than those before.
_LEAST_WHOLE_S = 1.5

_PERFTEST_ROW = re.compile(
    r"(?P<size>\d{1,12})\s+(?P<iters>\d{1,12})\s+(?P<peak>[\d.]{1,12})\s+(?P<average>[\d.]{1,12})(?:\s+[\d.]{1,12})?"
    r"(?:\s.{0,80})?$"
)
# perftest's MB/sec is of 2**20 bytes (perftest_parameters.c: format_factor).
_PERFTEST_GBIT = {
    "Gb": 1.0,
    "Gib": 1.0,
    "Mb": 1e-3,
    "MB": 2.0**20 * BITS_PER_BYTE / 1e9,
    "MiB": 2.0**20 * BITS_PER_BYTE / 1e9,
    "GB": 2.0**30 * BITS_PER_BYTE / 1e9,
    "GiB": 2.0**30 * BITS_PER_BYTE / 1e9,
}
# perftest's own default.
_LARGE_BYTES = 1 << 16
_PERFTEST_DEVICE = re.compile(r"\bDevice\s*:\s*(?P<device>[\w.-]{1,64})")
_PERFTEST_LAYER = re.compile(r"\bLink type\s*:\s*(?P<layer>Ethernet|IB)\b")
_PERFTEST_COMMAND = re.compile(r"\bib_(?:write|read|send)_bw\b")
_PROGRAMS = {"rdma_write": "ib_write_bw", "rdma_read": "ib_read_bw", "write": "ib_write_bw", "read": "ib_read_bw"}


class TcpRun(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one run of iperf."""

    pair: Pair | None = None  # addresses of sender and receiver; None if the text does not have them
    connections: int
    gbit_per_s: float | None = None  # None if it failed
    lost_share: float | None = None  # retransmitted share of its segments, if counted
    in_one_thread: bool = False  # whether it is a release that runs all connections in one thread
    is_udp: bool = False
    error: str | None = None


class RdmaRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of perftest."""

    program: str
    gbit_per_s: float  # one way: half of a bidirectional test
    size_bytes: int = 0  # of the message that reached it
    device: str | None = None
    link_layer: str | None = None  # `InfiniBand` or `Ethernet`

    @property
    def is_large(self) -> bool:
        """Whether the bandwidth limits such messages, and not their rate."""
        return self.size_bytes >= _LARGE_BYTES


class _Interval(msgspec.Struct, frozen=True, kw_only=True):
    stream: str  # its number, or SUM
    way: str | None
    start_s: float
    end_s: float
    size_bytes: float
    gbit_per_s: float
    retransmits: int | None
    role: str | None
    is_udp: bool


def parse_iperf(lines: Sequence[str]) -> tuple[TcpRun, ...]:
    """All runs of a text, in their order."""
    found = list(_json_runs("\n".join(lines)))
    run, version = _TextRun(), None
    for line in lines:
        text = line.strip()
        if (release := _VERSION.search(text)) is not None:
            version = (int(release["major"]), int(release["minor"]))
        local, match = _LOCAL.search(text), INTERVAL.search(text)
        interval = _interval(match) if match is not None else None
        command = _COMMAND.search(text)
        if run.intervals and (_BEGIN.search(text) or local or command or run.is_over(interval)):
            found += run.runs(version)
            run = _TextRun()
        if command is not None and (count := _CONNECTIONS.search(command[0])) is not None:
            run.connections = int(count[1])
        if "Reverse mode" in text:
            run.is_reverse = True
        if "Accepted connection from" in text:
            run.is_server = True
        if local is not None:
            run.local, run.remote = local["local"], local["remote"]
            run.is_server = run.is_server or int(local["port"]) == _SERVER_PORT
        if interval is not None:
            run.take(interval)
    return (*found, *run.runs(version))


def _interval(match: re.Match[str]) -> _Interval:
    rest = match["rest"]
    bits = match["kind"] == "bits"
    rate = float(match["rate"]) * (_UNITS[match["unit"]] if bits else _BINARY[match["unit"]] * BITS_PER_BYTE)
    sent_again = _RETRANSMITS.match(rest)
    return _Interval(
        stream=match["id"],
        way=match["way"],
        start_s=float(match["start"]),
        end_s=float(match["end"]),
        size_bytes=float(match["amount"]) * _BINARY[match["amount_unit"]],
        gbit_per_s=rate / 1e9,
        retransmits=int(sent_again[1]) if sent_again is not None else None,
        role=next((role for role in ("sender", "receiver") if role in rest), None),
        is_udp=_UDP.search(rest) is not None,
    )


class _TextRun:
    """What a run has printed so far."""

    def __init__(self) -> None:
        self.intervals: list[_Interval] = []
        self.local, self.remote = "", ""
        self.is_server = self.is_reverse = False
        self.connections = 1
        self._streams: set[str] = set()
        self._summed: set[tuple[str, str | None, str]] = set()

    def take(self, interval: _Interval) -> None:
        """One more interval of this run."""
        self.intervals.append(interval)
        self._streams.add(interval.stream)
        if interval.role is not None:
            self._summed.add((interval.stream, interval.way, interval.role))

    def is_over(self, after: _Interval | None) -> bool:
        """Whether an interval belongs to the next run: this one has its summary already, or only one stream to sum."""
        if after is None or not self._summed:
            return False
        is_of_one = after.stream == "SUM" and len(self._streams) == 1 and "SUM" not in self._streams
        return after.role is None or (after.stream, after.way, after.role) in self._summed or is_of_one

    def runs(self, version: tuple[int, int] | None) -> Iterator[TcpRun]:
        for way in dict.fromkeys(interval.way for interval in self.intervals):
            mine = [interval for interval in self.intervals if interval.way == way]
            yield from self._one_way(mine, way, version)

    def _one_way(self, mine: Sequence[_Interval], way: str | None, version: tuple[int, int] | None) -> Iterator[TcpRun]:
        # iperf3 of the sender has both roles: what arrived counts.
        whole = [interval for interval in mine if interval.role] or _longest(mine)
        received = [interval for interval in whole if interval.role == "receiver"] or whole
        sent = [interval for interval in whole if interval.role == "sender"] or whole
        sums = [interval for interval in received if interval.stream == "SUM"]
        streams = {interval.stream for interval in mine} - {"SUM"}
        again = _total(sent, lambda each: each.retransmits)
        size_bytes = _total(sent, lambda each: each.size_bytes)
        pair = (self.local, self.remote)
        if (way == "RX") if way else self.is_reverse != self.is_server:
            pair = pair[::-1]
        yield TcpRun(
            pair=pair if all(pair) else None,
            connections=max(self.connections, len(streams), 1 + bool(sums)),
            gbit_per_s=sums[-1].gbit_per_s if sums else _sum_of_streams(received),
            lost_share=again * _SEGMENT_BYTES / size_bytes if again is not None and size_bytes else None,
            in_one_thread=version is not None and (3, 0) <= version < _THREADS_SINCE,
            is_udp=any(interval.is_udp for interval in mine),
        )


def _longest(mine: Sequence[_Interval]) -> list[_Interval]:
    """Without roles (iperf 2, or a text that was cut): the intervals of the whole test, else all."""
    begun = [interval for interval in mine if interval.start_s == 0 and interval.end_s >= _LEAST_WHOLE_S]
    most = max((interval.end_s for interval in begun), default=0.0)
    return [interval for interval in begun if interval.end_s == most] or list(mine)


def _sum_of_streams(mine: Sequence[_Interval]) -> float:
    """Of each stream the mean over its intervals."""
    by_stream: dict[str, list[float]] = {}
    for interval in mine:
        by_stream.setdefault(interval.stream, []).append(interval.gbit_per_s)
    return sum(sum(speeds) / len(speeds) for speeds in by_stream.values())


def _total(mine: Sequence[_Interval], figure: Any) -> float | None:
    sums = [interval for interval in mine if interval.stream == "SUM"]
    values = [value for interval in sums or mine if (value := figure(interval)) is not None]
    return sum(values) if values else None


def _json_runs(text: str) -> Iterator[TcpRun]:
    """Whole documents; without any, the sums of one that was cut."""
    documents = list(_documents(text))
    for document in documents:
        yield from _document_runs(document)
    sums = [] if documents else _SUM.findall(text)
    for name, part in sums:
        with contextlib.suppress(ValueError):
            yield from _document_runs({"end": {name: json.loads(part)}})


def _documents(text: str) -> Iterator[Any]:
    last = text.rfind('"sum_')
    tries = itertools.islice(_OBJECT.finditer(text, 0, max(last, 0)), _MOST_DOCUMENTS)
    end = 0
    for begin in (match.start() for match in tries):
        if begin < end:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            document, size = json.JSONDecoder().raw_decode(text[begin:])
            end = begin + size
            yield document


def _document_runs(document: Any) -> Iterator[TcpRun]:
    """What iperf3 --json wrote; whatever else has another form is skipped."""
    start, end = (_part(document, name) for name in ("start", "end"))
    test = _part(start, "test_start")
    connected = start.get("connected")
    first = connected[0] if isinstance(connected, list) and connected and isinstance(connected[0], dict) else {}
    hosts = [clean_log(host)[:_MOST_NAME] for name in _HOSTS if isinstance(host := first.get(name), str)]
    pair = (hosts[0], hosts[1]) if len(hosts) == len(_HOSTS) else None
    release = _VERSION.search(str(start.get("version", "")))
    version = (int(release["major"]), int(release["minor"])) if release is not None else None
    streams = end.get("streams")
    connections = _number(test, "num_streams") or (len(streams) if isinstance(streams, list) else 1)
    run = TcpRun(
        pair=pair,
        connections=max(1, int(connections)),
        in_one_thread=version is not None and version < _THREADS_SINCE,
        is_udp=test.get("protocol") == "UDP",
    )
    if isinstance(document, dict) and isinstance(document.get("error"), str) and not end:
        yield replace(run, error=clean_log(document["error"])[:_MOST_ERROR])
    for suffix in ("", "_bidir_reverse"):
        sent, received = _part(end, f"sum_sent{suffix}"), _part(end, f"sum_received{suffix}")
        rate = _number(received, "bits_per_second") or _number(sent, "bits_per_second")
        if rate is None:
            continue
        again, size_bytes = _number(sent, "retransmits"), _number(sent, "bytes")
        is_back = bool(test.get("reverse")) or bool(suffix)
        yield replace(
            run,
            pair=pair[::-1] if pair is not None and is_back else pair,
            gbit_per_s=rate / 1e9,
            lost_share=again * _SEGMENT_BYTES / size_bytes if again is not None and size_bytes else None,
        )


def _part(document: Any, name: str) -> dict[str, Any]:
    part = document.get(name) if isinstance(document, dict) else None
    return part if isinstance(part, dict) else {}


def _number(document: dict[str, Any], name: str) -> float | None:
    value = document.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def parse_perftest(lines: Iterable[str]) -> tuple[RdmaRun, ...]:
    """The best average of each run, over its sizes."""
    runs = list[RdmaRun]()
    program, parts, unit = "ib_write_bw", 1.0, None
    device: str | None = None
    layer: str | None = None
    for line in lines:
        text = line.strip()
        if (title := PERFTEST_TITLE.search(text)) is not None:
            program = _PROGRAMS.get(title["verb"].lower(), "ib_send_bw")
            parts = 0.5 if title["both"] else 1.0
            unit, device, layer = None, None, None
        if (command := _PERFTEST_COMMAND.search(text)) is not None:
            program, unit = command[0], None
        if (named := _PERFTEST_DEVICE.search(text)) is not None:
            device = named["device"]
        if (linked := _PERFTEST_LAYER.search(text)) is not None:
            layer = "InfiniBand" if linked["layer"] == "IB" else "Ethernet"
        if (head := PERFTEST_HEAD.search(text)) is not None:
            unit = head["unit"]
            runs.append(RdmaRun(program=program, gbit_per_s=0.0, device=device, link_layer=layer))
        elif unit is not None and (row := _PERFTEST_ROW.match(text)) is not None:
            speed = float(row["average"]) * _PERFTEST_GBIT[unit] * parts
            if speed > runs[-1].gbit_per_s:
                runs[-1] = replace(runs[-1], gbit_per_s=speed, size_bytes=int(row["size"]))
    return tuple(run for run in runs if run.gbit_per_s > 0)
