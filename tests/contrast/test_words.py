from __future__ import annotations

from typing import Any

import pytest

from multinode.contrast.figures import ASKED, Contrast, Side
from multinode.contrast.judge import compare, judge, prefers_one_node
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.step_bytes import BytesPerStep
from tests.contrast.made_up_sides import side_of, split_of
from tests.golden import Golden

ALONE = Bottleneck(kind="no_communication", message="")
COUNTED: dict[str, Any] = {"bytes_per_step": BytesPerStep(nic=14.7e6), "link_gbit_per_s": 0.1, "step_ms": 1342.0}
LATE: dict[str, Any] = {"stragglers": ("n2",), "late_ms": 60.0}


def contrast_of(mode: str, *sides: Side) -> Contrast:
    return compare(sides, mode=mode, why=ASKED.found(None), job="job", rule="all count")


def same_workers(rate: float, **known: Any) -> Contrast:
    """Two nodes with a worker each against one with two that makes 100 samples per second, 40 ms per step."""
    baseline = side_of("baseline", 100.0, split=split_of(40.0), **known)
    step_ms = 4 / rate * 1000
    candidate = side_of("candidate", rate, 2, 1, split=split_of(step_ms, max(0.0, step_ms - 40)), **known)
    return contrast_of("same-workers", baseline, candidate)


def scaled_out(rate: float, mode: str = "scale-out", **known: Any) -> Contrast:
    """Two nodes with two workers each against such a one that makes 100 samples per second, 40 ms per step."""
    step_ms = 8 / rate * 1000
    known = {"split": split_of(step_ms, max(0.0, step_ms - 40))} | known
    return contrast_of(mode, side_of("baseline", 100.0, split=split_of(40.0)), side_of("candidate", rate, 2, **known))


def with_each_node(candidate_rate: float, *alone: float, **known: Any) -> Contrast:
    """Two nodes against one of 100 samples per second, each node alone, n2 and those after it at these rates."""
    each = [
        side_of("each-node", rate, node_names=(f"n{number}",), **known) for number, rate in enumerate(alone, start=2)
    ]
    baseline, candidate = side_of("baseline", 100.0, **known), side_of("candidate", candidate_rate, 2, **known)
    return contrast_of("scale-out", baseline, candidate, *each)


def step_of(step_ms: float, **known: Any) -> Contrast:
    """Two nodes with steps of so many ms against one with 100 ms, two workers each."""
    baseline = side_of("baseline", 40.0, split=split_of(100.0))
    return contrast_of("scale-out", baseline, side_of("candidate", 8 / step_ms * 1000, 2, **known))


CASES = {
    "same workers, as fast": same_workers(100.0),
    "same workers, slower": same_workers(25.0),
    "same workers, faster": same_workers(150.0),
    "same workers, a little scatter": same_workers(101.0),
    "same workers, noise": same_workers(90.0, spread=0.2),
    "more workers, worth it": scaled_out(196.0),
    "more workers, some lost": scaled_out(160.0),
    "more workers, slower": scaled_out(50.0),
    "more workers, as fast": scaled_out(101.0),
    "more workers, noise": scaled_out(90.0, spread=0.3),
    "more workers, cause unknown": scaled_out(50.0, split=None),
    "no synchronisation": scaled_out(200.0, bottleneck=ALONE),
    "two runs, faster": scaled_out(160.0, "compare"),
    "two runs, slower": scaled_out(50.0, "compare"),
    "two runs, as fast": scaled_out(100.0, "compare"),
    "two runs, noise": scaled_out(90.0, "compare", spread=0.3),
    "counted bytes": contrast_of(
        "same-workers",
        side_of("baseline", 24.1, split=split_of(166.0)),
        side_of("candidate", 2.98, 2, 1, split=split_of(1342.0, 1176.0), **COUNTED),
    ),
    "expected bytes, unknown link": scaled_out(100.0, bytes_per_step=BytesPerStep(expected=1e6)),
    "slow node, alone": with_each_node(95.0, 50.0),
    "slow node, by its waits": step_of(170.0, split=split_of(170.0, 10.0, wait_ms=30.0), **LATE),
    "slow node and slower network": with_each_node(30.0, 80.0),
    "like nodes, not split": with_each_node(60.0, 99.0),
    "many nodes": with_each_node(900.0, *(100.0 - number for number in range(2, 21))),
    "nothing known": contrast_of("scale-out", side_of("baseline", 100.0), side_of("candidate", 100.0, 2)),
    "no loss": step_of(103.0, split=split_of(103.0, 3.0)),
    "gained": step_of(50.0, split=split_of(50.0)),
    "data grew": step_of(180.0, split=split_of(90.0, 1.0, data_ms=39.0)),
}


def test_the_words_of_every_case_are_the_golden_ones(golden: Golden) -> None:
    told = []
    for name, found in CASES.items():
        reasons = (f"  {reason.message}" for reason in found.reasons)
        lines = [found.verdict.message, *reasons, f"  ({found.loss.message})"]
        told.append("\n".join((f"# {name}", *lines)))
    golden.check("contrast-words.txt", "\n\n".join(told) + "\n")


@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("same workers, as fast", "equal", "equal"),
        ("same workers, slower", "slower", "slower"),
        ("same workers, faster", "faster", "faster"),
        ("same workers, noise", "inconclusive", "inconclusive"),
        ("more workers, as fast", "equal", "no-faster"),
        ("more workers, slower", "slower", "harmful"),
        ("more workers, noise", "inconclusive", "inconclusive"),
        ("two runs, slower", "slower", "slower"),
        ("no synchronisation", "unsynchronised", "unsynchronised"),
    ],
)
def test_the_outcome_of_a_contrast_is_a_code(name: str, outcome: str, code: str) -> None:
    assert (judge(CASES[name]), CASES[name].verdict.code) == (outcome, code)


@pytest.mark.parametrize(
    ("name", "is_preferred"),
    [
        ("same workers, slower", True),
        ("same workers, as fast", False),
        ("same workers, noise", False),
        ("more workers, slower", True),
        ("more workers, as fast", True),
        ("more workers, worth it", False),
    ],
)
def test_one_node_is_preferred_where_more_nodes_gain_nothing(name: str, is_preferred: bool) -> None:  # noqa: FBT001
    assert prefers_one_node(CASES[name]) is is_preferred
