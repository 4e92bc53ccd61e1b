from __future__ import annotations

import msgspec
import pytest

from multinode.contrast.figures import ASKED, Side
from multinode.contrast.judge import compare
from multinode.contrast.sheets import side_sheet, small_sheet
from multinode.contrast.side import make_side
from multinode.errors import UsageError
from multinode.model.workload import JobSettings, Workload
from multinode.profile.step_split import KnownSteps, StepSplit
from multinode.profile.summary import Comm, StepTimes, Summary
from multinode.stats.estimate import Estimate, of_repeats
from multinode.stats.unknown import Unknown, known, reason_of, unknown_fields
from tests import make
from tests.contrast.made_up_sides import run_of, split_of, split_summary, summary_of, traffic


def test_repeats_give_their_mean_and_what_they_leave_open() -> None:
    runs = [run_of(summary_of(rate, step_ms)) for rate, step_ms in ((24.0, 166.0), (20.0, 200.0), (25.0, 160.0))]
    side = make_side("baseline", runs)
    assert side.samples_per_s == of_repeats([24.0, 20.0, 25.0])
    assert side.step_time_ms == of_repeats([166.0, 200.0, 160.0])
    assert side.steady_steps == 75
    assert side.run_ids == ("r", "r", "r")


def test_one_repeat_has_the_intervals_of_its_own_steps() -> None:
    rate, tgs = Estimate(value=100.0, low=97.0, high=102.0), Estimate(value=1500.0, low=1490.0, high=1520.0)
    times = StepTimes(median=Estimate(value=166.0, low=165.0, high=170.0), p95=170.0, cv=0.01)
    side = make_side("baseline", [run_of(summary_of(samples_per_s=rate, step_time_ms=times, tgs=tgs))])
    assert (side.samples_per_s, side.step_time_ms, side.tgs) == (rate, times.median, tgs)


def test_the_global_batch_is_of_all_workers_and_unknown_without_settings() -> None:
    assert make_side("candidate", [run_of(nodes=2)]).global_batch == 2 * 4
    unknown = make_side("candidate", [run_of(nodes=2, workload=None)])
    assert unknown.global_batch == unknown.settings == Unknown("the run did not record its settings")
    partly = make_side("baseline", [run_of(workload=Workload(settings=JobSettings(model="m")))])
    assert reason_of(partly.global_batch).startswith("the per-device batch")


def test_exposed_communication_has_the_interval_of_the_repeats() -> None:
    side = make_side("candidate", [run_of(split_summary(20.0)), run_of(split_summary(40.0))])
    assert side.exposed_ms == of_repeats([20.0, 40.0])
    assert (side.late_ms, side.stragglers) == (0.0, ())


def test_tokens_stand_where_every_repeat_counted_them() -> None:
    counted = [run_of(summary_of(tokens_per_s=tokens, tgs=tokens / 2)) for tokens in (3000.0, 3200.0)]
    side = make_side("baseline", counted)
    assert known(side.tokens_per_s).value == pytest.approx(3100.0)
    unknown = make_side("baseline", [*counted, run_of(summary_of(tokens_per_s=Unknown("no tokenizer")))])
    assert reason_of(unknown.tokens_per_s) == "no tokenizer"


@pytest.mark.parametrize("price", [4.0, None])
def test_a_side_with_a_price_has_that_of_its_tokens(price: float | None) -> None:
    summary = summary_of(tokens_per_s=2000.0)
    side = make_side("candidate", [run_of(summary, nodes=2, price_per_hour=price)])
    if price is None:
        assert "price=" in reason_of(side.price_per_hour)
        assert side.cost_per_million_tokens == side.price_per_hour
    else:
        assert side.price_per_hour == price
        assert side.cost_per_million_tokens == pytest.approx(4.0 / (2000 * 3600) * 1e6)


def test_bytes_and_link_are_those_of_the_last_repeat() -> None:
    runs = [run_of(summary_of(comm=traffic(size)), nodes=2, link_gbit_per_s=0.1) for size in (1e6, 2e6)]
    side = make_side("candidate", runs)
    assert (side.bytes_per_step.nic, side.link_gbit_per_s) == (2e6, 0.1)


def test_a_run_without_samples_cannot_be_compared_and_says_why() -> None:
    nothing = make.no_steps()
    with pytest.raises(UsageError, match="run r has no samples/s to compare: no worker recorded a step"):
        make_side("baseline", [run_of(), run_of(nothing)])


def test_what_is_none_has_a_reason() -> None:
    side = make_side("baseline", [run_of(workload=None)])
    assert [field for field in side.__struct_fields__ if getattr(side, field) is None] == ["relative"]
    assert {"settings", "global_batch", "price_per_hour"} <= unknown_fields(side).keys()
    assert msgspec.json.decode(msgspec.json.encode(side), type=type(side)) == side


def side_of_two(summaries: list[Summary]) -> Side:
    return make_side("candidate", [run_of(summary, nodes=2) for summary in summaries])


def test_every_part_is_the_mean_of_the_repeats() -> None:
    found = side_of_two([split_summary(20.0), split_summary(40.0)])
    assert known(found.split).rank == -1
    assert known(found.split).exposed_ms == pytest.approx(30.0)
    assert known(found.split).compute_ms == pytest.approx(166 - 30 - 16)
    assert found.exposed_ms == of_repeats([20.0, 40.0])
    assert found.exposed_share == pytest.approx(30 / 166)
    assert found.late_ms == 0.0


def test_exposed_communication_is_of_the_steps_of_all_repeats_in_which_it_is_known() -> None:
    few, whole = (
        msgspec.structs.replace(
            split_summary(20.0),
            split=msgspec.structs.replace(split_summary(20.0).split, steps=KnownSteps(known=known, measured=25)),
        )
        for known in (4, 25)
    )
    found = side_of_two([few, whole])
    assert found.exposed_steps.words == "from 29 of 50 measured steps"
    baseline = make_side("baseline", [run_of(whole)])
    contrast = compare([baseline, found], mode="compare", why=ASKED.found(None), job="job", rule="all count")
    for sheet in (small_sheet(contrast, contrast.measured), side_sheet(contrast, contrast.measured)):
        assert any(note.endswith(": from 29 of 50 measured steps") for note in sheet.notes)


def test_a_repeat_that_was_not_split_leaves_none_and_its_reason() -> None:
    blind = summary_of(split=StepSplit(mean=Unknown("no counters")), comm=Comm(exposed_ms=Unknown("no counters")))
    found = side_of_two([split_summary(20.0), blind])
    assert {reason_of(getattr(found, name)) for name in ("split", "exposed_ms", "exposed_share", "late_ms")} == {
        "no counters"
    }


def test_a_part_that_one_repeat_lacks_is_not_that_of_the_others() -> None:
    partly = summary_of(
        split=StepSplit(
            mean=msgspec.structs.replace(
                split_of(166.0), compute_ms=Unknown("no counters"), exposed_ms=Unknown("no counters")
            )
        )
    )
    found = side_of_two([split_summary(20.0), partly])
    assert known(found.split).compute_ms == known(found.split).exposed_ms == Unknown("no counters")
    assert known(found.split).optimizer_ms == pytest.approx(10.0)
    assert isinstance(found.exposed_ms, Unknown)


def test_nodes_that_any_repeat_finds_late_are_named_the_latest_first() -> None:
    found = side_of_two([split_summary(0.0, late) for late in ({"n2": 30.0}, {"n2": 50.0, "n3": 100.0})])
    assert found.stragglers == ("n3", "n2")
    assert found.late_ms == pytest.approx(50.0)  # 100 in one of two repeats
