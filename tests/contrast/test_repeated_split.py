from __future__ import annotations

import msgspec
import pytest

from multinode.contrast.figures import Side
from multinode.contrast.side import make_side
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Summary
from multinode.stats.estimate import of_repeats
from tests.contrast.made_up_sides import run_of, split_of, split_summary, summary_of


def _side(summaries: list[Summary]) -> Side:
    return make_side("candidate", [run_of(summary, nodes=2) for summary in summaries])


def test_every_part_is_the_mean_of_the_repeats() -> None:
    found = _side([split_summary(20.0), split_summary(40.0)])
    assert found.split is not None
    assert found.split.rank == -1
    assert found.split.exposed_ms == pytest.approx(30.0)
    assert found.split.compute_ms == pytest.approx(166 - 30 - 16)
    assert found.exposed_ms == of_repeats([20.0, 40.0])
    assert found.exposed_share == pytest.approx(30 / 166)
    assert found.late_ms == 0.0


def test_a_repeat_that_was_not_split_leaves_none_and_its_reason() -> None:
    blind = summary_of(split=StepSplit(missing={"exposed_ms": "no counters"}))
    found = _side([split_summary(20.0), blind])
    assert (found.split, found.exposed_ms, found.exposed_share, found.late_ms) == (None, None, None, None)
    assert {found.missing[name] for name in ("split", "exposed_ms", "exposed_share", "late_ms")} == {"no counters"}


def test_a_part_that_one_repeat_lacks_is_not_that_of_the_others() -> None:
    partly = summary_of(
        split=StepSplit(mean=msgspec.structs.replace(split_of(166.0), compute_ms=None, exposed_ms=None))
    )
    found = _side([split_summary(20.0), partly])
    assert found.split is not None
    assert (found.split.compute_ms, found.split.exposed_ms, found.exposed_ms) == (None, None, None)
    assert found.split.optimizer_ms == pytest.approx(10.0)
    assert "exposed_ms" in found.missing


@pytest.mark.parametrize("step_ms", [0.0, 1e300])
def test_a_step_that_cannot_be_is_none(step_ms: float) -> None:
    wrong = summary_of(split=StepSplit(mean=WorkerSplit(rank=-1, step_ms=step_ms, exposed_ms=0.0)))
    assert _side([wrong]).split is None


def test_nodes_that_any_repeat_finds_late_are_named_the_latest_first() -> None:
    found = _side([split_summary(0.0, late) for late in ({"n2": 30.0}, {"n2": 50.0, "n3": 100.0})])
    assert found.stragglers == ("n3", "n2")
    assert found.late_ms == pytest.approx(50.0)  # 100 in one of two repeats
