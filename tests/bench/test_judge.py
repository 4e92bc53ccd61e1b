from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multinode.bench.figures import DeviceSpeed
from multinode.bench.judge import summarise_bench, with_progress
from multinode.bench.sheets import bench_sheets
from multinode.cluster.facts import Gpu, GpuProcess, NodeFacts
from multinode.records.benchmark import DeviceTest
from multinode.records.samples import Sample, parse_samples
from multinode.stats.estimate import of_repeats
from multinode.stats.unknown import reason_of
from tests.golden import Golden

from .made_up_bench import (
    COPY,
    MATMUL,
    gpu,
    limited,
    on_cpu,
    on_gpu,
    part,
    processors,
    report,
    speed,
    speeds,
    verdict,
)


def test_a_speed_is_that_of_the_median_and_stands_beside_the_data_sheet() -> None:
    found = report(part(0, on_gpu(speeds(), gpu())))
    (worker,) = found.nodes[0].workers
    matmul, copy, bus = worker.tests
    assert (matmul.label, matmul.unit, matmul.size) == ("matmul 4096 bf16", "TFLOP/s", "4096")
    assert matmul.alone is not None
    assert copy.alone is not None
    assert matmul.alone.value.value == pytest.approx(MATMUL, rel=1e-3)
    assert matmul.alone.cv == pytest.approx(0.0105, abs=1e-3)
    assert matmul.peak == pytest.approx(312)
    assert matmul.alone.of_peak == pytest.approx(MATMUL / 312, rel=1e-3)
    assert "A100 data sheet" in matmul.peak_source
    assert copy.alone.of_peak == pytest.approx(COPY / 2039, rel=1e-3)
    assert (bus.unit, reason_of(bus.peak).split(":")[1]) == ("GB/s", " no data sheet lists it")
    assert matmul.together is None
    assert found.phases == ("alone",)
    assert verdict(found) == ("1 device measured, but there is no peer to compare with",)


@pytest.mark.parametrize(
    ("size", "graph", "device", "bound"),
    [
        (1024, False, "cuda", True),
        (1024, True, "cuda", False),
        (4096, False, "cuda", False),
        (1024, False, "cpu", False),
    ],
)
def test_a_product_that_takes_no_longer_than_its_launch_is_marked(
    size: int, device: str, *, graph: bool, bound: bool
) -> None:
    rate_us = 2 * size**3 / 1e12 / MATMUL * 1e6
    timed = speed("matmul", MATMUL, size=size, graph=graph, times_us=(rate_us,) * 10)
    found = report(part(0, on_gpu([timed], device=device)))
    assert [test.alone.launch_bound for test in found.workers[0].tests if test.alone is not None] == [bound]
    notes = [note for sheet in bench_sheets(found) for note in sheet.notes if note.startswith("~ lower bound")]
    assert bool(notes) is bound


def test_of_a_processor_and_an_unknown_gpu_no_peak_is_guessed() -> None:
    found = report(part(0, on_cpu(speeds())), part(1, on_gpu(speeds(), name="NVIDIA A200")))
    reasons = {reason_of(test.peak) for node in found.nodes for test in node.workers[0].tests if test.kind == "matmul"}
    assert reasons == {"no CPU data sheets are available", "no data sheet of NVIDIA A200 is available"}
    assert verdict(found) == ("2 devices measured, but none has a peer to compare with",)


def test_like_devices_that_are_as_fast_are_called_so() -> None:
    found = report(*(part(rank, on_gpu(speeds(1 - rank / 100), gpu())) for rank in range(4)))
    assert found.slow == ()
    assert verdict(found) == ("4 devices OK: none is slower than 90% of its peers' speed",)
    assert found.nodes[0].workers[0].tests[0].alone is not None
    assert found.nodes[0].workers[0].tests[0].alone.of_peers == pytest.approx(1 / 0.98, rel=1e-3)


CAUSES: list[tuple[str, tuple[Sample, ...], str]] = [
    (
        "gpu_heat",
        on_gpu(speeds(0.7), gpu(throttle=("hw_thermal_slowdown",), temperature_c=92)),
        "heat throttled a GPU on node2",
    ),
    (
        "gpu_power",
        on_gpu(speeds(0.7), gpu(throttle=("sw_power_cap",), sm_clock_mhz=900)),
        "a power limit throttled a GPU on node2",
    ),
    ("gpu_clocks", on_gpu(speeds(0.7), gpu(sm_clock_mhz=900)), "GPU 0 on node2 ran at 900 of 1410 MHz, compared with"),
    ("pcie", on_gpu(speeds(bus=0.4), gpu(pcie_width=4)), "PCIe link of gen 4 x4 of gen 4 x16, "),
    ("cpu", on_gpu(speeds(0.7), gpu(), processors(steal=30)), "CPU steal was 30% on node2"),
    ("other_load", on_gpu(speeds(0.7), gpu(), processors(95)), "other processes used 14.2 of node2's 16 cores"),
    (
        "software",
        on_gpu(speeds(0.7), gpu(), torch="2.1.0"),
        "node2 has torch 2.1.0, compared with 2.8.0 on node0 and node1",
    ),
    ("unknown", on_gpu(speeds(0.7), gpu()), "no recorded data explains it"),
]


@pytest.mark.parametrize(("cause", "samples", "said"), CAUSES, ids=[one[0] for one in CAUSES])
def test_a_slow_gpu_is_named_with_what_differs(cause: str, samples: tuple[Sample, ...], said: str) -> None:
    sound = [part(rank, on_gpu(speeds(), gpu(), processors(10))) for rank in range(2)]
    (slow,) = report(*sound, part(2, samples)).slow
    assert (slow.node, slow.rank, slow.cause) == ("node2", None, cause)
    assert said in slow.text
    assert all(ratio < 0.9 for ratio in slow.ratios["alone"].values())
    assert all(cause.hint for cause in slow.causes)


def test_a_slow_bus_slows_nothing_else() -> None:
    sound = part(0, on_gpu(speeds(), gpu()))
    (slow,) = report(sound, part(1, on_gpu(speeds(bus=0.4), gpu(pcie_gen=3, pcie_width=8)))).slow
    assert slow.ratios == {"alone": {"bus": pytest.approx(0.4, rel=1e-3)}}
    assert slow.text == (
        "node1 is slow: 40% of the speed of node0 in transfers to the GPU (alone); likely cause: GPU 0 on node1 had "
        "a PCIe link of gen 3 x8 of gen 4 x16, compared with gen 4 x16 of gen 4 x16 on node0"
    )


def test_a_processor_that_its_control_group_holds_is_named_with_its_quota(golden: Golden) -> None:
    sound = part(0, on_cpu(speeds(), processors(100, job=2.0), limited(None)))
    held = part(1, on_cpu(speeds(0.3), processors(100, job=0.6), limited(0.6)))
    found = report(sound, held)
    (slow,) = found.slow
    assert (slow.node, slow.cause) == ("node1", "cpu")
    golden.check_findings("slow_quota", {slow.text: slow.causes})
    # It stands in the verdict, and in each figure.
    assert verdict(found) == (slow.text,)
    assert [test.alone.slow for node in found.nodes for test in node.workers[0].tests if test.alone] == [False] * 3 + [
        True
    ] * 3


def test_fewer_threads_are_told_before_what_else_differs(golden: Golden) -> None:
    (slow,) = report(part(0, on_cpu(speeds())), part(1, on_cpu(speeds(0.5), threads=1, torch="2.1.0"))).slow
    assert [cause.cause for cause in slow.causes] == ["threads", "software"]
    golden.check_findings("slow_threads", {slow.text: slow.causes})


def test_another_device_is_the_cause_where_there_is_no_like_one() -> None:
    (slow,) = report(part(0, on_gpu(speeds())), part(1, on_gpu(speeds(0.4), name="NVIDIA GeForce RTX 3090"))).slow
    assert (slow.node, slow.cause) == ("node1", "device")
    # Beside a like one, it is held against that one.
    others = [part(rank, on_gpu(speeds(0.4), name="NVIDIA GeForce RTX 3090")) for rank in (1, 2)]
    assert report(part(0, on_gpu(speeds())), *others).slow == ()


def test_one_gpu_of_a_node_is_named_and_not_the_node() -> None:
    def node(rank: int, second: float) -> Any:
        return part(rank, (*on_gpu(speeds(), gpu()), *on_gpu(speeds(second, rank=1), gpu(1), rank=1)))

    (slow,) = report(node(0, 1.0), node(1, 0.5)).slow
    assert (slow.node, slow.rank) == ("node1", 1)
    assert slow.text.startswith("worker 1 of node1 is slow: 50% of the speed of node0 in matrix products, 50% in")


def test_gpus_of_a_node_that_is_alone_are_held_against_each_other() -> None:
    members = (on_gpu(speeds(0.6 if rank == 3 else 1.0, rank=rank), gpu(rank), rank=rank) for rank in range(4))
    (slow,) = report(part(0, [one for member in members for one in member])).slow
    assert (slow.rank, str(slow.peers)) == (3, "the other workers on its node")


def test_a_speed_has_the_interval_of_its_repeats_or_of_the_timings_of_one() -> None:
    def alone(*rates: float) -> DeviceSpeed:
        timed = [speed("matmul", rate, index=index) for index, rate in enumerate(rates)]
        (worker,) = report(part(0, on_gpu(timed))).nodes[0].workers
        found = worker.tests[0].alone
        assert found is not None
        return found

    once, thrice = alone(MATMUL), alone(MATMUL, 1.1 * MATMUL, 0.9 * MATMUL)
    assert once.value.bounds == pytest.approx((MATMUL / 1.01, MATMUL / 0.99))
    expected = of_repeats([factor * once.value.value for factor in (1.0, 1.1, 0.9)])
    assert thrice.value.value == pytest.approx(once.value.value)
    assert thrice.value.bounds == pytest.approx((expected.low, expected.high))


def test_what_the_timings_scatter_by_makes_nobody_slow() -> None:
    noisy = speed("matmul", MATMUL * 0.85)
    scattered = msgspec.structs.replace(
        noisy, times_us=tuple(time * (1 + 0.4 * (-1) ** at) for at, time in enumerate(noisy.times_us))
    )
    assert report(part(0, on_gpu([speed("matmul", MATMUL)])), part(1, on_gpu([scattered]))).slow == ()
    assert len(report(part(0, on_gpu([speed("matmul", MATMUL)])), part(1, on_gpu([noisy]))).slow) == 1


def test_a_gpu_that_others_held_is_told_with_who_they_are(golden: Golden) -> None:
    process = GpuProcess(pid=77, user="eve", command="python", memory_mib=9000)
    facts = NodeFacts(node="node1", gpus=(Gpu(index=0, name="g", processes=(process,)),))
    held = part(1, on_gpu(speeds(0.6), gpu()), facts=facts)
    (slow,) = report(part(0, on_gpu(speeds(), gpu())), held).slow
    assert slow.cause == "other_load"
    golden.check_findings("slow_held_gpu", {slow.text: slow.causes})


def test_a_drop_of_all_together_is_told_with_what_differs_from_alone() -> None:
    def node(rank: int) -> list[Any]:
        hot = gpu(throttle=("hw_thermal_slowdown",), sm_clock_mhz=1100, temperature_c=91)
        return [part(rank, on_gpu(speeds(), gpu())), part(rank, on_gpu(speeds(0.75), hot), "together")]

    found = report(*node(0), *node(1))
    assert found.slow == ()
    (drop,) = found.drops
    assert (drop.nodes, drop.cause) == (("node0", "node1"), "gpu_heat")
    assert drop.ratio == pytest.approx(0.75, rel=1e-3)
    assert drop.text.startswith(
        "node0 and node1 drop to 75% of the single-worker speed when all workers run at once; likely cause: "
        "heat throttled a GPU on"
    )
    assert found.phases == ("alone", "together")


@pytest.mark.parametrize(
    ("cores", "job", "said"),
    [
        ({}, 1.9, "all 2 cores that node0 sees were busy, but its workers used only 1.0 of them"),
        (
            {"cores": 8, "node_cores": 64},
            7.9,
            "all 64 cores that node0 sees were busy, but its workers used only 1.0 of the 8 available to them",
        ),
    ],
)
def test_nodes_that_share_processors_are_told_so(cores: dict[str, int], job: float, said: str) -> None:
    def node(rank: int) -> list[Any]:
        early = on_cpu(speeds(), processors(95, job=job), **cores)
        return [part(rank, early), part(rank, on_cpu(speeds(0.5), processors(100, job=1.0), **cores), "together")]

    (drop,) = report(*node(0), *node(1)).drops
    assert [cause.cause for cause in drop.causes] == ["shared_processors"]
    assert said in drop.text


def test_other_load_is_seen_where_a_worker_is_confined_to_some_cores(golden: Golden) -> None:
    def confined(rank: int, speed_of: float, busy: float) -> Any:
        return part(rank, on_cpu(speeds(speed_of), processors(busy, job=8.0), cores=8, node_cores=64))

    (slow,) = report(confined(0, 1.0, 12.5), confined(1, 0.5, 75)).slow
    assert slow.cause == "other_load"
    golden.check_findings("slow_other_load", {slow.text: slow.causes})


def test_where_nothing_could_be_measured_that_is_said() -> None:
    failed = speed("matmul", 1.0, times_us=(), error="no memory")
    found = report(part(0, on_gpu([failed])))
    assert verdict(found) == ("no device was measured",)
    (test,) = found.workers[0].tests
    assert test.error is not None
    assert (test.error.code, test.error.node) == ("test-failed", "node0")
    assert test.error.figures == {"rank": 0, "label": "matmul 4096 bf16", "error": "no memory"}
    assert test.error.message == "worker 0 of node0 could not measure matmul 4096 bf16: no memory"


def test_a_gpu_before_ampere_is_held_against_its_fp16_and_has_no_bf16() -> None:
    tests = [speed("matmul", 100.0, index=index, dtype=dtype) for index, dtype in enumerate(("fp16", "bf16"))]
    found = report(part(0, on_gpu(tests, name="Tesla V100-SXM2-16GB")))
    half, brain = found.nodes[0].workers[0].tests
    assert (half.peak, half.peak_source) == (125.0, "NVIDIA V100 data sheet, SXM2")
    assert reason_of(brain.peak) == "its data sheet's figure is missing"


def test_a_gpu_at_forty_percent_of_its_data_sheet_is_told_with_the_usual_reasons() -> None:
    found = report(*(part(rank, on_gpu(speeds(0.5), gpu(sm_clock_mhz=705))) for rank in range(2)))
    matmul, memory = found.below_sheet
    assert (matmul.device, matmul.workers) == ("NVIDIA A100-SXM4-80GB", ("node0/0", "node1/0"))
    assert matmul.of_peak == pytest.approx(125 / 312, rel=1e-3)
    assert [cause.cause for cause in matmul.causes] == ["gpu_clocks", "usual"]
    assert matmul.text == (
        "NVIDIA A100-SXM4-80GB on node0/0 and node1/0 reaches at most 40% of the rate in its data sheet (matmul 4096 "
        "bf16); likely cause: the GPU ran at 705 of 1410 MHz"
    )
    assert memory.label == "copy"


def test_a_node_that_failed_is_told_and_costs_the_others_nothing() -> None:
    found = report(part(0, on_gpu(speeds(), gpu())), part(1, (), run_id=None, error="no route to node1"))
    assert verdict(found)[0] == "node1 could not be measured (alone): no route to node1"
    assert found.nodes[1].failures == found.unmeasured
    assert found.unmeasured[0].figures == {"phase": "alone", "error": "no route to node1"}
    assert found.nodes[0].workers[0].tests


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "speed", "rank": 0, "test": "matmul", "dtype": "bf16", "size": 4096, "times_us": [NaN]}',
        '{"kind": "speed", "rank": -1, "test": "matmul", "dtype": "bf16", "size": 4096, "times_us": [1]}',
        '{"kind": "speed", "rank": 0, "test": "matmul", "dtype": "bf16", "size": 4096, "times_us": [-5, 0, 1e300]}',
        '{"kind": "speed", "rank": 0, "test": "matmul", "dtype": "bf16", "size": 1152921504606846976, "times_us": [1]}',
        '{"kind": "speed", "rank": 0, "test": "matmul", "dtype": "bf16", "size": 65536, "times_us": [0.001]}',
        '{"kind": "speed", "rank": 0, "test": "rm -rf", "dtype": "bf16", "size": 1, "times_us": [1]}',
        '{"kind": "speed", "rank": 0, "test": "copy", "dtype": "fp32", "times_us": [1]}',
        '{"kind": "speed", "rank": 0, "test": "matmul", "dtype": "\\u001b[2J", "size": 4096, "times_us": [1]}',
        '{"kind": "speed", "rank": 7, "test": "matmul", "dtype": "bf16", "size": 4096, "times_us": [1]}',
        '{"kind": "speed", "rank": 0, "test": "bert", "dtype": "bf16", "batch": 0, "sequence": 0, "times_us": [1]}',
        '{"kind": "device", "rank": 3, "device": "cuda", "name": "another"}',
        '{"kind": "device", "rank": 0, "device": "tpu"}',
        '{"kind": "gpu", "time_s": 0, "mono_ns": 11000000000, "index": 0, "sm_clock_mhz": -5, "pcie_gen": 99999}',
        '{"kind": "cpu", "time_s": 0, "mono_ns": 11000000000, "busy_percent": 1e308, "job_cores": -1}',
        '{"kind": "cgroup", "time_s": 0, "mono_ns": 1, "quota_cores": -2, "throttled_us": 1e308, "periods": 1}',
        '{"kind": "cgroup", "time_s": 0, "mono_ns": 1, "throttled_us": 1e308, "periods": 1, "throttled_periods": 1}',
    ],
)
def test_a_node_that_lies_changes_no_figure_of_another_and_none_that_can_be_true(line: str) -> None:
    lies = tuple(parse_samples([line.encode()]))
    samples = on_gpu(speeds(), gpu(), processors(10))
    found = report(part(0, samples), part(1, (*samples, *lies), ranks=(0,)))
    honest = report(part(0, samples), part(1, samples, ranks=(0,)))
    values = [
        [(test.label, test.alone.value) for test in one.nodes[1].workers[0].tests if test.alone is not None]
        for one in (found, honest)
    ]
    assert values[0] == values[1]
    assert found.nodes[0] == honest.nodes[0]
    assert found.slow == ()
    # No NaN, no infinity: a document that any reader of JSON takes.
    json.loads(msgspec.json.encode(found), parse_constant=pytest.fail)


def test_a_flood_of_tests_is_cut() -> None:
    flood = [speed("matmul", 100.0, index=index, size=1 + index) for index in range(500)]
    assert len(report(part(0, on_gpu(flood))).nodes[0].workers[0].tests) == 100


def test_of_much_that_is_left_the_next_is_named_and_the_rest_counted() -> None:
    found = report(part(0, on_gpu(speeds(), gpu())))
    assert with_progress(found, still_running=False) == found
    left = msgspec.structs.replace(found, left=tuple(f"node{rank} alone" for rank in range(1, 8)))
    told, *rest = verdict(with_progress(left, still_running=False))
    named = "node2 alone; node3 alone; node4 alone"
    assert told == f"interrupted while measuring node1 alone; not yet measured: {named}; 3 more"
    assert tuple(rest) == verdict(found)


def test_a_hint_says_how_the_node_is_reached() -> None:
    parts = [part(0, on_gpu(speeds(), gpu())), part(1, on_gpu(speeds(0.7), gpu(sm_clock_mhz=900)))]
    (slow,) = summarise_bench("r", parts, DeviceTest(), lambda hint: hint.replace("ssh node1", "ssh -p 2 n")).slow
    assert (
        slow.causes[0].hint
        == "find out what lowers the clocks of the GPU: ssh -p 2 n nvidia-smi -q -d CLOCK,PERFORMANCE"
    )


def test_every_figure_has_the_clock_and_the_power_that_it_was_reached_at() -> None:
    cold = gpu(sm_clock_mhz=1410, power_w=250.0, power_limit_w=400.0)
    found = report(part(0, on_gpu(speeds(), cold)))
    (worker,) = found.workers
    assert {(speed.clock_mhz, speed.power_w) for test in worker.tests for speed in test.speeds} == {(1410, 250)}
    assert "power-limited" not in [note.code for note in found.notes]
    sizes = next(sheet for sheet in bench_sheets(found) if sheet.title == "matrix products by type and size")
    assert [row[-1] for row in sizes.rows] == ["1410/250"]
    capped = cold[:3] + gpu(sm_clock_mhz=1200, power_w=400.0, power_limit_w=400.0, throttle=("sw_power_cap",))[3:]
    notes = report(part(0, on_gpu(speeds(), capped))).notes
    (limited,) = (note for note in notes if note.code == "power-limited")
    assert limited.message.startswith("node0/0 (alone): the power limit of 400 W reduced the clock for 50%")
    assert limited.node == "node0"
    assert limited.figures["limited_share"] == pytest.approx(0.5, abs=0.05)
