from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.calls import read_calls, rooted_part
from multinode.profile.exposure import find_exposure
from multinode.profile.figures import Straggler, Waiting
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.observed import Observed
from multinode.profile.step_split import split_steps
from multinode.profile.stragglers import find_stragglers, find_waiting
from multinode.records.samples import CallCount, DdpSample, GroupSample, Sample, StepSample, TrafficSample
from tests.profile.made_up_steps import Duration, MadeUp, always, changed

FOUR = ((0,), (1,), (2,), (3,))
TWO_BY_TWO = ((0, 1), (2, 3))
LATE = MadeUp(compute_ms=always(100.0, r1=300.0))
LATE_GPU = msgspec.structs.replace(LATE, device="cuda")


def find(made_up: MadeUp | Observed, *uses: NodeUse) -> tuple[Straggler, ...]:
    observed = made_up.observed() if isinstance(made_up, MadeUp) else made_up
    exposure = find_exposure(observed)
    return find_stragglers(observed, exposure, split_steps(exposure), uses, rooted_part(read_calls(observed).values()))


def waiting(made_up: MadeUp) -> Waiting:
    observed = made_up.observed()
    return find_waiting(observed, find_exposure(observed))


def use(number: int, **figures: Any) -> NodeUse:
    usual: dict[str, Any] = {"node": f"node{number}", "node_rank": number, "ranks": (number,)}
    return NodeUse(**(usual | figures))


def only(found: tuple[Straggler, ...]) -> Straggler:
    assert len(found) == 1
    return found[0]


def test_a_balanced_training_has_no_straggler() -> None:
    assert find(MadeUp()) == ()


def test_a_node_that_is_late_in_every_step_is_one_with_what_it_costs() -> None:
    found = only(find(LATE))
    assert (found.node, found.ranks) == ("node1", (1,))
    assert found.late_ms == pytest.approx(200.0)
    assert found.share == pytest.approx(200 / 318)


@pytest.mark.parametrize("told_by", ["ddp", "device", "host"])
def test_every_source_tells_it(told_by: str) -> None:
    device = "cuda" if told_by == "device" else "cpu"
    found = only(find(msgspec.structs.replace(LATE, told_by=told_by, device=device)))
    assert found.node == "node1"
    assert found.late_ms == pytest.approx(200.0)


def test_without_a_source_nobody_is_blamed() -> None:
    assert find(msgspec.structs.replace(LATE, told_by="nothing", device="cuda")) == ()


def test_a_slow_network_makes_nobody_late() -> None:
    assert find(MadeUp(transfer_ms=always(2000.0))) == ()


def test_a_node_that_is_late_by_less_than_a_twentieth_is_none() -> None:
    assert find(MadeUp(compute_ms=always(100.0, r1=105.0))) == ()
    assert find(MadeUp(compute_ms=always(100.0, r1=108.0))) != ()


def test_one_of_four_nodes_is_found_and_the_ones_that_wait_are_not() -> None:
    found = only(find(MadeUp(nodes=FOUR, compute_ms=always(100.0, r2=300.0))))
    assert found.node == "node2"
    assert found.late_ms == pytest.approx(200.0)


def test_two_of_four_nodes_are_late_each_by_its_own() -> None:
    found = find(MadeUp(nodes=FOUR, compute_ms=always(100.0, r2=400.0, r3=300.0)))
    assert {one.node: round(one.late_ms) for one in found} == {"node2": 300, "node3": 200}


def test_where_most_nodes_are_late_the_other_is_merely_fast() -> None:
    assert find(MadeUp(nodes=FOUR, compute_ms=always(300.0, r0=100.0))) == ()
    assert find(MadeUp(nodes=FOUR[:3], compute_ms=always(300.0, r0=100.0))) == ()


def test_one_slow_worker_makes_its_node_late_and_is_named() -> None:
    found = only(find(MadeUp(nodes=TWO_BY_TWO, compute_ms=always(100.0, r3=300.0))))
    assert (found.node, found.ranks) == ("node1", (3,))
    found = only(find(MadeUp(nodes=TWO_BY_TWO, compute_ms=always(100.0, r2=300.0, r3=300.0))))
    assert found.ranks == (2, 3)


def test_one_slow_worker_on_a_single_node_is_found_beside_the_others() -> None:
    found = only(find(MadeUp(nodes=((0, 1, 2, 3),), compute_ms=always(100.0, r2=300.0))))
    assert (found.node, found.ranks) == ("node0", (2,))
    assert found.late_ms == pytest.approx(200.0)


@pytest.mark.parametrize("steps", [10, 20, 60])
@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_that_take_turns_at_random_are_hardly_ever_stragglers(steps: int, nodes: int) -> None:
    """Chance makes one node late again and again, now and then: in one run of forty at the most."""
    blamed = 0
    for seed in range(40):
        jitter = _jitter(f"{steps} {nodes} {seed}", nodes, steps)
        blamed += bool(find(MadeUp(nodes=FOUR[:nodes], steps=steps, compute_ms=_jittery((100.0,) * nodes, jitter))))
    assert blamed <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_straggler_among_jitter_is_found_in_ten_steps(seed: int) -> None:
    made_up = MadeUp(steps=10, compute_ms=_jittery((100.0, 250.0), _jitter(f"{seed}", 2, 10)))
    assert only(find(made_up)).node == "node1"


def _jitter(seed: str, nodes: int, steps: int) -> list[list[float]]:
    rng = random.Random(seed)  # noqa: S311 - a made-up training needs no secrets
    return [[rng.uniform(0.0, 100.0) for _ in range(steps)] for _ in range(nodes)]


def _jittery(compute_ms: tuple[float, ...], jitter: list[list[float]]) -> Duration:
    return lambda rank, step: compute_ms[rank] + jitter[rank][step - 1]


def test_lost_records_hide_no_straggler() -> None:
    lost = frozenset((step % 2, step) for step in range(6, 14))
    assert only(find(msgspec.structs.replace(LATE, lost=lost))).late_ms == pytest.approx(200.0)


def test_too_few_steps_blame_nobody() -> None:
    assert find(msgspec.structs.replace(LATE, steps=3)) == ()


def rooted(observed: Observed, *calls: tuple[str, float]) -> Observed:
    """The same, whose workers call this in each step."""
    counted = changed(
        observed,
        lambda sample: msgspec.structs.replace(sample, traffic=0) if isinstance(sample, StepSample) else sample,
    )
    counts = tuple(CallCount(op=op, group="0", size_bytes=size, count=1) for op, size in calls)
    ranks = tuple(rank for node in observed.nodes for rank in node.ranks)
    nodes = tuple(
        msgspec.structs.replace(
            node,
            samples=(
                *node.samples,
                *(GroupSample(rank=rank, group="0", ranks=ranks, backend="gloo") for rank in node.ranks),
                *(TrafficSample(rank=rank, traffic=0, calls=counts) for rank in node.ranks),
            ),
        )
        for node in counted.nodes
    )
    return msgspec.structs.replace(counted, nodes=nodes)


def root_of_a_slow_link() -> Observed:
    """Rank 0 hands its data over in 20 ms, and the others receive them in 150 ms; all compute alike."""
    observed = MadeUp(nodes=FOUR[:3], told_by="host").observed()

    def wait(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        blocked_us = 20_000.0 if sample.rank == 0 else 150_000.0
        return msgspec.structs.replace(
            sample, step_time_us=258_000.0, phases_us=(sample.phases_us or {}) | {"comm": blocked_us}
        )

    return changed(observed, wait)


@pytest.mark.parametrize("op", ["broadcast", "scatter", "send"])
def test_the_root_of_a_call_that_it_leaves_first_is_not_late(op: str) -> None:
    waits_least = root_of_a_slow_link()
    assert find(rooted(waits_least, (op, 1e8))) == ()
    # A flag that is broadcast beside the gradients excuses nobody.
    assert only(find(rooted(waits_least, ("all_reduce", 1e8), (op, 1e6)))).node == "node0"


def test_a_root_that_computes_longer_is_late_all_the_same() -> None:
    assert only(find(rooted(LATE.observed(), ("broadcast", 1e8)))).node == "node1"


def test_what_nodes_wait_for_the_last_of_them_is_known_where_none_stands_out() -> None:
    few = waiting(msgspec.structs.replace(LATE, steps=3))
    assert few.late_ms == pytest.approx(200.0)
    assert not few.take_turns
    assert waiting(MadeUp()) == Waiting(late_ms=0.0)
    assert waiting(msgspec.structs.replace(LATE, told_by="nothing", device="cuda")) == Waiting()
    assert waiting(MadeUp(nodes=((0,),))) == Waiting()


def test_nodes_take_turns_only_where_the_last_one_changes() -> None:
    turns = MadeUp(nodes=FOUR, compute_ms=lambda rank, step: 300.0 if step % 4 == rank else 100.0)
    assert waiting(turns).take_turns
    assert waiting(turns).late_ms == pytest.approx(200.0)
    assert not waiting(msgspec.structs.replace(turns, steps=9)).take_turns
    # Two of three are slow, by turns a little more or less: neither is the last again and again, and both always are.
    slow = MadeUp(nodes=FOUR[:3], compute_ms=lambda rank, step: (300.0 + (rank + step) % 2) if rank else 100.0)
    assert find(slow) == ()
    assert not waiting(slow).take_turns


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1e300, 1e300])
def test_a_node_that_lies_blames_nobody_else(lie: float) -> None:
    def tell(sample: Sample) -> Sample:
        return msgspec.structs.replace(sample, comm_us=lie) if isinstance(sample, DdpSample) and sample.rank else sample

    assert find(changed(MadeUp().observed(), tell)) == ()


def evidence(found: Straggler) -> tuple[str, ...]:
    return tuple(cause.message for cause in found.causes)


def test_a_job_that_is_held_to_a_share_of_a_core_is_told_with_both_sides() -> None:
    # 300 ms of computing at 0.3 cores; the other node computes a third of the time, and uses no core while it waits.
    limited = use(1, job_cores=0.283, quota_cores=0.3, throttled_share=0.68)
    found = only(find(LATE, use(0, job_cores=0.33), limited))
    assert found.cause == "cpu"
    limit, cores = evidence(found)
    assert limit.startswith("CPU throttled (cgroup) on node1 (0.30 cores) for 68% of the time")
    assert limit.endswith(", no limit on node0")
    assert cores == "node1's job used 0.292 cores during compute, 0.972 on node0"
    assert "CPUQuota" in str(found.hint)


def test_a_limit_that_holds_every_node_makes_nobody_late() -> None:
    found = only(find(LATE, *(use(number, quota_cores=0.3, throttled_share=0.6, job_cores=0.3) for number in (0, 1))))
    assert not any("limit" in sentence for sentence in evidence(found))


def test_fewer_cores_without_a_limit_ask_for_what_else_may_hold_it() -> None:
    found = only(find(LATE, use(0, job_cores=0.33), use(1, job_cores=0.3)))
    assert found.cause == "cpu"
    assert "OMP_NUM_THREADS" in str(found.hint)
    crowded = only(find(LATE, use(0, job_cores=0.33), use(1, job_cores=0.3, cpu_busy_percent=99.0)))
    assert crowded.causes[0].message.endswith(", and its CPUs are 99% busy")
    assert crowded.hint == "see what else runs there: ssh node1 top -b -n 1"


def test_a_worker_that_waits_for_its_peers_is_not_said_to_have_few_cores() -> None:
    """The node that waits uses few cores in all; the late one computes all the time."""
    found = only(find(LATE, use(0, job_cores=0.33), use(1, job_cores=0.95)))
    assert found.cause == "unknown"


@pytest.mark.parametrize(
    ("figures", "cause", "words"),
    [
        ({"cpu_steal_percent": 30.0}, "cpu", "CPU steal 30% on node1, 1% on"),
        ({"cpu_iowait_percent": 40.0}, "disk", "iowait 40% on node1, 1% on node0"),
        ({"memory_available_gib": 0.2}, "memory", "node1 had 0.20 GiB of free memory, node0 9.00 GiB"),
    ],
)
def test_what_differs_between_the_machines_is_the_cause(figures: dict[str, float], cause: str, words: str) -> None:
    usual = {"cpu_steal_percent": 1.0, "cpu_iowait_percent": 1.0, "memory_available_gib": 9.0}
    found = only(find(LATE, use(0, **usual), use(1, **(usual | figures))))
    assert found.cause == cause
    assert words in found.causes[0].message
    assert "node1" in str(found.hint)


def test_a_container_s_memory_is_not_looked_for_in_free_alone() -> None:
    found = only(find(LATE, use(0, memory_available_gib=9.0), use(1, memory_available_gib=0.2)))
    assert "ssh node1 'free -h" in str(found.hint)
    assert "multinode check" in str(found.hint)


GOOD_GPU = GpuUse(index=0, sm_clock_mhz=2500.0, pcie="gen 4 x16")


@pytest.mark.parametrize(
    ("bad", "cause", "words"),
    [
        ({"sm_clock_mhz": 900.0}, "gpu_clocks", "ran at 900 MHz, node0 at 2500 MHz"),
        (
            {"sm_clock_mhz": 900.0, "throttle": {"hw_thermal_slowdown": 0.9}},
            "gpu_heat",
            "clocks of a GPU of node1 throttled (heat) for 90% of the time, of node0 for 0%",
        ),
        (
            {"sm_clock_mhz": 900.0, "throttle": {"sw_power_cap": 0.9}},
            "gpu_power",
            "clocks of a GPU of node1 throttled (a power limit)",
        ),
        ({"pcie": "gen 4 x4", "pcie_reduced": True}, "pcie", "GPU 0 of node1 had PCIe gen 4 x4, node0 gen 4"),
    ],
)
def test_a_gpu_that_is_worse_than_the_others_is_the_cause(bad: dict[str, Any], cause: str, words: str) -> None:
    gpu = msgspec.structs.replace(GOOD_GPU, **bad)
    found = only(find(LATE_GPU, use(0, gpus=(GOOD_GPU,)), use(1, gpus=(gpu,))))
    assert found.cause == cause
    assert words in found.causes[0].message


def test_a_power_cap_that_costs_no_clocks_or_is_reached_everywhere_is_no_cause() -> None:
    capped = msgspec.structs.replace(GOOD_GPU, throttle={"sw_power_cap": 1.0})
    assert only(find(LATE_GPU, use(0, gpus=(GOOD_GPU,)), use(1, gpus=(capped,)))).cause == "unknown"
    slow = msgspec.structs.replace(capped, sm_clock_mhz=900.0)
    assert only(find(LATE_GPU, use(0, gpus=(capped,)), use(1, gpus=(slow,)))).cause == "gpu_clocks"


def test_a_hot_gpu_is_found_among_those_of_a_single_node() -> None:
    gpus = tuple(msgspec.structs.replace(GOOD_GPU, index=index) for index in range(3))
    hot = msgspec.structs.replace(GOOD_GPU, index=3, sm_clock_mhz=900.0, throttle={"sw_thermal_slowdown": 0.8})
    made_up = MadeUp(nodes=((0, 1, 2, 3),), device="cuda", compute_ms=always(100.0, r3=300.0))
    found = only(find(made_up, use(0, ranks=(0, 1, 2, 3), gpus=(*gpus, hot), throttled_share=0.9)))
    assert found.cause == "gpu_heat"
    # What holds all workers makes none of them late.
    assert not any("limit" in sentence for sentence in evidence(found))


def test_a_slow_loader_on_one_node_is_the_data_and_on_all_of_them_is_no_straggler() -> None:
    found = only(find(MadeUp(data_ms=always(2.0, r1=200.0))))
    assert found.cause == "data"
    assert evidence(found) == ("rank 1 on node1 waited 200 ms per step for batches, node0 2 ms",)
    assert find(MadeUp(data_ms=always(200.0))) == ()


def test_a_loader_that_explains_little_of_the_delay_is_not_the_cause() -> None:
    assert only(find(MadeUp(compute_ms=always(100.0, r1=300.0), data_ms=always(2.0, r1=20.0)))).cause == "unknown"


def test_a_worker_with_more_tokens_has_more_work() -> None:
    made_up = msgspec.structs.replace(LATE, tokens=lambda rank: 3000 if rank == 1 else 1000)
    found = only(find(made_up))
    assert (found.cause, evidence(found)) == ("work", ("rank 1 on node1 had 3000 tokens per step, node0 1000",))


def test_more_tokens_that_explain_little_of_the_delay_are_not_the_cause() -> None:
    made_up = msgspec.structs.replace(LATE, tokens=lambda rank: 1100 if rank == 1 else 1000)
    assert only(find(made_up)).cause == "unknown"


def test_the_best_evidence_names_the_cause_and_the_rest_is_told_too() -> None:
    made_up = MadeUp(data_ms=always(2.0, r1=200.0))
    found = only(find(made_up, use(0, cpu_iowait_percent=1.0), use(1, cpu_iowait_percent=60.0)))
    assert found.cause == "data"
    assert [sentence.split()[0] for sentence in evidence(found)] == ["rank", "iowait"]


def test_where_nothing_differs_it_is_said_what_was_compared() -> None:
    machine = {"job_cores": 1.0, "cpu_iowait_percent": 1.0, "memory_available_gib": 9.0}
    observed = msgspec.structs.replace(LATE, compute_ms=always(100.0, r1=110.0))
    found = only(find(observed, use(0, **machine), use(1, **machine)))
    assert found.cause == "unknown"
    said, compared = found.causes[0].message.split(": ")
    assert said == (
        "rank 1 on node1 computed 110 ms per step, node0 100 ms; no difference from node0 explains it; compared"
    )
    assert compared == "tokens, waits for batches, processors, waits for a disk, memory"
    assert found.hint == "watch it during training: ssh node1 top -b -n 1"


def test_a_machine_that_was_not_sampled_is_no_evidence() -> None:
    """What only one side tells is nothing to compare."""
    told = use(1, cpu_steal_percent=90.0, cpu_iowait_percent=90.0, memory_available_gib=0.1, job_cores=0.1)
    found = only(find(LATE, use(0), told))
    assert found.cause == "unknown"
    assert found.causes[0].message.endswith("no difference from node0 explains it; compared: tokens, waits for batches")


@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(100, 400), min_size=4, max_size=4))
def test_renaming_ranks_renames_the_stragglers_and_changes_nothing_else(order: list[int], times: list[int]) -> None:
    made_up = MadeUp(nodes=FOUR, steps=10, compute_ms=lambda rank, _: times[rank])
    renamed = msgspec.structs.replace(
        made_up,
        nodes=tuple((rank,) for rank in order),
        compute_ms=lambda rank, _: times[order.index(rank)],
    )
    before = {one.ranks: (one.node, one.late_ms, one.share) for one in find(made_up)}
    after = {(order.index(one.ranks[0]),): (one.node, one.late_ms, one.share) for one in find(renamed)}
    assert after == before


def test_a_hint_says_how_the_node_is_reached() -> None:
    observed = msgspec.structs.replace(
        LATE.observed(), write_hint=lambda hint: hint.replace("ssh node1", "ssh -p 2201 n")
    )
    (late,) = find(observed)
    assert late.hint == late.causes[0].hint == "watch it during training: ssh -p 2201 n top -b -n 1"
