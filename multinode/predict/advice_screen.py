"""What `advise` prints: the best change, those that pay and how to make them, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.predict.advice import Advice, Recommendations, best_tried, pays
from multinode.predict.advice_sheet import (
    failures,
    gain_words,
    gains_sheet,
    is_one_node,
    meaning_words,
)
from multinode.predict.words import error_words, launch_command
from multinode.render.screen import Command, Part, labelled_parts, paragraph
from multinode.render.sheet import format_sig, span_of_times, times
from multinode.render.table import sheet_table
from multinode.units import format_count, format_rate


def advice_parts(
    recommendations: Recommendations,
    advice: Sequence[Advice],
    *,
    details: bool = False,
    more: str = "",
    next_command: str = "",
) -> Iterator[Part]:
    """The screen of `advise`.

    Args:
        recommendations: with their words.
        advice: what of them is shown, best first.
        details: with every change, why, and all notes.
        more: the command that shows the details; empty where they are shown.
        next_command: what to do next; empty for nothing.
    """
    shown = list(advice) if details else [one for one in advice if one.tried is not None or pays(one)]
    yield paragraph(_verdict(recommendations, advice), "bold")
    if shown:
        yield ""
        yield sheet_table(gains_sheet(shown))
    yield ""
    yield from labelled_parts(_rows(recommendations, shown, details=details))
    if more and not details:
        yield f"Details     {more}"
    if next_command:
        yield f"Next        {next_command}"
        if " --try " in next_command:
            yield "            (measures the best that need no purchase, in short runs)"


def _verdict(recommendations: Recommendations, advice: Sequence[Advice]) -> str:
    """The best change in one sentence: of what was tried, by its measured gain."""
    if any(one.tried is not None and one.tried.gain is not None for one in advice):
        best = best_tried(advice)
        if best is None or best.tried is None or best.tried.gain is None:
            return "No tried change makes this training noticeably faster."
        return f"Best tried change: {best.name}, {times(best.tried.gain)} faster (predicted {times(best.gain)})."
    paying = next((one for one in recommendations.advice if pays(one)), None)
    if paying is None:
        return "No change is predicted to make this training noticeably faster."
    how = "measured" if paying.measured else "predicted"
    if is_one_node(paying):
        today = format_count(recommendations.today.nodes, "node")
        gain = f"{times(paying.gain)} faster" if paying.measured else gain_words(paying)
        said = f"Train on 1 node: {gain} than on {today} as today, {how}."
        return " ".join([said, *_beside_one_node(recommendations)])
    return f"Best change: {paying.name}, {gain_words(paying)} than today, {how}."


def _beside_one_node(recommendations: Recommendations) -> Iterator[str]:
    """The best change that may still beat it, where one may."""
    for one in recommendations.advice:
        span = one.against_one_node_interval
        if one.against_one_node is not None and span is not None and not is_one_node(one) and span[1] > 1:
            is_known = span[0] > 1
            verdict = "more than that" if is_known else "whether that is more is inconclusive"
            figure = span_of_times(one.against_one_node, span)
            yield f"With {one.name} {recommendations.today.nodes} nodes reach {figure} of it: {verdict}."
            return


def _rows(recommendations: Recommendations, shown: Sequence[Advice], *, details: bool) -> Iterator[tuple[str, str]]:
    yield "Today", _today(recommendations)
    for number, one in enumerate(shown, 1):
        if one.change is not None:
            yield f"Try {number}", one.name
            yield "", Command(launch_command(recommendations.job, recommendations.hosts, one.command))
        else:
            yield f"Try {number}", one.command
        if one.fits is False or one.meaning != "nothing":
            yield "", meaning_words(one)
        if details and one.why:
            yield "", f"why: {one.why}"
    for failure in failures(shown):
        yield "Failed", failure
    if recommendations.back_test is not None:
        yield "Model", error_words(recommendations.back_test)
    for label, texts in (("Note", recommendations.notes), ("Source", recommendations.sources)) if details else ():
        for number, text in enumerate(texts):
            yield "" if number else label, text


def _today(recommendations: Recommendations) -> str:
    """The training as it stands."""
    today, measured, tried = recommendations.today, recommendations.measured_samples_per_s, recommendations.today_tried
    link = f" at {format_rate(today.link_gbit_per_s)}" if today.link_gbit_per_s is not None else ""
    low, high = today.interval
    predicted = f"{format_sig(today.samples_per_s)} predicted ({format_sig(low)}-{format_sig(high)})"
    rates = [predicted if measured is None else f"{format_sig(measured)} measured"]
    if tried is not None and tried.samples_per_s is not None:
        rates.append(f"{format_sig(tried.samples_per_s)} in a short run now")
    settings = f"{today.strategy} on {format_count(today.nodes, 'node')}{link}, accumulation {today.accumulation}"
    return f"{settings}; samples/s: {', '.join(rates)}"
