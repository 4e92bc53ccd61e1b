"""Which change is recommended: by the time to the loss of the unchanged job, and never with a worse loss."""

from __future__ import annotations

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.profile.observed import ObservedNode, observe
from multinode.records.samples import EvaluationSample, LossSample, Sample
from multinode.tune.judge import SAME_LOSS, Tuning, judge
from multinode.tune.trial import PARTS, CandidateTrial, Losses, TrialRun, read_losses, samples_to
from tests.tune.trials import curve, trial

ASKED = Tuning(run_id="t", job="tiny.yaml")
# Samples/s of each seed, and how far its losses lie from the others'.
SEEDS = ((1.0, 0.0), (1.02, 0.01), (0.98, -0.01))


def seeds(label: str, rate: float, *losses: float) -> CandidateTrial:
    """Three seeds whose rates and losses scatter together."""
    return trial(label, *((rate * by, curve(*(loss + off for loss in losses))) for by, off in SEEDS))


BASELINE = seeds("baseline", 10, 3.0, 2.5, 2.2, 2.0)
# Half as many samples in a step: it learns more of each of them.
ALONE = seeds("one-node", 12, 2.6, 2.0, 1.8, 1.7)
FAST = seeds("fast", 40, 3.0, 2.5, 2.2, 2.0)
WORSE = seeds("worse", 80, 3.0, 2.6, 2.4, 2.1)
SLOW = seeds("slow", 11, 3.0, 2.5, 2.2, 2.0)
MAYBE = trial(
    "maybe",
    *((by, curve(*(loss + off for loss in (3.0, 2.5, 2.2, 2.0)))) for by, off in ((20, 0.0), (60, 0.01), (28, -0.01))),
)
DIVERGED = trial("diverged", (50, curve(3.0, None)), (50, curve(3.0, 2.0)), (50, curve(3.0, 2.0)))
# It was as good for a while.
REBOUND = seeds("rebound", 60, 3.0, 1.9, 2.2, 2.4)
GONE = trial("gone", *((60, curve(3.0, 1.9, 1.8, None)) for _ in SEEDS))
# Of three seeds one did not reach it, by less than the noise.
SHORT = trial("short", *((60, curve(3.0, 2.5, 2.2, end)) for end in (2.03, 1.9, 1.95)))
FAILED = trial("failed", why=Finding(message="out of memory"), state="out_of_memory")


@pytest.mark.parametrize(
    ("trials", "outcome", "recommended", "best"),
    [
        ((FAST, WORSE, SLOW), "change", "fast", "fast"),
        ((WORSE,), "one_node", "one-node", None),
        ((SLOW, FAILED), "one_node", "one-node", "slow"),
        ((MAYBE,), "inconclusive", None, "maybe"),
        ((MAYBE, FAST), "change", "fast", "fast"),
        ((DIVERGED,), "one_node", "one-node", None),
        ((SHORT,), "one_node", "one-node", None),
        ((REBOUND, GONE), "one_node", "one-node", None),
        ((), "one_node", "one-node", None),
    ],
    ids=lambda value: "+".join(one.candidate.label for one in value) if isinstance(value, tuple) else None,
)
def test_what_is_recommended_reaches_the_loss_sooner_than_one_node_beyond_noise(
    trials: tuple[CandidateTrial, ...], outcome: str, recommended: str | None, best: str | None
) -> None:
    found = judge(ASKED, (BASELINE, ALONE, *trials))
    assert (found.outcome, found.recommended, found.best) == (outcome, recommended, best)
    assert found.loss_of == "held-out"


@pytest.mark.parametrize(
    ("losses", "needed"),
    [
        # 8% above at the half, 2.5% at the end: every doubling leaves 0.31 of the gap, and 1.4 of them leave 0.5%.
        ((3.3, 2.7, 2.3, 2.05), 270),
        # As far above as at the half, or further.
        ((3.3, 2.7, 2.3, 2.16), None),
        ((3.3, 2.5, 2.3, 2.05), None),
        # So slowly that nobody would wait for it.
        ((3.3, 2.7, 2.3, 2.15), None),
        # Not worse.
        ((3.3, 2.7, 2.3, 2.0), None),
    ],
)
def test_a_loss_that_comes_closer_says_how_many_steps_its_verdict_needs(
    losses: tuple[float, ...], needed: int | None
) -> None:
    found = judge(msgspec.structs.replace(ASKED, steps=100), (BASELINE, ALONE, seeds("other", 80, *losses)))
    assert [row.needs_steps for row in found.rows] == [None, None, needed]


def test_a_gap_is_between_runs_as_far_in_their_schedules() -> None:
    """A run on more samples is compared at its own half and at its own end, not where the other one ends."""
    losses, more = (3.3, 2.7, 2.3, 2.05), 1120
    other = trial("other", *((80 * by, curve(*(loss + off for loss in losses), samples=more)) for by, off in SEEDS))
    found = judge(msgspec.structs.replace(ASKED, steps=100), (BASELINE, ALONE, other))
    assert [row.samples for row in found.rows] == [800, 800, more]
    assert found.rows[2].needs_steps == 270


def test_where_one_node_is_slower_too_the_training_stays_as_it_is() -> None:
    alone = seeds("one-node", 4, 3.0, 2.5, 2.2, 2.0)
    assert judge(ASKED, (BASELINE, alone, seeds("slow", 9, 3.0, 2.5, 2.2, 2.0))).outcome == "baseline"
    # What failed on one node is no rival.
    missing = trial("one-node", state="out_of_memory")
    found = judge(ASKED, (BASELINE, missing, FAST))
    assert (found.outcome, found.recommended) == ("change", "fast")


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (2.0, "same"),
        (2.0 * (1 + SAME_LOSS / 2), "same"),
        (2.0 * (1 + 2 * SAME_LOSS), "worse"),
        (1.9, "better"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_is_worse_beyond_noise_and_beyond_rounding(end: float, verdict: str, count: int) -> None:
    def first(one: CandidateTrial) -> CandidateTrial:
        return msgspec.structs.replace(one, runs=one.runs[:count])

    other = seeds("other", 100, 3.0, end)
    found = judge(ASKED, (first(BASELINE), first(ALONE), first(other)))
    row = found.row("other")
    assert row is not None
    assert row.loss_verdict == verdict
    assert (found.recommended == "other") == (verdict != "worse")


def test_losses_that_scatter_more_than_they_differ_are_not_worse_and_not_recommended_where_one_did_not_reach() -> None:
    noisy = trial("noisy", *((80, curve(3.0, end)) for end in (1.8, 2.4, 2.1)))
    found = judge(ASKED, (BASELINE, ALONE, noisy))
    row = found.row("noisy")
    assert row is not None
    assert (row.loss_verdict, row.reached, row.time_to_loss_s) == ("same", 1, None)
    assert found.recommended == "one-node"


def test_the_time_is_that_of_the_samples_to_the_baselines_loss() -> None:
    found = judge(ASKED, [msgspec.structs.replace(one, runs=one.runs[:1]) for one in (BASELINE, ALONE, FAST)])
    baseline, alone, fast = found.rows
    target = 2.0 * (1 + SAME_LOSS)
    # From 2.2 after 600 samples to 2.0 after 800.
    expected = 600 + 200 * (2.2 - target) / 0.2
    assert baseline.samples_to_loss is not None
    assert alone.time_to_loss_s is not None
    assert fast.time_to_loss_s is not None
    assert fast.sooner is not None
    assert baseline.samples_to_loss.value == pytest.approx(expected)
    assert fast.time_to_loss_s.value == pytest.approx(expected / 40)
    # From 2.6 after 200 samples to 2.0 after 400.
    assert alone.time_to_loss_s.value == pytest.approx((200 + 200 * (2.6 - target) / 0.6) / 12)
    assert fast.sooner.value == pytest.approx(alone.time_to_loss_s.value / fast.time_to_loss_s.value)


def test_seeds_are_compared_with_the_same_seed_alone() -> None:
    # The second of the three was not measured.
    other = msgspec.structs.replace(FAST, runs=(FAST.runs[0], FAST.runs[2]))
    row = judge(ASKED, (BASELINE, ALONE, other)).row("fast")
    assert row is not None
    assert row.against_baseline is not None
    assert row.against_baseline.value == pytest.approx(1)
    assert row.against_baseline.high - row.against_baseline.low < 1e-9
    assert row.sooner is not None
    assert row.sooner.repeats == 2


@pytest.mark.parametrize(
    ("changed", "loss_of"),
    [
        ({}, "held-out"),
        ({"held_out": (), "training": curve(3.0, 2.0)}, "training"),
        ({"held_out": ()}, ""),
    ],
)
def test_losses_of_different_data_are_not_compared(changed: dict[str, object], loss_of: str) -> None:
    def with_training(one: CandidateTrial, **fields: object) -> CandidateTrial:
        runs = [msgspec.structs.replace(run.losses, training=curve(3.0, 2.0)) for run in one.runs]
        runs = [msgspec.structs.replace(losses, **fields) for losses in runs]
        return msgspec.structs.replace(
            one, runs=tuple(msgspec.structs.replace(run, losses=new) for run, new in zip(one.runs, runs, strict=True))
        )

    first = with_training(FAST, **({"training": ()} if not loss_of else {}) | changed)
    found = judge(ASKED, (with_training(BASELINE), with_training(ALONE), first))
    assert found.loss_of == loss_of
    assert (found.outcome == "unjudged") == (not loss_of)
    if not loss_of:
        assert found.recommended is None
        assert found.rows[2].samples_per_s is not None


def test_a_training_as_it_stands_that_diverged_is_nothing_to_compare_with() -> None:
    gone = trial("baseline", *((10, curve(3.0, None)) for _ in range(3)))
    assert judge(ASKED, (gone, ALONE, FAST)).outcome == "unjudged"
    nothing = judge(ASKED, (trial("baseline", state="waiting"), trial("one-node", state="waiting")))
    assert (nothing.outcome, nothing.loss_of) == ("unjudged", "")


@pytest.mark.parametrize(
    ("losses", "target", "samples"),
    [
        ((3.0, 2.0), 2.5, 600),
        ((3.0, 2.0), 3.5, 400),
        ((3.0, 2.0), 1.9, None),
        ((None, 2.0), 2.0, 800),
        ((3.0, 2.0, 2.6, 1.0), 2.2, 360),
        ((), 2.0, None),
    ],
)
def test_samples_to_a_loss_are_those_of_its_first_crossing(
    losses: tuple[float | None, ...], target: float, samples: float | None
) -> None:
    assert samples_to(curve(*losses), target) == (None if samples is None else pytest.approx(samples))


def read(samples: list[Sample]) -> Losses:
    node = ObservedNode(name="a", node_rank=0, ranks=(0, 1), samples=tuple(samples))
    return read_losses(observe("t", [node]), global_batch=10)


def test_losses_are_those_of_the_first_worker_once_a_step() -> None:
    found = read(
        [
            EvaluationSample(rank=1, step=8, loss=9.0),
            *(EvaluationSample(rank=0, step=step, loss=loss) for step, loss in ((8, 2.0), (16, None), (8, 7.0))),
        ]
    )
    assert [(point.samples, point.loss) for point in found.held_out] == [(80, 2.0), (160, None)]
    assert found.training == ()


def test_the_training_loss_is_smoothed_over_parts_of_the_run() -> None:
    logged: list[Sample] = [LossSample(rank=0, step=step, loss=float(step)) for step in range(1, 2 * PARTS + 1)]
    points = read(logged).training
    assert [(point.samples, point.loss) for point in points] == [
        (10 * 2 * part, 2 * part - 0.5) for part in range(1, PARTS + 1)
    ]
    logged[-1] = LossSample(rank=0, step=2 * PARTS, loss=None)
    assert read(logged).training[-1].loss is None
    # Of a training that logs seldom a part may have none.
    assert [point.samples for point in read([LossSample(rank=0, step=PARTS, loss=1.0)]).training] == [10 * PARTS]


def test_a_run_of_no_loss_has_a_rate_all_the_same() -> None:
    run = TrialRun(run_id="a", seed=1, samples_per_s=5.0, losses=Losses())
    found = judge(ASKED, [msgspec.structs.replace(BASELINE, runs=(run,)), msgspec.structs.replace(ALONE, runs=(run,))])
    assert found.rows[0].samples_per_s is not None
    assert (found.outcome, found.rows[0].loss) == ("unjudged", None)
