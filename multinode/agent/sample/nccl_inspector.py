"""What NCCL's Inspector plugin writes of each operation, read while the job runs: one record an operation and rank.

The plugin (NCCL 2.28 and newer; RCCL has a port) writes a file for each process below NCCL_INSPECTOR_DUMP_DIR, one JSON
object a line (plugins/profiler/inspector/README.md). Here they only become shorter; who reads them judges them.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import Any, Dict, List, Optional

from ..channel import Record

FOLDER = "nccl-inspector"
"""Below the run's directory (job/planning.py)."""
_MOST_FILES = 64
_MOST_READ_BYTES = 4 << 20
_LONGEST_LINE = 1 << 16
# Of a node: some 15 MB, which travel to the controller.
_MOST_RECORDS = 50_000


class InspectorReader:
    """Follows the files of one run's processes.

    Args:
        run_path: the run's directory.
    """

    def __init__(self, run_path: str) -> None:
        self._folder = os.path.join(run_path, FOLDER)
        # By file, how far it was read; a line that was not whole is read again.
        self._offsets: Dict[str, int] = {}
        self._left = _MOST_RECORDS
        self._is_cut = False

    def read(self) -> List[Record]:
        """`nccl_op` records of what came since the last call; once a note, where there is too much of it."""
        found: List[Record] = []
        if not os.path.isdir(self._folder):
            return found
        for path in sorted(glob.glob(os.path.join(glob.escape(self._folder), "*.log")))[:_MOST_FILES]:
            with contextlib.suppress(OSError):
                found += self._read_file(path)
        self._left -= len(found)
        if self._left <= 0 and not self._is_cut:
            self._is_cut = True
            found.append({"kind": "note", "message": f"NCCL's Inspector: only the first {_MOST_RECORDS} operations"})
        return found

    def _read_file(self, path: str) -> List[Record]:
        if self._left <= 0:
            return []
        with open(path, "rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read(_MOST_READ_BYTES)
        whole, newline, rest = data.rpartition(b"\n")
        if not newline and len(rest) < _LONGEST_LINE:
            return []
        # What is no line at all is passed over.
        self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if newline else len(data))
        records = (shorten(line) for line in whole.splitlines() if len(line) <= _LONGEST_LINE)
        return [record for record in records if record is not None][: self._left]


def shorten(line: bytes) -> Optional[Record]:
    """The record of a line; None where it is of no collective, or none of the plugin's."""
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
