"""with_derived: what follows by arithmetic from the figures that a row of a foreign table gives. Pure.

A figure that is given is never replaced. Nothing is assumed: without the accumulation there is no global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from multinode.core.text.rounded import Rounded, exactly

__all__ = ["with_derived"]

_MS_PER_S = 1e3


class _Rule(NamedTuple):
    """One figure as the product of some over the product of others."""

    name: str
    over: tuple[str, ...] = ()  # Names of the factors.
    under: tuple[str, ...] = ()  # Names of the divisors.
    scale: float = 1.0  # A further, constant factor.
    counts: bool = False  # Whether it is a number of things, and so nothing where it comes out broken.


_RULES = (
    _Rule("devices", ("nodes", "workers_per_node")),
    _Rule("workers_per_node", ("devices",), ("nodes",), counts=True),
    _Rule("nodes", ("devices",), ("workers_per_node",), counts=True),
    _Rule("per_device_batch", ("all_devices_batch",), ("devices",), counts=True),
    _Rule("per_device_batch", ("global_batch",), ("devices", "accumulation"), counts=True),
    _Rule("accumulation", ("global_batch",), ("all_devices_batch",), counts=True),
    _Rule("accumulation", ("global_batch",), ("devices", "per_device_batch"), counts=True),
    _Rule("global_batch", ("devices", "accumulation", "per_device_batch")),
    _Rule("global_batch", ("all_devices_batch", "accumulation")),
    _Rule("tokens_per_sample", ("tokens",), ("samples",)),
    _Rule("samples_per_s", ("samples", "epochs"), ("runtime",)),
    _Rule("samples_per_s", ("steps_per_s", "global_batch")),
    _Rule("samples_per_s", ("global_batch",), ("step_time_ms",), _MS_PER_S),
    _Rule("tokens_per_s", ("tgs", "devices")),
    _Rule("samples_per_s", ("tokens_per_s",), ("tokens_per_sample",)),
    _Rule("tokens_per_s", ("samples_per_s", "tokens_per_sample")),
    _Rule("tgs", ("tokens_per_s",), ("devices",)),
    _Rule("step_time_ms", (), ("steps_per_s",), _MS_PER_S),
    _Rule("step_time_ms", ("runtime",), ("steps",), _MS_PER_S),
    _Rule("step_time_ms", ("global_batch",), ("samples_per_s",), _MS_PER_S),
    _Rule("runtime", ("samples", "epochs"), ("samples_per_s",)),
    _Rule("runtime", ("steps",), ("steps_per_s",)),
    _Rule("price_per_hour", ("price_gpu_per_hour", "devices")),
    _Rule("price_purchase", ("price_purchase_gpu", "devices")),
)


def with_derived(figures: Mapping[str, Rounded]) -> dict[str, Rounded]:
    """The figures with all that follows from them, each with the bounds that the rounding of its parts leaves.

    Args:
        figures: by the names of `core.imported_columns`.
    """
    known = dict(figures)
    # What one rule gives another may need, whichever stands first.
    while found := next((found for rule in _RULES if (found := _apply(rule, known)) is not None), None):
        known |= found
    return known


def _apply(rule: _Rule, known: Mapping[str, Rounded]) -> dict[str, Rounded] | None:
    if rule.name in known or not all(name in known for name in (*rule.over, *rule.under)):
        return None
    value = exactly(rule.scale)
    for name in rule.over:
        value *= known[name]
    for name in rule.under:
        value /= known[name]
    return None if rule.counts and not value.value.is_integer() else {rule.name: value}
