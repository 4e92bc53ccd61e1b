"""contrast_outlook: a contrast's forecast and advice as tables of text: what if, break-even, what would change it.

No figure is made here; how a table looks is the business of terminal, page and Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from multinode.analyse.advice.advice import Advice, Tried
from multinode.analyse.prediction.break_even import BreakEven, Needed
from multinode.analyse.prediction.forecast import Forecast, PredictedScenario
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, figure, format_sig, percent
from multinode.units import format_count, format_rate

__all__ = ["advice_sheet", "break_even_sheet", "what_if_sheet", "what_it_changes"]

_MOST_SCENARIOS = 60

# What a scenario may vary: a column stands only where it does.
_VARIED: tuple[tuple[Column, Callable[[PredictedScenario], str]], ...] = (
    (Column("nodes x workers"), lambda one: f"{one.nodes} x {one.workers_per_node}"),
    (Column("batch", "a device"), lambda one: figure(one.per_device_batch, "g")),
    (Column("accumulation"), lambda one: str(one.accumulation)),
    (Column("strategy", words=True), lambda one: one.strategy),
    (Column("method", words=True), lambda one: one.method or UNKNOWN),
    (Column("gradients as", words=True), lambda one: one.grad_compress or UNKNOWN),
    (Column("bucket", "MiB"), lambda one: figure(one.bucket_mib, "g")),
    (Column("overlap", words=True), lambda one: "yes" if one.overlap else "no"),
)


def what_if_sheet(forecast: Forecast | None) -> Sheet:
    """A row a scenario; settings that all of them share have no column."""
    scenarios = forecast.scenarios[:_MOST_SCENARIOS] if forecast is not None else ()
    varied = [(column, told) for column, told in _VARIED if len({told(one) for one in scenarios}) > 1]
    figures = (
        Column("step", "ms"),
        Column("samples/s"),
        Column("low to high"),
        Column("speed-up"),
        Column("efficiency"),
        Column("exposed"),
        Column("", words=True),
    )
    return Sheet(
        title="what if",
        columns=(Column("link"), *(column for column, _ in varied), *figures),
        rows=tuple((_link(one), *(told(one) for _, told in varied), *_figures(one)) for one in scenarios),
        notes=tuple(_notes(forecast)) if forecast is not None else (),
    )


def break_even_sheet(forecast: Forecast | None) -> Sheet:
    """What it would take; empty where that is not known."""
    found = forecast.break_even if forecast is not None else None
    return Sheet(title="break-even", rows=tuple(_break_even(found)) if found is not None else ())


def advice_sheet(advice: Sequence[Advice]) -> Sheet:
    """A row a change, as they are ranked; what was tried beside what was predicted."""
    is_tried = any(one.tried is not None for one in advice)
    measured = (Column("measured", words=True),) if is_tried else ()
    return Sheet(
        title="what would change it",
        columns=(
            Column("change", words=True),
            Column("gain"),
            Column("low to high"),
            *measured,
            Column("memory", "GiB a worker"),
            Column("what it changes", words=True),
            Column("why", words=True),
        ),
        rows=tuple(_advice_row(one, is_tried=is_tried) for one in advice),
        notes=("gain: predicted samples/s over those of today; a range is of the prediction",),
    )


def what_it_changes(one: Advice) -> str:
    """In the training's meaning or its price; before it, that the GPUs have no room for it."""
    return f"does not fit the GPUs; {one.meaning}" if one.fits is False else one.meaning


def _figures(one: PredictedScenario) -> tuple[str, ...]:
    low, high = one.interval
    return (
        figure(one.step_time_ms, ",.0f"),
        format_sig(one.samples_per_s),
        f"{format_sig(low)} to {format_sig(high)}",
        f"{one.speedup:.2f}",
        percent(one.efficiency, ".0f"),
        percent(one.parts.exposed_ms / one.step_time_ms if one.step_time_ms > 0 else None, ".0f"),
        "measured" if one.measured else "",
    )


def _link(one: PredictedScenario) -> str:
    return UNKNOWN if one.link_gbit_per_s is None else format_rate(one.link_gbit_per_s)


def _notes(forecast: Forecast) -> Iterator[str]:
    yield "predicted; speed-up is over one node in the same settings, efficiency that over the ratio of workers"
    left = len(forecast.scenarios) - _MOST_SCENARIOS
    if left > 0:
        yield f"and {left} more in the JSON"
    yield forecast.back_test.sentence
    yield from forecast.sources
    yield from forecast.notes


def _break_even(found: BreakEven) -> Iterator[tuple[str, str]]:
    target = f"{found.target:.0%} efficiency"
    workers = format_count(found.one_node_workers, "worker")
    yield f"several nodes beat one with {workers}", _needed(found.beats_one)
    if found.full_beats_one is not None:
        yield f"they do with {workers} each", _needed(found.full_beats_one)
    yield target, _needed(found.efficient)
    yield "nothing exposed", _needed(found.nothing_exposed)
    accumulation = found.accumulation
    told = "" if accumulation.value is None else f"{accumulation.value:g} micro-batches a step: "
    yield f"{target} by accumulation", f"{told}{accumulation.why}"
    yield "one more node", found.next_node.sentence


def _needed(needed: Needed) -> str:
    # The slowest link that is looked at says nothing where each one is enough.
    if needed.value is None or needed.always:
        return needed.why
    return f"from {format_rate(needed.value)} on"


def _advice_row(one: Advice, *, is_tried: bool) -> tuple[str, ...]:
    low, high = one.interval
    return (
        one.name,
        f"{one.gain:.2f} x",
        f"{low:.2f} to {high:.2f}",
        *((_tried(one.tried),) if is_tried else ()),
        figure(one.memory_gib, "+.1f"),
        what_it_changes(one),
        one.why,
    )


def _tried(tried: Tried | None) -> str:
    if tried is None:
        return UNKNOWN
    if tried.gain is None:
        return tried.reason or UNKNOWN
    within = {True: ", within the range", False: ", outside the range", None: ""}[tried.is_covered]
    return f"{tried.gain:.2f} x{within}"
