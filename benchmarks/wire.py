"""How long the controller takes to read what a node sends of a run, a record at a time.

python benchmarks/wire.py [--before CHECKOUT]: a session follows scripted nodes; with `--before`, that
checkout of multinode takes turns with this one.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from multinode.cluster.cluster import Node
from multinode.launch.session import Event, EventQueue, NodeSession
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport

_ROOT = Path(__file__).parents[1]
_STEP = {"kind": "step", "rank": 0, "step": 1000, "time_s": 1.7e9, "mono_ns": 10**15, "step_time_us": 312345.6}
_RECORDS = {
    "64 KiB of log": ("log", b"0123456789abcde\n" * 4096),
    "a step": ("samples/rank-0.jsonl", json.dumps(_STEP).encode() + b"\n"),
}
_COUNT = 500


class _Taken(EventQueue):
    """Keeps only what went wrong."""

    error: Exception | None = None

    def put(self, event: Event, timeout_s: float) -> bool:
        """Add an event."""
        del timeout_s
        self.error = event.error or self.error
        return True


def _read(name: str, count: int) -> float:
    """Microseconds a record."""
    file, data = _RECORDS[name]
    text = base64.b64encode(data).decode()
    pieces = [{"kind": "chunk", "file": file, "offset": at * len(data), "data": text} for at in range(count)]
    said = [{"kind": "hello", "time_s": 0.0}, *pieces, {"kind": "end", "state": "ended", "exit_code": 0}]
    lines = [json.dumps(record).encode() + b"\n" for record in said]
    agent, events = AgentTransport(FakeTransport(lambda *_: lines), AgentArchive(b"")), _Taken()
    request = {"schema": 1, "run_id": "r.0", "poll_s": 0.1, "lease_s": None}
    session = NodeSession(agent, Node(name="a"), 0, request, events, silence_s=60.0)
    began = time.perf_counter()
    # In this thread: no other has a share of the time.
    session._follow()  # noqa: SLF001
    took_s = time.perf_counter() - began
    if events.error is not None:
        raise events.error
    return took_s / count * 1e6


def _ask(checkout: Path, name: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--read", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print the median of each record, of each checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--read", choices=list(_RECORDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(_read(options.read, _COUNT))
        return
    checkouts = {"now": _ROOT} if options.before is None else {"before": options.before.resolve(), "now": _ROOT}
    for name in _RECORDS:
        took: dict[str, list[float]] = {which: [] for which in checkouts}
        for _ in range(options.repeats):
            for which, checkout in checkouts.items():
                took[which].append(_ask(checkout, name))
        for which, times in took.items():
            low, high = min(times), max(times)
            print(f"{name}, {which}: {statistics.median(times):.1f} us a record ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
