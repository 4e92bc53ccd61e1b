from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import msgspec
import pytest

from multinode.network.measure import scan_messages
from multinode.records.benchmark import CollectiveTest
from multinode.records.progress import (
    RECENT_STEPS,
    NodeProgress,
    RecentSteps,
    RunProgress,
    TrainingTime,
    start_progress,
)
from multinode.records.samples import (
    AveragingSample,
    CollectiveSample,
    DdpSample,
    DeviceWaitSample,
    GpuSample,
    LossSample,
    ModelSample,
    NicSample,
    Sample,
    StepSample,
    WorkerSample,
)
from tests import make

NODE = NodeProgress(name="b", node_rank=1, ranks=(2, 3))


def after(node: NodeProgress, samples: Iterable[Sample]) -> NodeProgress:
    """A copy of the node after these samples."""
    changed = copy.deepcopy(node)
    changed.take(samples)
    return changed


def step(number: int, *, rank: int = 2, us: float | None = 1000.0, samples: int | None = 4) -> StepSample:
    return StepSample(
        rank=rank, step=number, time_s=0, mono_ns=number, step_time_us=us, total_steps=100, samples=samples
    )


def nic(mono_ns: int, rx: int, tx: int, ifname: str = "eth0") -> NicSample:
    return NicSample(time_s=0, mono_ns=mono_ns, ifname=ifname, rx_bytes=rx, tx_bytes=tx, rx_packets=0, tx_packets=0)


def gpu(index: int, percent: float | None) -> GpuSample:
    return GpuSample(time_s=0, mono_ns=0, index=index, sm_percent=percent)


def test_before_anything_happened_every_node_of_the_plan_waits() -> None:
    progress = start_progress(make.plan("a", "b", workers=2, link_gbit_per_s=10.0))
    assert (progress.run_id, progress.job, progress.world_size) == ("r", "train.py", 4)
    assert [(node.name, node.ranks, node.state, node.step) for node in progress.nodes] == [
        ("a", (0, 1), "waiting", None),
        ("b", (2, 3), "waiting", None),
    ]
    assert (progress.nodes[0].ifname, progress.nodes[0].link_gbit_per_s) == ("ens1f0", 10.0)


def test_steps_of_the_first_worker_are_shown_and_those_of_the_others_are_not_counted_twice() -> None:
    node = after(NODE, [step(1), step(1, rank=3), step(2), step(7, rank=3)])
    assert (node.step, node.total_steps) == (2, 100)
    assert node.recent_us == (1000.0, 1000.0)


def test_a_shorter_last_step_of_an_epoch_makes_the_rate_not_jump() -> None:
    whole = after(NODE, [step(1), step(2)])
    assert after(whole, [step(3, samples=1)]).samples_per_s == whole.samples_per_s == 8000.0


def test_the_step_time_is_the_median_of_the_last_ten() -> None:
    node = after(NODE, [step(1, us=None), step(2, us=9e9), *(step(n, us=1000.0 * n) for n in range(3, 13))])
    assert len(node.recent_us) == 10
    assert node.step_time_us == 7500.0


def test_the_step_time_of_rounds_is_the_mean_of_whole_ones() -> None:
    rounds = [AveragingSample(rank=2, nodes=2, every=4)]
    node = after(NODE, [*rounds, *(step(number, us=9000.0 if number % 4 == 0 else 1000.0) for number in range(1, 31))])
    assert len(node.recent_us) == 12
    assert node.step_time_us == 3000.0
    assert len(after(node, [AveragingSample(rank=2, nodes=2, every=64), step(31)]).recent_us) == 13


def test_samples_a_second_are_those_of_all_workers_of_the_node() -> None:
    node = after(NODE, [step(1, us=500_000.0), step(2, us=1_500_000.0)])
    assert node.samples_per_s == pytest.approx(8.0)  # 2 workers x 4 samples x 2 steps in 2 s
    assert after(NODE, [step(1, samples=None)]).samples_per_s is None
    assert after(NODE, [step(1, us=None)]).samples_per_s is None


def test_a_step_that_took_no_time_gives_no_speed() -> None:
    assert after(NODE, [step(1, us=0.0)]).samples_per_s is None


def test_a_time_that_nobody_would_wait_for_is_not_said() -> None:
    running = msgspec.structs.replace(NODE, state="running")
    endless = StepSample(rank=2, step=1, time_s=0, mono_ns=1, step_time_us=1e12, total_steps=1 << 60)
    assert after(running, [endless]).left_s is None


def test_the_network_is_the_difference_of_two_samples_of_one_nic() -> None:
    once = after(NODE, [nic(10**9, 1000, 2000)])
    assert (once.net_in_gbit_per_s, once.net_out_gbit_per_s) == (None, None)
    twice = after(once, [nic(3 * 10**9, 1000 + 125_000_000, 2000 + 250_000_000)])
    assert twice.net_in_gbit_per_s == pytest.approx(0.5)
    assert twice.net_out_gbit_per_s == pytest.approx(1.0)


@pytest.mark.parametrize("second", [nic(10**9, 5, 5), nic(5, 5, 5), nic(3 * 10**9, 5, 5, ifname="eth1")])
def test_a_clock_that_stands_still_or_another_nic_gives_no_rate(second: NicSample) -> None:
    node = after(NODE, [nic(10**9, 1000, 2000), second])
    assert (node.net_in_gbit_per_s, node.net_out_gbit_per_s) == (None, None)


def test_two_nics_that_are_sampled_in_turn_have_their_rates_and_the_busier_one_is_shown() -> None:
    quiet, busy = [nic(10**9, 0, 0, "eth1"), nic(2 * 10**9, 1, 1, "eth1")], [nic(10**9, 0, 0), nic(2 * 10**9, 125, 250)]
    node = after(NODE, [sample for pair in zip(busy, quiet, strict=True) for sample in pair])
    assert node.net_in_gbit_per_s == pytest.approx(1e-6)
    assert node.net_out_gbit_per_s == pytest.approx(2e-6)


def test_the_share_of_the_link_is_that_of_the_data_planes_nic_alone() -> None:
    linked = msgspec.structs.replace(NODE, ifname="eth0", link_gbit_per_s=10.0)
    ethernet = [nic(10**9, 0, 0), nic(2 * 10**9, 125_000_000, 250_000_000)]
    port = [nic(10**9, 0, 0, "mlx5_0/1"), nic(2 * 10**9, 10**9, 10**9, "mlx5_0/1")]
    node = after(linked, [*ethernet, *port])
    assert node.link_share == pytest.approx(0.2)
    assert node.net_out_gbit_per_s == pytest.approx(8.0)
    assert after(linked, port).link_share is None
    assert msgspec.structs.replace(node, link_gbit_per_s=None).link_share is None
    # More than it can carry: the link is not what it was taken for.
    assert msgspec.structs.replace(node, link_gbit_per_s=1.0).link_share is None


def test_a_nic_that_was_reset_gives_no_rate_until_it_was_read_twice() -> None:
    node = after(NODE, [nic(10**9, 10**9, 10**9), nic(2 * 10**9, 0, 0)])
    assert node.net_in_gbit_per_s is None
    assert after(node, [nic(3 * 10**9, 125_000_000, 0)]).net_in_gbit_per_s == pytest.approx(1.0)


def test_gpus_are_summed_up_over_what_each_said_last() -> None:
    hot = GpuSample(
        time_s=0, mono_ns=1, index=6, sm_percent=90.0, memory_used_gib=20.0, power_w=300.0, temperature_c=80.0
    )
    cool = GpuSample(time_s=0, mono_ns=1, index=7, sm_percent=50.0, memory_used_gib=22.0, power_w=400.0)
    node = after(NODE, [gpu(6, 10.0), hot, cool])
    assert node.gpu_percent == pytest.approx(70.0)
    assert (node.gpu_memory_gib, node.gpu_power_w, node.gpu_temperature_c) == (22.0, 350.0, 80.0)
    assert after(node, [gpu(6, None)]).gpu_percent == pytest.approx(50.0)
    assert (NODE.gpu_percent, NODE.gpu_memory_gib) == (None, None)


def test_tgs_are_tokens_of_one_worker_whatever_their_number() -> None:
    steps = [
        StepSample(rank=rank, step=number, time_s=0, mono_ns=number, step_time_us=500_000.0, tokens=tokens)
        for rank, tokens in ((2, 1000), (3, 2000))
        for number in (1, 2)
    ]
    assert after(NODE, steps).tgs == pytest.approx(3000.0)
    assert after(NODE, [step(1)]).tgs is None


def test_exposed_communication_is_that_of_the_worker_that_waited_least() -> None:
    def ddp(rank: int, number: int, exposed_us: float) -> DdpSample:
        return DdpSample(
            rank=rank,
            step=number,
            iteration=number,
            bucket_sizes_bytes=(8,),
            forward_us=1,
            backward_us=1,
            comm_us=exposed_us + 50,
            overlap_us=50,
        )

    steps: list[Sample] = [step(number, rank=rank) for number in (1, 2) for rank in (2, 3)]
    counters = [ddp(2, 1, 300), ddp(2, 2, 500), ddp(3, 1, 100), ddp(3, 2, 300), ddp(99, 1, 0)]
    # Whether the counters or the step are written first is the recorder's choice.
    for samples in ([*steps, *counters], [*counters, *steps]):
        node = after(NODE, samples)
        assert node.exposed_share == pytest.approx(0.2)
    other = msgspec.structs.replace(NODE, name="c", node_rank=2, ranks=(4,))
    assert RunProgress(run_id="r", job="j", world_size=3, nodes=(other, node)).exposed_share == pytest.approx(0.2)
    assert RunProgress(run_id="r", job="j", world_size=1, nodes=(other,)).exposed_share is None


def test_time_blocked_in_collectives_counts_only_where_the_host_waits_for_their_end() -> None:
    blocked = StepSample(
        rank=2, step=1, time_s=0, mono_ns=1, step_time_us=1000.0, phases_us={"comm": 400.0, "data": 1.0}
    )
    assert after(NODE, [blocked]).exposed_share == pytest.approx(0.4)
    model = ModelSample(rank=2, wrapper="ddp", parameters=1, trainable=1, device="cuda")
    assert after(NODE, [model, blocked]).exposed_share is None
    assert after(NODE, [gpu(0, 1.0), blocked]).exposed_share is None


def test_the_last_loss_is_kept_and_a_worker_that_began_is_at_its_first_step() -> None:
    node = after(NODE, [LossSample(rank=2, step=1, loss=2.5), LossSample(rank=2, step=2, loss=1.5)])
    assert node.loss == 1.5
    diverged = after(node, [LossSample(rank=2, step=3, loss=None)])
    assert diverged.loss is not None
    assert math.isnan(diverged.loss)
    worker = WorkerSample(rank=2, local_rank=0, world_size=4, time_s=0, source="trainer")
    assert after(node, [worker]) == msgspec.structs.replace(node, stage="first step")
    assert msgspec.json.decode(msgspec.json.encode(node), type=NodeProgress) == node


def test_the_time_left_is_that_of_the_node_which_needs_longest_while_it_runs() -> None:
    running = msgspec.structs.replace(NODE, state="running", step=10, total_steps=20, recent_us=(1e6,))
    slower = msgspec.structs.replace(running, step=8)
    ended = msgspec.structs.replace(running, state="ended", step=1)
    whole = RunProgress(run_id="r", job="j", world_size=2, nodes=(running, slower, ended))
    assert whole.left_s == pytest.approx(12.0)
    unknown = msgspec.structs.replace(running, total_steps=None)
    assert msgspec.structs.replace(whole, nodes=(unknown, ended)).left_s is None


def test_the_time_left_of_a_training_that_is_stopped_at_its_time_is_that_of_its_time() -> None:
    running = msgspec.structs.replace(NODE, state="running", step=10)
    whole = RunProgress(run_id="r", job="j", world_size=2, nodes=(running,), training=TrainingTime(limit_s=60.0))
    # Nobody knows how long it loads yet.
    assert whole.left_s is None
    later = msgspec.structs.replace(whole, training=TrainingTime(limit_s=60.0, trained_s=20.0))
    assert later.left_s == 40.0
    over = TrainingTime(limit_s=60.0, trained_s=61.0)
    assert msgspec.structs.replace(whole, training=over).left_s == 0.0
    stopping = msgspec.structs.replace(running, state="stopping")
    assert msgspec.structs.replace(later, nodes=(stopping,)).left_s is None


def test_messages_of_a_collective_test_are_its_steps() -> None:
    test = CollectiveTest(messages=scan_messages(["all_reduce"], (1024, 2048)), iters=7, warmup_iters=1)
    node = msgspec.structs.replace(NODE, state="running", test=test, total_steps=2)
    sample = CollectiveSample(
        rank=NODE.ranks[0],
        collective="all_reduce",
        dtype="float",
        size_bytes=1024,
        count=256,
        times_us=(100.0, 300.0, 200.0),
    )
    measured = after(node, [sample])
    assert (measured.step, measured.step_time_us) == (1, 200.0)
    # Twice the size: ten calls of 400 us are left.
    assert measured.left_s == pytest.approx(10 * 400e-6)
    # Another worker's, one that the test does not have, what took no time that there is: nothing changes.
    foreign: list[dict[str, object]] = [{"rank": 99}, {"index": 7}, {"times_us": ()}]
    for changes in foreign:
        assert after(node, [msgspec.structs.replace(sample, **changes)]) == node
    assert after(measured, [step(1 << 60, rank=NODE.ranks[0])]).left_s == measured.left_s


def recent(*samples: StepSample | DdpSample | DeviceWaitSample) -> RecentSteps:
    worker = RecentSteps()
    for sample in samples:
        worker.take(sample)
    return worker


def one_step(number: int, comm_us: float | None = None, us: float = 1000.0) -> StepSample:
    phases_us = {"comm": comm_us} if comm_us is not None else None
    return StepSample(rank=0, step=number, time_s=0, mono_ns=number, step_time_us=us, tokens=10, phases_us=phases_us)


def ddp(number: int, exposed_us: float) -> DdpSample:
    return DdpSample(
        rank=0,
        step=number,
        iteration=number,
        bucket_sizes_bytes=(),
        forward_us=0,
        backward_us=0,
        comm_us=exposed_us + 200.0,
        overlap_us=200.0,
    )


def wait(number: int, wait_us: float, calls: int = 4) -> DeviceWaitSample:
    return DeviceWaitSample(rank=0, step=number, wait_us=wait_us, calls=calls, of_calls=4)


def test_only_the_last_steps_count_and_old_ones_are_forgotten() -> None:
    worker = RecentSteps()
    for number in range(1, 200):
        worker.take(one_step(number, comm_us=900.0 if number < 190 else 100.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.1)
    assert len(worker.steps) < 4 * RECENT_STEPS
    assert worker.tokens_and_time == (10 * RECENT_STEPS, 1000.0 * RECENT_STEPS)


def test_ddps_counters_come_before_waits_of_the_device_and_these_before_the_host() -> None:
    worker = recent(one_step(1, comm_us=500.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.5)
    worker.take(wait(1, 250.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.25)
    reduced = recent(one_step(1), wait(2, 250.0), ddp(1, 100.0))
    assert reduced.exposed_share(host_waits=True) == pytest.approx(0.1)


def test_several_reductions_of_a_step_add_up() -> None:
    worker = recent(one_step(1))
    for _ in range(4):
        worker.take(ddp(1, 100.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.4)


def test_calls_beside_ddp_are_exposed_too() -> None:
    worker = recent(one_step(1, comm_us=400.0), ddp(1, 100.0))
    assert worker.exposed_share(host_waits=True) == pytest.approx(0.5)
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.1)
    worker.take(wait(1, 250.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.35)


def test_a_step_of_which_not_every_call_was_timed_says_nothing() -> None:
    worker = recent(one_step(1), wait(1, 250.0, calls=3))
    assert worker.exposed_share(host_waits=False) is None
    worker.take(ddp(1, 100.0))
    assert worker.exposed_share(host_waits=False) is None


def test_a_worker_that_was_started_again_begins_anew() -> None:
    worker = RecentSteps()
    for number in range(1, 101):
        worker.take(one_step(number))
        worker.take(ddp(number, 100.0))
    # From the last checkpoint, twice as slow as before.
    for number in range(51, 54):
        worker.take(one_step(number, us=2000.0))
        worker.take(ddp(number, 1000.0))
    assert worker.exposed_share(host_waits=False) == pytest.approx(0.5)
    assert worker.tokens_and_time == (30, 6000.0)
    worker.take(one_step(53, us=4000.0))
    assert worker.tokens_and_time == (10, 4000.0)
