from __future__ import annotations

from typing import Any

import pytest

from multinode.analyse.comparison.contrast import compare
from multinode.analyse.comparison.contrast_figures import Contrast, Side
from multinode.analyse.steps.bottleneck import Bottleneck
from multinode.analyse.traffic.step_bytes import BytesPerStep
from tests.analyse.made_up_sides import side_of, split_of


def contrast_of(mode: str, *sides: Side) -> Contrast:
    return compare(sides, mode=mode, why="asked", job="job", rule="all count")


def same_workers(rate: float, **known: Any) -> Contrast:
    """Two nodes with a worker each against one with two that makes 100 samples a second, 40 ms a step."""
    baseline = side_of("baseline", 100.0, split=split_of(40.0), **known)
    step_ms = 4 / rate * 1000
    candidate = side_of("candidate", rate, 2, 1, split=split_of(step_ms, max(0.0, step_ms - 40)), **known)
    return contrast_of("same-workers", baseline, candidate)


def scaled_out(rate: float, mode: str = "scale-out", **known: Any) -> Contrast:
    """Two nodes with two workers each against such a one that makes 100 samples a second, 40 ms a step."""
    step_ms = 8 / rate * 1000
    known = {"split": split_of(step_ms, max(0.0, step_ms - 40))} | known
    return contrast_of(mode, side_of("baseline", 100.0, split=split_of(40.0)), side_of("candidate", rate, 2, **known))


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (100.0, "2 nodes are as fast as one node with the same 2 workers: the network costs next to nothing here."),
        (
            25.0,
            (
                "One node is 4 times (3.94 to 4.06) as fast as 2 nodes with the same 2 workers: "
                "the network costs 120 ms of a step of 160 ms."
            ),
        ),
        (150.0, "2 nodes are 1.5 times (1.48 to 1.52) as fast as one node with the same 2 workers."),
    ],
)
def test_the_same_workers_tell_what_the_network_costs(rate: float, said: str) -> None:
    assert same_workers(rate).verdict == said


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (196.0, "2 nodes are 1.96 times (1.93 to 1.99) as fast as one node, 98% of what their workers could give."),
        (
            160.0,
            (
                "2 nodes are 1.6 times (1.58 to 1.62) as fast as one node, 80% of what their workers could give: "
                "the network costs 10 ms of a step of 50 ms."
            ),
        ),
        (
            50.0,
            (
                "Do not use 2 nodes for this job: they are no faster than one node alone, at 0.5 "
                "times (0.493 to 0.507) its speed; "
                "the network costs 120 ms of a step of 160 ms."
            ),
        ),
    ],
)
def test_more_workers_tell_whether_they_are_worth_it(rate: float, said: str) -> None:
    assert scaled_out(rate).verdict == said


@pytest.mark.parametrize("rate", [90.0, 110.0])
def test_what_the_spread_hides_is_not_called_a_difference(rate: float) -> None:
    verdict = same_workers(rate, spread=0.2).verdict
    assert verdict.startswith("Whether 2 nodes are as fast as one node with the same 2 workers cannot be told: ")
    assert "more --repeats or --steps would tell" in verdict
    assert scaled_out(rate, spread=0.3).verdict.startswith("Whether 2 nodes are faster than one node cannot be told")


def test_a_little_scatter_around_the_same_speed_is_the_same_speed() -> None:
    assert same_workers(101.0, spread=0.01).verdict.startswith("2 nodes are as fast as")


def test_a_slow_node_is_named_with_its_speed_and_the_network_is_cleared() -> None:
    sides = [
        side_of("baseline", 100.0, split=split_of(40.0)),
        side_of("candidate", 95.0, 2, split=split_of(8 / 95 * 1000, 4.0, wait_ms=20.0)),
        side_of("each-node", 50.0, node_names=("n2",)),
    ]
    contrast = contrast_of("scale-out", *sides)
    assert contrast.verdict == (
        "Do not use 2 nodes for this job: they are no faster than one node alone, at "
        "0.95 times (0.937 to 0.964) its speed; "
        "the node, not the network, is the cause: n2 at 50% of the others' speed costs 40 ms of a step of 84.2 ms."
    )
    assert "Alone: n1 100 samples/s (100%), n2 50 samples/s (50%)." in contrast.reasons


def test_a_cause_that_is_not_known_is_not_made_up() -> None:
    verdict = scaled_out(50.0, split=None).verdict
    assert verdict.endswith("what costs the difference is not known.")


def test_workers_that_train_alone_get_no_verdict_on_the_network() -> None:
    verdict = scaled_out(200.0, bottleneck=Bottleneck(kind="no_communication")).verdict
    assert verdict.startswith("The 4 workers of the candidate train alone")


def test_two_stored_runs_are_called_by_their_ids() -> None:
    assert scaled_out(160.0, "compare").verdict == (
        "Run run-candidate (2 nodes, 4 workers) is 1.6 times (1.58 to 1.62) as fast as "
        "run run-baseline (one node, 2 workers)."
    )
    slower = scaled_out(50.0, "compare").verdict
    assert slower.startswith(
        "Run run-baseline (one node, 2 workers) is 2 times (1.97 to 2.03) as fast as run run-candidate"
    )
    assert scaled_out(100.0, "compare").verdict.endswith("is as fast as run run-baseline (one node, 2 workers).")


def test_three_reasons_say_where_the_step_goes_what_passes_and_what_computing_takes() -> None:
    baseline = side_of("baseline", 24.1, split=split_of(166.0))
    split = split_of(1342.0, 1176.0)
    known = {"split": split, "bytes_per_step": BytesPerStep(card=14.7e6), "link_gbit_per_s": 0.1, "step_ms": 1342.0}
    contrast = contrast_of("same-workers", baseline, side_of("candidate", 2.98, 2, 1, **known))
    goes, passes, computing = contrast.reasons
    assert goes == (
        "A step of the candidate takes 1342 ms: 88% communication that nothing hides, 11% computing; "
        "on the baseline 166 ms: 90% computing, 6% the optimizer."
    )
    assert passes == (
        "14.7 MB a step pass the busiest node's card one way: 87.6 Mbit/s in the mean, 88% of its 100 Mbit/s; "
        "with usual frames TCP gets at most 94%."
    )
    assert computing == (
        "Of a step, computing takes 150 ms on the candidate, 150 ms on the baseline: without what the network costs, "
        "a step would take about 166 ms."
    )


def test_bytes_that_no_card_counted_are_the_backends_and_an_unknown_link_is_left_out() -> None:
    said = scaled_out(100.0, bytes_per_step=BytesPerStep(expected=1e6)).reasons[1]
    assert said == (
        "1 MB a step pass the busiest node's card one way by the backend's algorithms: 100 Mbit/s in the mean."
    )


def test_what_is_not_known_gives_no_reason() -> None:
    contrast = contrast_of("scale-out", side_of("baseline", 100.0), side_of("candidate", 100.0, 2))
    assert len(contrast.reasons) == 1
    assert "--each-node tells a slow node from a slow network" in contrast.reasons[0]


def test_of_many_nodes_the_fastest_are_listed_and_the_slowest_is_told() -> None:
    alone = [side_of("each-node", 100.0 - number, node_names=(f"n{number}",)) for number in range(2, 21)]
    reasons = contrast_of("scale-out", side_of("baseline", 100.0), side_of("candidate", 900.0, 20), *alone).reasons
    assert reasons[-1].endswith("and 12 more, the slowest at 80%.")
