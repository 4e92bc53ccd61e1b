"""Advice as a table of text, for terminal, page and Markdown: one row a change with its gain, memory and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from multinode.analyse.advice.advice import Advice, Recommendations, Tried
from multinode.report.render.escaping import sanitize
from multinode.report.render.sheet import Column, Sheet
from multinode.units import format_count, format_rate

__all__ = ["advice_lines", "advice_sheet", "describe_gain", "how_sheet"]

_SOME_GIB = 0.005


def advice_sheet(advice: Sequence[Advice]) -> Sheet:
    """What is advised, best first, and why; predicted beside measured where it was tried."""
    notes = ("gain: predicted samples/s over those of today; a range is of the prediction", *_failures(advice))
    return _sheet("what would change it", advice, (Column("why", words=True), lambda one: one.why), notes)


def how_sheet(recommendations: Recommendations, advice: Sequence[Advice]) -> Sheet:
    """What is advised, best first, and how to do it."""
    today, measured, tried = (
        recommendations.today,
        recommendations.measured_samples_per_s,
        recommendations.today_tried,
    )
    link = f" at {format_rate(today.link_gbit_per_s)}" if today.link_gbit_per_s is not None else ""
    against = f"{today.strategy} on {format_count(today.nodes, 'node')}{link}, accumulation {today.accumulation}"
    low, high = today.interval
    rate = f"as it stands: {today.samples_per_s:.3g} samples/s predicted ({low:.3g} to {high:.3g})"
    if measured is not None:
        rate += f", {measured:.3g} measured"
    if tried is not None and tried.samples_per_s is not None:
        rate += f", {tried.samples_per_s:.3g} in a short run now"
    how = Column("how: options of multinode launch, or by hand", words=True)
    return _sheet(f"what would change it, against {against}", advice, (how, lambda one: one.command), (rate,))


def describe_gain(advice: Advice) -> str:
    """`1.78 times as fast (1.70 to 1.90)`."""
    low, high = advice.interval
    return f"{advice.gain:.2f} times as fast ({low:.2f} to {high:.2f})"


def advice_lines(recommendations: Recommendations, advice: Sequence[Advice]) -> Iterator[str]:
    """Why each change pays or does not, then what a try of one came to where it has no figures, then the notes."""
    lines = [f"{one.name}: {one.why}" for one in advice]
    lines += _failures(advice)
    lines += [f"note: {note}" for note in recommendations.notes]
    lines += [f"from {source}" for source in recommendations.sources]
    yield from map(sanitize, lines)


def _failures(advice: Sequence[Advice]) -> Iterator[str]:
    return (f"{one.name} was tried: {one.tried.reason}" for one in advice if one.tried is not None and one.tried.reason)


def _sheet(
    title: str, advice: Sequence[Advice], last: tuple[Column, Callable[[Advice], str]], notes: tuple[str, ...]
) -> Sheet:
    tried = any(one.tried is not None for one in advice)
    return Sheet(
        title=title,
        columns=(
            Column("change", words=True),
            Column("gain"),
            Column("from - to"),
            *((Column("measured"), Column("error")) if tried else ()),
            Column("memory", "GiB"),
            Column("what else it changes", words=True),
            last[0],
        ),
        rows=tuple(
            (
                one.name,
                f"x{one.gain:.2f}{' *' if one.measured else ''}",
                f"{one.interval[0]:.2f} - {one.interval[1]:.2f}",
                *(_measured(one.tried) if tried else ()),
                _memory(one.memory_gib),
                f"does not fit the GPUs; {one.meaning}" if one.fits is False else one.meaning,
                last[1](one),
            )
            for one in advice
        ),
        notes=(*notes, *(["* measured"] if any(one.measured for one in advice) else [])),
    )


def _measured(tried: Tried | None) -> tuple[str, str]:
    if tried is None:
        return "", ""
    if tried.gain is None or tried.error is None:
        return "failed", ""
    return f"x{tried.gain:.2f}", f"{tried.error:+.1%}{', outside' if tried.is_covered is False else ''}"


def _memory(more_gib: float | None) -> str:
    if more_gib is None:
        return "unknown"
    return "0" if abs(more_gib) < _SOME_GIB else f"{more_gib:+.2f}"
