"""A tuning in words: which change is recommended, or why none is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.experiment.shortlist import LeftOut
from multinode.experiment.tuning import SOONER, TunedRow, Tuning
from multinode.render.sheet import times
from multinode.stats.estimate import Estimate
from multinode.units import format_count

_LEFT_OUT = {
    "memory": "the GPUs have no room",
    "little": f"predicted to gain less than {SOONER:.0%}",
    "slower": "predicted slower than one node alone, whatever the error of the prediction",
    "more": "others are predicted to be better; --candidates tries more",
}


def with_words(tuning: Tuning) -> Tuning:
    """With its verdict."""
    return msgspec.structs.replace(tuning, verdict=_verdict(tuning))


def left_out_words(left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    """Which changes are not tried, and why, a line a reason."""
    names: dict[str, list[str]] = {}
    for one in left_out:
        needs = f"needs runs of {one.needs_steps} steps: --steps {one.needs_steps}"
        names.setdefault(needs if one.reason == "short" else _LEFT_OUT[one.reason], []).append(one.name)
    return tuple(f"{', '.join(named)}: {why}" for why, named in names.items())


def loss_words(tuning: Tuning) -> str:
    """What the losses of its table are of."""
    if tuning.loss_of == "held-out":
        return f"after {tuning.samples:,} samples, on held-out data; where nodes average, of averaged parameters"
    if tuning.loss_of == "training":
        return (
            f"training loss as logged, the mean of the last part of {tuning.samples:,} samples; where nodes average, "
            "of parameters between two averages"
        )
    return "none was recorded in every run"


def _verdict(tuning: Tuning) -> str:
    unmeasured = [row for row in tuning.rows if row.state == "waiting"]
    said = {
        "change": _change,
        "inconclusive": _inconclusive,
        "one_node": _one_node,
        "baseline": _baseline,
        "no_loss": _no_loss,
    }[tuning.outcome](tuning)
    if unmeasured and tuning.outcome != "no_loss":
        said += f" {format_count(len(unmeasured), 'change')} not measured yet."
    return said


def _change(tuning: Tuning) -> str:
    row = tuning.row(tuning.recommended)
    if row is None:
        return ""
    said = f"Recommended: {row.candidate.name}: {_sooner(row)}."
    return said if _is_repeated(row) else f"{said} By one seed: how far seeds scatter is not known."


def _inconclusive(tuning: Tuning) -> str:
    row = tuning.row(tuning.best)
    if row is None:
        return ""
    if _is_repeated(row):
        return f"Inconclusive: {row.candidate.name} may be better: {_sooner(row)}. More seeds tell: --seeds."
    return f"Inconclusive: {row.candidate.name}: {_sooner(row)}, by one seed. More seeds tell: --seeds."


def _sooner(row: TunedRow) -> str:
    """`it reaches the loss of the training as it stands 1.8x faster than one node alone (1.6x to 2.0x)`."""
    reference, gain = "one node alone", row.sooner
    if gain is None:
        reference, gain = "the training as it stands", row.sooner_than_baseline
    if gain is None:
        return ""
    loss = "that loss" if reference != "one node alone" else "the loss of the training as it stands"
    return f"it reaches {loss} {times(gain.value)} faster than {reference}{_range(gain)}"


def _range(estimate: Estimate) -> str:
    low, high = times(estimate.low), times(estimate.high)
    return "" if estimate.repeats == 1 or low == high else f" ({low} to {high})"


def _one_node(tuning: Tuning) -> str:
    gain = tuning.rows[1].sooner_than_baseline
    faster = f"{times(gain.value)} faster{_range(gain)}" if gain is not None else "faster"
    return f"Train on one node: it reaches the loss of the training as it stands {faster}, and {_no_change(tuning)}."


def _baseline(tuning: Tuning) -> str:
    rate = tuning.rows[0].learning_rate if tuning.rows[0].rates else None
    at = "" if rate is None else f", at learning rate {rate:g}"
    return f"Keep the training as it is{at}: {_no_change(tuning)}."


def _no_change(tuning: Tuning) -> str:
    """What became of the changes, of which none is better."""
    measured = [row for row in tuning.rows[2:] if row.run_ids]
    if not measured:
        return "no change was measured" if tuning.rows[2:] else "no change is predicted to be worth a run"
    return "no change that was measured is better"


def _no_loss(tuning: Tuning) -> str:
    baseline = tuning.rows[0]
    if not baseline.run_ids:
        why = baseline.reason or "it was not measured"
        return f"Nothing is recommended: the training as it stands has no figures: {why}."
    if not tuning.loss_of:
        return "Nothing is recommended: not every run recorded a loss, and speed alone says nothing of it."
    return "Nothing is recommended: the training as it stands diverged, and there is no loss to reach."


def _is_repeated(row: TunedRow) -> bool:
    return row.time_to_loss_s is not None and row.time_to_loss_s.repeats > 1
