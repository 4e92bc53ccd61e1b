"""The GPUs of this node and the processes that hold their memory, as nvidia-smi lists them, and other accelerators.

Other accelerators are listed by their vendors' programs; a fact that a program does not print is None.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

from ..channel import Record
from ..files import user_name
from ..processes import command_of
from ..programs import Query, find_program
from .unknown import Unknown

# Without the persistence daemon, each call loads the driver again, which takes seconds per GPU.
_DEADLINE_S = 30.0
_FIELDS = "index,name,memory.total,memory.used,driver_version,uuid,mig.mode.current"
# WSL 2 has nvidia-smi here, and adds the folder to the PATH of interactive shells only.
_WSL = "/usr/lib/wsl/lib"
# Devices of the NVIDIA driver, and in WSL 2 of Windows.
_DEVICES = ("/dev/nvidia", "/dev/dxg")
_PROCESS_FIELDS = "gpu_uuid,pid,used_memory"
_FORMAT = "--format=csv,noheader,nounits"
_MAX_PROCESSES = 64
# Target of /proc/self/ns/pid in the machine's own pid namespace: PROC_PID_INIT_INO of linux/proc_ns.h.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


class Holder(NamedTuple):
    """A process that holds memory of a GPU."""

    uuid: str
    pid: int  # pid of the process in the driver's namespace
    memory_mib: Optional[float]  # memory that it holds; None if the driver does not report it


def find_nvidia_smi(path: str, wsl: str = _WSL) -> Optional[str]:
    """Path of nvidia-smi, on PATH or in WSL 2's folder; None if there is none."""
    return find_program("nvidia-smi", os.pathsep.join((path, wsl)))


def query_gpus(nvidia_smi: str) -> Query:
    """Ask nvidia-smi for the GPUs."""
    return Query([nvidia_smi, f"--query-gpu={_FIELDS}", _FORMAT], deadline_s=_DEADLINE_S)


def query_processes(nvidia_smi: str) -> Query:
    """Ask nvidia-smi for the processes; it has no single query for both."""
    return Query([nvidia_smi, f"--query-compute-apps={_PROCESS_FIELDS}", _FORMAT], deadline_s=_DEADLINE_S)


def parse_gpus(text: str) -> list[Record]:
    """One record for each line of nvidia-smi's CSV."""
    gpus: list[Record] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        index, name, total, used, driver, uuid, mig = _split(line, _FIELDS)
        gpus.append(
            {
                "index": int(index),
                "name": name,
                "memory_total_mib": _number(total),
                "memory_used_mib": _number(used),
                "driver": driver,
                "uuid": uuid,
                "mig": mig == "Enabled",
            }
        )
    return gpus


def parse_processes(text: str) -> list[Holder]:
    """One `Holder` for each line of nvidia-smi's CSV; an empty text has none."""
    rows = [_split(line, _PROCESS_FIELDS) for line in filter(None, map(str.strip, text.splitlines()))]
    return [Holder(uuid, int(pid), _number(memory)) for uuid, pid, memory in rows]


def join_processes(
    gpus: Iterable[Record], holders: Union[Iterable[Holder], Unknown], run_ids: Mapping[int, str]
) -> list[Record]:
    """The GPUs, each with its processes; `run_ids` maps pids of our runs' processes to run ids."""
    if isinstance(holders, Unknown):
        return [{**gpu, "processes": holders} for gpu in gpus]
    by_uuid: dict[str, list[Holder]] = {}
    for holder in holders:
        by_uuid.setdefault(holder.uuid, []).append(holder)
    return [{**gpu, "processes": _describe(by_uuid.get(gpu["uuid"], ()), run_ids)} for gpu in gpus]


def _describe(holders: Iterable[Holder], run_ids: Mapping[int, str]) -> list[Record]:
    return [
        {"pid": holder.pid, "memory_mib": holder.memory_mib, **_identify(holder.pid, run_ids)}
        for holder in list(holders)[:_MAX_PROCESSES]
    ]


def _identify(pid: int, run_ids: Mapping[int, str]) -> dict[str, Any]:
    """User, command and run of a process; in a container, the driver's pid may be invalid or another process's."""
    who: dict[str, Any] = {"user": None, "command": None, "run_id": None}
    if not _is_the_drivers(pid):
        return who
    with contextlib.suppress(OSError):
        who["user"] = user_name(os.stat(f"/proc/{pid}").st_uid)
    return {**who, "command": command_of(pid), "run_id": run_ids.get(pid)}


def _is_the_drivers(pid: int) -> bool:
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:
            return True
    return uses_gpu(pid)


def uses_gpu(pid: int, proc: str = "/proc") -> bool:
    """Whether the process has a device of the NVIDIA driver open, or of Windows in WSL 2."""
    folder = f"{proc}/{pid}/fd"
    with contextlib.suppress(OSError):
        return any(os.readlink(f"{folder}/{fd}").startswith(_DEVICES) for fd in os.listdir(folder))
    return False


def _split(line: str, fields: str) -> list[str]:
    columns = [column.strip() for column in line.split(",")]
    if len(columns) != fields.count(",") + 1:
        raise ValueError(f"not a line of nvidia-smi's table: {line}")
    return columns


def _number(text: str) -> Optional[float]:
    # nvidia-smi prints [N/A], [Not Supported], [GPU is lost] or ERR! if a GPU does not report something.
    return None if text.startswith(("[", "ERR")) else float(text)


_BYTES_PER_MIB = 1 << 20
_MOST = 256
_CARD = re.compile(r"card(\d+)")
_HEX = re.compile(r"0x([0-9A-Fa-f]{1,16})")
# A line `| 0     910B4               | OK  ...`, then `| 0     2   | 0000:99:00.0  | 0   0 / 0   3415 / 65536 |`.
_NPU_NAME = re.compile(r"\|\s*\d+\s+(\S.*?)\s*\|")
_NPU_CHIP = re.compile(
    r"\|\s*\d+(?:\s+(\d+))?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:\S+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$"
)
_NPU_DRIVER = re.compile(r"Version:\s*(\S+)")


def parse_rocm(text: str) -> List[Record]:
    """One record for each line of rocm-smi's CSV; order and case of its columns differ between releases.

    Raises:
        ValueError: the text has no such table.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((place for place, line in enumerate(lines) if line.lower().startswith("device,")), None)
    if start is None:
        raise ValueError("rocm-smi printed no table")
    gpus = []
    for row in csv.DictReader(lines[start:]):
        fields = {(name or "").strip().lower(): (value or "").strip() for name, value in row.items() if name}
        card = _CARD.fullmatch(fields.get("device", ""))
        if card is None:
            continue
        unique = _HEX.fullmatch(fields.get("unique id", ""))
        gpus.append(
            _device(
                int(card[1]),
                fields.get("card series") or fields.get("card model") or "AMD GPU",
                memory_total_mib=_mib(fields.get("vram total memory (b)")),
                memory_used_mib=_mib(fields.get("vram total used memory (b)")),
                # ROCR_VISIBLE_DEVICES uses this name.
                uuid=f"GPU-{unique[1].lower().zfill(16)}" if unique is not None else None,
            )
        )
    return gpus[:_MOST]


def parse_xpu(text: str) -> List[Record]:
    """One record for each device of `xpu-smi discovery -j`.

    Raises:
        ValueError: the text has no list of devices.
    """
    document = json.loads(text)
    devices = document.get("device_list") if isinstance(document, dict) else None
    if not isinstance(devices, list):
        raise ValueError("xpu-smi printed no list of devices")  # noqa: TRY004 - it is what the program said
    return [
        _device(int(device["device_id"]), str(device.get("device_name") or "Intel GPU"), uuid=device.get("uuid"))
        for device in devices[:_MOST]
        if isinstance(device, dict) and device.get("device_type", "GPU") == "GPU" and "device_id" in device
    ]


def parse_npu(text: str) -> List[Record]:
    """One record for each chip of `npu-smi info`, which has two lines per chip; each chip is a device.

    Raises:
        ValueError: the text lists no chip.
    """
    driver = _NPU_DRIVER.search(text)
    devices: List[Record] = []
    name = "Ascend NPU"
    for line in text.splitlines():
        chip = _NPU_CHIP.search(line)
        if chip is not None:
            index = int(chip[1]) if chip[1] is not None else len(devices)
            devices.append(
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
    if not devices:
        raise ValueError("npu-smi listed no chip")
    return devices[:_MOST]


def _device(index: int, name: str, uuid: Any = None, **fields: Any) -> Record:
    unknown: Record = {"memory_total_mib": None, "memory_used_mib": None, "driver": None, "processes": []}
    uuid = uuid if isinstance(uuid, str) else None
    return {"index": index, "name": name[:200], "uuid": uuid, **unknown, **fields}


def _mib(size_bytes: Optional[str]) -> Optional[float]:
    return int(size_bytes) / _BYTES_PER_MIB if size_bytes is not None and size_bytes.isdigit() else None


class Tool(NamedTuple):
    """The program that lists one vendor's devices, and the parser of its output."""

    program: str
    arguments: List[str]
    parse: Callable[[str], List[Dict[str, Any]]]


TOOLS = {
    "rocm": Tool("rocm-smi", ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--csv"], parse_rocm),
    "xpu": Tool("xpu-smi", ["discovery", "-j"], parse_xpu),
    "npu": Tool("npu-smi", ["info"], parse_npu),
}
"""Tools by kind of accelerator; cluster/accelerators.py has the same kinds."""
