"""Files that NCCL writes into the run's directory (job/engines/place.py): its warnings, and its Inspector's records.

The Inspector plugin (NCCL 2.28 and newer; RCCL has a port) writes a file for each process below
NCCL_INSPECTOR_DUMP_DIR, with one JSON object per operation and line (plugins/profiler/inspector/README.md). NVIDIA
ships only its source, so a build may lie anywhere. Records are read while the job runs, and only shortened here.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional

from .channel import Record
from .files import read_end

FOLDER = "nccl-inspector"
"""Folder of the Inspector's files below the run's directory (job/planning.py)."""
_MOST_FILES = 64
_MOST_READ_BYTES = 4 << 20
_LONGEST_LINE = 1 << 16
# Per node: about 15 MB, which are sent to the controller.
_MOST_RECORDS = 50_000


class InspectorReader:
    """Follows the files of one run's processes.

    Args:
        run_path: the run's directory.
    """

    def __init__(self, run_path: str) -> None:
        self._folder = os.path.join(run_path, FOLDER)
        # How far each file has been read; an incomplete line is read again.
        self._offsets: Dict[str, int] = {}
        self._left = _MOST_RECORDS
        self._is_cut = False

    def read(self) -> List[Record]:
        """New `nccl_op` records since the last call; one note if there are too many."""
        records: List[Record] = []
        if not os.path.isdir(self._folder):
            return records
        for path in sorted(glob.glob(os.path.join(glob.escape(self._folder), "*.log")))[:_MOST_FILES]:
            with contextlib.suppress(OSError):
                records += self._read_file(path)
        self._left -= len(records)
        if self._left <= 0 and not self._is_cut:
            self._is_cut = True
            records.append({"kind": "note", "message": f"NCCL's Inspector: only the first {_MOST_RECORDS} operations"})
        return records

    def _read_file(self, path: str) -> List[Record]:
        if self._left <= 0:
            return []
        with open(path, "rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read(_MOST_READ_BYTES)
        whole, newline, rest = data.rpartition(b"\n")
        if not newline and len(rest) < _LONGEST_LINE:
            return []
        # A block of 64 KiB or more without a newline is skipped.
        self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if newline else len(data))
        records = (shorten(line) for line in whole.splitlines() if len(line) <= _LONGEST_LINE)
        return [record for record in records if record is not None][: self._left]


def shorten(line: bytes) -> Optional[Record]:
    """The `nccl_op` record of a line; None if the line is not the plugin's record of a collective."""
    try:
        read: Any = json.loads(line)
        header, done = read["header"], read["coll_perf"]
        return {
            "kind": "nccl_op",
            "comm": str(header["id"])[:40],
            "comm_rank": int(header["rank"]),
            "comm_ranks": int(header["n_ranks"]),
            "nodes": int(header["nnodes"]),
            "op": str(done["coll"])[:40],
            "number": int(done["coll_sn"]),
            "size_bytes": int(done["coll_msg_size_bytes"]),
            "time_us": float(done["coll_exec_time_us"]),
            "busbw_gb_per_s": float(done["coll_busbw_gbs"]),
            "timing": str(done["coll_timing_source"])[:40] if "coll_timing_source" in done else None,
            "written_s": int(read["metadata"]["dump_timestamp_us"]) / 1e6,
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


_MARK = b" NCCL WARN "
_MOST_LINES = 20
_LONGEST_WARNING = 1000
# Only the end of each file is read: the warnings that matter are near it.
_MOST_BYTES = 8 << 20


def read_nccl_warnings(run_path: str) -> List[str]:
    """The last warnings of each process, as NCCL wrote them: node, process and thread, GPU, source and message."""
    warnings: List[str] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(run_path), "nccl.*.log")))[:_MOST_FILES]:
        with contextlib.suppress(OSError):
            warnings += _read_warnings(path)
    return warnings


def _read_warnings(path: str) -> List[str]:
    lines = read_end(path, _MOST_BYTES).splitlines()
    texts = [line[:_LONGEST_WARNING].decode(errors="replace").strip() for line in lines if _MARK in line]
    return texts[-_MOST_LINES:]


_NAMES = ("libnccl-profiler-inspector.so", "librccl-profiler-inspector.so")
_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/nccl/lib",
    "/opt/nccl/lib",
    "/opt/rocm/lib",
)


def find_inspector(env: Mapping[str, str], python: Optional[str], folders: tuple[str, ...] = _FOLDERS) -> Optional[str]:
    """Path of the plugin: NCCL_PROFILER_PLUGIN, LD_LIBRARY_PATH, beside torch's NCCL, or the usual library folders."""
    named = env.get("NCCL_PROFILER_PLUGIN", "")
    if "inspector" in os.path.basename(named) and os.path.isfile(named):
        return os.path.abspath(named)
    places = [
        *filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
        *_beside_torch(python),
        *folders,
    ]
    paths = (os.path.join(folder, name) for folder in places for name in _NAMES)
    return next((os.path.abspath(path) for path in paths if os.path.isfile(path)), None)


def _beside_torch(python: Optional[str]) -> Iterator[str]:
    if python is not None:
        environment = glob.escape(os.path.dirname(os.path.dirname(python)))
        yield from sorted(glob.glob(f"{environment}/lib/python3*/site-packages/nvidia/nccl/lib"))
