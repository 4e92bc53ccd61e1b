"""Devices of other vendors, by output of their programs that people have shown; the hardware itself nobody here has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multinode.cluster.accelerators import ACCELERATORS
from multinode.node.facts.gpus import TOOLS, parse_npu, parse_rocm, parse_xpu
from tests.golden import Golden, raised

# rocm-smi of ROCm 6 with an RX 6800 and the processor's own graphics (mudler/LocalAI#7761; its id is masked there,
# and the last twelve digits are zeros here).
ROCM = """\
device,Unique ID,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series,Card Model,Card Vendor,Card SKU,\
Subsystem ID,Device Rev,Node ID,GUID,GFX Version
card0,0x9246000000000000,17163091968,692142080,Navi 21 [Radeon RX 6800/6800 XT / 6900 XT],0x73bf,\
Advanced Micro Devices Inc. [AMD/ATI],001,0x2406,0xc1,1,45534,gfx1030
card1,N/A,67108864,26079232,Raphael,0x164e,\
Advanced Micro Devices Inc. [AMD/ATI],RAPHAEL,0x364e,0xc6,2,52156,gfx1036
"""
# An older release on two MI100 (easybuilders/easybuild-framework#3978).
OLD_ROCM = """\
device,Card series,Card model,Card vendor,Card SKU
card0,Arcturus GL-XL [AMD Instinct MI100],0x0c34,Advanced Micro Devices Inc. [AMD/ATI],D34316
card1,Arcturus GL-XL [AMD Instinct MI100],0x0c34,Advanced Micro Devices Inc. [AMD/ATI],D34316
"""
# Intel XPU System Management Interface User Guide, `xpu-smi discovery -j`.
XPU = """\
{
    "device_list": [
        {
            "device_id": 0,
            "device_name": "Intel(R) Graphics [0x020a]",
            "device_type": "GPU",
            "pci_bdf_address": "0000:4d:00.0",
            "pci_device_id": "0x20a",
            "uuid": "00000000-0000-0000-0000-020a00008086",
            "vendor_name": "Intel(R) Corporation"
        }
    ]
}
"""
# Two cards of one chip (1Panel-dev/1Panel#9472), and one card of two (vllm-project/vllm-ascend#2534).
NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.1                   Version: 24.1.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4               | OK            | 88.2        30                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          26838/ 32768         |
+===========================+===============+====================================================+
| 1     910B4               | OK            | 87.0        30                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          29356/ 32768         |
+===========================+===============+====================================================+
"""
TWO_CHIPS = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 186.3       36                0    / 0             |
| 0     2                   | 0000:99:00.0  | 0           0    / 0          3415 / 65536         |
+------------------------------------------------------------------------------------------------+
"""


def test_cards_of_amd_are_read_by_the_names_of_the_columns() -> None:
    first, second = parse_rocm(f"WARNING: AMD GPU device(s) is/are in a low-power state.\n\n{ROCM}")
    assert (first["index"], first["name"]) == (0, "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]")
    assert (first["memory_total_mib"], first["memory_used_mib"]) == (16368.0, pytest.approx(660.08, abs=0.01))
    # As ROCR_VISIBLE_DEVICES takes it.
    assert (first["uuid"], second["uuid"]) == ("GPU-9246000000000000", None)
    assert [(one["name"], one["memory_total_mib"]) for one in parse_rocm(OLD_ROCM)] == [
        ("Arcturus GL-XL [AMD Instinct MI100]", None)
    ] * 2


def test_devices_of_intel_are_read_from_their_document() -> None:
    (device,) = parse_xpu(XPU)
    assert (device["index"], device["name"]) == (0, "Intel(R) Graphics [0x020a]")


@pytest.mark.parametrize(
    ("text", "names", "used"),
    [(NPU, ["910B4"] * 2, [26838.0, 29356.0]), (TWO_CHIPS, ["Ascend910"] * 3, [3416.0, 3195.0, 3415.0])],
)
def test_each_chip_of_an_ascend_card_is_a_device(text: str, names: list[str], used: list[float]) -> None:
    chips = parse_npu(text)
    assert [(chip["index"], chip["name"], chip["memory_used_mib"]) for chip in chips] == [
        (index, name, mib) for index, (name, mib) in enumerate(zip(names, used, strict=True))
    ]
    assert {chip["driver"] for chip in chips} == ({"24.1.1"} if text is NPU else {None})


def test_what_lists_no_device_says_so(golden: Golden) -> None:
    parsers: tuple[Callable[[str], object], ...] = (parse_rocm, parse_xpu, parse_npu)
    errors = {
        f"{parse.__name__}({text!r})": raised(ValueError, parse, text)
        for parse in parsers
        for text in ("", "no devices found\n", "[]", "null")
    }
    golden.check_errors("no_accelerators", errors)


def test_the_agents_table_and_the_controllers_are_of_the_same_vendors() -> None:
    assert {one.kind: one.query for one in ACCELERATORS} == {
        "cuda": "nvidia-smi",
        **{kind: tool.program for kind, tool in TOOLS.items()},
    }
