"""find_contradictions: whether the figures of one row fit together, by arithmetic that holds for every training. Pure.

A breach is named and nothing is mended: which of the figures is wrong nobody can tell from the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from multinode.core.text.rounded import Rounded, exactly

__all__ = ["TOLERANCE", "find_contradictions"]

TOLERANCE = 0.02
"""How far apart two ways to one figure may be, beyond what the rounding of the published digits explains."""

Figures = Mapping[str, Rounded]


class _Way(NamedTuple):
    """One way to a figure: in words, and how it is computed."""

    words: str
    of: Callable[[Figures], Rounded]


class _Relation(NamedTuple):
    """Two ways to one figure."""

    needs: tuple[str, ...]  # Figures without which there is nothing to compare.
    left: _Way
    right: _Way
    unless: str = ""  # A figure beside which another relation says the same.


def find_contradictions(figures: Figures) -> tuple[str, ...]:
    """What does not fit together by more than the tolerance, a sentence each.

    Args:
        figures: of one row as they were published, by the names of `core.grid.cell_columns`.
    """
    return tuple(_breaches(figures))


def _breaches(figures: Figures) -> Iterator[str]:
    for relation in _RELATIONS:
        if relation.unless not in figures and all(name in figures for name in relation.needs):
            left, right = relation.left.of(figures), relation.right.of(figures)
            if max(left.low / right.high, right.low / left.high) > 1 + TOLERANCE:
                yield _sentence(relation, left.value, right.value)


def _sentence(relation: _Relation, left: float, right: float) -> str:
    apart = left / right - 1
    size = f"{100 * abs(apart):.1f} % {'more' if apart > 0 else 'less'}"
    return f"{relation.left.words} is {_number(left)}, {relation.right.words} is {_number(right)}: {size}"


def _number(value: float) -> str:
    """With as many digits as tell two figures apart that are a percent from each other."""
    return f"{value:.6g}" if value < 1e6 else f"{value:,.0f}"  # noqa: PLR2004 - above it .6g would write 1e+06


def _steps_for_samples(figures: Figures) -> Rounded:
    """Optimizer steps of the data: the last of an epoch may be partial, or its samples may be dropped."""
    whole = figures["samples"] / figures["global_batch"]
    epochs = figures["epochs"]
    least, most = max(1, math.floor(whole.low)) * epochs.low, max(1, math.ceil(whole.high)) * epochs.high
    return Rounded(value=(whole * epochs).value, low=max(1, math.floor(least)), high=max(1, math.ceil(most)))


def _samples_of_step(figures: Figures) -> Rounded:
    """As the batch has it; or as the steps had it on average, where the last one of an epoch was partial."""
    batch = figures["global_batch"]
    if not {"samples", "epochs", "steps"} <= figures.keys():
        return batch
    average = figures["samples"] * figures["epochs"] / figures["steps"]
    expected = _steps_for_samples(figures)
    if not expected.low <= figures["steps"].value <= expected.high:
        return batch
    return Rounded(value=batch.value, low=min(batch.low, average.low), high=max(batch.high, average.high))


def _product(*names: str) -> Callable[[Figures], Rounded]:
    def multiply(figures: Figures) -> Rounded:
        found = exactly(1)
        for name in names:
            found *= figures[name]
        return found

    return multiply


_RELATIONS = (
    _Relation(
        ("global_batch", "devices", "accumulation", "per_device_batch"),
        _Way("the global batch", _product("global_batch")),
        _Way("GPUs x accumulation x batch of a GPU", _product("devices", "accumulation", "per_device_batch")),
    ),
    _Relation(
        ("all_devices_batch", "devices", "per_device_batch"),
        _Way("the batch of all GPUs", _product("all_devices_batch")),
        _Way("GPUs x batch of a GPU", _product("devices", "per_device_batch")),
    ),
    _Relation(
        ("global_batch", "all_devices_batch", "accumulation"),
        _Way("the global batch", _product("global_batch")),
        _Way("batch of all GPUs x accumulation", _product("all_devices_batch", "accumulation")),
    ),
    _Relation(
        ("devices", "nodes", "workers_per_node"),
        _Way("the number of GPUs", _product("devices")),
        _Way("nodes x workers a node", _product("nodes", "workers_per_node")),
    ),
    _Relation(
        ("samples_per_s", "runtime", "samples", "epochs"),
        _Way("samples/s x runtime", _product("samples_per_s", "runtime")),
        _Way("samples x epochs", _product("samples", "epochs")),
    ),
    _Relation(
        ("tokens_per_s", "runtime", "tokens", "epochs"),
        _Way("tokens/s x runtime", _product("tokens_per_s", "runtime")),
        _Way("tokens x epochs", _product("tokens", "epochs")),
        unless="samples_per_s",
    ),
    _Relation(
        ("steps_per_s", "runtime", "steps"),
        _Way("steps/s x runtime", _product("steps_per_s", "runtime")),
        _Way("the number of steps", _product("steps")),
    ),
    _Relation(
        ("steps", "global_batch", "samples", "epochs"),
        _Way("the number of steps", _product("steps")),
        _Way("samples x epochs / global batch", _steps_for_samples),
    ),
    _Relation(
        ("samples_per_s", "steps_per_s", "global_batch"),
        _Way("samples/s over steps/s", lambda figures: figures["samples_per_s"] / figures["steps_per_s"]),
        _Way("the global batch", _samples_of_step),
    ),
    _Relation(
        ("samples_per_s", "step_time_ms", "global_batch"),
        _Way("samples/s x step time in ms", _product("samples_per_s", "step_time_ms")),
        _Way("1000 x the global batch", lambda figures: _samples_of_step(figures) * exactly(1e3)),
    ),
    _Relation(
        ("tokens_per_s", "samples_per_s", "tokens", "samples"),
        _Way("tokens/s", _product("tokens_per_s")),
        _Way(
            "samples/s x tokens / samples",
            lambda figures: figures["samples_per_s"] * figures["tokens"] / figures["samples"],
        ),
    ),
    _Relation(
        ("tokens_per_s", "samples_per_s", "tokens_per_sample"),
        _Way("tokens/s", _product("tokens_per_s")),
        _Way("samples/s x tokens a sample", _product("samples_per_s", "tokens_per_sample")),
    ),
    _Relation(
        ("tokens_per_sample", "tokens", "samples"),
        _Way("tokens a sample", _product("tokens_per_sample")),
        _Way("tokens / samples", lambda figures: figures["tokens"] / figures["samples"]),
    ),
    _Relation(
        ("tgs", "tokens_per_s", "devices"),
        _Way("tokens/s of a GPU x GPUs", _product("tgs", "devices")),
        _Way("tokens/s", _product("tokens_per_s")),
    ),
    _Relation(
        ("mfu", "hfu", "model_tflops", "hardware_tflops"),
        _Way("MFU x the hardware's TFLOP/s", _product("mfu", "hardware_tflops")),
        _Way("HFU x the model's TFLOP/s", _product("hfu", "model_tflops")),
    ),
)
