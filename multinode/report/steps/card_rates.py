"""card_rates: the counters of network cards as rates between their samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from multinode.core.run.samples import NicSample

__all__ = ["CardRate", "card_rates"]

_BITS_PER_BYTE = 8


class CardRate(msgspec.Struct, frozen=True, kw_only=True):
    """What passed a card between two samples; both rates are None where its counters began anew.

    Attributes:
        sample: the later one.
        in_gbit_per_s: as counted, headers and all; likewise `out_gbit_per_s`.
    """

    sample: NicSample
    in_gbit_per_s: float | None
    out_gbit_per_s: float | None


def card_rates(samples: Iterable[NicSample]) -> dict[str, list[CardRate]]:
    """By card, in the order of time."""
    cards: dict[str, list[NicSample]] = {}
    for sample in samples:
        cards.setdefault(sample.ifname, []).append(sample)
    return {
        ifname: [_rate(before, after) for before, after in itertools.pairwise(taken) if after.mono_ns > before.mono_ns]
        for ifname, taken in cards.items()
    }


def _rate(before: NicSample, after: NicSample) -> CardRate:
    received, sent = after.rx_bytes - before.rx_bytes, after.tx_bytes - before.tx_bytes
    if received < 0 or sent < 0:
        return CardRate(sample=after, in_gbit_per_s=None, out_gbit_per_s=None)
    # Bits in a nanosecond are Gbit in a second.
    bits = _BITS_PER_BYTE / (after.mono_ns - before.mono_ns)
    return CardRate(sample=after, in_gbit_per_s=received * bits, out_gbit_per_s=sent * bits)
