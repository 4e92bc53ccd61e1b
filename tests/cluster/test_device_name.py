from __future__ import annotations

import pytest

from multinode.cluster.accelerators import device_key, short_device_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("  rtx  4090 ", "rtx 4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("1 x NVIDIA GeForce RTX 3090 + 2 x NVIDIA GeForce RTX 4090", "1 x RTX 3090 + 2 x RTX 4090"),
        ("NVIDIA", "NVIDIA"),
        ("", ""),
    ],
)
def test_a_gpu_is_called_by_what_tells_it_from_others(name: str, short: str) -> None:
    assert short_device_name(name) == short


# As Linux and hypervisors name them.
@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("AMD EPYC 9B14 96-Core Processor", "AMD EPYC 9B14"),
        ("AMD FX(tm)-8350 Eight-Core Processor", "AMD FX-8350"),
        ("AMD Opteron(tm) Processor 6174", "AMD Opteron 6174"),
        ("AMD EPYC-Rome Processor", "AMD EPYC-Rome"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz", "Intel Xeon E5-2680 v4"),
        ("Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", "Intel Xeon Gold 6148"),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "Intel Core i7-8700K"),
        ("Intel(R) Core(TM)2 Duo CPU     T7300  @ 2.00GHz", "Intel Core2 Duo T7300"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon @ 2.20GHz"),
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", "Intel Xeon @ 2.50GHz"),
        ("Intel Xeon Processor (Skylake, IBRS)", "Intel Xeon (Skylake, IBRS)"),
        ("1 x NVIDIA GeForce RTX 4090 + 2 x AMD EPYC 9B14 96-Core Processor", "1 x RTX 4090 + 2 x AMD EPYC 9B14"),
        ("1 x NVIDIA GeForce RTX 4090 + 2 x CPU", "1 x RTX 4090 + 2 x CPU"),
        ("CPU", "CPU"),
        ("Processor", "Processor"),
    ],
)
def test_a_processor_is_called_by_what_tells_it_from_others(name: str, short: str) -> None:
    assert short_device_name(name) == short
    assert short_device_name(short) == short


def test_one_device_has_one_key_and_another_has_another() -> None:
    assert device_key("NVIDIA GeForce RTX 4090") == device_key("rtx 4090")
    assert device_key("AMD EPYC 9B14 96-Core Processor") == device_key("amd epyc 9b14")
    names = [
        "RTX 4090",
        "RTX 4090 D",
        "A100",
        "A100 80GB PCIe",
        "A100-PCIE-40GB",
        "RTX 6000",
        "A6000",
        "V100",
        "V100 16G",
        "CPU",
        "AMD EPYC 9B14 96-Core Processor",
        "AMD EPYC 9654 96-Core Processor",
        "Intel(R) Xeon(R) CPU @ 2.20GHz",
        "Intel(R) Xeon(R) CPU @ 2.50GHz",
    ]
    assert len({device_key(name) for name in names}) == len(names)
