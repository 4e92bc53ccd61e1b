"""The screen of tune: a change that wins, none that does, one seed, a plan; whole, at both widths."""

from __future__ import annotations

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.job.job_files import Change
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.render.sheet import NextCommand
from multinode.stats.estimate import of_bounds
from multinode.tune.judge import Tuning, judge
from multinode.tune.screen import show, show_plan
from multinode.tune.trial import Candidate, CandidateTrial, LeftOut, Losses
from tests.golden import Golden
from tests.tune.trials import curve, trial

changed = msgspec.structs.replace
ASKED = Tuning(
    run_id="20261123-120000-abcd",
    job="train.yaml (LLaMA-Factory sft full)",
    samples=800,
    steps=200,
    seeds=3,
    budget_s=1200.0,
    spent_s=741.0,
    left_out=(
        LeftOut(name="DiLoCo every 64 steps in fp16", reason="short", needs_steps=640),
        LeftOut(name="gradient accumulation 2", reason="slower"),
        LeftOut(name="local SGD every 4 steps", reason="slower"),
        LeftOut(name="buckets of 100 MiB", reason="little"),
    ),
)
SEEDS = ((1.0, 0.0), (1.02, 0.01), (0.98, -0.01))


def candidate(label: str, name: str, nodes: int = 2, **others: object) -> Candidate:
    return Candidate(label=label, name=name, nodes=nodes, workers_per_node=2, **others)  # type: ignore[arg-type]


def measured(one: Candidate, rate: float, *losses: float) -> CandidateTrial:
    runs = ((rate * by, curve(*(loss + off for loss in losses))) for by, off in SEEDS)
    return trial(one.label, *runs, candidate=one)


AVERAGED = candidate(
    "local-sgd",
    "local SGD every 16 steps in fp16",
    change=Change(levers=Levers(averaging=Averaging(every=16, dtype="fp16"))),
    predicted_samples_per_s=of_bounds(38.0, (30.0, 44.0)),
    against_one_node=of_bounds(1.7, (1.2, 2.1)),
    expected_s=95.0,
    effects=(
        Finding(
            message="a different algorithm: nodes train independently between averaging steps, so the loss may be worse"
        ),
    ),
)
BASELINE = measured(candidate("baseline", "unchanged, 2 nodes"), 10, 3.0, 2.5, 2.2, 2.0)
ALONE = measured(candidate("one-node", "one node", 1, kind="nodes"), 12, 2.6, 2.0, 1.8, 1.7)
WINNER = measured(AVERAGED, 40, 3.0, 2.5, 2.2, 2.0)
WORSE = measured(candidate("accumulation", "gradient accumulation 8"), 44, 3.2, 2.9, 2.7, 2.5)
CLOSING = measured(candidate("power-sgd", "PowerSGD of rank 4"), 40, 3.3, 2.7, 2.3, 2.05)
# As it is tried: on more samples, of which it needs 1.2 times those of DDP to its loss.
LONGER = trial(
    AVERAGED.label,
    *((40 * by, curve(*(loss + off for loss in (3.0, 2.5, 2.2, 2.0, 1.95)), samples=1200)) for by, off in SEEDS),
    candidate=changed(AVERAGED, samples_ratio=1.4),
)
FAILED = trial(
    "power-sgd",
    state="out_of_memory",
    why=Finding(message="b: CUDA out of memory"),
    candidate=candidate("power-sgd", "PowerSGD of rank 4"),
)
WAITING = trial("pair", state="waiting", candidate=candidate("pair", "gradients in fp16 + gradient accumulation 4"))


def first_seed(one: CandidateTrial) -> CandidateTrial:
    return changed(one, runs=one.runs[:1])


def logged(one: CandidateTrial) -> CandidateTrial:
    """As if nothing was evaluated."""
    runs = (changed(run, losses=Losses(training=run.losses.held_out)) for run in one.runs)
    return changed(one, runs=tuple(runs))


def at_rates(one: CandidateTrial, *more: float | None) -> CandidateTrial:
    """The same runs at three learning rates: how much higher each loss is; None diverged."""
    runs = []
    for rate, higher in zip((1e-3, 2e-3, 4e-3), more, strict=True):
        for run in one.runs if higher == 0.0 else one.runs[:1]:
            points = (
                changed(point, loss=None if higher is None or point.loss is None else point.loss + higher)
                for point in run.losses.held_out
            )
            runs.append(changed(run, learning_rate=rate, losses=Losses(held_out=tuple(points))))
    return changed(one, runs=tuple(runs))


TUNINGS = {
    "winner": (ASKED, (BASELINE, ALONE, WINNER, WORSE, FAILED)),
    "longer": (changed(ASKED, left_out=()), (BASELINE, ALONE, LONGER, WORSE)),
    "none": (changed(ASKED, waiting=2), (BASELINE, ALONE, CLOSING, WORSE, WAITING)),
    "learning_rates": (
        changed(ASKED, learning_rates=(1e-3, 2e-3, 4e-3), left_out=()),
        (
            at_rates(BASELINE, 0.2, 0.0, 0.1),
            at_rates(ALONE, 0.0, 0.1, 0.2),
            at_rates(WINNER, 0.1, 0.0, None),
            WAITING,
        ),
    ),
    "one_seed": (
        changed(ASKED, seeds=1, left_out=()),
        tuple(logged(first_seed(one)) for one in (BASELINE, ALONE, WINNER, WORSE)),
    ),
}


@pytest.mark.parametrize("name", TUNINGS)
def test_the_screen_of_a_tuning(golden: Golden, name: str) -> None:
    asked, trials = TUNINGS[name]
    tuning = judge(asked, trials)
    command = "multinode launch --with runs/20261123-120000-abcd/tuned.yaml train.yaml --hosts hosts.txt"
    commands = (NextCommand("Launch it", command),) if name != "none" else ()
    golden.check_answer(f"tuning_{name}", (*show(tuning), *commands))


def test_the_screen_of_a_plan(golden: Golden) -> None:
    planned = changed(ASKED, needed_s=1140.0, waiting=9, sources=("20261123-110000-aaaa", "20261123-110500-bbbb"))
    trials = [
        trial(one.label, state="waiting", candidate=one)
        for one in (BASELINE.candidate, ALONE.candidate, LONGER.candidate)
    ]
    golden.check_answer("tuning_plan", show_plan(judge(planned, trials)))
    golden.check_answer("tuning_plan_rates", show_plan(judge(changed(planned, learning_rates=(1e-3, 2e-3)), trials)))
    unknown = judge(changed(ASKED, left_out=()), trials[:2])
    golden.check_answer("tuning_plan_unknown", show_plan(unknown))


def with_losses(one: CandidateTrial, losses: Losses) -> CandidateTrial:
    return changed(one, runs=tuple(changed(run, losses=losses) for run in one.runs))


NOTHING_ELSE = {
    "one-node": (BASELINE, ALONE),
    "baseline": (BASELINE, changed(ALONE, runs=()), WORSE),
    "undecided": (BASELINE, changed(ALONE, runs=(), state="waiting")),
    "no-figures": (changed(BASELINE, runs=(), why=Finding(message="a: it hung")), ALONE),
    "no-loss": (BASELINE, ALONE, with_losses(WINNER, Losses())),
    "diverged": (with_losses(BASELINE, Losses(held_out=curve(2.0, None))), ALONE),
}


def test_why_nothing_else_is_recommended(golden: Golden) -> None:
    verdicts = {code: judge(ASKED, trials).verdict for code, trials in NOTHING_ELSE.items()}
    found = {code: verdict for code, verdict in verdicts.items() if verdict is not None}
    assert {code: verdict.code for code, verdict in found.items()} == {code: code for code in NOTHING_ELSE}
    golden.check_findings("tuning_verdicts", found)
