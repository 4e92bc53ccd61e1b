from __future__ import annotations

import math

import msgspec
import pytest

from multinode.core.collective_test import CollectiveTest, sweep_messages
from multinode.core.command import Command
from multinode.core.plan import LaunchPlan, NodePlan
from multinode.core.progress import NodeProgress, RunProgress, advance_node, start_progress
from multinode.core.samples import CollectiveSample, GpuSample, LossSample, NicSample, StepSample, WorkerSample

NODE = NodeProgress(name="b", node_rank=1, ranks=(2, 3))


def step(number: int, *, rank: int = 2, us: float | None = 1000.0, samples: int | None = 4) -> StepSample:
    return StepSample(
        rank=rank, step=number, time_s=0, mono_ns=number, step_time_us=us, total_steps=100, samples=samples
    )


def nic(mono_ns: int, rx: int, tx: int, ifname: str = "eth0") -> NicSample:
    return NicSample(time_s=0, mono_ns=mono_ns, ifname=ifname, rx_bytes=rx, tx_bytes=tx, rx_packets=0, tx_packets=0)


def gpu(index: int, percent: float | None) -> GpuSample:
    return GpuSample(time_s=0, mono_ns=0, index=index, sm_percent=percent)


def test_before_anything_happened_every_node_of_the_plan_waits() -> None:
    nodes = tuple(
        NodePlan(
            node=name,
            node_rank=index,
            ranks=(2 * index, 2 * index + 1),
            addr=None,
            ifname=None,
            link_gbit_per_s=10.0,
            run_dir="/r",
            command=Command(argv=("true",)),
        )
        for index, name in enumerate("ab")
    )
    plan = LaunchPlan(
        run_id="r",
        engine="torchrun",
        job="train.py",
        master_addr="10.0.0.1",
        master_port=29500,
        nproc_per_node=2,
        world_size=4,
        nodes=nodes,
    )
    progress = start_progress(plan)
    assert (progress.run_id, progress.job, progress.world_size) == ("r", "train.py", 4)
    assert [(node.name, node.ranks, node.state, node.step) for node in progress.nodes] == [
        ("a", (0, 1), "waiting", None),
        ("b", (2, 3), "waiting", None),
    ]
    assert progress.nodes[0].link_gbit_per_s == 10.0


def test_steps_of_the_first_worker_are_shown_and_those_of_the_others_are_not_counted_twice() -> None:
    node = advance_node(NODE, [step(1), step(1, rank=3), step(2), step(7, rank=3)])
    assert (node.step, node.total_steps) == (2, 100)
    assert node.recent_us == (1000.0, 1000.0)


def test_the_step_time_is_the_median_of_the_last_ten() -> None:
    node = advance_node(NODE, [step(1, us=None), step(2, us=9e9), *(step(n, us=1000.0 * n) for n in range(3, 13))])
    assert len(node.recent_us) == 10
    assert node.step_time_us == 7500.0


def test_samples_a_second_are_those_of_all_workers_of_the_node() -> None:
    node = advance_node(NODE, [step(1, us=500_000.0), step(2, us=1_500_000.0)])
    assert node.samples_per_s == pytest.approx(8.0)  # 2 workers x 4 samples x 2 steps in 2 s
    assert advance_node(NODE, [step(1, samples=None)]).samples_per_s is None
    assert advance_node(NODE, [step(1, us=None)]).samples_per_s is None


def test_a_step_that_took_no_time_gives_no_speed() -> None:
    assert advance_node(NODE, [step(1, us=0.0)]).samples_per_s is None


def test_the_network_is_the_difference_of_two_samples_of_one_card() -> None:
    once = advance_node(NODE, [nic(10**9, 1000, 2000)])
    assert (once.net_in_gbit_per_s, once.net_out_gbit_per_s) == (None, None)
    twice = advance_node(once, [nic(3 * 10**9, 1000 + 125_000_000, 2000 + 250_000_000)])
    assert twice.net_in_gbit_per_s == pytest.approx(0.5)
    assert twice.net_out_gbit_per_s == pytest.approx(1.0)


@pytest.mark.parametrize("second", [nic(10**9, 5, 5), nic(5, 5, 5), nic(3 * 10**9, 5, 5, ifname="eth1")])
def test_a_clock_that_stands_still_or_another_card_gives_no_rate(second: NicSample) -> None:
    node = advance_node(NODE, [nic(10**9, 1000, 2000), second])
    assert (node.net_in_gbit_per_s, node.net_out_gbit_per_s) == (None, None)


def test_gpus_are_averaged_over_what_each_said_last() -> None:
    node = advance_node(NODE, [gpu(6, 10.0), gpu(7, 50.0), gpu(6, 90.0), gpu(7, None)])
    assert node.gpu_percent == pytest.approx(70.0)
    assert NODE.gpu_percent is None


def test_the_last_loss_is_kept_and_what_is_not_shown_changes_nothing() -> None:
    node = advance_node(NODE, [LossSample(rank=2, step=1, loss=2.5), LossSample(rank=2, step=2, loss=1.5)])
    assert node.loss == 1.5
    diverged = advance_node(node, [LossSample(rank=2, step=3, loss=None)])
    assert diverged.loss is not None
    assert math.isnan(diverged.loss)
    worker = WorkerSample(rank=2, local_rank=0, world_size=4, time_s=0, source="trainer")
    assert advance_node(node, [worker]) == node
    assert msgspec.json.decode(msgspec.json.encode(node), type=NodeProgress) == node


def test_the_time_left_is_that_of_the_node_which_needs_longest_while_it_runs() -> None:
    running = msgspec.structs.replace(NODE, state="running", step=10, total_steps=20, recent_us=(1e6,))
    slower = msgspec.structs.replace(running, step=8)
    ended = msgspec.structs.replace(running, state="ended", step=1)
    whole = RunProgress(run_id="r", job="j", world_size=2, nodes=(running, slower, ended))
    assert whole.left_s == pytest.approx(12.0)
    unknown = msgspec.structs.replace(running, total_steps=None)
    assert msgspec.structs.replace(whole, nodes=(unknown, ended)).left_s is None


def test_messages_of_a_collective_test_are_its_steps() -> None:
    test = CollectiveTest(messages=sweep_messages(["all_reduce"], (1024, 2048)), iters=7, warmup_iters=1)
    node = msgspec.structs.replace(NODE, state="running", test=test, total_steps=2)
    sample = CollectiveSample(
        rank=NODE.ranks[0],
        collective="all_reduce",
        dtype="float",
        size_bytes=1024,
        count=256,
        times_us=(100.0, 300.0, 200.0),
    )
    after = advance_node(node, [sample])
    assert (after.step, after.step_time_us) == (1, 200.0)
    # Twice the size: ten calls of 400 us are left.
    assert after.left_s == pytest.approx(10 * 400e-6)
    # Another worker's, or one that the test does not have, changes nothing.
    for foreign in (msgspec.structs.replace(sample, rank=99), msgspec.structs.replace(sample, index=7)):
        assert advance_node(node, [foreign]) == node
