"""Measure what the lab's links really carry, one TCP stream at a time: a rate asked for is not yet a rate."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import NodeFailed
from multinode.lab.shaping import burst_bytes
from multinode.lab.spec import Lab, LabNode
from multinode.units import goodput_gb_per_s

__all__ = ["LinkSpeed", "measure_links", "measure_stream"]

# Below this part of what the rate leaves for payload, the link is not what was asked for.
_ENOUGH = 0.95

_PROGRAM = Path(__file__).with_name("stream.py")
_SKIP_S = 0.12
_WINDOW_S = 0.3
_DEADLINE_S = 30.0
_BITS_PER_BYTE = 8


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two nodes.

    Attributes:
        rate_gbit_per_s: line rate that was asked for, the lower of the two ends; None is unshaped.
        expected_gbit_per_s: what of it is left for TCP payload at an MTU of 1500; None is unshaped.
        goodput_gbit_per_s: TCP payload that arrived.
    """

    source: str
    target: str
    rate_gbit_per_s: float | None
    expected_gbit_per_s: float | None
    goodput_gbit_per_s: float

    @property
    def is_slow(self) -> bool:
        """Whether the link carries more than 5 % less than it should."""
        return self.expected_gbit_per_s is not None and self.goodput_gbit_per_s < _ENOUGH * self.expected_gbit_per_s


class _Arrived(msgspec.Struct, frozen=True):
    size_bytes: int
    time_s: float


def measure_links(lab: Lab) -> Iterator[LinkSpeed]:
    """Measure node 0 to each other node and back, one after the other: about a second a node.

    A slow link is measured once more and the better figure counts: the question is what the link can carry, and all
    nodes share this machine with whatever else runs on it.

    Raises:
        NodeFailed: no connection came about.
    """
    first, *others = lab.nodes
    for other in others:
        for source, target in ((first, other), (other, first)):
            speed = measure_stream(source, target)
            yield max(speed, measure_stream(source, target), key=_goodput) if speed.is_slow else speed


def measure_stream(source: LabNode, target: LabNode, window_s: float = _WINDOW_S) -> LinkSpeed:
    """Send from one node to another for a moment.

    Raises:
        NodeFailed: no connection came about.
    """
    rates = [node.rate_gbit_per_s for node in (source, target) if node.rate_gbit_per_s is not None]
    rate = min(rates, default=None)
    # Two buckets lie on the way, and both begin full.
    skip_bytes = 0 if rate is None else 4 * burst_bytes(rate)
    receiver = _start(target, "receive", target.addr, str(_SKIP_S), str(skip_bytes), str(window_s))
    sender = None
    try:
        sender = _start(source, "send", target.addr, _first_line(receiver))
        said, _ = receiver.communicate(timeout=_DEADLINE_S)
        arrived = decode_json(said, _Arrived)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise NodeFailed(
            f"no stream from {source.name} to {target.addr} came about: {error}",
            node=target.name,
            hint="take the lab down and up again: multinode lab down",
        ) from error
    finally:
        for process in (receiver, sender):
            if process is not None:
                process.kill()
                process.communicate()
    return LinkSpeed(
        source=source.name,
        target=target.name,
        rate_gbit_per_s=rate,
        expected_gbit_per_s=None if rate is None else goodput_gb_per_s(rate) * _BITS_PER_BYTE,
        goodput_gbit_per_s=arrived.size_bytes * _BITS_PER_BYTE / arrived.time_s / 1e9,
    )


def _goodput(speed: LinkSpeed) -> float:
    return speed.goodput_gbit_per_s


def _first_line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None or not select.select([process.stdout], [], [], _DEADLINE_S)[0]:
        raise subprocess.TimeoutExpired(process.args, _DEADLINE_S)
    return process.stdout.readline().strip()


def _start(node: LabNode, *arguments: str) -> subprocess.Popen[str]:
    # Only the node's network is entered: the program need not be on the node's disk.
    return subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{node.namespace}", sys.executable, "-I", "-S", str(_PROGRAM), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
