"""Figures of an imported row that contradict each other. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.predict.rounded import product
from multinode.stats.estimate import Estimate, exactly
from multinode.units import format_figure

# Tolerance between two ways to one figure, beyond the rounding of published digits.
_TOLERANCE = 0.02
Figures = Mapping[str, Estimate]


class Contradiction(Finding, frozen=True, kw_only=True):
    """Figures of one row that contradict each other."""

    # two ways to one figure, as formulas of the names of figures: `samples_per_s*whole_s`,
    # `dataset_samples*epochs`; or `out_of_memory` and the names of figures that such a row has
    sides: tuple[str, ...]
    values: tuple[float, ...] = ()  # of both ways; empty for a row out of memory


CONTRADICTIONS = RuleGroup("Contradictions of an imported row")
_TWO_WAYS = CONTRADICTIONS.rule(
    "two-ways",
    about="a figure that differs from the value that other figures of the row imply",
    message="{first} is {value}, but {other} is {other_value}: {size}",
)
OUT_OF_MEMORY_WITH_FIGURES = CONTRADICTIONS.rule(
    "out-of-memory-with-figures",
    about="a row that ran out of memory but has a speed or a runtime",
    message="it ran out of memory but has {figures}",
)


class _Way(NamedTuple):
    """One way to a figure: a product over another, or a function."""

    words: str
    names: tuple[str, ...]
    under: tuple[str, ...] = ()
    compute: Callable[[Figures], Estimate] | None = None
    computed: str = ""

    @property
    def formula(self) -> str:
        """Its name."""
        return self.computed or "/".join("*".join(names) for names in (self.names, self.under) if names)

    def of(self, figures: Figures) -> Estimate:
        """The figure."""
        if self.compute is not None:
            return self.compute(figures)
        return product((figures[name] for name in self.names), (figures[name] for name in self.under))


def find_contradictions(figures: Figures) -> tuple[Contradiction, ...]:
    """Contradictions beyond the tolerance.

    Args:
        figures: of one row as published, by the names of figures.
    """
    return tuple(_breaches(figures))


def _breaches(figures: Figures) -> Iterator[Contradiction]:
    for first, other in _SAME:
        needed = {*first.names, *first.under, *other.names, *other.under}
        # Samples/s predict the runtime better than tokens/s.
        if not needed <= figures.keys() or (first is _TOKENS_OF_RUNTIME and "samples_per_s" in figures):
            continue
        left, right = first.of(figures), other.of(figures)
        if max(left.low / right.high, right.low / left.high) > 1 + _TOLERANCE:
            apart = left.value / right.value - 1 if right.value else math.inf
            size = f"{100 * abs(apart):.1f}% {'more' if apart > 0 else 'less'}"
            words = {
                "first": first.words,
                "value": _number(left.value),
                "other": other.words,
                "other_value": _number(right.value),
                "size": size,
            }
            yield Contradiction(
                **_TWO_WAYS.fields(None, words),
                sides=(first.formula, other.formula),
                values=(left.value, right.value),
            )


def _number(value: float) -> str:
    return format_figure(value, digits=6)


def _steps_for_samples(figures: Figures) -> Estimate:
    """The last step of an epoch may be partial, or its samples may be dropped."""
    whole = figures["dataset_samples"] / figures["global_batch"]
    epochs = figures["epochs"]
    least, most = max(1, math.floor(whole.low)) * epochs.low, max(1, math.ceil(whole.high)) * epochs.high
    return Estimate(value=(whole * epochs).value, low=max(1, math.floor(least)), high=max(1, math.ceil(most)))


def _samples_of_step(figures: Figures) -> Estimate:
    batch = figures["global_batch"]
    if not {"dataset_samples", "epochs", "steps"} <= figures.keys():
        return batch
    average = figures["dataset_samples"] * figures["epochs"] / figures["steps"]
    expected = _steps_for_samples(figures)
    if not expected.low <= figures["steps"].value <= expected.high:
        return batch
    return Estimate(value=batch.value, low=min(batch.low, average.low), high=max(batch.high, average.high))


_GLOBAL_BATCH = _Way("the global batch", ("global_batch",))
_STEPS = _Way("the number of steps", ("steps",))
_TOKENS_PER_S = _Way("tokens/s", ("tokens_per_s",))
_TOKENS_OF_RUNTIME = _Way("tokens/s x runtime", ("tokens_per_s", "whole_s"))
# Pairs of ways to one figure.
_SAME = (
    (
        _GLOBAL_BATCH,
        _Way("GPUs x accumulation x batch per GPU", ("world_size", "accumulation", "per_device_batch")),
    ),
    (
        _Way("the batch of all GPUs", ("all_devices_batch",)),
        _Way("GPUs x batch per GPU", ("world_size", "per_device_batch")),
    ),
    (_GLOBAL_BATCH, _Way("batch of all GPUs x accumulation", ("all_devices_batch", "accumulation"))),
    (_Way("the number of GPUs", ("world_size",)), _Way("nodes x workers per node", ("nodes", "workers_per_node"))),
    (
        _Way("samples/s x runtime", ("samples_per_s", "whole_s")),
        _Way("samples x epochs", ("dataset_samples", "epochs")),
    ),
    (_TOKENS_OF_RUNTIME, _Way("tokens x epochs", ("tokens", "epochs"))),
    (_Way("steps/s x runtime", ("steps_per_s", "whole_s")), _STEPS),
    (
        _STEPS,
        _Way(
            "samples x epochs / global batch",
            ("dataset_samples", "epochs", "global_batch"),
            compute=_steps_for_samples,
            computed="dataset_samples*epochs/global_batch",
        ),
    ),
    (
        _Way("samples/s divided by steps/s", ("samples_per_s",), ("steps_per_s",)),
        _Way("the global batch", ("global_batch",), compute=_samples_of_step),
    ),
    (
        _Way("samples/s x step time in ms", ("samples_per_s", "step_time_ms")),
        _Way(
            "1000 x the global batch",
            ("global_batch",),
            compute=lambda figures: _samples_of_step(figures) * exactly(1e3),
            computed="1000*global_batch",
        ),
    ),
    (_TOKENS_PER_S, _Way("samples/s x tokens / samples", ("samples_per_s", "tokens"), ("dataset_samples",))),
    (_TOKENS_PER_S, _Way("samples/s x tokens per sample", ("samples_per_s", "tokens_per_sample"))),
    (
        _Way("tokens per sample", ("tokens_per_sample",)),
        _Way("tokens / samples", ("tokens",), ("dataset_samples",)),
    ),
    (_Way("tokens/s per GPU x GPUs", ("tgs", "world_size")), _TOKENS_PER_S),
    (
        _Way("samples_per_s_per_gpu*world_size", ("samples_per_s_per_gpu", "world_size")),
        _Way("samples_per_s", ("samples_per_s",)),
    ),
    (
        _Way("MFU x the hardware's TFLOP/s", ("mfu", "hardware_tflops")),
        _Way("HFU x the model's TFLOP/s", ("hfu", "model_tflops")),
    ),
)
