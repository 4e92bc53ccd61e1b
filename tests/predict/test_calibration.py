from __future__ import annotations

import msgspec
import pytest

from multinode.predict.calibration import Calibration, CalibrationRun, calibrate, calibrate_without_single
from multinode.predict.cost_model import Scenario
from multinode.predict.network_model import Link, NetworkModel
from multinode.predict.prediction import Prediction
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import StepTimes, Summary
from multinode.stats.estimate import exactly
from multinode.stats.unknown import Unknown, known
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work, fit_curve
from tests import make
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed

ONE, TWO = Layout(nodes=1, workers_per_node=2), Layout(nodes=2)
G = 14_767_104
WORK = Work(
    strategy=Strategy.DDP, load=TrafficInputs(parameters=G // 4, trainable=G // 4, parameter_bytes=4, gradient_bytes=4)
)
# An all-reduce of G takes 125 ms between two workers.
CURVE = fit_curve([(G // 4, 125_000 / 4), (G, 125_000)])
NETWORK = NetworkModel(link=Link(gbit_per_s=1), layout=TWO, backend="gloo", curves={"all_reduce": CURVE})


def summary(
    mean: WorkerSplit | None, *, step_ms: float = 200, samples_per_s: float | None = 20, micro_steps: float = 1
) -> Summary:
    return make.summary(
        run_id="r1",
        steps=20,
        steady_steps=15,
        step_time_ms=StepTimes(median=exactly(step_ms), p95=step_ms, cv=0.03),
        samples_per_s=exactly(samples_per_s) if samples_per_s else Unknown("the training does not say it"),
        micro_steps=micro_steps,
        tokens_per_sample=128,
        split=StepSplit(mean=mean or Unknown("nobody looked")),
    )


def on_two(mean: WorkerSplit | None, *, step_ms: float = 200, per_device_batch: float = 2) -> Summary:
    """Of the batch that `summary` comes to on one node with two workers."""
    return msgspec.structs.replace(summary(mean, step_ms=step_ms), per_device_batch=per_device_batch)


SPLIT = make.split(200, compute_ms=120, exposed_ms=30, wait_ms=8, data_ms=4, optimizer_ms=20, host_ms=18)


def seen(mean: WorkerSplit | None = SPLIT, several: Summary | None = None, micro_steps: float = 1) -> Calibration:
    run = CalibrationRun.of(summary(mean, micro_steps=micro_steps), ONE)
    return calibrate(run, WORK, NETWORK, CalibrationRun.of(several, TWO) if several else None)


def test_one_node_tells_its_own_work_and_its_workers_exchange_is_taken_out() -> None:
    found = seen()
    # What the others wait for the slowest worker is its computing.
    assert found.costs.compute_ms == 128
    assert (found.costs.optimizer_ms, found.costs.host_ms, found.costs.data_ms) == (20, 18, 4)
    assert found.local_ms == 30
    assert (found.per_device_batch, found.scatter, found.tokens_per_sample) == (2, 0.03, 128)
    assert found.costs.overlap is None


def test_computing_and_batches_are_of_a_micro_batch() -> None:
    found = seen(micro_steps=4.0)
    assert (found.costs.compute_ms, found.costs.data_ms, found.costs.optimizer_ms) == (32, 1, 20)
    assert (found.accumulation, found.per_device_batch) == (4, 0.5)


def test_a_batch_that_is_known_is_not_made_of_the_rate() -> None:
    # 64 samples in 200 ms are 320 a second; at 323 the rate makes 65 of them.
    told = msgspec.structs.replace(summary(SPLIT, samples_per_s=2 * 323), per_device_batch=64.0)
    assert calibrate(CalibrationRun.of(told, ONE), WORK, NETWORK).per_device_batch == 64
    older = msgspec.structs.replace(told, per_device_batch=None)
    assert calibrate(CalibrationRun.of(older, ONE), WORK, NETWORK).per_device_batch == 65


def test_where_computing_was_not_told_it_is_what_nothing_else_explains() -> None:
    found = seen(make.split(200, exposed_ms=30, wait_ms=8, data_ms=4, optimizer_ms=20))
    assert (found.costs.compute_ms, found.costs.host_ms) == (146, 0)
    assert [note.message for note in found.notes] == [
        "everything except communication, data and optimizer counts as compute"
    ]


def test_where_nothing_was_split_the_whole_step_counts_and_that_is_said() -> None:
    found = seen(None)
    assert (found.costs.compute_ms, found.local_ms) == (200, 0)
    assert [note.message for note in found.notes] == [
        "the whole step counts as compute, including communication between the workers: nobody looked"
    ]


# 125 ms of communication, 0.05 of which is 6.25 ms, beside a backward pass of 85.3 ms, 0.3 of which is 25.6 ms.
OF_RHO = 25.6**2 / (25.6**2 + 6.25**2)


@pytest.mark.parametrize(
    ("exposed_ms", "rho"), [(125.0, 1 - OF_RHO), (82.3333333, 1 - OF_RHO / 2), (300.0, 0.0), (0.0, 1.0)]
)
def test_what_several_nodes_expose_tells_the_overlap_as_far_as_it_is_not_of_the_network(
    exposed_ms: float, rho: float
) -> None:
    several = on_two(make.split(300, exposed_ms=exposed_ms))
    found = seen(several=several)
    assert found.costs.overlap == pytest.approx(rho)


def test_what_follows_the_optimizer_tells_nothing_of_the_overlap() -> None:
    zero = msgspec.structs.replace(WORK, strategy=Strategy.ZERO2)
    gather = fit_curve([(G // 4, 70_000 / 4), (G, 70_000)])
    curves = {"all_reduce": CURVE, "all_gather": gather}
    network = msgspec.structs.replace(NETWORK, backend="nccl", curves=curves)
    # 125 ms of gradients of which a backward pass of 85 ms hides half, and 70 ms of parameters afterwards.
    several = on_two(make.split(400, exposed_ms=125 - 128 / 3 + 70))
    runs = CalibrationRun.of(summary(SPLIT), ONE), CalibrationRun.of(several, TWO)
    assert calibrate(runs[0], zero, network, runs[1]).costs.overlap == pytest.approx(1 - OF_RHO / 2)


@pytest.mark.parametrize("median_ms", [140, 180, 200])
def test_a_step_is_as_long_as_the_rate_says_whatever_its_median(median_ms: float) -> None:
    """A few long steps, of longer samples or of a checkpoint, are part of every rate."""
    single = CalibrationRun.of(summary(SPLIT, step_ms=median_ms), ONE)
    found = calibrate(single, WORK, NETWORK)
    assert found.costs.compute_ms == pytest.approx(128)
    assert found.local_ms == pytest.approx(30)
    alone = Prediction(found, Scenario(link=Link(gbit_per_s=1), layout=ONE, per_device_batch=found.per_device_batch))
    assert alone.samples_per_s == pytest.approx(known(single.speed.samples_per_s).value)


def test_without_a_split_the_exposed_part_is_what_the_step_is_longer() -> None:
    # 128 + 20 + 18 + 4 = 170 ms are the worker's own.
    assert seen(several=on_two(None, step_ms=170 + 125)).costs.overlap == pytest.approx(1 - OF_RHO)
    assert seen(several=on_two(None, step_ms=170 + 125 - 128 / 3)).costs.overlap == pytest.approx(1 - OF_RHO / 2)


def test_where_all_could_be_hidden_only_what_hid_the_rest_is_known() -> None:
    long = make.split(1000, compute_ms=900, exposed_ms=0, wait_ms=0)
    found = calibrate(
        CalibrationRun.of(summary(long, step_ms=1000), ONE),
        WORK,
        NETWORK,
        CalibrationRun.of(summary(make.split(1010, exposed_ms=9)), TWO),
    )
    # Of 125 ms the run hid 116, beside 600 ms of computing: more of these would have been used, had there been more.
    assert found.costs.overlap is None
    assert found.costs.least_overlap == pytest.approx(116 / 600)


def test_a_run_of_another_batch_tells_the_overlap_that_its_own_computing_had() -> None:
    """Half the batch computes 64 ms, of which a third of 125 ms of communication hides behind two thirds, all used."""
    several = on_two(make.split(300, exposed_ms=125 - 64 * 2 / 3), per_device_batch=1)
    found = seen(several=several)
    assert found.costs.overlap == pytest.approx(1.0)
    assert found.costs.compute_ms == 128
    # Where nothing was split, its step without communication is shorter, too: 64 + 20 + 18 + 2 ms.
    unsplit = on_two(None, step_ms=104 + 125 - 64 * 2 / 3, per_device_batch=1)
    assert seen(several=unsplit).costs.overlap == pytest.approx(1.0)
    # The same in the prediction of that run, and of another batch: nothing is lost on the way.
    for batch in (1, 2, 4):
        scenario = Scenario(link=NETWORK.link, layout=TWO, per_device_batch=batch)
        step_ms = batch / 2 * 132 + 38 + max(0.0, 125 - batch / 2 * 128 * 2 / 3)
        # Half of what the workers of one node exchange is the least; there is one on each of two.
        assert Prediction(found, scenario).step_time_ms == pytest.approx(step_ms)


def test_until_the_first_bucket_is_full_nothing_tells_the_overlap() -> None:
    cut = msgspec.structs.replace(WORK, bucket_bytes=G / 4)
    single = CalibrationRun.of(summary(SPLIT), ONE)
    several = CalibrationRun.of(on_two(make.split(300, exposed_ms=125 - 0.75 * 128 / 3)), TWO)
    # A quarter of the gradients comes before anything is sent: 19.2 ms instead of 25.6.
    of_rho = 19.2**2 / (19.2**2 + 6.25**2)
    assert calibrate(single, cut, NETWORK, several).costs.overlap == pytest.approx(1 - of_rho / 2)


def test_a_slow_link_tells_the_network_and_hardly_the_overlap() -> None:
    # 1250 ms of communication, of which 62 ms more or less are the network's.
    several = CalibrationRun.of(on_two(make.split(1500, exposed_ms=1250)), TWO, link=Link(gbit_per_s=0.1))
    found = calibrate(CalibrationRun.of(summary(SPLIT), ONE), WORK, NETWORK, several)
    assert found.costs.overlap is not None
    assert found.costs.overlap > 0.8


def test_the_share_that_can_hide_is_of_the_training() -> None:
    costs = calibrate(CalibrationRun.of(summary(SPLIT), ONE), WORK, NETWORK, share=0.75).costs
    assert costs.hideable_ms == pytest.approx(0.75 * 128)


def test_a_run_that_was_not_to_overlap_tells_nothing_of_the_overlap() -> None:
    several = CalibrationRun.of(on_two(make.split(300, exposed_ms=125)), TWO, overlap=False)
    assert calibrate(CalibrationRun.of(summary(SPLIT), ONE), WORK, NETWORK, several).costs.overlap is None


def test_runs_that_cannot_tell_are_refused(golden: Golden) -> None:
    one = CalibrationRun.of(summary(SPLIT), ONE)
    alone = NetworkModel(link=NETWORK.link, layout=ONE)
    mute = CalibrationRun.of(summary(SPLIT, samples_per_s=None), ONE)
    unsplit = CalibrationRun.of(summary(None), TWO)
    golden.check_errors(
        "refused_calibration",
        {
            "a run on two nodes": error_of(calibrate, CalibrationRun.of(summary(SPLIT), TWO), WORK, NETWORK),
            "an nccl-test of one node": error_of(calibrate, one, WORK, alone),
            "no speed": error_of(calibrate, mute, WORK, NETWORK),
            "no split": error_of(calibrate_without_single, unsplit, WORK, NETWORK),
        },
    )


def test_several_nodes_alone_tell_their_own_work_less_what_was_exposed() -> None:
    several = CalibrationRun.of(summary(SPLIT), TWO)
    found = calibrate_without_single(several, WORK, NETWORK)
    assert found.costs.compute_ms == 128
    assert (found.local_ms, found.layout) == (0, Layout(nodes=1))
    (note,) = found.notes
    assert note.message.endswith("subtracts its exposed communication (30 ms)")
    assert note.figures["exposed_ms"] == 30
    assert found.doubts[0].part == "compute"


FOUR = Layout(nodes=2, workers_per_node=2)


def of_rank(rank: int, compute_ms: float) -> WorkerSplit:
    """A worker of four whose step takes 500 ms, 200 of them transfer."""
    return WorkerSplit(
        rank=rank, step_ms=500, compute_ms=compute_ms, exposed_ms=200, wait_ms=300 - compute_ms, data_ms=0,
        optimizer_ms=0, host_ms=0,
    )  # fmt: skip


def split_of_four(comm_ms: float) -> CalibrationRun:
    workers = tuple(of_rank(rank, compute_ms) for rank, compute_ms in enumerate((80, 120, 300, 290)))
    mean = make.split(500, compute_ms=197.5, exposed_ms=200, wait_ms=102.5)
    told = msgspec.structs.replace(
        summary(SPLIT, step_ms=500, samples_per_s=8), split=StepSplit(mean=mean, workers=workers, comm_ms=comm_ms)
    )
    return CalibrationRun.of(told, FOUR)


def test_one_node_is_the_first_of_several_and_waits_for_the_slowest_of_its_own_workers_alone() -> None:
    found = calibrate_without_single(split_of_four(300), WORK, NETWORK)
    assert (found.costs.compute_ms, found.layout) == (120, ONE)


def test_what_its_workers_exchange_passes_at_an_assumed_rate_and_no_slower_than_over_all_nodes() -> None:
    slow, fast = (calibrate_without_single(split_of_four(comm_ms), WORK, NETWORK) for comm_ms in (300, 10))
    assert slow.network.local_gb_per_s == (0.25, 2.5)
    # A worker of four sends 1.5 times the gradients.
    assert fast.network.local_gb_per_s == pytest.approx((1.5 * G / 10e6, 2.5))
    scenario = Scenario(link=NETWORK.link, layout=ONE, per_device_batch=1.0)
    found = Prediction(slow, scenario)
    # Two workers pass the gradients once, at the geometric mean of the bounds, and hide what they may.
    assert found.parts.comm_ms == pytest.approx(G / (0.25 * 2.5) ** 0.5 / 1e6)
    assert max(parts.comm_ms for parts in found.draws) == pytest.approx(G / 0.25 / 1e6)
    assert any("0.25 to 2.5 GB/s is assumed" in doubt.message for doubt in found.doubts)
    alone = Prediction(slow, msgspec.structs.replace(scenario, layout=Layout(nodes=1)))
    assert (alone.parts.comm_ms, alone.parts.exposed_ms) == (0, 0)


def test_the_overlap_is_that_of_the_link_and_the_hook_of_the_run_it_came_from() -> None:

    several = on_two(make.split(300, exposed_ms=62.5))
    single = CalibrationRun.of(summary(SPLIT), ONE)
    slow = CalibrationRun.of(several, TWO, link=Link(gbit_per_s=0.5))
    half = CalibrationRun.of(several, TWO, link=Link(gbit_per_s=0.5), levers=compressed("fp16"))
    # At half the rate 250 ms are sent, or 125 ms of half the bytes; 85.3 ms may be hidden.
    assert calibrate(single, WORK, NETWORK, slow).costs.overlap == 1.0
    half_hidden = 62.5 / (128 * 2 / 3)
    assert calibrate(single, WORK, NETWORK, half).costs.overlap == pytest.approx(1 - OF_RHO * (1 - half_hidden))
