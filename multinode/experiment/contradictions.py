"""find_contradictions: whether the figures of one row fit together, by arithmetic that holds for every training. Pure.

A breach is named and nothing is corrected: which of the figures is wrong nobody can tell from the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from multinode.records.plausible import Rounded, exactly, product

# How far apart two ways to one figure may be, beyond what the rounding of the published digits explains.
_TOLERANCE = 0.02

Figures = Mapping[str, Rounded]


class Contradiction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one row that do not fit together; the words are `experiment.cell_words`'.

    Attributes:
        sides: two ways to one figure, as formulas of the names of `experiment.columns`: `samples_per_s*whole_s`,
            `dataset_samples*epochs`; or `out_of_memory` and the names of what such a row has all the same.
        values: of both ways; empty of a row that ran out of memory.
    """

    sides: tuple[str, ...]
    values: tuple[float, ...] = ()


class _Way(NamedTuple):
    """One way to a figure: as a product over another, or computed otherwise."""

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


def find_contradictions(figures: Figures) -> tuple[Contradiction, ...]:
    """What does not fit together by more than the tolerance.

    Args:
        figures: of one row as they were published, by the names of `experiment.columns`.
    """
    return tuple(_breaches(figures))


def _breaches(figures: Figures) -> Iterator[Contradiction]:
    for one, other in _SAME:
        needed = {*one.names, *one.under, *other.names, *other.under}
        # Samples/s tell more of the runtime than tokens/s.
        if not needed <= figures.keys() or (one is _TOKENS_OF_RUNTIME and "samples_per_s" in figures):
            continue
        left, right = one.of(figures), other.of(figures)
        if max(left.low / right.high, right.low / left.high) > 1 + _TOLERANCE:
            yield Contradiction(sides=(one.formula, other.formula), values=(left.value, right.value))


def _steps_for_samples(figures: Figures) -> Rounded:
    """Optimizer steps of the data: the last of an epoch may be partial, or its samples may be dropped."""
    whole = figures["dataset_samples"] / figures["global_batch"]
    epochs = figures["epochs"]
    least, most = max(1, math.floor(whole.low)) * epochs.low, max(1, math.ceil(whole.high)) * epochs.high
    return Rounded(value=(whole * epochs).value, low=max(1, math.floor(least)), high=max(1, math.ceil(most)))


def _samples_of_step(figures: Figures) -> Rounded:
    """As the batch has it; or as the steps had it on average, where the last one of an epoch was partial."""
    batch = figures["global_batch"]
    if not {"dataset_samples", "epochs", "steps"} <= figures.keys():
        return batch
    average = figures["dataset_samples"] * figures["epochs"] / figures["steps"]
    expected = _steps_for_samples(figures)
    if not expected.low <= figures["steps"].value <= expected.high:
        return batch
    return Rounded(value=batch.value, low=min(batch.low, average.low), high=max(batch.high, average.high))


_GLOBAL_BATCH = _Way(("global_batch",))
_STEPS = _Way(("steps",))
_TOKENS_PER_S = _Way(("tokens_per_s",))
_TOKENS_OF_RUNTIME = _Way(("tokens_per_s", "whole_s"))
# Two ways each to one figure.
_SAME = (
    (
        _GLOBAL_BATCH,
        _Way(("world_size", "accumulation", "per_device_batch")),
    ),
    (
        _Way(("all_devices_batch",)),
        _Way(("world_size", "per_device_batch")),
    ),
    (_GLOBAL_BATCH, _Way(("all_devices_batch", "accumulation"))),
    (_Way(("world_size",)), _Way(("nodes", "workers_per_node"))),
    (
        _Way(("samples_per_s", "whole_s")),
        _Way(("dataset_samples", "epochs")),
    ),
    (_TOKENS_OF_RUNTIME, _Way(("tokens", "epochs"))),
    (_Way(("steps_per_s", "whole_s")), _STEPS),
    (
        _STEPS,
        _Way(
            ("dataset_samples", "epochs", "global_batch"),
            compute=_steps_for_samples,
            computed="dataset_samples*epochs/global_batch",
        ),
    ),
    (
        _Way(("samples_per_s",), ("steps_per_s",)),
        _Way(("global_batch",), compute=_samples_of_step),
    ),
    (
        _Way(("samples_per_s", "step_time_ms")),
        _Way(
            ("global_batch",),
            compute=lambda figures: _samples_of_step(figures) * exactly(1e3),
            computed="1000*global_batch",
        ),
    ),
    (_TOKENS_PER_S, _Way(("samples_per_s", "tokens"), ("dataset_samples",))),
    (_TOKENS_PER_S, _Way(("samples_per_s", "tokens_per_sample"))),
    (
        _Way(("tokens_per_sample",)),
        _Way(("tokens",), ("dataset_samples",)),
    ),
    (_Way(("tgs", "world_size")), _TOKENS_PER_S),
    (_Way(("samples_per_s_per_gpu", "world_size")), _Way(("samples_per_s",))),
    (
        _Way(("mfu", "hardware_tflops")),
        _Way(("hfu", "model_tflops")),
    ),
)
