"""Which lines of a text are the output of nccl-tests, iperf3 or perftest (ib_write_bw). Pure.

Their figures are read by `multinode.network`.
"""

from __future__ import annotations

import re

_FIGURE = r"(?:-?[\d.]{1,20}(?:e[+-]?\d{1,3})?|N/A)"
TABLE_ROW = re.compile(
    r"(?:\[[^\]]{0,64}\]:?\s+|\S{1,64}[:>|]\s+){0,3}(?P<size>\d{1,18})\s+(?P<count>\d{1,18})\s+(?P<dtype>[a-z]\w{2,15})\s+"
    rf"(?:(?P<redop>[a-z]\w{{0,15}})\s+)?(?P<figures>(?:{_FIGURE}\s+){{3,8}}{_FIGURE})\s*$",
    re.ASCII | re.IGNORECASE,
)
"""A row of nccl-tests: size, count, type, reduction, root; time, algbw, busbw and #wrong, out of place and in place."""
INTERVAL = re.compile(
    r"\[ *(?P<id>SUM|\d{1,6})\](?:\[(?P<way>[TR]X)-[CS]\])? +"
    r"(?P<start>\d{1,9}\.\d{1,6}) *- *(?P<end>\d{1,9}\.\d{1,6}) +sec +"
    r"(?P<amount>[\d.]{1,12}) +(?P<amount_unit>[KMGT]?)Bytes +"
    r"(?P<rate>[\d.]{1,12}) +(?P<unit>[KMGT]?)(?P<kind>bits|Bytes)/sec(?P<rest>.{0,120})",
    re.ASCII,
)
"""An interval of iperf3 or iperf 2: transfer, rate, and in `rest` retransmits and the role."""
PERFTEST_TITLE = re.compile(
    r"\b(?P<verb>RDMA_Write|RDMA_Read|Send|Write|Read)(?: Post List)?(?P<both> Bidirectional)? BW Test", re.IGNORECASE
)
PERFTEST_HEAD = re.compile(r"BW average ?\[(?P<unit>Gb|Gib|GiB|GB|MB|MiB|Mb)/sec\]")

_PROGRAMS = {
    "nccl-tests": (
        re.compile(r"\bnThread \d+ nGpus \d|\b(?:Out of bounds values|Avg bus bandwidth) *:|# Collective test\b"),
        TABLE_ROW,
    ),
    "iperf3": (INTERVAL, re.compile(r'"sum_(?:sent|received)"\s*:')),
    "perftest": (PERFTEST_TITLE, PERFTEST_HEAD),
}


def benchmark_of(line: str) -> str | None:
    """`nccl-tests`, `iperf3` or `perftest` if a line is a part of its output; without the marks before the line."""
    text = line.strip()
    for program, patterns in _PROGRAMS.items():
        if any(pattern.search(text) if pattern is not TABLE_ROW else pattern.match(text) for pattern in patterns):
            return program
    return None
