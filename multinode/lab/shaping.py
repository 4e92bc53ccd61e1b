"""The token bucket that makes a virtual link as fast as a card of a given line rate. Pure: lines for `tc -batch`."""

from __future__ import annotations

from multinode.units import parse_rate

__all__ = ["burst_bytes", "parse_lab_rate", "rate_text", "shape_lines", "speed_text"]

# tbf counts 14 of the 38 bytes that Ethernet adds to each packet of 1500; a card spends its line rate on all of them.
_COUNTED_BYTES = 1514
_ON_THE_WIRE_BYTES = 1538

# A bucket of 16 kB costs gloo a third at 1 Gbit/s; segments of up to 64 kB must fit whole. Beyond that a millisecond of
# the rate: at 25 Gbit/s a bucket of 128 kB carries 3 % less.
_LEAST_BURST_BYTES = 128 * 1024
_BURST_S = 1e-3
_QUEUE_MS = 50

_VETH_SPEED = "10000"

_UNSHAPED = {"0", "none"}


def parse_lab_rate(text: str) -> float | None:
    """A line rate in Gbit/s; None for `none` or `0`: unshaped.

    Raises:
        ValueError: it is not a rate; the message says how to write one.
    """
    return None if text.strip().lower() in _UNSHAPED else parse_rate(text)


def rate_text(rate_gbit_per_s: float | None) -> str:
    """A line rate as the command line takes it: `1gbit`, `100mbit`, `none`."""
    if rate_gbit_per_s is None:
        return "none"
    if rate_gbit_per_s < 1:
        return f"{rate_gbit_per_s * 1e3:.6g}mbit"
    return f"{rate_gbit_per_s:.6g}gbit"


def speed_text(rate_gbit_per_s: float | None) -> str:
    """What a card of this line rate says in /sys/class/net/X/speed, in Mbit/s; unshaped is what veth says itself."""
    return str(round(rate_gbit_per_s * 1000)) if rate_gbit_per_s is not None else _VETH_SPEED


def burst_bytes(rate_gbit_per_s: float) -> int:
    """How much may pass at once at this rate."""
    return max(_LEAST_BURST_BYTES, round(rate_gbit_per_s * 1e9 / 8 * _BURST_S))


def shape_lines(ifname: str, rate_gbit_per_s: float | None) -> list[str]:
    """What `tc` has to do to give the sending side of an interface this line rate, whatever it had before."""
    if rate_gbit_per_s is None:
        # Deleting fails where there is nothing to delete: put something there first.
        return [f"qdisc replace dev {ifname} root pfifo", f"qdisc del dev {ifname} root"]
    bits_per_s = round(rate_gbit_per_s * 1e9 * _COUNTED_BYTES / _ON_THE_WIRE_BYTES)
    bucket = f"rate {bits_per_s}bit burst {burst_bytes(rate_gbit_per_s)}b latency {_QUEUE_MS}ms"
    return [f"qdisc replace dev {ifname} root tbf {bucket}"]
