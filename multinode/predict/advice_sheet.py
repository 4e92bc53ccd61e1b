"""Advice as tables of text, one row a change with its gain, memory and meaning; and what is said of one change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from multinode.predict.advice import Advice, Tried
from multinode.render.sheet import UNKNOWN, Column, Sheet, span_of_times, times

_SOME_GIB = 0.005


def advice_sheet(advice: Sequence[Advice]) -> Sheet:
    """What is advised, best first, and why; predicted beside measured where it was tried."""
    tried = any(one.tried is not None for one in advice)
    notes = ["gain: predicted samples/s over those of today; the range is of the prediction", *failures(advice)]
    return Sheet(
        title="what would change it",
        columns=(
            Column("change", words=True),
            Column("gain"),
            Column("range"),
            *((Column("measured"), Column("error")) if tried else ()),
            Column("memory", "GiB"),
            Column("what else it changes", words=True),
            Column("why", words=True),
        ),
        rows=tuple(
            (
                one.name,
                f"{one.gain:.2f}x{' *' if one.measured else ''}",
                f"{one.interval[0]:.2f}-{one.interval[1]:.2f}",
                *(_tried(one.tried) if tried else ()),
                _memory(one.memory_gib),
                meaning_words(one),
                one.why,
            )
            for one in advice
        ),
        notes=(*notes, *(["* measured"] if any(one.measured for one in advice) else [])),
    )


def gains_sheet(advice: Sequence[Advice], title: str = "") -> Sheet:
    """The figures alone, best first: narrow enough for a terminal."""
    tried = any(one.tried is not None for one in advice)
    has_one_node = any(one.against_one_node is not None for one in advice)
    return Sheet(
        title=title,
        columns=(
            Column(""),
            Column("change", words=True),
            Column("against", "today"),
            *((Column("against", "1 node"),) if has_one_node else ()),
            *((Column("measured"), Column("error")) if tried else ()),
            Column("memory", "+GiB"),
        ),
        rows=tuple(
            (
                str(number),
                one.name,
                f"{times(one.gain)} measured" if one.measured else span_of_times(one.gain, one.interval),
                *((_against_one_node(one),) if has_one_node else ()),
                *(_tried(one.tried) if tried else ()),
                _memory(one.memory_gib),
            )
            for number, one in enumerate(advice, 1)
        ),
        notes=tuple(_order_notes(advice)),
    )


def is_one_node(advice: Advice) -> bool:
    """Whether it is today's training on one node; what earlier releases stored does not say so."""
    return advice.kind == "nodes" and advice.outlook.nodes == 1


def _against_one_node(advice: Advice) -> str:
    if advice.against_one_node is None or is_one_node(advice):
        return UNKNOWN
    return span_of_times(advice.against_one_node, advice.against_one_node_interval)


def _order_notes(advice: Sequence[Advice]) -> Iterator[str]:
    """That an order is not known, where ranges overlap."""
    numbered = [(number, one) for number, one in enumerate(advice, 1) if not one.measured]
    if any(second.interval[1] > first.interval[0] for (_, first), (_, second) in itertools.pairwise(numbered)):
        yield "ranges that overlap: which of the two is faster is not known"
    if advice and is_one_node(advice[0]) and any(one.gain > advice[0].gain for one in advice):
        yield "one node alone comes before what may not be faster than it"


def gain_words(advice: Advice) -> str:
    """`2.9x faster (2.8x to 3.1x)`; `1.20x slower (1.10x to 1.30x)`."""
    (low, high), gain, word = advice.interval, advice.gain, "faster"
    if gain < 1:
        gain, low, high, word = 1 / gain, 1 / high, 1 / low, "slower"
    return f"{times(gain)} {word} ({times(low)} to {times(high)})"


def meaning_words(advice: Advice) -> str:
    """What it changes beside the speed, and whether the GPUs have room for it."""
    return f"does not fit the GPUs; {advice.meaning}" if advice.fits is False else advice.meaning


def _memory(more_gib: float | None) -> str:
    """`+0.50`, `-0.50`, `0`, `unknown`: GiB more per worker."""
    if more_gib is None:
        return "unknown"
    return "0" if abs(more_gib) < _SOME_GIB else f"{more_gib:+.2f}"


def _tried(tried: Tried | None) -> tuple[str, str]:
    """The gain that a short run had, and how far off its prediction was."""
    if tried is None:
        return "", ""
    if tried.gain is None or tried.error is None:
        return "failed", ""
    return f"{tried.gain:.2f}x", f"{tried.error:+.1%}{', outside' if tried.is_covered is False else ''}"


def failures(advice: Sequence[Advice]) -> Iterator[str]:
    """What a short run came to where it has no figures."""
    return (f"{one.name} was tried: {one.tried.reason}" for one in advice if one.tried is not None and one.tried.reason)
