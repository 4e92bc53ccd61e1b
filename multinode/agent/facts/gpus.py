"""The GPUs of this node and the processes that hold their memory, as nvidia-smi lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

from ..channel import Record
from ..programs import Query
from ..run.processes import command_of, user_name

# Without its persistence daemon the driver is loaded anew for each call, which takes seconds for each GPU.
_DEADLINE_S = 30.0
_FIELDS = "index,name,memory.total,memory.used,driver_version,uuid"
_PROCESS_FIELDS = "gpu_uuid,pid,used_memory"
_FORMAT = "--format=csv,noheader,nounits"
_MAX_PROCESSES = 64
# What /proc/self/ns/pid leads to where pids are the machine's own: PROC_PID_INIT_INO of linux/proc_ns.h.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


class Holder(NamedTuple):
    """A process that holds memory of a GPU.

    Attributes:
        pid: the process's, as the driver knows it.
        memory_mib: how much it holds; None where the driver does not tell.
    """

    uuid: str
    pid: int
    memory_mib: Optional[float]


def query_gpus(nvidia_smi: str) -> Query:
    """Ask nvidia-smi for the GPUs."""
    return Query([nvidia_smi, f"--query-gpu={_FIELDS}", _FORMAT], deadline_s=_DEADLINE_S)


def query_processes(nvidia_smi: str) -> Query:
    """Ask it for the processes; it has no one query for both."""
    return Query([nvidia_smi, f"--query-compute-apps={_PROCESS_FIELDS}", _FORMAT], deadline_s=_DEADLINE_S)


def parse_gpus(text: str) -> list[Record]:
    """One record for each line of its CSV.

    Raises:
        ValueError: a line is something else.
    """
    gpus: list[Record] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        index, name, total, used, driver, uuid = _split(line, _FIELDS)
        gpus.append(
            {
                "index": int(index),
                "name": name,
                "memory_total_mib": _number(total),
                "memory_used_mib": _number(used),
                "driver": driver,
                "uuid": uuid,
            }
        )
    return gpus


def parse_processes(text: str) -> list[Holder]:
    """One for each line of its CSV; empty text is no process.

    Raises:
        ValueError: a line is something else.
    """
    rows = [_split(line, _PROCESS_FIELDS) for line in filter(None, map(str.strip, text.splitlines()))]
    return [Holder(uuid, int(pid), _number(memory)) for uuid, pid, memory in rows]


def join_processes(gpus: Iterable[Record], holders: Iterable[Holder], run_ids: Mapping[int, str]) -> list[Record]:
    """The GPUs, each with the processes on it; `run_ids` has the run by pid, of the processes of our runs."""
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
    """Who the process is; in a container the driver's pid may be nobody's, or somebody else's."""
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


def uses_gpu(pid: int) -> bool:
    """Whether the process has one of the NVIDIA driver's devices open."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        return any(os.readlink(f"{folder}/{fd}").startswith("/dev/nvidia") for fd in os.listdir(folder))
    return False


def _split(line: str, fields: str) -> list[str]:
    columns = [column.strip() for column in line.split(",")]
    if len(columns) != fields.count(",") + 1:
        raise ValueError(f"not a line of nvidia-smi's table: {line}")
    return columns


def _number(text: str) -> Optional[float]:
    # [N/A], [Not Supported] and [Insufficient Permissions] stand for what a card does not tell.
    return None if text.startswith("[") else float(text)
