from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.analyse.grid.imported_rows import with_derived
from multinode.core.text.rounded import Rounded, exactly, parse_rounded


def derived(**values: float) -> dict[str, float]:
    return {name: figure.value for name, figure in with_derived({n: exactly(v) for n, v in values.items()}).items()}


@pytest.mark.parametrize(
    ("given_", "name", "value"),
    [
        ({"nodes": 2, "workers_per_node": 4}, "world_size", 8),
        ({"world_size": 8, "nodes": 2}, "workers_per_node", 4),
        ({"world_size": 8, "per_device_batch": 2, "accumulation": 4}, "global_batch", 64),
        ({"all_devices_batch": 32, "accumulation": 4}, "global_batch", 128),
        ({"all_devices_batch": 32, "world_size": 4}, "per_device_batch", 8),
        ({"global_batch": 128, "world_size": 4, "per_device_batch": 8}, "accumulation", 4),
        ({"dataset_samples": 1100, "epochs": 2, "whole_s": 200}, "samples_per_s", 11),
        ({"dataset_samples": 1100, "epochs": 2, "samples_per_s": 11}, "whole_s", 200),
        ({"steps_per_s": 0.5, "global_batch": 32}, "samples_per_s", 16),
        ({"steps_per_s": 0.5}, "step_time_ms", 2000),
        ({"steps": 32, "whole_s": 64}, "step_time_ms", 2000),
        ({"samples_per_s": 16, "global_batch": 32}, "step_time_ms", 2000),
        ({"step_time_ms": 2000, "global_batch": 32}, "samples_per_s", 16),
        ({"samples_per_s": 2, "tokens": 5000, "dataset_samples": 10}, "tokens_per_s", 1000),
        ({"tgs": 1000, "world_size": 4, "tokens_per_sample": 500}, "samples_per_s", 8),
        ({"tokens_per_s": 4000, "world_size": 4}, "tgs", 1000),
        ({"price_gpu_per_hour": 9.3, "world_size": 2}, "price_per_hour", 18.6),
        ({"price_purchase_gpu": 80000, "world_size": 2}, "price_purchase", 160000),
    ],
)
def test_a_figure_follows_from_others(given_: dict[str, float], name: str, value: float) -> None:
    assert derived(**given_)[name] == pytest.approx(value)


def test_nothing_is_assumed() -> None:
    # Whether gradients were accumulated, and over how many nodes the GPUs stand, nobody told.
    assert derived(world_size=2, per_device_batch=4) == {"world_size": 2, "per_device_batch": 4}
    assert "per_device_batch" not in derived(all_devices_batch=33, world_size=4)


def test_a_figure_that_is_told_stays_though_it_contradicts() -> None:
    assert derived(dataset_samples=1000, epochs=1, samples_per_s=10, whole_s=500)["whole_s"] == 500


def test_what_follows_is_known_no_better_than_what_it_follows_from() -> None:
    found = with_derived(
        {"samples_per_s": parse_rounded("0.085"), "dataset_samples": exactly(1100), "epochs": exactly(1)}
    )
    assert (found["whole_s"].low, found["whole_s"].high) == pytest.approx((1100 / 0.0855, 1100 / 0.0845))


_NAMES = [
    "world_size",
    "nodes",
    "accumulation",
    "global_batch",
    "dataset_samples",
    "epochs",
    "whole_s",
    "tokens",
    "tokens_per_s",
]


@given(st.dictionaries(st.sampled_from(_NAMES), st.floats(1e-9, 1e15).map(exactly)))
def test_any_figures_are_completed_and_none_is_changed(told: dict[str, Rounded]) -> None:
    found = with_derived(told)
    assert {name: found[name] for name in told} == told
    assert all(0 < figure.low <= figure.high < float("inf") for figure in found.values())
