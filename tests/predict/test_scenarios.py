from __future__ import annotations

from typing import Any

import pytest

from multinode.errors import UsageError
from multinode.levers.levers import NONE
from multinode.model.workload import read_workload
from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import ForecastRequest, PredictedScenario, make_forecast
from multinode.predict.run_selection import Record
from multinode.traffic.step_calls import Strategy
from tests.levers.compressed import compressed, compressions
from tests.predict.stored import BYTES, COMPUTE_MS, OPTIMIZER_MS, comm_ms, renamed, sweep_record, training_record

OWN_MS = COMPUTE_MS + OPTIMIZER_MS


def evidence(**job: Any) -> Evidence:
    """Of one node and an nccl-test at 1 Gbit/s."""
    return gather([training_record("one", 1, job=job), sweep_record("sweep")])


def outlooks(request: ForecastRequest, **job: Any) -> tuple[PredictedScenario, ...]:
    return make_forecast(evidence(**job), request).scenarios


def test_one_node_and_an_nccl_test_foretell_two_nodes_on_any_link() -> None:
    found = outlooks(ForecastRequest(links=(0.1, 1.0), nodes=(2,)))
    assert [one.link_gbit_per_s for one in found] == [0.1, 1.0]
    for one, link in zip(found, (0.1, 1.0), strict=True):
        # All but the first bucket, which is full early, waits for the last gradient.
        assert one.step_time_ms == pytest.approx(OWN_MS + comm_ms(link), rel=0.08)
        assert one.step_time_ms < OWN_MS + comm_ms(link)
        assert one.samples_per_s.low < one.samples_per_s.value < one.samples_per_s.high
    assert not any(one.measured for one in found)


def test_without_asking_there_are_the_usual_links_and_the_measured_one() -> None:
    found = make_forecast(gather([training_record("one", 1), sweep_record("sweep", 0.3)]), ForecastRequest()).scenarios
    assert [one.link_gbit_per_s for one in found] == [0.3, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0]
    assert {one.nodes for one in found} == {2}


def test_one_node_is_one_scenario_whatever_the_links() -> None:
    found = outlooks(ForecastRequest(links=(1.0, 10.0), nodes=(1, 2)))
    assert [(one.nodes, one.link_gbit_per_s) for one in found] == [(1, None), (2, 1.0), (2, 10.0)]
    assert (found[0].speedup.value, found[0].efficiency) == (1.0, 1.0)
    assert found[0].step_time_ms == pytest.approx(OWN_MS)


def test_unequal_nodes_stay_as_they_are_and_are_held_against_the_first_one() -> None:
    exposed_ms = comm_ms(1.0, 4 / 3 * BYTES)
    runs = [
        training_record("one", 1, workers_per_node=2),
        training_record("two", 2, exposed_ms=exposed_ms, workers_per_node=(2, 1)),
    ]
    found = make_forecast(gather([*runs, sweep_record("sweep")]), ForecastRequest(nodes=(1, 2, 3), links=(0.1, 1.0)))
    assert [(one.nodes, one.layout.counts) for one in found.scenarios] == [
        (1, (2,)),
        *[(2, (2, 1))] * 2,
        # One more is like the fullest.
        *[(3, (2, 1, 2))] * 2,
    ]
    slow, measured = found.scenarios[1:3]
    assert measured.measured
    # Of three workers that do what each of two did.
    assert measured.samples_per_s.value == pytest.approx(1000 * 6 / (OWN_MS + exposed_ms), rel=0.01)
    assert slow.step_time_ms == pytest.approx(OWN_MS + comm_ms(0.1, 4 / 3 * BYTES), rel=0.08)
    assert measured.speedup.value == pytest.approx(1.5 * OWN_MS / (OWN_MS + exposed_ms), rel=0.01)
    assert measured.efficiency == pytest.approx(measured.speedup.value / 1.5)
    assert found.break_even is not None
    assert found.break_even.one_node_workers == 2
    # Nodes that are full as they are have no fuller ones beside them.
    assert found.break_even.full_beats_one is None
    assert "2 nodes with 3 workers" in found.break_even_of
    equal = make_forecast(gather([*runs, sweep_record("sweep")]), ForecastRequest(workers_per_node=(2,), links=(1.0,)))
    assert [one.layout.counts for one in equal.scenarios] == [(2, 2)]


def test_of_unequal_nodes_alone_the_first_ones_workers_are_one_node() -> None:
    record = training_record("two", 2, exposed_ms=50.0, workers_per_node=(1, 3))
    found = make_forecast(gather([record, sweep_record("sweep")]), ForecastRequest(nodes=(1, 2), links=(1.0,)))
    assert [one.layout.counts for one in found.scenarios] == [(1,), (1, 3)]
    assert found.break_even is not None
    assert found.break_even.one_node_workers == 1


def test_accumulation_helps_ddp_and_not_zero_2() -> None:
    gains = []
    for strategy in (Strategy.DDP, Strategy.ZERO2):
        one, four = outlooks(ForecastRequest(links=(0.1,), accumulations=(1, 4), strategies=(strategy,)))
        gains.append(four.samples_per_s.value / one.samples_per_s.value)
    # Of ZeRO-2, 4 G and once Psi for four times the samples: 5/8 of what a sample sent with G and Psi.
    assert gains[0] > 3
    assert gains[1] == pytest.approx(8 / 5, rel=0.05)


def test_a_hook_halves_what_ddp_exposes_and_leaves_zero_2_as_it_is() -> None:
    plain, half = outlooks(ForecastRequest(links=(0.1,), levers=compressions(None, "fp16")))
    assert half.parts.exposed_ms == pytest.approx(plain.parts.exposed_ms / 2, rel=0.05)
    assert (plain.levers, half.levers) == (NONE, compressed("fp16"))
    both = outlooks(
        ForecastRequest(
            links=(1.0,),
            strategies=(Strategy.DDP, Strategy.ZERO2),
            levers=compressions(None, "fp16"),
        )
    )
    assert [(one.strategy, one.levers.words.get("compression")) for one in both] == [
        (Strategy.DDP, None),
        (Strategy.DDP, "fp16"),
        (Strategy.ZERO2, None),
    ]


def test_an_adapter_sends_little_and_computes_less() -> None:
    full, lora = outlooks(ForecastRequest(links=(0.1,), methods=("full", "lora:8")))
    assert (full.method, lora.method) == ("full", "lora:8")
    assert lora.parts.comm_ms < full.parts.comm_ms / 10
    assert lora.parts.compute_ms < full.parts.compute_ms
    assert any("FLOPs" in doubt.message for doubt in lora.doubts)


def test_what_another_strategy_sends_is_told_and_that_its_engine_was_not_measured() -> None:
    found = outlooks(
        ForecastRequest(links=(0.1,), strategies=(Strategy.DDP, Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP))
    )
    ddp, zero2, zero3, fsdp = found
    # So small a model stays whole from the forward to the backward pass of ZeRO-3: G and Psi, as ZeRO-2 sends them.
    assert ddp.step_time_ms < zero2.step_time_ms == pytest.approx(zero3.step_time_ms, rel=1e-3)
    assert fsdp.parts.comm_ms > zero3.parts.comm_ms
    assert any("the overhead of the engine was measured only with DDP" in doubt.message for doubt in zero3.doubts)


def test_without_overlap_all_is_exposed_and_small_buckets_hide_most() -> None:
    (off,) = outlooks(ForecastRequest(links=(1.0,), overlaps=(False,)))
    assert off.parts.exposed_ms == pytest.approx(comm_ms(1.0), rel=0.01)
    (cut,) = outlooks(ForecastRequest(links=(1.0,), bucket_mib=(1.0,)))
    assert cut.parts.exposed_ms < off.parts.exposed_ms / 2
    assert cut.bucket_mib == 1.0


def test_a_larger_batch_and_more_workers_give_more_samples() -> None:
    small, large = outlooks(ForecastRequest(links=(1.0,), per_device_batches=(2.0, 8.0)))
    assert large.parts.compute_ms == pytest.approx(4 * small.parts.compute_ms)
    assert large.samples_per_s.high / large.samples_per_s.low > small.samples_per_s.high / small.samples_per_s.low
    two, four = outlooks(ForecastRequest(links=(10.0,), nodes=(2, 4)))
    assert four.samples_per_s.value > two.samples_per_s.value


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (ForecastRequest(links=(0.0,)), "--link 0"),
        (ForecastRequest(links=(float("nan"),)), "--link nan"),
        (ForecastRequest(links=(float("inf"),)), "--link inf"),
        (ForecastRequest(nodes=(0,)), "--nodes 0"),
        (ForecastRequest(nodes=(10**9,)), "--nodes"),
        (ForecastRequest(workers_per_node=(-1,)), "--workers-per-node -1"),
        (ForecastRequest(per_device_batches=(0.0,)), "--batch 0"),
        (ForecastRequest(accumulations=(0,)), "--accumulation 0"),
        (ForecastRequest(bucket_mib=(-1.0,)), "--bucket-mib -1"),
        (ForecastRequest(methods=("dora",)), "cannot predict the method 'dora'"),
        (ForecastRequest(methods=("lora:0",)), "cannot predict the method 'lora:0'"),
        (ForecastRequest(levers=compressions("int8")), "--grad-compress int8"),
        (ForecastRequest(target=1.0), "--target 1"),
        (ForecastRequest(links=tuple(range(1, 200)), nodes=tuple(range(2, 200))), "scenarios exceed the limit"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(asked: ForecastRequest, option: str) -> None:
    with pytest.raises(UsageError) as refused:
        outlooks(asked)
    assert option in refused.value.message


def test_the_measured_scenario_is_marked_and_its_figure_is_near() -> None:
    exposed = comm_ms(1.0) * 0.9
    records = [training_record("one", 1), training_record("two", 2, exposed_ms=exposed), sweep_record("sweep")]
    found = make_forecast(gather(records), ForecastRequest(links=(0.1, 1.0)))
    assert [one.measured for one in found.scenarios] == [False, True]
    assert found.scenarios[1].step_time_ms == pytest.approx(OWN_MS + exposed, rel=0.01)
    assert found.break_even is not None
    assert found.break_even_of.startswith("DDP on 2 nodes with 1 worker each, 1 Gbit/s")


def test_stored_runs_are_predicted_without_themselves_and_a_bad_memory_widens_every_interval() -> None:
    near = training_record("near", 2, 0.1, exposed_ms=comm_ms(0.1))
    far = training_record("far", 2, 0.1, exposed_ms=3 * comm_ms(0.1))
    named = [training_record("one", 1), sweep_record("sweep")]
    asked = ForecastRequest(links=(0.1,))
    good, bad = (make_forecast(gather(named, [other]), asked) for other in (near, far))
    assert good.back_test.median_error is not None
    assert good.back_test.median_error < 0.06
    assert good.back_test.coverage == 1.0
    assert bad.back_test.median_error is not None
    assert bad.back_test.median_error > 0.5
    assert width(bad.scenarios[0]) > 2 * width(good.scenarios[0])
    assert any("the largest error in 1 stored run was" in doubt.message for doubt in bad.scenarios[0].doubts)
    # What it was learnt from lies within what was learnt from it.
    low, high = bad.scenarios[0].samples_per_s.bounds
    assert low <= far.samples_per_s * (1 + 1e-9)
    assert far.samples_per_s <= high


def test_more_workers_on_a_node_than_were_measured_are_doubted_and_that_is_said() -> None:
    request = ForecastRequest(nodes=(1, 2), links=(1.0,), workers_per_node=(1, 8))
    found = make_forecast(evidence(), request)
    eight = make_forecast(gather([training_record("one", 1, workers_per_node=8), sweep_record("sweep")]), request)
    one, many = ({(row.nodes, row.workers_per_node): width(row) for row in rows.scenarios} for rows in (found, eight))
    assert one[1, 8] > 1.3 * one[1, 1]
    assert one[2, 8] > one[2, 1]
    (note,) = [note for note in found.notes if note.code == "more-workers"]
    assert note.message.startswith("no run had more than 1 worker on a node. Communication and contention")
    assert note.figures == {"workers_per_node": 1}
    # Eight that were measured need no such words, nor does one of them alone.
    assert not any(note.code == "more-workers" for note in eight.notes)
    assert not any("worker per node measured" in doubt.message for row in eight.scenarios for doubt in row.doubts)
    assert not any("workers per node measured" in doubt.message for row in eight.scenarios for doubt in row.doubts)
    assert many[1, 8] == many[1, 1] == one[1, 1]


def width(row: PredictedScenario) -> float:
    return row.samples_per_s.high / row.samples_per_s.low


@pytest.mark.parametrize("strategy", [Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD])
def test_the_other_ways_of_fsdp_send_less_between_nodes(strategy: Strategy) -> None:
    request = ForecastRequest(links=(0.1,), workers_per_node=(2,), strategies=(Strategy.FSDP, strategy))
    full, other = outlooks(request)
    assert other.strategy == strategy
    assert other.parts.comm_ms < full.parts.comm_ms


def test_a_run_whose_gradients_were_compressed_is_continued_as_it_was() -> None:
    exposed = comm_ms(1.0, BYTES / 2)
    records = [with_hook(training_record("one", 1)), with_hook(training_record("two", 2, exposed_ms=exposed))]
    (found,) = make_forecast(gather([*records, sweep_record("sweep")]), ForecastRequest(links=(1.0,))).scenarios
    assert (found.levers, found.measured) == (compressed("fp16"), True)
    assert found.parts.exposed_ms == pytest.approx(exposed, rel=0.05)


def test_another_strategy_than_that_of_a_compressed_run_has_no_hook() -> None:
    records = [with_hook(training_record("one", 1)), with_hook(training_record("two", 2, exposed_ms=10.0))]
    request = ForecastRequest(links=(1.0,), strategies=(Strategy.ZERO2,))
    (found,) = make_forecast(gather([*records, sweep_record("sweep")]), request).scenarios
    assert (found.strategy, found.levers) == (Strategy.ZERO2, NONE)


def test_a_hook_that_stepped_aside_has_compressed_nothing() -> None:
    records = [
        renamed(with_hook(training_record(name, nodes, exposed_ms=exposed)), unused_levers=("compression",))
        for name, nodes, exposed in (("one", 1, 0.0), ("two", 2, comm_ms(1.0)))
    ]
    request = ForecastRequest(links=(1.0,), levers=compressions(None, "fp16"))
    plain, half = make_forecast(gather([*records, sweep_record("sweep")]), request).scenarios
    assert (plain.measured, half.measured) == (True, False)
    assert plain.samples_per_s.value == pytest.approx(records[1].samples_per_s, rel=0.02)
    assert half.samples_per_s.value > plain.samples_per_s.value


def with_hook(record: Record) -> Record:
    job = record.job
    assert job is not None
    workload = read_workload(job, record.model, record.layout, levers=compressed("fp16"))
    return record.having(workload=workload)
