from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import Interrupted, NodeFailed
from multinode.findings.finding import message_of
from multinode.job.job import TrainingJob
from multinode.job.job_files import parse_change
from multinode.job.planning import workers_of_nodes
from multinode.levers.averaging import Averaging
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import GridRecord
from multinode.series.series import Resume
from multinode.traffic.algorithms import Layout
from multinode.tune.change import changed_launch
from multinode.tune.judge import Tuning
from multinode.tune.measure import find_tuned
from multinode.tune.request import TUNING_FILE, first_two, plan_tuning
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed
from tests.tune.tuning import HOSTS, YAML, Elsewhere, steps_of, tuning_request

changed = msgspec.structs.replace
# By what is predicted of them here, best first.
CHANGES = ["local-sgd-every-16-steps-in-fp16", "gradients-in-fp16-gradient-accumulation", "gradient-accumulation-8"]


def test_on_unequal_nodes_the_first_two_have_their_own_slots() -> None:
    baseline, alone = first_two(Layout.of((1, 2)))
    assert [(one.nodes, one.workers_per_node) for one in (baseline, alone)] == [(2, None), (1, 1)]
    launch = msgspec.structs.replace(tuning_request().launch, cluster=parse_hostfile("a slots=1\nb slots=2\n", "hosts"))
    made = [changed_launch(launch, one.change, Layout.of((1, 2))) for one in (baseline, alone)]
    assert [workers_of_nodes(one.cluster, {}, one.workers_per_node) for one in made] == [(1, 2), (1,)]


def labels(nodes: Elsewhere, number: int) -> list[str]:
    """The cells of one round, in the order of their runs."""
    return [name.removesuffix(f"-{number}") for name in nodes.order if name.endswith(f"-{number}")]


def grid_of(runs: Path) -> GridRecord:
    (path,) = runs.glob("*/grid.json")
    return msgspec.json.decode(path.read_bytes(), type=GridRecord)


def test_the_first_two_say_what_is_tried_and_every_seed_has_all_of_them_in_turns(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    tuned = nodes.tune(tuning_request())
    assert labels(nodes, 1) == ["baseline", "one-node", *CHANGES]
    assert labels(nodes, 2) == ["one-node", *reversed(CHANGES), "baseline"]
    assert [row.candidate.label for row in tuned.tuning.rows] == ["baseline", "one-node", *CHANGES]
    assert {len(row.run_ids) for row in tuned.tuning.rows} == {2}
    assert tuned.tuning.loss_of == "held-out"
    assert RunDirectory(tuned.directory).read(TUNING_FILE, Tuning) == tuned.tuning
    run = RunDirectory(tuned.directory).read("run.json", Run)
    assert run is not None
    assert (run.kind, run.status, len(run.nodes)) == ("tuning", "succeeded", 2)
    assert (tuned.directory / "hostfile.txt").read_text() == HOSTS


def test_every_run_trains_on_the_samples_of_its_efficiency_with_the_seed_of_its_round(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.tune(tuning_request())
    # Averaging every 16 steps has needed up to 1.4 times as many to the same loss: six rounds, where four are DDP's.
    steps = {"baseline": 64, "one-node": 128, CHANGES[0]: 96, CHANGES[1]: 16, CHANGES[2]: 8}
    evaluated = {"baseline": 8, "one-node": 16, CHANGES[0]: 16, CHANGES[1]: 2, CHANGES[2]: 1}
    for name, what in zip(nodes.order, nodes.launches, strict=True):
        label, number = name[:-2], int(name[-1])
        assert isinstance(what.job, TrainingJob)
        config = what.job.config
        assert steps_of(what) == steps[label]
        # The job's own seed, and the next one.
        assert config["seed"] == 6 + number
        # Where nodes average, an evaluation is at the end of a round, and ends none early.
        assert (config["eval_strategy"], config["eval_steps"]) == ("steps", evaluated[label])
        assert steps_of(what) % evaluated[label] == 0
        assert (config["val_size"], config["per_device_eval_batch_size"]) == (8, 2)
        assert (config["save_strategy"], what.job.keeps_output) == ("no", False)
        assert what.execute.kind == "tuning"
    alone = nodes.launches[1]
    assert (len(alone.cluster.nodes), alone.workers_per_node) == (1, 1)
    assert nodes.launches[2].levers.averaging == Averaging(every=16, dtype="fp16")
    assert nodes.launches[3].levers == compressed("fp16")


def test_the_winner_is_written_as_launch_takes_it(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    tuned = nodes.tune(tuning_request())
    assert (tuned.tuning.outcome, tuned.tuning.recommended) == ("one_node", "one-node")
    assert tuned.tuning.verdict is not None
    assert tuned.tuning.verdict.code == "one-node"
    change = parse_change((tuned.directory / "tuned.yaml").read_text(), "tuned.yaml")
    assert change.options == "--nodes 1 --workers-per-node 1"


def test_a_change_that_wins_is_written_with_the_nodes_it_won_on(
    tmp_path: Path,
) -> None:
    output = tmp_path / "mine.yaml"
    # Averaging that costs nothing of the loss.
    nodes = Elsewhere(tmp_path / "runs", loss_by_round=0.0)
    tuned = nodes.tune(tuning_request(output=output))
    assert tuned.tuning.recommended == CHANGES[0], tuned.tuning.verdict
    assert tuned.tuning.file == str(output)
    change = parse_change(output.read_text(), output)
    assert change.options == "--nodes 2 --workers-per-node 1 --average local:16:fp16"
    assert not (tuned.directory / "tuned.yaml").exists()


def test_averaging_that_reaches_the_loss_after_more_samples_has_its_time_to_it(tmp_path: Path) -> None:
    # It learns as much of 1.1 times the samples, and is worse after as many.
    tuned = Elsewhere(tmp_path, loss_by_round=0.1 / 16).tune(tuning_request()).tuning
    baseline, averaged = tuned.row("baseline"), tuned.row(CHANGES[0])
    assert baseline is not None
    assert averaged is not None
    assert (baseline.samples, averaged.samples) == (64 * 4, 96 * 4)
    assert averaged.loss_verdict == "better"
    assert baseline.samples_to_loss is not None
    assert averaged.samples_to_loss is not None
    assert averaged.samples_to_loss.value / baseline.samples_to_loss.value == pytest.approx(1.1, rel=0.02)
    assert averaged.sooner is not None
    assert (averaged.sooner.low > 1, tuned.recommended) == (True, CHANGES[0])


def test_averaging_that_does_not_reach_the_loss_within_the_measured_samples_is_worse(tmp_path: Path) -> None:
    # Twice the samples, where it has needed up to 1.4 times.
    tuned = Elsewhere(tmp_path, loss_by_round=1 / 16).tune(tuning_request()).tuning
    averaged = tuned.row(CHANGES[0])
    assert averaged is not None
    assert (averaged.samples, averaged.loss_verdict, averaged.time_to_loss_s) == (96 * 4, "worse", None)
    assert tuned.recommended == "one-node"


class Killed(BaseException):
    """The controller is gone."""


@pytest.mark.parametrize("begun", [1, 2, 3, 5, 8])
def test_killed_anywhere_the_same_command_makes_the_rest_and_nothing_twice(tmp_path: Path, begun: int) -> None:
    nodes = Elsewhere(tmp_path)

    def kill(_: str) -> None:
        if len(nodes.order) == begun:
            raise Killed

    nodes.ends = kill
    with pytest.raises(Killed):
        nodes.tune(tuning_request())
    cut = nodes.order[-1]
    nodes.ends = lambda _: None
    tuned = nodes.tune(tuning_request())
    # Two seeds of five, and the one that was cut off once more.
    assert len(nodes.order) == 2 * 5 + 1
    assert {name for name in nodes.order if nodes.order.count(name) > 1} == {cut}
    assert {len(row.run_ids) for row in tuned.tuning.rows} == {2}
    whole = Elsewhere(tmp_path / "whole").tune(tuning_request())
    assert tuned.tuning.verdict == whole.tuning.verdict
    assert [row.loss for row in tuned.tuning.rows] == [row.loss for row in whole.tuning.rows]


def test_what_ctrl_c_stops_is_kept_and_goes_on(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path)

    def stop(label: str) -> Exception | None:
        if label != f"{CHANGES[0]}-1":
            return None
        nodes.stop.ask("SIGINT")
        return Interrupted("interrupted")

    nodes.ends = stop
    interrupted = error_of(nodes.tune, tuning_request())
    assert isinstance(interrupted, Interrupted)
    stored = next(tmp_path.glob(f"*/{TUNING_FILE}"))
    so_far = msgspec.json.decode(stored.read_bytes(), type=Tuning)
    assert so_far.verdict is not None
    assert so_far.verdict.message.endswith("3 changes not yet measured.")
    golden.check_errors("interrupted", {"Ctrl-C": interrupted}, Path(so_far.run_id))
    nodes.stop, nodes.ends = type(nodes.stop)(), lambda _: None
    nodes.tune(tuning_request())
    assert len(nodes.order) == 11


def test_a_change_that_fails_or_runs_out_of_memory_is_a_result(tmp_path: Path) -> None:
    ends: dict[str, str | Exception] = {
        f"{CHANGES[0]}-1": "out_of_gpu_memory",
        f"{CHANGES[1]}-1": NodeFailed("no such option", node="a"),
    }
    nodes = Elsewhere(tmp_path, ends.get)
    tuned = nodes.tune(tuning_request())
    rows = {row.candidate.label: row for row in tuned.tuning.rows}
    assert rows[CHANGES[0]].state == "out_of_memory"
    assert (rows[CHANGES[1]].state, message_of(rows[CHANGES[1]].why)) == ("failed", "a: no such option")
    assert len(rows[CHANGES[2]].run_ids) == 2
    # It is not tried again for the second seed, nor by the same command, unless that is asked for.
    assert [name for name in nodes.order if name.startswith(CHANGES[0])] == [f"{CHANGES[0]}-1"]
    done = len(nodes.order)
    nodes.tune(tuning_request())
    assert len(nodes.order) == done
    nodes.ends = lambda _: None
    nodes.tune(tuning_request(), retry_failed=True)
    assert nodes.order[done:] == [f"{CHANGES[1]}-1", f"{CHANGES[1]}-2"]


def test_a_training_that_fails_as_it_stands_is_nothing_to_tune(tmp_path: Path, golden: Golden) -> None:
    nodes = Elsewhere(tmp_path, lambda label: "missing_file" if label.startswith("baseline") else None)
    failed = error_of(nodes.tune, tuning_request())
    assert failed.run_id is not None
    directory = RunDirectory.open(tmp_path, failed.run_id)
    golden.check_errors("failed_baseline", {"the unchanged job": failed}, directory.path)
    run = directory.read("run.json", Run)
    assert run is not None
    assert run.kind == "tuning"
    assert run.first_failure is not None
    assert (run.first_failure.message, run.first_failure.run_id) == (
        "missing_file happened",
        f"{run.run_id}-baseline-1",
    )


def test_one_node_that_fails_leaves_the_changes_to_be_compared_with_the_training_as_it_stands(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, lambda label: "out_of_gpu_memory" if label.startswith("one-node") else None)
    tuned = nodes.tune(tuning_request())
    alone = tuned.tuning.rows[1]
    assert (alone.state, alone.run_ids) == ("out_of_memory", ())
    assert len(tuned.tuning.rows) > 2
    assert tuned.tuning.outcome in {"baseline", "change"}


def test_what_does_not_fit_the_budget_is_not_begun_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    small = tuning_request(budget_s=1e-6)
    tuned = nodes.tune(small)
    # Of the first nobody knows how long it takes.
    assert nodes.order == ["baseline-1"]
    assert tuned.tuning.waiting > 0
    assert tuned.tuning.spent_s > 0
    again = find_tuned(small, tmp_path, Resume())
    assert again is not None
    assert again.directory == tuned.directory
    nodes.tune(tuning_request())
    assert nodes.order[:2] == ["baseline-1", "one-node-1"]
    assert len(grid_of(tmp_path).cells) == len({name[:-2] for name in nodes.order})


def test_more_seeds_go_on_and_another_length_begins_anew(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    first = nodes.tune(tuning_request())
    done = len(nodes.order)
    assert find_tuned(tuning_request(), tmp_path, Resume()) is not None
    third = nodes.tune(tuning_request(seeds=3))
    assert third.directory == first.directory
    assert [name[-1] for name in nodes.order[done:]] == ["3"] * 5
    assert third.tuning.rows[0].loss is not None
    assert third.tuning.rows[0].loss.repeats == 3
    assert nodes.tune(tuning_request(seeds=1, steps=32)).directory != first.directory
    assert nodes.tune(tuning_request(seeds=1), anew=True).directory != first.directory


RATES = (1e-3, 2e-3, 4e-3)


def rates_of(nodes: Elsewhere) -> dict[str, list[tuple[float, int]]]:
    """Learning rate and seed of every run, by its candidate."""
    found: dict[str, list[tuple[float, int]]] = {}
    for name, what in zip(nodes.order, nodes.launches, strict=True):
        assert isinstance(what.job, TrainingJob)
        found.setdefault(name[:-2], []).append((what.job.config["learning_rate"], what.job.config["seed"]))
    return found


def test_every_change_has_the_best_learning_rate_of_its_own(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, loss_by_round=0.0)
    tuned = nodes.tune(tuning_request(learning_rates=RATES, most=2))
    first = [(rate, 7) for rate in RATES]
    # Two samples in a step of one node, four of both, and sixteen with accumulation, whose best was not tried.
    assert rates_of(nodes) == {
        "baseline": [*first, (2e-3, 8)],
        "one-node": [*first, (1e-3, 8)],
        CHANGES[0]: [*first, (2e-3, 8)],
        CHANGES[1]: [*first, (4e-3, 8)],
    }
    rows = {row.candidate.label: row for row in tuned.tuning.rows}
    assert {label: row.learning_rate for label, row in rows.items()} == {
        "baseline": 2e-3, "one-node": 1e-3, CHANGES[0]: 2e-3, CHANGES[1]: 4e-3,
    }  # fmt: skip
    assert {len(row.run_ids) for row in rows.values()} == {2}
    assert [one.learning_rate for one in rows["baseline"].rates] == list(RATES)
    losses = [one.loss for one in rows["baseline"].rates]
    assert all(loss is not None and loss >= (losses[1] or 0.0) for loss in losses)
    # The winner trains with the rate that it won with.
    assert tuned.tuning.recommended == CHANGES[0]
    change = parse_change((tuned.directory / "tuned.yaml").read_text(), "tuned.yaml")
    assert change.options == ("--nodes 2 --workers-per-node 1 --average local:16:fp16 --set learning_rate=0.002")


def test_learning_rates_are_resumed_like_seeds(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    asked = tuning_request(learning_rates=RATES, most=1, seeds=1)
    assert plan_tuning(asked, tmp_path, Resume()).learning_rates == RATES

    def kill(name: str) -> None:
        if name == "one-node-2":
            raise Killed

    nodes.ends = kill
    with pytest.raises(Killed):
        nodes.tune(asked)
    nodes.ends = lambda _: None
    first = nodes.tune(asked)
    assert len(nodes.order) == 3 * len(RATES) + 1
    # A seed more: each at its best rate, and nothing else again.
    done = len(nodes.order)
    more = changed(asked, seeds=2)
    assert plan_tuning(more, tmp_path, Resume()).waiting == 3
    second = nodes.tune(more)
    assert (second.directory, len(nodes.order)) == (first.directory, done + 3)
    assert nodes.tune(changed(asked, learning_rates=RATES[:2])).directory != first.directory


def test_a_learning_rate_that_diverges_or_fails_is_not_taken(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, lambda name: "missing_file" if name == "baseline-2" else None)
    asked = tuning_request(learning_rates=RATES, most=1)
    tuned = nodes.tune(asked)
    baseline = tuned.tuning.rows[0]
    # Its best one failed.
    assert [one.learning_rate for one in baseline.rates] == [1e-3, 4e-3]
    assert (baseline.learning_rate, len(baseline.run_ids)) == (1e-3, 2)
    assert "a repeat failed" in message_of(baseline.why)
    # Made again, it is the rate that is missing, not the last one.
    nodes.ends = lambda _: None
    done = len(nodes.order)
    nodes.tune(asked, retry_failed=True)
    (again,) = nodes.launches[done:]
    assert isinstance(again.job, TrainingJob)
    assert (again.job.config["learning_rate"], again.job.config["seed"]) == (2e-3, 7)


def test_without_evaluations_the_training_loss_is_compared(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path, evaluates=False)
    tuned = nodes.tune(tuning_request())
    assert tuned.tuning.loss_of == "training"


def test_data_that_were_tokenized_before_are_not_split(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nodes.tune(tuning_request(yaml=f"{YAML}tokenized_path: there\n", seeds=1))
    assert isinstance(nodes.launches[0].job, TrainingJob)
    config = nodes.launches[0].job.config
    assert not {"val_size", "eval_strategy"} & set(config)
    assert config["logging_steps"] == 8


def test_a_plan_says_what_is_tried_as_far_as_stored_runs_tell(tmp_path: Path) -> None:
    nodes = Elsewhere(tmp_path)
    nothing = plan_tuning(tuning_request(), tmp_path, Resume())
    assert [row.candidate.label for row in nothing.rows] == ["baseline", "one-node"]
    assert nothing.needed_s is None
    nodes.tune(tuning_request())
    own = plan_tuning(tuning_request(seeds=3), tmp_path, Resume())
    assert [row.candidate.label for row in own.rows] == ["baseline", "one-node", *CHANGES]
    assert own.waiting == 5
    # By runs of the same training, in another tuning.
    other = plan_tuning(tuning_request(steps=200), tmp_path, Resume())
    assert other.run_id == ""
    assert len(other.rows) == 5
    assert other.needed_s is not None
    assert all(row.candidate.predicted_samples_per_s for row in other.rows)
    # Nothing was started.
    assert len(nodes.order) == 10
