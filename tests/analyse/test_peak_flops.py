from __future__ import annotations

import pytest

from multinode.analyse.job.peak_flops import mean_peak, peak_of
from multinode.core.cluster.device_name import short_device_name

# Multiprocessors, boost clock in GHz, and FLOP a clock that the tensor cores of one multiprocessor make of dense bf16
# summed in fp32, from NVIDIA's papers on the GA102, GA100, Ada, Hopper and Blackwell architectures. A GeForce, and the
# L40 like one, sums in fp32 at half the rate of the same chip in a workstation.
HALF, FULL, GA100, HOPPER = 512, 1024, 2048, 4096
CHIPS = [
    ("NVIDIA GeForce RTX 3090", 82, 1.695, HALF),
    ("NVIDIA GeForce RTX 3090 Ti", 84, 1.860, HALF),
    ("NVIDIA GeForce RTX 4080", 76, 2.505, HALF),
    ("NVIDIA GeForce RTX 4090", 128, 2.520, HALF),
    ("NVIDIA GeForce RTX 4090 D", 114, 2.520, HALF),
    ("NVIDIA GeForce RTX 5080", 84, 2.617, HALF),
    ("NVIDIA GeForce RTX 5090", 170, 2.407, HALF),
    ("NVIDIA L40", 142, 2.490, HALF),
    ("NVIDIA L40S", 142, 2.490, FULL),
    ("NVIDIA L4", 58, 2.040, FULL),
    ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, FULL),
    ("NVIDIA RTX A6000", 84, 1.800, FULL),
    ("NVIDIA A40", 84, 1.740, FULL),
    ("NVIDIA A30", 56, 1.440, GA100),
    ("NVIDIA A100-SXM4-80GB", 108, 1.410, GA100),
    ("NVIDIA A100 80GB PCIe", 108, 1.410, GA100),
    ("NVIDIA H100 80GB HBM3", 132, 1.830, HOPPER),
    ("NVIDIA H100 PCIe", 114, 1.620, HOPPER),
    ("NVIDIA H200", 132, 1.830, HOPPER),
]
# The same of fp16, from the papers on the GV100 and the Turing architecture: their tensor cores have nothing else.
BEFORE_AMPERE = [
    ("Tesla V100-SXM2-32GB", 80, 1.530, FULL),
    ("Tesla V100-PCIE-16GB", 80, 1.370, FULL),
    ("Tesla T4", 40, 1.590, FULL),
    ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, HALF),
]


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), [*CHIPS, *BEFORE_AMPERE])
def test_a_peak_is_what_the_chip_can_do_without_sparsity(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.tflops == pytest.approx(multiprocessors * boost_ghz * flop_a_clock / 1000, rel=0.005)


def test_the_denominator_says_what_it_is() -> None:
    peak = peak_of("NVIDIA GeForce RTX 4090")
    assert peak is not None
    assert peak.denominator == (
        "165.2 TFLOP/s a GPU, dense bf16 with fp32 accumulation "
        "(NVIDIA Ada architecture; 128 multiprocessors x 512 FLOP x 2.52 GHz)"
    )


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), BEFORE_AMPERE)
def test_a_gpu_whose_tensor_cores_know_fp16_alone_says_so(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    assert flop_a_clock
    peak = peak_of(name)
    assert peak is not None
    assert f"{peak.tflops:g} TFLOP/s a GPU, dense fp16 with fp32 accumulation" in peak.denominator
    assert peak.fp32_tflops == pytest.approx(multiprocessors * boost_ghz * 128 / 1000, rel=0.015)
    assert peak.tf32_tflops is None
    mixed = mean_peak([name, "NVIDIA L40S"])
    assert mixed is not None
    assert "dense fp16 or bf16" in mixed.denominator


def test_what_differs_in_its_links_alone_has_the_same_peak() -> None:
    for name, like in (("A800-SXM4-80GB", "A100-SXM4-80GB"), ("A800 80GB PCIe", "A100 80GB PCIe")):
        assert peak_of(f"NVIDIA {name}") == peak_of(f"NVIDIA {like}") is not None


def test_a_figure_with_sparsity_is_halved_and_said_to_be() -> None:
    peak = peak_of("NVIDIA H100 80GB HBM3")
    assert peak is not None
    assert "989.5 TFLOP/s" in peak.denominator
    assert "half of the 1979 TFLOP/s that it gives with sparsity" in peak.denominator


def test_an_older_driver_leaves_the_maker_out() -> None:
    assert peak_of("A100-SXM4-40GB") == peak_of("NVIDIA A100-SXM4-40GB") is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 40",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM2e",
        "Tesla P100-SXM2-16GB",
        "AMD Instinct MI300X",
    ],
)
def test_of_another_gpu_nothing_is_said(name: str) -> None:
    assert peak_of(name) is None


def test_workers_on_unequal_gpus_are_held_to_the_mean() -> None:
    mixed = mean_peak(["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"])
    assert mixed is not None
    assert mixed.tflops == pytest.approx((165.2 + 165.2 + 71.2) / 3)
    assert mixed.source == "mean of 2 x NVIDIA GeForce RTX 4090, 1 x NVIDIA GeForce RTX 3090"


def test_workers_on_equal_gpus_have_the_peak_of_one() -> None:
    assert mean_peak(["NVIDIA L40S"] * 4) == peak_of("NVIDIA L40S")


@pytest.mark.parametrize("names", [[], ["NVIDIA L40S", "a card of next year"]])
def test_one_unknown_gpu_leaves_no_mean(names: list[str]) -> None:
    assert mean_peak(names) is None


# FLOP a clock that one multiprocessor makes in fp32 outside its tensor cores, and the clock where it is another one.
FP32_CLOCKS = [
    *((name, count, ghz, 128 if "A100" in name or "A30" in name else 256) for name, count, ghz, _ in CHIPS[:-3]),
    ("NVIDIA H100 80GB HBM3", 132, 1.980, 256),
    ("NVIDIA H100 PCIe", 114, 1.755, 256),
    ("NVIDIA H200", 132, 1.980, 256),
]


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), FP32_CLOCKS)
def test_fp32_is_what_the_multiprocessors_can_do_and_tf32_half_of_bf16(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.fp32_tflops == pytest.approx(multiprocessors * boost_ghz * flop_a_clock / 1000, rel=0.015)
    assert peak.tf32_tflops == pytest.approx(peak.tflops / 2, rel=0.015)
    assert peak.others_source


# Width of the memory's bus in bits, and Gbit/s of each of its lines, as the makers of the memory sell it.
@pytest.mark.parametrize(
    ("name", "bits", "gbit_per_s"),
    [
        ("NVIDIA GeForce RTX 3090", 384, 19.5),
        ("NVIDIA GeForce RTX 3090 Ti", 384, 21),
        ("NVIDIA GeForce RTX 4080", 256, 22.4),
        ("NVIDIA GeForce RTX 4090", 384, 21),
        ("NVIDIA GeForce RTX 5080", 256, 30),
        ("NVIDIA GeForce RTX 5090", 512, 28),
        ("NVIDIA RTX 6000 Ada Generation", 384, 20),
        ("NVIDIA RTX A6000", 384, 16),
        ("NVIDIA A40", 384, 14.5),
        ("NVIDIA L4", 192, 12.5),
        ("NVIDIA L40S", 384, 18),
        ("NVIDIA A100-SXM4-40GB", 5120, 2.43),
        ("NVIDIA A100-SXM4-80GB", 5120, 3.19),
        ("NVIDIA H100 80GB HBM3", 5120, 5.23),
    ],
)
def test_memory_is_as_fast_as_its_bus(name: str, bits: int, gbit_per_s: float) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.memory_gb_per_s == pytest.approx(bits * gbit_per_s / 8, rel=0.005)


def test_a_figure_that_is_not_known_of_one_gpu_is_not_guessed() -> None:
    peak = peak_of("NVIDIA B200")
    assert peak is not None
    assert (peak.fp32_tflops, peak.tf32_tflops, peak.memory_gb_per_s) == (None, None, None)


@pytest.mark.parametrize(
    "name",
    ["CPU", "AMD EPYC 9B14 96-Core Processor", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "AMD Ryzen 9 A40", ""],
)
def test_a_processor_has_no_peak_here(name: str) -> None:
    assert peak_of(name) is None
    assert peak_of(short_device_name(name)) is None
    assert mean_peak([name, "NVIDIA A40"]) is None
