from __future__ import annotations

from typing import Any

import pytest

from multinode.profile.likely_causes import find_disturbances
from multinode.profile.machine_use import GpuUse
from tests.contrast.made_up_sides import node_use
from tests.golden import Golden

CORES = {"n1": 8}


def hot(**known: Any) -> dict[str, Any]:
    return {"gpus": (GpuUse(index=1, **known),)}


CASES: dict[str, dict[str, Any]] = {
    "steal": {"cpu_steal_percent": 5.0},
    "other load": {"cpu_busy_percent": 80.0, "job_cores": 2.0},
    "a CPU limit": {"throttled_share": 0.3},
    "retransmits": {"retransmitted_share": 0.012},
    "a hot GPU": hot(temperature_c=88.0),
    "clocks throttled by heat": hot(throttle={"sw_thermal_slowdown": 0.4}),
    "clocks throttled by power": hot(throttle={"sw_power_cap": 1.0}),
}


def test_what_disturbs_is_said_in_the_golden_words(golden: Golden) -> None:
    golden.check_findings(
        "disturbances", {name: find_disturbances([[node_use(**use)]], CORES) for name, use in CASES.items()}
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("steal", "cpu_steal_percent"),
        ("other load", "other_load"),
        ("a CPU limit", "throttled_share"),
        ("retransmits", "retransmitted_share"),
        ("a hot GPU", "heat"),
        ("clocks throttled by heat", "throttled_clocks"),
        ("clocks throttled by power", "throttled_clocks"),
    ],
)
def test_what_disturbs_is_found_with_its_node(name: str, code: str) -> None:
    (found,) = find_disturbances([[node_use(**CASES[name])]], CORES)
    assert (found.code, found.node) == (code, "n1")


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
    (found,) = find_disturbances(repeats, CORES)
    assert (found.code, found.figures) == ("cpu_steal_percent", {"cpu_steal_percent": 9.0})
