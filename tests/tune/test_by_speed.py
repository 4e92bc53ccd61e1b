"""Changes judged by speed: what is run, what is recommended, and which runs the choice is from."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from multinode.job.job import ScriptJob, TrainingJob
from multinode.job.job_files import Change, parse_change
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.predict.recommendations import stored_sources
from multinode.profile.observed import steps_to_run
from multinode.series.series import Resume
from multinode.stats.estimate import of_bounds
from multinode.traffic.algorithms import Layout
from multinode.tune.change import changed_launch
from multinode.tune.judge import Tuning, judge
from multinode.tune.request import TuningRequest, plan_tuning
from multinode.tune.screen import show
from multinode.tune.trial import Candidate, CandidateTrial
from tests.golden import Golden, error_of, screen_of
from tests.levers.compressed import compressed
from tests.predict.test_recommendations import keep
from tests.tune.trials import trial
from tests.tune.tuning import Elsewhere, steps_of, tuning_request

changed = msgspec.structs.replace
ONE_EACH = Layout(nodes=2, workers_per_node=1)


def by_speed(**fields: object) -> TuningRequest:
    """Of twenty measured steps, once each."""
    return tuning_request(**({"judge": "speed", "steps": 20, "seeds": 1} | fields))


def from_runs(runs: Path, **fields: object) -> TuningRequest:
    """Of changes that two stored runs tell of."""
    keep(runs, "one", 1, 0)
    keep(runs, "two", 2, 1181)
    return by_speed(sources=("two", "one"), layout=ONE_EACH, **fields)


def at(label: str, *rates: float, gain: tuple[float, float, float] | None = None) -> CandidateTrial:
    predicted = of_bounds(gain[0], gain[1:]) if gain is not None else None
    candidate = Candidate(label=label, name=label, nodes=2, workers_per_node=1, predicted_gain=predicted)
    return trial(label, *((rate, ()) for rate in rates), candidate=candidate)


ASKED = Tuning(run_id="t", job="tiny.yaml", judged_by="speed")


@pytest.mark.parametrize(
    ("alone", "change", "outcome", "recommended", "code"),
    [
        ((5,), (29,), "change", "change", "change-once"),
        ((50, 51), (29, 28), "one_node", "one-node", "one-node"),
        ((5, 5), (29, 30), "change", "change", "change"),
        ((5, 5), (9, 30), "inconclusive", None, "inconclusive"),
        ((5,), (10.2,), "inconclusive", None, "inconclusive-once"),
        ((5,), (9,), "baseline", "baseline", "baseline"),
    ],
)
def test_what_is_recommended_is_faster_than_one_node_and_than_the_training_as_it_is(
    alone: tuple[float, ...], change: tuple[float, ...], outcome: str, recommended: str | None, code: str
) -> None:
    baseline = at("baseline", *(10.0, 10.1)[: len(alone)])
    found = judge(ASKED, (baseline, at("one-node", *alone), at("change", *change)))
    assert found.verdict is not None
    assert (found.outcome, found.recommended, found.verdict.code) == (outcome, recommended, code), found.verdict
    # Nothing is said of a loss that nobody measured.
    assert (found.loss_of, found.rows[2].loss, found.rows[2].time_to_loss_s) == ("", None, None)


def test_the_predicted_gain_stands_beside_the_measured_one() -> None:
    trials = (
        at("baseline", 10.0),
        at("one-node", 5.0),
        at("near", 29.0, gain=(3.0, 2.8, 3.2)),
        at("off", 15.0, gain=(1.8, 1.7, 1.9)),
        at("failed", gain=(2.0, 1.0, 3.0)),
    )
    found = judge(ASKED, trials)
    rows = [found.row(label) for label in ("near", "off", "failed")]
    assert [row and row.gain and row.gain.value for row in rows] == [pytest.approx(2.9), pytest.approx(1.5), None]
    assert [row and row.gain_error for row in rows] == [pytest.approx(3 / 2.9 - 1), pytest.approx(0.2), None]
    assert [row and row.is_covered for row in rows] == [True, False, None]
    shown = screen_of(show(found), 100)
    near = next(line for line in shown.splitlines() if line.startswith("near"))
    assert near.split() == ["near", "29.0", "2.9x", "3.0x", "(2.8-3.2)", "+3.4%", "5.8x"]
    assert "+20.0%, outside" in shown


def test_changes_of_stored_runs_are_measured_in_turns_and_the_fastest_is_written(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    tuned = nodes.tune(from_runs(tmp_path, seeds=2, most=2))
    labels = [row.candidate.label for row in tuned.tuning.rows]
    assert labels[:2] == ["baseline", "one-node"]
    assert len(labels) == 4
    # Every second time in the opposite order.
    first, second = nodes.order[:4], nodes.order[4:]
    assert sorted(first) == sorted(f"{label}-1" for label in labels)
    assert [name[:-1] for name in second] == [name[:-1] for name in reversed(first)]
    assert tuned.tuning.sources == ("two", "one")
    for name, what in zip(nodes.order, nodes.launches, strict=True):
        assert isinstance(what.job, TrainingJob)
        # No evaluation; as many steps as are measured, or as its averages need.
        assert "eval_strategy" not in what.job.config or what.job.config["eval_strategy"] == "no"
        rounds = what.levers.round_steps
        assert steps_of(what) == max(steps_to_run(20), 3 * rounds if rounds > 1 else 0)
        assert (what.job.config["save_strategy"], what.job.keeps_output) == ("no", False)
        assert what.job.config["seed"] == 6 + int(name[-1])
    best = tuned.tuning.row(tuned.tuning.recommended)
    assert best is not None
    assert best.samples_per_s is not None
    assert best.samples_per_s.value == max(row.samples_per_s.value for row in tuned.tuning.rows if row.samples_per_s)
    assert parse_change(Path(tuned.tuning.file).read_text(), "tuned.yaml").options
    # The tuning stands for the runs that it was chosen from: the same command goes on with it.
    assert stored_sources(tmp_path, [tuned.directory.name]) == ("two", "one")
    assert nodes.tune(by_speed(sources=("two", "one"), layout=ONE_EACH, seeds=2, most=2)).directory == tuned.directory


def test_without_stored_runs_the_first_two_say_what_is_tried(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    tuned = nodes.tune(by_speed(most=1))
    assert nodes.order[:2] == ["baseline", "one-node"]
    assert [row.state for row in tuned.tuning.rows] == ["measured"] * 3
    # By loss it is another measurement.
    assert nodes.tune(tuning_request(most=1, seeds=1)).directory != tuned.directory


def test_only_what_is_picked_is_tried(tmp_path: Path) -> None:
    asked = from_runs(tmp_path, most=9)

    def names(*picks: str) -> list[str]:
        planned = plan_tuning(changed(asked, picks=picks), tmp_path, Resume())
        return [row.candidate.name for row in planned.rows[2:]]

    assert names("gradients in fp16") == ["gradients in fp16"]
    assert names("gradients in fp16 + ") == ["gradients in fp16 + gradient accumulation 4"]
    assert set(names("accumulation", "fp16")) > set(names("fp16"))
    assert names("one node") == []


def test_a_script_is_judged_by_its_speed(tmp_path: Path) -> None:
    request = by_speed()
    script = changed(request, launch=changed(request.launch, job=ScriptJob(argv=("train.py",))))
    assert plan_tuning(script, tmp_path, Resume()).samples is None


JOB = changed(
    tuning_request(yaml="model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\n").launch.job,
    deepspeed_text='{"zero_optimization": {"stage": 3}}',
)
LAUNCH = changed(tuning_request().launch, job=JOB)
FOUR = Change(overrides=("gradient_accumulation_steps=4",))


def test_a_json_that_fixes_the_global_batch_fits_each_change() -> None:
    fixed = changed(
        LAUNCH, job=changed(JOB, deepspeed_text='{"train_batch_size": 16, "zero_optimization": {"stage": 3}}')
    )
    made = [changed_launch(fixed, change, ONE_EACH).job for change in (Change(), Change(nodes=1), FOUR)]
    texts = [job.deepspeed_text for job in made if isinstance(job, TrainingJob)]
    assert [json.loads(text)["train_batch_size"] for text in texts if text] == [16, 8, 64]


def test_a_change_is_made_as_its_options_would_make_it() -> None:
    alone = changed_launch(LAUNCH, Change(nodes=1, workers_per_node=2), ONE_EACH)
    assert [node.name for node in alone.cluster.nodes] == ["a"]
    assert alone.workers_per_node == 2
    stage = changed_launch(LAUNCH, Change(deepspeed=("zero_optimization.stage=2",)), ONE_EACH).job
    assert isinstance(stage, TrainingJob)
    assert json.loads(stage.deepspeed_text or "") == {"zero_optimization": {"stage": 2}}
    ddp = changed_launch(LAUNCH, Change(overrides=("deepspeed=null",), levers=compressed("bf16")), ONE_EACH)
    assert isinstance(ddp.job, TrainingJob)
    assert ddp.job.deepspeed_text is None
    assert ddp.job.config["deepspeed"] is None
    assert ddp.levers == compressed("bf16")
    assert ddp.cluster == LAUNCH.cluster
    rounds = Averaging(every=16, dtype="fp16")
    assert isinstance(JOB, TrainingJob)
    short = changed(JOB, config=JOB.config | {"max_steps": 25})
    for steps, job in ((48, short), (None, JOB)):
        local = changed_launch(changed(LAUNCH, job=job), Change(levers=Levers(averaging=rounds)), ONE_EACH)
        assert isinstance(local.job, TrainingJob)
        assert local.levers.averaging == rounds
        # A round that warms up and two that are measured.
        assert local.job.config.get("max_steps") == steps
    # As many workers as today, whatever the hostfile's slots are.
    assert ddp.workers_per_node == 1


def test_what_cannot_be_tried_is_refused(tmp_path: Path, golden: Golden) -> None:
    one_node = by_speed(sources=("one",), layout=Layout(nodes=1))
    plain = tuning_request(yaml="model_name_or_path: m\nstage: sft\ndeepspeed:\n  a: 1\n").launch
    script = changed(LAUNCH, job=ScriptJob(argv=("train.py",)))
    golden.check_errors(
        "refused_changes",
        {
            "runs of one node": error_of(plan_tuning, one_node, tmp_path, Resume()),
            "settings of a script": error_of(changed_launch, script, FOUR, ONE_EACH),
            "more nodes than there are": error_of(changed_launch, LAUNCH, Change(nodes=3), ONE_EACH),
            "no DeepSpeed JSON": error_of(
                changed_launch, plain, Change(deepspeed=("zero_optimization.stage=2",)), ONE_EACH
            ),
        },
    )
