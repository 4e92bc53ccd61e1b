"""carry_residual: what a run on several nodes took beyond the model of it -> a Calibration that gives it back. Pure.

What the model makes of the run without that is `calibration`'s; how it is carried on to other scenarios is `predict`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from multinode.analyse.job.step_calls import with_gradients
from multinode.analyse.prediction.calibration import Calibration, Measured, Residual
from multinode.analyse.prediction.cost_model import StepParts
from multinode.analyse.prediction.predict import predict, sent_bytes
from multinode.analyse.prediction.scenario import Scenario
from multinode.analyse.steps.summary import Summary
from multinode.errors import UsageError

__all__ = ["carry_residual"]

_MS_PER_S = 1e3
_AGAIN = "measure it anew, or name another run"
_LEAST_MS, _MOST_MS = 1e-6, 1e9
# No run is that far off by what is carried on; what remains is a doubt.
_LEAST_FACTOR, _MOST_FACTOR = 1 / 16, 16.0
_HALVINGS = 40
# Of a step, what a user would notice.
_NOTICEABLE = 0.05
# Rounding must not decide.
_ROUNDING = 1e-9


def carry_residual(calibration: Calibration, several: Measured, scenario: Scenario) -> Calibration:
    """The same calibration, whose prediction of that run is what it measured.

    Exposed communication that the model does not know is carried on by the bytes that are sent; what it has too much of
    is taken from what the calls take; all else, as waiting for a slower node, by the workers' own work.

    Args:
        calibration: of that run among others.
        several: on several nodes.
        scenario: what it ran as, its gradients as they were sent.

    Raises:
        UsageError: its samples a second cannot be.
    """
    step_ms = _step_ms(several.summary, scenario)
    try:
        alone = predict(calibration, scenario).parts
    except ValueError:
        # What it sends is not known: that is told where it is asked for.
        return calibration
    exposed_ms = _exposed_ms(several.summary, step_ms, alone)
    residual = _of_exposed(_Model(calibration, scenario), exposed_ms, alone)
    residual = _of_own(_Model(calibration, scenario), residual, step_ms)
    residual = msgspec.structs.replace(residual, size=_missed(step_ms, alone.step_ms))
    notes = (*calibration.notes, *_notes(several.summary.run_id, step_ms, alone, residual))
    return msgspec.structs.replace(calibration, residual=residual, notes=notes)


class _Model(NamedTuple):
    """A calibration, and the scenario at which its residual is looked for."""

    calibration: Calibration
    scenario: Scenario

    def parts(self, residual: Residual) -> StepParts:
        """Of the step, with that residual."""
        return predict(msgspec.structs.replace(self.calibration, residual=residual), self.scenario).parts


def _step_ms(summary: Summary, scenario: Scenario) -> float:
    """By its rate, which is what predictions are held against."""
    rate = summary.samples_per_s or 0.0
    step_ms = scenario.samples / rate * _MS_PER_S if rate > 0 else 0.0
    if not _LEAST_MS <= step_ms <= _MOST_MS:
        reason = summary.missing.get("samples_per_s", f"{rate:g} samples/s cannot be")
        raise UsageError(f"run {summary.run_id} tells no samples/s to predict others from: {reason}", hint=_AGAIN)
    return step_ms


def _exposed_ms(summary: Summary, step_ms: float, alone: StepParts) -> float:
    """By the share of the steps that were split; else what the step is longer than the workers' own work."""
    mean = summary.split.mean
    if mean is None or mean.exposed_ms is None or mean.step_ms <= 0:
        return max(0.0, step_ms - (alone.step_ms - alone.exposed_ms))
    return min(1.0, max(0.0, mean.exposed_ms / mean.step_ms)) * step_ms


def _of_exposed(model: _Model, exposed_ms: float, alone: StepParts) -> Residual:
    """With which the model exposes that much; as little, where it cannot expose less."""
    calibration, scenario = model
    if exposed_ms < alone.exposed_ms:
        return Residual(at=scenario, comm=_comm(model, exposed_ms))
    calls = with_gradients(calibration.work.calls_of(scenario.strategy, scenario.layout), scenario.gradient_factor)
    return Residual(at=scenario, extra_ms=exposed_ms - alone.exposed_ms, sent_bytes=sent_bytes(scenario, calls))


def _comm(model: _Model, exposed_ms: float) -> float:
    """The largest part of the calls' time with which no more is exposed, or as little as can be."""

    def exposed_at(factor: float) -> float:
        return model.parts(Residual(at=model.scenario, comm=factor)).exposed_ms

    little, much = _LEAST_FACTOR, 1.0
    goal_ms = max(exposed_ms, exposed_at(little)) * (1 + _ROUNDING)
    for _ in range(_HALVINGS):
        middle = (little + much) / 2
        little, much = (middle, much) if exposed_at(middle) <= goal_ms else (little, middle)
    return little


def _of_own(model: _Model, residual: Residual, step_ms: float) -> Residual:
    """With what is neither exposed nor the workers' work on one node, and with what remains all the same."""
    parts = model.parts(residual)
    own = (step_ms - parts.exposed_ms) / (parts.step_ms - parts.exposed_ms)
    residual = msgspec.structs.replace(residual, own=min(_MOST_FACTOR, max(_LEAST_FACTOR, own)))
    left = _missed(step_ms, model.parts(residual).step_ms)
    return msgspec.structs.replace(residual, left=left if left > _ROUNDING else 0.0)


def _missed(measured_ms: float, predicted_ms: float) -> float:
    return max(measured_ms / predicted_ms, predicted_ms / measured_ms) - 1


def _notes(run_id: str, step_ms: float, alone: StepParts, residual: Residual) -> Iterator[str]:
    if residual.size > _NOTICEABLE:
        causes = "; ".join(_causes(step_ms, residual))
        yield (
            f"a step of run {run_id} took {step_ms:.3g} ms, where the model alone has {alone.step_ms:.3g}: {causes}; "
            "predictions on several nodes carry that on"
        )


def _causes(step_ms: float, residual: Residual) -> Iterator[str]:
    if residual.extra_ms > _NOTICEABLE * step_ms:
        yield f"{residual.extra_ms:.3g} ms of it is exposed communication that the network's figures do not explain"
    if residual.comm < 1 - _NOTICEABLE:
        yield f"its calls took {residual.comm:.2f} times what the network's figures say"
    if abs(residual.own - 1) > _NOTICEABLE:
        yield f"its workers' own work and waiting for each other took {residual.own:.2f} times that on one node"
