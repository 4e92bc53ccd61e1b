from __future__ import annotations

import pytest

from multinode.analyse.comparison.contrast_side import make_side
from multinode.analyse.telemetry.gpus import GpuUse
from multinode.analyse.telemetry.machine_use import energy_of
from tests.analyse.made_up_sides import node_use, run_of, summary_of


def gpus(*figures: tuple[float | None, float | None]) -> tuple[GpuUse, ...]:
    return tuple(GpuUse(index=index, power_w=power, energy_j=energy) for index, (power, energy) in enumerate(figures))


def test_energy_is_counted_by_the_gpus_over_the_samples_of_the_window() -> None:
    nodes = (node_use(gpus=gpus((300.0, 1000.0), (200.0, 600.0))),)
    found = energy_of(nodes, 25 * 4, None)
    assert found.power_w == pytest.approx(500.0)
    assert found.j_per_sample == pytest.approx(1600 / (25 * 4))  # 25 steps of 4 samples


def test_energy_follows_from_the_power_where_it_is_not_counted() -> None:
    nodes = (node_use(gpus=gpus((300.0, None), (200.0, 600.0))),)
    assert energy_of(nodes, 25 * 4, 25.0).j_per_sample == pytest.approx(20.0)


def test_energy_follows_from_the_power_where_the_samples_of_the_window_are_not_known() -> None:
    nodes = (node_use(gpus=gpus((300.0, 1000.0), (200.0, 600.0))),)
    assert energy_of(nodes, 0, 25.0).j_per_sample == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ((), "no GPU of n1 was sampled"),
        (((300.0, None),), "not every GPU of n1 was sampled"),
        (((300.0, None), (None, None)), "not every GPU tells what it draws"),
    ],
)
def test_energy_of_some_gpus_is_not_taken_for_that_of_all(
    figures: tuple[tuple[float | None, float | None], ...], reason: str
) -> None:
    found = energy_of((node_use(gpus=gpus(*figures)),), 100, None)
    assert (found.power_w, found.j_per_sample, found.reason) == (None, None, reason)


def test_a_side_has_the_energy_of_its_repeats_or_a_reason() -> None:
    sampled = summary_of(25.0, nodes=(node_use(gpus=gpus((300.0, None), (200.0, None))),))
    side = make_side("baseline", [run_of(sampled), run_of(sampled)])
    assert [side.power_w, side.energy_j_per_sample] == pytest.approx([500.0, 20.0])
    partly = make_side("baseline", [run_of(sampled), run_of(summary_of(nodes=(node_use(),)))])
    assert (partly.power_w, partly.energy_j_per_sample) == (None, None)
    assert partly.missing["power_w"] == partly.missing["energy_j_per_sample"] == "no GPU of n1 was sampled"
