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
from tests.golden import Golden
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


GOOD_GPU = GpuUse(index=0, sm_clock_mhz=2500.0, pcie="gen 4 x16")
CAPPED_GPU = msgspec.structs.replace(GOOD_GPU, throttle={"sw_power_cap": 1.0})


def beside(late: dict[str, Any], other: dict[str, Any], observed: MadeUp = LATE) -> Straggler:
    """The late node1, with these figures of its machine, and of node0's."""
    return only(find(observed, use(0, **other), use(1, **late)))


def with_gpu(gpu: GpuUse = GOOD_GPU, other: GpuUse = GOOD_GPU, **changes: Any) -> Straggler:
    """The late node1, with this GPU with changes."""
    changed_gpu = msgspec.structs.replace(gpu, **changes)
    return beside({"gpus": (changed_gpu,)}, {"gpus": (other,)}, LATE_GPU)


def among_four_gpus() -> Straggler:
    """One node, whose last GPU is hot; all of its workers are held to a share of the CPU."""
    gpus = tuple(msgspec.structs.replace(GOOD_GPU, index=index) for index in range(3))
    hot = msgspec.structs.replace(GOOD_GPU, index=3, sm_clock_mhz=900.0, throttle={"sw_thermal_slowdown": 0.8})
    made_up = MadeUp(nodes=((0, 1, 2, 3),), device="cuda", compute_ms=always(100.0, r3=300.0))
    return only(find(made_up, use(0, ranks=(0, 1, 2, 3), gpus=(*gpus, hot), throttled_share=0.9)))


HELD = {"quota_cores": 0.3, "throttled_share": 0.6, "job_cores": 0.3}
USUAL = {"cpu_steal_percent": 1.0, "cpu_iowait_percent": 1.0, "memory_available_gib": 9.0}
ALIKE = {"job_cores": 1.0, "cpu_iowait_percent": 1.0, "memory_available_gib": 9.0}
UNSEEN = {"cpu_steal_percent": 90.0, "cpu_iowait_percent": 90.0, "memory_available_gib": 0.1, "job_cores": 0.1}
LOADING = MadeUp(data_ms=always(2.0, r1=200.0))
CASES = {
    # 300 ms of computing at 0.3 cores; the other node computes a third of the time, and uses no core while it waits.
    "a CPU limit": beside({"job_cores": 0.283, "quota_cores": 0.3, "throttled_share": 0.68}, {"job_cores": 0.33}),
    "a CPU limit on each node": beside(HELD, HELD),
    "fewer cores": beside({"job_cores": 0.3}, {"job_cores": 0.33}),
    "fewer cores, busy CPUs": beside({"job_cores": 0.3, "cpu_busy_percent": 99.0}, {"job_cores": 0.33}),
    # The node that waits uses few cores in all; the late one computes all the time.
    "more cores": beside({"job_cores": 0.95}, {"job_cores": 0.33}),
    "steal": beside(USUAL | {"cpu_steal_percent": 30.0}, USUAL),
    "iowait": beside(USUAL | {"cpu_iowait_percent": 40.0}, USUAL),
    "little memory": beside(USUAL | {"memory_available_gib": 0.2}, USUAL),
    "slow clocks": with_gpu(sm_clock_mhz=900.0),
    "heat": with_gpu(sm_clock_mhz=900.0, throttle={"hw_thermal_slowdown": 0.9}),
    "a power limit": with_gpu(sm_clock_mhz=900.0, throttle={"sw_power_cap": 0.9}),
    "a power limit, full clocks": with_gpu(CAPPED_GPU),
    "a power limit on each node": with_gpu(CAPPED_GPU, CAPPED_GPU, sm_clock_mhz=900.0),
    "a narrow PCIe link": with_gpu(pcie="gen 4 x4", pcie_reduced=True),
    "heat, on one node": among_four_gpus(),
    "a slow loader": only(find(LOADING)),
    "a slower loader": only(find(MadeUp(compute_ms=always(100.0, r1=300.0), data_ms=always(2.0, r1=20.0)))),
    "a slow loader, iowait": beside({"cpu_iowait_percent": 60.0}, {"cpu_iowait_percent": 1.0}, LOADING),
    "three times the tokens": only(find(msgspec.structs.replace(LATE, tokens=lambda rank: 1000 + 2000 * rank))),
    "a tenth more tokens": only(find(msgspec.structs.replace(LATE, tokens=lambda rank: 1000 + 100 * rank))),
    "nothing differs": beside(ALIKE, ALIKE, msgspec.structs.replace(LATE, compute_ms=always(100.0, r1=110.0))),
    # What only one side tells is nothing to compare.
    "only one node sampled": beside(UNSEEN, {}),
}


def test_the_words_of_every_cause_are_the_golden_ones(golden: Golden) -> None:
    golden.check_findings("straggler_causes", {name: found.causes for name, found in CASES.items()})


@pytest.mark.parametrize(
    ("name", "cause", "codes"),
    [
        ("a CPU limit", "cpu", ["throttled_share_alone", "fewer_cores"]),
        ("fewer cores", "cpu", ["fewer_cores"]),
        ("more cores", "unknown", ["nothing_differs"]),
        ("fewer cores, busy CPUs", "cpu", ["busy_cpus"]),
        ("steal", "cpu", ["cpu_steal_percent"]),
        ("iowait", "disk", ["cpu_iowait_percent"]),
        ("little memory", "memory", ["little_memory"]),
        ("slow clocks", "gpu_clocks", ["gpu_clocks"]),
        ("heat", "gpu_heat", ["gpu_heat", "gpu_clocks"]),
        ("a power limit", "gpu_power", ["gpu_power", "gpu_clocks"]),
        ("a power limit, full clocks", "unknown", ["nothing_differs"]),
        ("a power limit on each node", "gpu_clocks", ["gpu_clocks"]),
        ("a narrow PCIe link", "pcie", ["pcie"]),
        # What holds all workers makes none of them late.
        ("a CPU limit on each node", "cpu", ["fewer_cores"]),
        ("heat, on one node", "gpu_heat", ["gpu_heat", "gpu_clocks"]),
        ("a slow loader", "data", ["slow_data"]),
        ("a slower loader", "unknown", ["nothing_differs"]),
        # The best evidence comes first, and the rest is told too.
        ("a slow loader, iowait", "data", ["slow_data", "cpu_iowait_percent"]),
        ("three times the tokens", "work", ["more_tokens"]),
        ("a tenth more tokens", "unknown", ["nothing_differs"]),
        ("nothing differs", "unknown", ["nothing_differs"]),
        ("only one node sampled", "unknown", ["nothing_differs"]),
    ],
)
def test_what_differs_from_the_peers_is_the_cause(name: str, cause: str, codes: list[str]) -> None:
    found = CASES[name]
    assert (found.cause, [one.code for one in found.causes]) == (cause, codes)
    assert found.hint == found.causes[0].hint


def test_slow_loaders_on_all_nodes_make_nobody_late() -> None:
    assert find(MadeUp(data_ms=always(200.0))) == ()


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
    assert late.hint == late.causes[0].hint == "watch the node during training: ssh -p 2201 n top -b -n 1"
