from __future__ import annotations

from typing import Any

import pytest

from multinode.profile.likely_causes import find_disturbances
from multinode.profile.machine_use import GpuUse
from tests.contrast.made_up_sides import node_use

CORES = {"n1": 8}


def hot(**known: Any) -> dict[str, Any]:
    return {"gpus": (GpuUse(index=1, **known),)}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({"cpu_steal_percent": 5.0}, "n1: CPU steal 5%"),
        ({"cpu_busy_percent": 80.0, "job_cores": 2.0}, "n1: other processes used 55% of its 8 CPU cores"),
        ({"throttled_share": 0.3}, "n1: CPU throttled (cgroup) for 30%"),
        ({"retransmitted_share": 0.012}, "n1: TCP retransmits: 1.20% of the segments"),
        (hot(temperature_c=88.0), "n1: its GPU 1 reached 88 C"),
        (
            hot(throttle={"sw_thermal_slowdown": 0.4}),
            "n1: clocks of its GPU 1 throttled (sw_thermal_slowdown) for 40%",
        ),
        (hot(throttle={"sw_power_cap": 1.0}), "n1: clocks of its GPU 1 throttled (sw_power_cap) for 100%"),
    ],
)
def test_what_disturbs_is_said_with_its_node_and_its_figure(use: dict[str, Any], said: str) -> None:
    (found,) = find_disturbances([[node_use(**use)]], CORES)
    assert found.node == "n1"
    assert found.message.startswith(said)


@pytest.mark.parametrize(
    "use",
    [
        {},
        {"cpu_steal_percent": 1.0},
        {"cpu_busy_percent": 100.0, "job_cores": 7.5},
        {"cpu_busy_percent": 100.0},
        {"throttled_share": 0.01},
        {"retransmitted_share": 0.0005},
        hot(temperature_c=70.0, throttle={"gpu_idle": 1.0, "sw_power_cap": 0.01}),
    ],
)
def test_what_is_usual_disturbs_nobody(use: dict[str, Any]) -> None:
    assert find_disturbances([[node_use(**use)]], CORES) == ()


def test_other_load_is_unknown_without_the_number_of_cores() -> None:
    busy = [node_use(cpu_busy_percent=100.0, job_cores=1.0)]
    assert find_disturbances([busy], {}) == ()


def test_repeats_that_saw_the_same_say_it_once_at_its_strongest() -> None:
    repeats = [[node_use(cpu_steal_percent=part)] for part in (3.0, 9.0, 4.0)]
    assert [found.message for found in find_disturbances(repeats, CORES)] == ["n1: CPU steal 9%"]
