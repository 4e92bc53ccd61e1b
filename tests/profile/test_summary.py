from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from multinode.profile.observed import ObservedNode, observe
from multinode.profile.summary import Summary, summarise
from multinode.profile.summary_sheets import summary_sheets
from multinode.profile.trace import read_traces
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import LossSample, ModelSample, NoteSample, Sample, StepSample, TrainEndSample
from multinode.stats.estimate import estimate_median, estimate_rate, spread_of, value_of
from multinode.stats.unknown import Unknown, known
from tests.golden import Golden
from tests.reasons import reasons

TRACES = Path(__file__).parent / "traces"


def steps(rank: int, times_ms: Sequence[float | None], samples: int | None = 8) -> list[Sample]:
    return [
        StepSample(
            rank=rank,
            step=number,
            time_s=0,
            mono_ns=0,
            step_time_us=None if time_ms is None else time_ms * 1000,
            samples=samples,
        )
        for number, time_ms in enumerate(times_ms, start=1)
    ]


def summary_of(samples: Sequence[Sample]) -> Summary:
    """Of one node that has all the workers."""
    ranks = tuple(sorted({sample.rank for sample in samples if isinstance(sample, StepSample)})) or (0,)
    return summarise(observe("r", [ObservedNode(name="one", node_rank=0, ranks=ranks, samples=tuple(samples))]))


def test_a_steady_training_of_two_workers() -> None:
    found = summary_of(steps(0, [100.0] * 20) + steps(1, [100.0] * 20))
    assert (found.steps, found.steady_steps) == (20, 15)
    times = known(found.step_time_ms)
    assert (times.median.value, times.p95, times.cv) == (100.0, 100.0, 0.0)
    assert value_of(found.samples_per_s) == pytest.approx(160.0)  # 2 workers x 8 samples / 0.1 s
    assert reasons(found)["first_loss"] == reasons(found)["last_loss"] == "no loss was logged"
    assert "tokens" in reasons(found)["tgs"]
    assert "first 5 of 20" in found.rule


def test_its_intervals_are_those_of_its_measured_steps() -> None:
    times_ms = [100.0, 110.0, 95.0, 130.0, 105.0, 98.0, 120.0, 101.0, 99.0, 140.0]
    found = summary_of(steps(0, [500.0] * 5 + times_ms) + steps(1, [500.0] * 5 + times_ms))
    rate, median = estimate_rate([16.0] * 10, [one / 1000 for one in times_ms]), estimate_median(times_ms)
    # One worker's record went missing: it takes its time along with its samples.
    lost = [one for one in steps(1, [500.0] * 5 + times_ms) if not isinstance(one, StepSample) or one.step != 9]
    for one in (found, summary_of(steps(0, [500.0] * 5 + times_ms) + lost)):
        assert value_of(one.samples_per_s) == pytest.approx(rate.value, rel=0.02)
        assert known(one.samples_per_s).bounds == pytest.approx((rate.low, rate.high), rel=0.03)
        assert known(one.step_time_ms).median.bounds == pytest.approx((median.low, median.high))


def test_warm_up_is_in_the_one_rate_and_not_in_the_other() -> None:
    found = summary_of(steps(0, [1000.0] * 5 + [100.0] * 15))
    assert value_of(found.samples_per_s) == pytest.approx(80.0)
    assert found.all_steps_samples_per_s == pytest.approx(20 * 8 / 6.5)
    times = known(found.step_time_ms)
    assert (times.p95, times.cv) == (100.0, 0.0)


def test_the_rate_is_all_samples_over_all_time_and_not_the_mean_of_rates() -> None:
    found = summary_of(steps(0, [100.0, 300.0] * 10))
    assert value_of(found.samples_per_s) == pytest.approx(15 * 8 / (8 * 0.3 + 7 * 0.1))


def test_the_order_of_the_samples_does_not_matter() -> None:
    samples = [
        *steps(0, [100.0 + n for n in range(30)]),
        *steps(1, [101.0 + n for n in range(30)]),
        *(LossSample(rank=0, step=n, loss=3.0 - n / 10) for n in range(10, 31, 10)),
    ]
    mixed = sorted(samples, key=repr)
    assert mixed != samples
    assert summary_of(mixed) == summary_of(samples)


def test_the_step_time_is_the_median_over_the_workers_of_each_step() -> None:
    found = summary_of(steps(0, [100.0] * 9) + steps(1, [200.0] * 9) + steps(2, [900.0] * 9))
    times = known(found.step_time_ms)
    assert times.median.value == 200.0


def test_a_first_step_without_a_time_is_counted_as_a_step_and_timed_nowhere() -> None:
    found = summary_of(steps(0, [None, *[100.0] * 20]))
    assert (found.steps, found.steady_steps) == (21, 15)
    assert found.all_steps_samples_per_s == pytest.approx(80.0)


def test_losses_are_those_of_the_first_and_the_last_step_that_logged_one() -> None:
    losses = [LossSample(rank=0, step=step, loss=loss) for step, loss in ((20, 1.0), (10, 2.0), (30, 0.5))]
    found = summary_of(losses)
    assert (found.first_loss, found.last_loss) == (2.0, 0.5)
    assert not {"first_loss", "last_loss"} & set(reasons(found))


def test_a_training_that_diverged_is_not_reported_with_its_last_good_loss() -> None:
    found = summary_of([LossSample(rank=0, step=1, loss=2.0), LossSample(rank=0, step=2, loss=None)])
    assert found.first_loss == 2.0
    assert found.last_loss == Unknown("it was not finite at step 2")


def test_the_trainers_own_figure_stands_beside_ours() -> None:
    end = TrainEndSample(rank=0, time_s=0, train_runtime_s=2.0, train_samples_per_s=77.0)
    assert summary_of([*steps(0, [100.0] * 20), end]).trainer_samples_per_s == 77.0


def test_what_is_not_known_says_why() -> None:
    nothing = summary_of([])
    figures = ("step_time_ms", "samples_per_s", "tokens_per_s", "tgs", "first_loss", "last_loss")
    assert set(figures) <= set(reasons(nothing))
    assert reasons(nothing)["samples_per_s"] == "no worker recorded a step"
    assert {"exposed_ms", "in_training_gb_per_s"} <= set(reasons(nothing.comm))
    assert {"calls", "nic"} <= set(reasons(nothing.comm.bytes_per_step))
    assert nothing.bottleneck is not None
    assert nothing.bottleneck.kind == "unknown"
    no_samples = summary_of(steps(0, [100.0] * 20) + steps(1, [100.0] * 20, samples=None))
    assert "does not report the number of samples" in reasons(no_samples)["samples_per_s"]
    assert not isinstance(no_samples.step_time_ms, Unknown)


@pytest.mark.parametrize("samples", [steps(0, [100.0] * 9), []])
def test_how_much_data_an_epoch_has_is_the_trainers_word_or_missing_with_a_reason(samples: list[Sample]) -> None:
    model = ModelSample(rank=0, wrapper="ddp", parameters=7, trainable=5, dataset_samples=400)
    found = summary_of([*samples, model])
    assert (found.dataset_samples, found.parameters) == (400, 7)
    assert "dataset_samples" not in reasons(found)
    streamed = summary_of([*samples, msgspec.structs.replace(model, dataset_samples=None)])
    assert "streamed" in reasons(streamed)["dataset_samples"]
    untold = summary_of(samples)
    assert (
        reasons(untold)["dataset_samples"] == reasons(untold)["parameters"] == "no worker reported its model and data"
    )


@pytest.mark.parametrize(
    ("values", "median", "p95", "cv"),
    [
        ([5.0], 5.0, 5.0, 0.0),
        ([1.0, 3.0], 2.0, 3.0, 2**0.5 / 2),
        ([float(n) for n in range(1, 101)], 50.5, 95.0, 0.5745),
        ([0.0, 0.0], 0.0, 0.0, 0.0),
    ],
)
def test_a_spread_is_median_p95_and_cv(values: list[float], median: float, p95: float, cv: float) -> None:
    found = spread_of(values)
    assert (found.median, found.p95) == (median, p95)
    assert found.cv == pytest.approx(cv, rel=1e-3)


def test_what_nodes_and_workers_report_is_noted_with_who_says_it(golden: Golden) -> None:
    driver = NoteSample(message="Driver Not Loaded", lacks="gpus")
    hidden = NoteSample(message="no control group can be seen", lacks="cgroup")
    late = NoteSample(message="the first\nsamples were lost", rank=1)
    lever = NoteSample(message="gradients were NOT compressed to fp16: the training has its own hook", rank=1)
    found = summary_of([*steps(0, [100.0] * 9), *steps(1, [100.0] * 9), driver, hidden, late, lever])
    golden.check_findings("notes", {"reported": found.notes})
    assert [note.concerns for note in found.notes] == ["one", "one", "one, rank 1", "one, rank 1"]
    (missing,) = (sheet for sheet in summary_sheets(found) if sheet.title == "missing")
    told = {figures: why for figures, why in missing.rows if figures.startswith("one")}
    assert told == {
        "one": f"no GPU samples: {driver.message}; no cgroup samples: {hidden.message}",
        "one, rank 1": f"the first samples were lost; {lever.message}",
    }


def test_of_many_notes_of_a_node_the_first_are_kept() -> None:
    found = summary_of([*steps(0, [100.0] * 9), *(NoteSample(message=f"{number}") for number in range(100))])
    assert [note.message for note in found.notes] == [f"{number}" for number in range(20)]


def test_a_trace_that_is_missing_or_broken_is_noted_and_the_others_are_read(golden: Golden, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.trace_path(0).parent.mkdir(parents=True)
    directory.trace_path(0).write_bytes((TRACES / "nccl.json").read_bytes())
    directory.trace_path(2).write_bytes(b"torn")
    events, notes = read_traces(directory, (0, 1, 2))
    assert events.keys() == {0}
    golden.check_findings("unread_traces", {note.concerns: note for note in notes})
