from __future__ import annotations

import pytest

from multinode.analyse.contrast import Side, Terms, compare, make_side
from multinode.analyse.spread import Spread
from multinode.analyse.summary import Summary
from multinode.errors import UsageError

TERMS = Terms(mode="same-workers", why="asked", job="job", rule="all count")


def side(samples_per_s: float, *, nodes: int = 1, workers_per_node: int = 2) -> Side:
    return Side(
        run_id="r",
        nodes=nodes,
        workers_per_node=workers_per_node,
        world_size=nodes * workers_per_node,
        samples_per_s=samples_per_s,
        step_time_ms=Spread(median=1.0, p95=1.0, cv=0.0),
        steady_steps=10,
    )


@pytest.mark.parametrize(
    ("candidate", "speedup", "said"),
    [
        (100.0, 1.0, "2 nodes are as fast as one with the same 2 workers"),
        (25.0, 0.25, "One node is 4.00 times as fast as 2 nodes with the same 2 workers"),
        (150.0, 1.5, "2 nodes are 1.50 times as fast as one with the same 2 workers"),
    ],
)
def test_with_the_same_workers_efficiency_is_the_speed_up(candidate: float, speedup: float, said: str) -> None:
    contrast = compare(side(100.0), side(candidate, nodes=2, workers_per_node=1), TERMS)
    assert contrast.speedup == pytest.approx(speedup)
    assert contrast.efficiency == pytest.approx(speedup)
    assert contrast.verdict.startswith(said)


@pytest.mark.parametrize(
    ("candidate", "efficiency", "said"),
    [
        (180.0, 0.9, "2 nodes are 1.80 times as fast as one, 90% of what their workers could give"),
        (102.0, 0.51, "Do not use 2 nodes for this job"),
        (50.0, 0.25, "Do not use 2 nodes for this job"),
    ],
)
def test_scaled_out_efficiency_is_for_each_worker(candidate: float, efficiency: float, said: str) -> None:
    contrast = compare(side(100.0), side(candidate, nodes=2), TERMS)
    assert contrast.efficiency == pytest.approx(efficiency)
    assert contrast.verdict.startswith(said)


def test_a_run_without_samples_cannot_be_compared_and_says_why() -> None:
    summary = Summary(
        run_id="r", steps=0, steady_steps=0, rule="", missing={"samples_per_s": "no worker recorded a step"}
    )
    with pytest.raises(UsageError, match="run r has no samples/s to compare: no worker recorded a step"):
        make_side(summary, nodes=1, workers_per_node=1)
