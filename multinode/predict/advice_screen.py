"""The screen of `advise`: the best change, how to make it, and the uncertainty."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding
from multinode.predict.advice import (
    CHANGE,
    Advice,
    Recommendations,
    is_one_node,
    may_beat_one_node,
    pays,
    shortlist,
)
from multinode.render.sheet import Block, CommandLine, Labels, Prose, Sheet
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown
from multinode.units import UNKNOWN, format_count, format_figure, format_rate

_SOME_GIB = 0.005
# Without details.
_TOP = 3


def advice_sheet(advice: Sequence[Advice]) -> Sheet:
    """Changes, best first, with reasons."""
    figures = (CHANGE, GAIN, GAIN_RANGE, MORE_MEMORY, EFFECTS, WHY)
    notes = ["gain: predicted samples/s relative to the current ones, with the prediction interval"]
    if any(row.measured for row in advice):
        notes.append("* measured")
    return Frame(title="changes", rows=_frame_rows(advice), figures=figures).sheet(notes=notes)


def gains_sheet(advice: Sequence[Advice], title: str = "", against: str = "today") -> Sheet:
    """Only the figures, best first, narrow enough for a terminal; gains are `against` the training as it is."""
    has_one_node = any(row.against_one_node is not None for row in advice)
    figures = (
        NUMBER,
        CHANGE,
        msgspec.structs.replace(GAIN, title="against", unit=against, cell=_gain_with_range),
        *((AGAINST_ONE_NODE,) if has_one_node else ()),
        msgspec.structs.replace(MORE_MEMORY, unit="+GiB"),
    )
    frame = Frame(title=title, rows=_frame_rows(advice), figures=figures)
    return frame.sheet(notes=tuple(_order_notes(advice)))


def _frame_rows(advice: Sequence[Advice]) -> tuple[Row, ...]:
    return tuple(Row(row, msgspec.structs.asdict(row) | {NUMBER.name: number}) for number, row in enumerate(advice, 1))


def _gain(row: Row) -> str:
    return f"{row.item.gain.value:.2f}x{' *' if row.item.measured else ''}"


def _gain_with_range(row: Row) -> str:
    return f"{row.item.gain.text('times')}{' measured' if row.item.measured else ''}"


def _against_one_node(row: Row) -> str:
    if row.item.against_one_node is None or is_one_node(row.item):
        return UNKNOWN
    return str(row.item.against_one_node.text("times"))


def _order_notes(advice: Sequence[Advice]) -> Iterator[str]:
    numbered = [(number, row) for number, row in enumerate(advice, 1) if not row.measured]
    if any(second.gain.high > first.gain.low for (_, first), (_, second) in itertools.pairwise(numbered)):
        yield "where ranges overlap, it is unknown which change is faster"
    if advice and is_one_node(advice[0]) and any(row.gain.value > advice[0].gain.value for row in advice):
        yield "one node ranks above changes that may not be faster than one node"


def gain_words(advice: Advice) -> str:
    """`2.9x faster (2.8x to 3.1x)`; `1.20x slower (1.10x to 1.30x)`."""
    return advice.gain.text("faster")


def why_words(advice: Advice) -> str:
    """Why it is faster or not, in one sentence."""
    return "; ".join(finding.message for finding in advice.why)


def effects_words(advice: Advice) -> str:
    """Its effects other than speed, and that it does not fit the GPUs."""
    fits_not = ("does not fit on the GPUs",) if advice.fits is False else ()
    return "; ".join((*fits_not, *(effect.message for effect in advice.effects))) or "nothing"


def _memory(row: Row) -> str:
    """`+0.50`, `-0.50`, `0`, `unknown`."""
    more_gib = row[MORE_MEMORY]
    if isinstance(more_gib, Unknown):
        return "unknown"
    return "0" if abs(more_gib) < _SOME_GIB else f"{more_gib:+.2f}"


NUMBER = Figure[int]("number", form="number", about="rank of a change; 1 is the best")
GAIN = Figure[Estimate](
    "gain",
    "gain",
    form="times",
    about="predicted or measured samples/s relative to the unchanged job",
    cell=_gain,
)
GAIN_RANGE = msgspec.structs.replace(GAIN.ranged, cell=lambda row: f"{row.item.gain.low:.2f}-{row.item.gain.high:.2f}")
AGAINST_ONE_NODE = Figure[Estimate](
    "against_one_node",
    "against",
    "1 node",
    form="times",
    about="predicted samples/s relative to one node",
    cell=_against_one_node,
)
MORE_MEMORY = Figure[float](
    "memory_gib", "memory", "GiB", form="figure", about="additional memory that a change needs per worker", cell=_memory
)
EFFECTS = Figure[tuple[Finding, ...]](
    "effects", "other effects", about="effects of a change other than speed", cell=lambda row: effects_words(row.item)
)
WHY = Figure[tuple[Finding, ...]](
    "why", "why", about="why a change is faster or not", cell=lambda row: why_words(row.item)
)


def show(recommendations: Recommendations, most: int | None = None) -> Iterator[Block]:
    """The best change, those that pay and how to make them; in detail every change, its reason, and all notes.

    Args:
        recommendations: with all changes.
        most: changes that are shown; None shows the best of each kind, and all in detail.
    """
    changes = recommendations.advice[:most]
    paying = [row for row in (changes if most else shortlist(changes, _TOP)) if pays(row)]
    against = "today" if _is_measured(recommendations) else "unchanged"
    yield Prose(_verdict(recommendations), "lead")
    yield msgspec.structs.replace(gains_sheet(paying, against=against), detail="brief")
    yield msgspec.structs.replace(gains_sheet(changes, against=against), detail="screen")
    yield msgspec.structs.replace(advice_sheet(changes), detail="page")
    yield Labels((("Today" if _is_measured(recommendations) else "Unchanged", _today(recommendations)),))
    yield Labels(tuple(_tries(recommendations, paying)), detail="brief")
    yield Labels(tuple(_tries(recommendations, changes, why=True)), detail="full")
    if recommendations.back_test is not None:
        yield Labels((("Model", recommendations.back_test.outcome.message),))
    notes = tuple("; ".join(filter(None, (note.message, note.hint))) for note in recommendations.notes)
    for label, texts in (("Note", notes), ("Source", recommendations.sources)):
        yield Labels(tuple(("" if number else label, text) for number, text in enumerate(texts)), detail="full")


def _verdict(recommendations: Recommendations) -> str:
    paying = next((row for row in recommendations.advice if pays(row)), None)
    if paying is None:
        return "No change is predicted to make this training job noticeably faster."
    how = "measured" if paying.measured else "predicted"
    if is_one_node(paying):
        today = format_count(recommendations.today.nodes, "node")
        link = recommendations.today.link_gbit_per_s
        at = "" if _is_measured(recommendations) or link is None else f" at {format_rate(link)}"
        sentence = f"Train on 1 node: {how} to be {gain_words(paying)} than on the current {today}{at}."
        return " ".join([sentence, *_beside_one_node(recommendations)])
    return f"Best change: {paying.name}, {how} to be {gain_words(paying)} than {_now(recommendations)}."


def _is_measured(recommendations: Recommendations) -> bool:
    """Whether gains are of the measured training, and not of one on another link."""
    return recommendations.measured_samples_per_s is not None


def _now(recommendations: Recommendations) -> str:
    link = recommendations.today.link_gbit_per_s
    if _is_measured(recommendations) or link is None:
        return "now"
    return f"the unchanged job at {format_rate(link)}"


def _beside_one_node(recommendations: Recommendations) -> Iterator[str]:
    for row in recommendations.advice:
        beside = row.against_one_node
        if beside is not None and not is_one_node(row) and beside.high > 1 and may_beat_one_node(row):
            is_known = beside.low > 1
            verdict = "faster" if is_known else "it is unclear whether this is faster"
            figure = beside.text("times_in_words")
            yield f"With {row.name}, {recommendations.today.nodes} nodes reach {figure} the speed of 1 node: {verdict}."
            return


def _tries(
    recommendations: Recommendations, shown: Sequence[Advice], *, why: bool = False
) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(shown, 1):
        if row.change is not None:
            yield f"Try {number}", row.name
            command = recommendations.command
            yield "", CommandLine(command.launch(row.command) if command is not None else row.command)
        else:
            yield f"Try {number}", row.command
        if row.fits is False or row.effects:
            yield "", effects_words(row)
        if why and row.why:
            yield "", f"why: {why_words(row)}"


def _today(recommendations: Recommendations) -> str:
    today, measured = recommendations.today, recommendations.measured_samples_per_s
    link = f" at {format_rate(today.link_gbit_per_s)}" if today.link_gbit_per_s is not None else ""
    low, high = map(format_figure, today.samples_per_s.bounds)
    predicted = f"{format_figure(today.samples_per_s.value)} predicted ({low} to {high})"
    rate = predicted if measured is None else f"{format_figure(measured)} measured"
    settings = f"{today.strategy} on {format_count(today.nodes, 'node')}{link}, accumulation {today.accumulation}"
    return f"{settings}; samples/s: {rate}"
