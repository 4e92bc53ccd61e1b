"""What a contrast shows: verdict, a small table, cause, break-even and changes to try; in detail every table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.contrast.figures import (
    Contrast,
    Side,
    capitalised,
    network_words,
    side_row,
)
from multinode.contrast.judge import TRAFFIC, Outcome, judge, prefers_one_node
from multinode.contrast.sheets import (
    cost_sheet,
    each_node_sheet,
    efficiency_of,
    missing_sheet,
    settings_sheet,
    side_head,
    side_sheet,
    small_sheet,
)
from multinode.predict.advice import Advice, pays, shortlist
from multinode.predict.advice_screen import advice_sheet, gain_words, gains_sheet
from multinode.predict.screen import break_even_sheet, break_even_words, what_if_sheet
from multinode.predict.shortfall import shortfall_words
from multinode.profile.measured import EXPOSED, EXPOSED_SHARE, SPEEDUP
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME
from multinode.render.sheet import (
    Block,
    Chart,
    Charts,
    Labels,
    Prose,
    Tiles,
    Tone,
    in_detail,
)
from multinode.stats.estimate import inverse
from multinode.stats.unknown import UNMEASURED, Unknown, or_none
from multinode.units import UNKNOWN, format_count, format_figure, times

_TONES: dict[Outcome, Tone] = {
    "faster": "good",
    "slower": "bad",
    "unsynchronised": "bad",
    "equal": "doubtful",
    "inconclusive": "doubtful",
}
_MOST_ADVICE = 3
# Without details the screen fits 22 lines.
_MOST_ADVICE_SHORT = 2
# Maximum columns with ranges in 80 characters.
_MOST_SIDES = 3

_Rows = Iterator[tuple[str, str]]


def show(contrast: Contrast) -> Iterator[Block]:
    """The verdict, a small table, cause, break-even and changes to try; then charts and every table."""
    yield Prose(contrast.verdict.message, "lead", tone=_TONES[judge(contrast)])
    yield Tiles(tuple(_key_figures(contrast)))
    yield msgspec.structs.replace(small_sheet(contrast, contrast.measured), title="", split=_MOST_SIDES)
    yield Labels(tuple(_why_rows(contrast)), detail="brief")
    yield Labels(tuple(_why_rows(contrast, details=True)), "why", detail="full")
    yield Charts(lambda: _charts(contrast))
    yield from in_detail(_tables(contrast))


def _charts(contrast: Contrast) -> Iterable[Chart]:
    from multinode.contrast.charts import contrast_charts  # noqa: PLC0415 - plotly is an extra

    return contrast_charts(contrast)


def _tables(contrast: Contrast) -> Iterator[Block]:
    yield msgspec.structs.replace(side_sheet(contrast, contrast.measured, costs=False), split=_MOST_SIDES)
    yield each_node_sheet(contrast)
    yield msgspec.structs.replace(cost_sheet(contrast), split=_MOST_SIDES)
    yield msgspec.structs.replace(gains_sheet(contrast.advice, "possible changes"), detail="screen")
    yield msgspec.structs.replace(advice_sheet(contrast.advice), detail="page")
    how = "\n\n".join(f"# {change.name}\n{change.command}" for change in contrast.advice if change.command)
    yield Prose(how, "verbatim", "how to apply changes: options of multinode launch, or manual steps", detail="page")
    forecast = or_none(contrast.forecast)
    yield msgspec.structs.replace(what_if_sheet(forecast, narrow=True), detail="screen")
    yield msgspec.structs.replace(what_if_sheet(forecast), detail="page")
    yield break_even_sheet(forecast)
    yield settings_sheet(contrast)
    yield missing_sheet(contrast)


def _why_rows(contrast: Contrast, *, details: bool = False) -> _Rows:
    """Labelled rows below the small table: the cause, caveats, and changes to try.

    Args:
        contrast: with its sentences.
        details: with all reasons and differences.
    """
    passes = network_words(contrast.candidate)
    sentence = capitalised(f"{contrast.loss.message}.")
    if details:
        # The network has a row of its own.
        reasons = [reason.message for reason in contrast.reasons if reason.code != TRAFFIC.code]
        yield from _once("Why", list(dict.fromkeys([*reasons, sentence])))
    elif contrast.loss.cause in {"node", "unknown"}:
        yield "Cause", sentence
    forecast = or_none(contrast.forecast)
    short = forecast.shortfall if forecast is not None else None
    yield from _once("Network", [*filter(None, (passes, shortfall_words(short) if short is not None else ""))])
    sides = (*contrast.measured, *(side for side in contrast.others if side.role == "each-node"))
    disturbed = [f"{_where(contrast, side)}, {found.message}" for side in sides for found in side.disturbances]
    if details:
        yield from _once("Differs", [found.message for found in contrast.differences])
        yield from _once("Disturbed", [f"{sentence}; this side may be slower as a result" for sentence in disturbed])
    else:
        yield from _first("Differs", [found.message for found in contrast.differences])
        yield from _first("Disturbed", disturbed)
    yield from _once("Break-even", _break_even(contrast, shortly=not details))
    yield from _once("Try", _to_try(contrast) if details else _to_try_shortly(contrast))


def _where(contrast: Contrast, side: Side) -> str:
    return f"{', '.join(side.node_names)} alone" if side.role == "each-node" else side_head(contrast, side)


def _once(label: str, texts: Sequence[str]) -> _Rows:
    yield from (("" if number else label, text) for number, text in enumerate(texts))


def _first(label: str, texts: Sequence[str]) -> _Rows:
    more = f"; {len(texts) - 1} more" if len(texts) > 1 else ""
    yield from ((label, text.removesuffix(".") + more) for text in texts[:1])


def _break_even(contrast: Contrast, *, shortly: bool) -> list[str]:
    forecast = contrast.forecast
    if isinstance(forecast, Unknown):
        return [f"unknown: {forecast.reason}"] if forecast != UNMEASURED else []
    break_even = forecast.break_even
    if break_even is None:
        return []
    candidate = contrast.candidate
    alike = candidate.world_size == candidate.nodes * candidate.workers_per_node
    text = break_even_words(
        break_even, candidate.nodes, or_none(candidate.link_gbit_per_s), shortly=shortly, alike=alike
    )
    return [text]


def _predicted(contrast: Contrast) -> list[Advice]:
    baseline = contrast.baseline
    settings = or_none(baseline.settings)
    batch = None if settings is None else (settings.per_device_batch, settings.accumulation)
    fitting = [
        advice
        for advice in contrast.advice
        if pays(advice)
        and not advice.measured
        # The baseline was measured, so a prediction of it is no use.
        and (
            advice.outlook.nodes,
            advice.outlook.workers_per_node,
            (advice.outlook.per_device_batch, advice.outlook.accumulation),
        )
        != (baseline.nodes, baseline.workers_per_node, batch)
    ]
    return list(shortlist(fitting, _MOST_ADVICE))


def _to_try(contrast: Contrast) -> list[str]:
    predicted, now = _predicted(contrast), format_count(contrast.candidate.nodes, "node")
    changes = [f"{_gains(change, f'{now} now')}{_effects(change)}" for change in predicted]
    if prefers_one_node(contrast):
        changes = [f"train on 1 node: {times(inverse(contrast.speedup).value)} faster than {now}, measured", *changes]
        changes = changes[:_MOST_ADVICE]
    forecast = or_none(contrast.forecast)
    error = [f"(predicted, {forecast.back_test.brief})"] if predicted and forecast is not None else []
    return [*changes, *error]


def _to_try_shortly(contrast: Contrast) -> list[str]:
    changes = [f"{_gains(change, 'now')}{_batch(contrast, change)}, predicted" for change in _predicted(contrast)]
    if prefers_one_node(contrast):
        changes = [f"train on 1 node: {times(inverse(contrast.speedup).value)} faster, measured", *changes]
    return changes[:_MOST_ADVICE_SHORT]


def _gains(change: Advice, now: str) -> str:
    """Its gain against now and against one node."""
    beside = ""
    if change.against_one_node is not None:
        beside = f", {change.against_one_node.text('times_in_words')} the speed of 1 node"
    return f"{change.name}: {gain_words(change)} than {now}{beside}"


def _effects(change: Advice) -> str:
    return "".join(f"; {effect.message}" for effect in change.effects)


def _batch(contrast: Contrast, change: Advice) -> str:
    """What it makes of the global batch."""
    then, now = change.outlook, contrast.candidate
    per_worker = then.per_device_batch * then.accumulation
    batch = per_worker * (sum(then.unequal) if then.unequal else then.nodes * then.workers_per_node)
    current = or_none(now.global_batch)
    if not current or batch == current:
        return ""
    return f"; global batch x{format_figure(batch / current)}"


def _key_figures(contrast: Contrast) -> Iterator[tuple[str, str]]:
    few, many = ((side_head(contrast, side), side_row(side)) for side in (contrast.baseline, contrast.candidate))
    figures = (
        *((figure.heading, figure.tell(many[1])) for figure in (SPEEDUP, efficiency_of(contrast))),
        *((f"{SAMPLES_PER_S.title}, {head}", SAMPLES_PER_S.tell(row)) for head, row in (few, many)),
        *((f"{STEP_TIME.words}, {head} ({STEP_TIME.unit})", STEP_TIME.tell(row)) for head, row in (few, many)),
        (f"{EXPOSED.words}, {many[0]}", EXPOSED_SHARE.tell(many[1])),
    )
    yield from ((name, value) for name, value in figures if value != UNKNOWN)
