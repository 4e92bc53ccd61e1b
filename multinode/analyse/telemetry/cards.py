"""Card use: what each network card and RDMA port of a node carried. Pure.

Rates come from the records that read a card more often in the span: the sampler's, or those of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.run.observed import ObservedNode
from multinode.analyse.stats.counter_rates import Reading, Span, grown_in, in_whole, peak_in
from multinode.core.run.samples import CardBytes, NicSample, StepSample, WorkerSample

__all__ = ["CardUse", "use_of_cards"]

_GBIT_PER_BYTE = 8e-9
# More than any card, or any bundle of them, will carry for a long time.
_ABSURD_GBIT = 1e5
# Counters have headers and all, and a moment of reading is not sharp.
_OVER_LINK = 1.05
_MOST_CARDS = 64
_LONGEST_NAME = 64
_LOOPBACK = "lo"

_Counters = Sequence[tuple[int, NicSample | CardBytes]]


class CardUse(msgspec.Struct, frozen=True, kw_only=True):
    """One network card or RDMA port.

    Attributes:
        in_gbit_per_s: as counted, headers and all, mean over the window; likewise `out_gbit_per_s`.
        peak_in_gbit_per_s: the highest between two samples; likewise `peak_out_gbit_per_s`.
        idle_in_gbit_per_s: before the first worker began; likewise `idle_out_gbit_per_s`; None was not sampled.
        errors: in the whole run, both ways; likewise `drops`.
        link_gbit_per_s: what it says of its speed; `share` of it the busier direction's mean.
    """

    ifname: str
    in_gbit_per_s: float | None = None
    out_gbit_per_s: float | None = None
    peak_in_gbit_per_s: float | None = None
    peak_out_gbit_per_s: float | None = None
    idle_in_gbit_per_s: float | None = None
    idle_out_gbit_per_s: float | None = None
    errors: int | None = None
    drops: int | None = None
    link_gbit_per_s: float | None = None
    share: float | None = None


def use_of_cards(node: ObservedNode, span: Span | None) -> tuple[tuple[CardUse, ...], dict[str, str]]:
    """The cards that were sampled, that of the data plane first; and what could not be said of which, with the reason.

    Args:
        node: what it recorded.
        span: of the steps that count; None leaves out what is of that span.
    """
    missing: dict[str, str] = {}
    sampled, stepped = _sampled(node), _stepped(node)
    names = {name for name in (*sampled, *stepped) if _is_name(name)}
    ordered = sorted(names, key=lambda name: (name != node.ifname, name))[:_MOST_CARDS]
    cards = tuple(_card(node, name, sampled.get(name, []), missing) for name in ordered)
    if span is not None:
        cards = tuple(
            _with_rates(card, _finer(sampled.get(card.ifname, []), stepped.get(card.ifname, []), span), span, missing)
            for card in cards
        )
    return cards, missing


def _sampled(node: ObservedNode) -> dict[str, list[tuple[int, NicSample]]]:
    cards: dict[str, list[tuple[int, NicSample]]] = {}
    for sample in node.of(NicSample):
        cards.setdefault(sample.ifname, []).append((sample.mono_ns, sample))
    return cards


def _stepped(node: ObservedNode) -> dict[str, list[tuple[int, CardBytes]]]:
    cards: dict[str, list[tuple[int, CardBytes]]] = {}
    for sample in node.of(StepSample):
        for name, counters in (sample.cards or {}).items():
            cards.setdefault(name, []).append((sample.mono_ns, counters))
    return cards


def _is_name(name: str) -> bool:
    """Whether it can be a card's: it will be printed. The loopback is none."""
    return name.isprintable() and len(name) <= _LONGEST_NAME and name != _LOOPBACK


def _finer(sampled: _Counters, stepped: _Counters, span: Span) -> _Counters:
    def count(counters: _Counters) -> int:
        return sum(span.start_ns <= moment <= span.end_ns for moment, _ in counters)

    return stepped if count(stepped) > count(sampled) else sampled


def _card(node: ObservedNode, name: str, sampled: Sequence[tuple[int, NicSample]], missing: dict[str, str]) -> CardUse:
    """What is known without the span."""
    faults: dict[str, int | None] = {}
    for kind, fields in {"errors": ("rx_errors", "tx_errors"), "drops": ("rx_dropped", "tx_dropped")}.items():
        counts = [_readings(sampled, field) for field in fields]
        try:
            known = [round(in_whole(readings)) for readings in counts if readings]
            faults[kind] = sum(known) if known else None
        except ValueError as error:
            missing[f"{name} {kind}"] = str(error)
    idle_in, idle_out = _idle(node, sampled)
    return CardUse(
        ifname=name,
        idle_in_gbit_per_s=idle_in,
        idle_out_gbit_per_s=idle_out,
        errors=faults.get("errors"),
        drops=faults.get("drops"),
        link_gbit_per_s=node.link_gbit_per_s if name == node.ifname else None,
    )


def _idle(node: ObservedNode, sampled: Sequence[tuple[int, NicSample]]) -> tuple[float | None, float | None]:
    """Gbit/s in and out before the first worker began, from the first sample to the last one before that."""
    begun = [one.begun_mono_ns for one in node.of(WorkerSample) if one.begun_mono_ns is not None]
    moments = sorted(moment for moment, _ in sampled if begun and moment <= min(begun))
    if len(moments) < 2 or moments[0] == moments[-1]:  # noqa: PLR2004 - a beginning and an end
        return None, None
    span = Span(start_ns=moments[0], end_ns=moments[-1])
    try:
        received, sent = (_gbit(grown_in(_readings(sampled, field), span).per_s) for field in ("rx_bytes", "tx_bytes"))
    except ValueError:
        # The same counters are missed with their reason in the span of the steps.
        return None, None
    return received, sent


def _with_rates(card: CardUse, counters: _Counters, span: Span, missing: dict[str, str]) -> CardUse:
    received, sent = (_readings(counters, field) for field in ("rx_bytes", "tx_bytes"))
    try:
        means = [_gbit(grown_in(readings, span).per_s) for readings in (received, sent)]
        peaks = [_gbit(peak_in(readings, span)) for readings in (received, sent)]
    except ValueError as error:
        missing[card.ifname] = str(error)
        return card
    link = card.link_gbit_per_s
    share = max(means) / link if link is not None and link > 0 else None
    if share is not None and share > _OVER_LINK:
        # The counters are what was seen, and what a virtual card says of its speed is often a mere number.
        missing[f"{card.ifname} share"] = f"it carried more than the {link:g} Gbit/s that it says it can"
        share = None
    return msgspec.structs.replace(
        card,
        in_gbit_per_s=means[0],
        out_gbit_per_s=means[1],
        peak_in_gbit_per_s=peaks[0],
        peak_out_gbit_per_s=peaks[1],
        share=share,
    )


def _readings(counters: _Counters, field: str) -> list[Reading]:
    """One counter of a card; moments at which it was not told are left out."""
    return [Reading(moment, total) for moment, one in counters if (total := getattr(one, field)) is not None]


def _gbit(bytes_per_s: float) -> float:
    rate = bytes_per_s * _GBIT_PER_BYTE
    if rate > _ABSURD_GBIT:
        raise ValueError("no card carries as much as it counted")
    return rate
