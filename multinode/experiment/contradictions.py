"""Find contradictions between the figures of one row, by arithmetic that holds for every training. Pure.

They are reported and not corrected: the row alone does not show which figure is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from multinode.records.plausible import Rounded, exactly, product

# Tolerance between two ways to one figure, beyond the rounding of published digits.
_TOLERANCE = 0.02

Figures = Mapping[str, Rounded]


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one row that contradict each other."""

    # two ways to one figure, as formulas of the names of `experiment.columns`: `samples_per_s*whole_s`,
    # `dataset_samples*epochs`; or `out_of_memory` and the names of figures that such a row has
    sides: tuple[str, ...]
    values: tuple[float, ...] = ()  # of both ways; empty for a row out of memory


class _Way(NamedTuple):
    """One way to a figure: a product over another, or a function."""

    words: str
    names: tuple[str, ...]
    under: tuple[str, ...] = ()
    compute: Callable[[Figures], Rounded] | None = None
    computed: str = ""

    @property
    def formula(self) -> str:
        """Its name."""
        return self.computed or "/".join("*".join(names) for names in (self.names, self.under) if names)

    def of(self, figures: Figures) -> Rounded:
        """The figure."""
        if self.compute is not None:
            return self.compute(figures)
        return product((figures[name] for name in self.names), (figures[name] for name in self.under))


def find_contradictions(figures: Figures) -> dict[str, Contradiction]:
    """Contradictions beyond the tolerance, by their sentence.

    Args:
        figures: of one row as published, by the names of `experiment.columns`.
    """
    return dict(_breaches(figures))


def _breaches(figures: Figures) -> Iterator[tuple[str, Contradiction]]:
    for one, other in _SAME:
        needed = {*one.names, *one.under, *other.names, *other.under}
        # Samples/s predict the runtime better than tokens/s.
        if not needed <= figures.keys() or (one is _TOKENS_OF_RUNTIME and "samples_per_s" in figures):
            continue
        left, right = one.of(figures), other.of(figures)
        if max(left.low / right.high, right.low / left.high) > 1 + _TOLERANCE:
            apart = left.value / right.value - 1 if right.value else math.inf
            size = f"{100 * abs(apart):.1f}% {'more' if apart > 0 else 'less'}"
            told = f"{one.words} is {_number(left.value)}, {other.words} is {_number(right.value)}: {size}"
            yield told, Contradiction(sides=(one.formula, other.formula), values=(left.value, right.value))


def _number(value: float) -> str:
    return f"{value:.6g}" if value < 1e6 else f"{value:,.0f}"  # noqa: PLR2004 - above it .6g would write 1e+06


def _steps_for_samples(figures: Figures) -> Rounded:
    """The last step of an epoch may be partial, or its samples may be dropped."""
    whole = figures["dataset_samples"] / figures["global_batch"]
    epochs = figures["epochs"]
    least, most = max(1, math.floor(whole.low)) * epochs.low, max(1, math.ceil(whole.high)) * epochs.high
    return Rounded(value=(whole * epochs).value, low=max(1, math.floor(least)), high=max(1, math.ceil(most)))


def _samples_of_step(figures: Figures) -> Rounded:
    batch = figures["global_batch"]
    if not {"dataset_samples", "epochs", "steps"} <= figures.keys():
        return batch
    average = figures["dataset_samples"] * figures["epochs"] / figures["steps"]
    expected = _steps_for_samples(figures)
    if not expected.low <= figures["steps"].value <= expected.high:
        return batch
    return Rounded(value=batch.value, low=min(batch.low, average.low), high=max(batch.high, average.high))


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
        _Way("samples/s over steps/s", ("samples_per_s",), ("steps_per_s",)),
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
