"""Accelerators that are not NVIDIA's, as their vendors' programs list them. What a program has no word for is None."""

from __future__ import annotations

import csv
import json
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ..channel import Record

_BYTES_PER_MIB = 1 << 20
_MOST = 256
_CARD = re.compile(r"card(\d+)")
_HEX = re.compile(r"0x([0-9A-Fa-f]{1,16})")
# `| 0     910B4               | OK  ...`, and below it `| 0     2   | 0000:99:00.0  | 0   0 / 0   3415 / 65536 |`.
_NPU_NAME = re.compile(r"\|\s*\d+\s+(\S.*?)\s*\|")
_NPU_CHIP = re.compile(
    r"\|\s*\d+(?:\s+(\d+))?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:\S+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$"
)
_NPU_DRIVER = re.compile(r"Version:\s*(\S+)")


def parse_rocm(text: str) -> List[Record]:
    """One record for each line of rocm-smi's CSV, whose columns differ in place and case from release to release.

    Raises:
        ValueError: it has no such table.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((place for place, line in enumerate(lines) if line.lower().startswith("device,")), None)
    if start is None:
        raise ValueError("rocm-smi printed no table")
    found = []
    for row in csv.DictReader(lines[start:]):
        fields = {(name or "").strip().lower(): (value or "").strip() for name, value in row.items() if name}
        card = _CARD.fullmatch(fields.get("device", ""))
        if card is None:
            continue
        unique = _HEX.fullmatch(fields.get("unique id", ""))
        found.append(
            _device(
                int(card[1]),
                fields.get("card series") or fields.get("card model") or "AMD GPU",
                memory_total_mib=_mib(fields.get("vram total memory (b)")),
                memory_used_mib=_mib(fields.get("vram total used memory (b)")),
                # As ROCR_VISIBLE_DEVICES names it.
                uuid=f"GPU-{unique[1].lower().zfill(16)}" if unique is not None else None,
            )
        )
    return found[:_MOST]


def parse_xpu(text: str) -> List[Record]:
    """One record for each device of `xpu-smi discovery -j`.

    Raises:
        ValueError: it is something else.
    """
    document = json.loads(text)
    devices = document.get("device_list") if isinstance(document, dict) else None
    if not isinstance(devices, list):
        raise ValueError("xpu-smi printed no list of devices")  # noqa: TRY004 - it is what the program said
    return [
        _device(int(one["device_id"]), str(one.get("device_name") or "Intel GPU"), uuid=one.get("uuid"))
        for one in devices[:_MOST]
        if isinstance(one, dict) and one.get("device_type", "GPU") == "GPU" and "device_id" in one
    ]


def parse_npu(text: str) -> List[Record]:
    """One record for each chip of `npu-smi info`, which has two lines for it; each chip of a card is a device.

    Raises:
        ValueError: it lists none.
    """
    driver = _NPU_DRIVER.search(text)
    found: List[Record] = []
    name = "Ascend NPU"
    for line in text.splitlines():
        chip = _NPU_CHIP.search(line)
        if chip is not None:
            index = int(chip[1]) if chip[1] is not None else len(found)
            found.append(
                _device(
                    index,
                    name,
                    memory_total_mib=float(chip[3]),
                    memory_used_mib=float(chip[2]),
                    driver=driver[1] if driver is not None else None,
                )
            )
        elif (named := _NPU_NAME.match(line)) is not None:
            name = named[1]
        if "Process id" in line:
            break
    if not found:
        raise ValueError("npu-smi listed no chip")
    return found[:_MOST]


def _device(index: int, name: str, uuid: Any = None, **known: Any) -> Record:
    unknown: Record = {"memory_total_mib": None, "memory_used_mib": None, "driver": None, "processes": []}
    uuid = uuid if isinstance(uuid, str) else None
    return {"index": index, "name": name[:200], "uuid": uuid, **unknown, **known}


def _mib(size_bytes: Optional[str]) -> Optional[float]:
    return int(size_bytes) / _BYTES_PER_MIB if size_bytes is not None and size_bytes.isdigit() else None


class Tool(NamedTuple):
    """How one vendor's devices are listed."""

    program: str
    arguments: List[str]
    parse: Callable[[str], List[Dict[str, Any]]]


TOOLS = {
    "rocm": Tool("rocm-smi", ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--csv"], parse_rocm),
    "xpu": Tool("xpu-smi", ["discovery", "-j"], parse_xpu),
    "npu": Tool("npu-smi", ["info"], parse_npu),
}
"""By kind, as cluster/accelerators.py has them."""
