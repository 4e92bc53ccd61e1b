"""What NCCL and PyTorch's flight recorder can tell of a run that hangs: the RAS service's answer, and dumps on disk."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import time
from collections.abc import Iterable
from typing import Optional

from ..channel import Record

__all__ = ["RasQuestion", "list_flight_records"]

# NCCL 2.24 and later listen here unless NCCL_RAS_ADDR says otherwise (NCCL documentation, "RAS").
_PORT = 28028
_CONNECT_S = 1.0
_MOST_BYTES = 1 << 16
_FLIGHT_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_NAME = "nccl_trace_rank_"
_MOST_FILES = 64


class RasQuestion:
    """`verbose status`, asked early and read late: the service may have to wait for peers that are stuck.

    Args:
        addr: NCCL_RAS_ADDR of the workers; only its port is taken, since no other node is asked.
    """

    def __init__(self, addr: Optional[str]) -> None:
        self._missing: Optional[str] = None
        self._socket: Optional[socket.socket] = None
        port = (addr or "").rpartition(":")[2]
        target = ("127.0.0.1", int(port) if port.isdecimal() and int(port) < 1 << 16 else _PORT)
        try:
            self._socket = socket.create_connection(target, _CONNECT_S)
            self._socket.sendall(b"verbose status\n")
        except OSError as error:
            self._missing = f"no NCCL RAS on port {target[1]}: {error.strerror or error}"
            self.close()

    def answer(self, deadline_s: float) -> Record:
        """`ras` and `ras_missing`; what has come by the deadline is kept, finished or not."""
        data = b""
        end = time.monotonic() + deadline_s
        while self._socket is not None and len(data) < _MOST_BYTES and (left_s := end - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                piece = self._socket.recv(_MOST_BYTES - len(data))
            except OSError:
                break
            if not piece:
                break
            data += piece
        self.close()
        text = data.decode(errors="replace")
        return {"ras": text or None, "ras_missing": None if text else self._missing or "NCCL RAS answered nothing"}

    def close(self) -> None:
        """Let go of it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def list_flight_records(run_dir: str, environs: Iterable[dict[str, str]]) -> list[Record]:
    """Name and size of each dump that workers wrote, where their variables say, or in the run directory."""
    prefixes = {environ[name] for environ in environs for name in _FLIGHT_VARIABLES if environ.get(name)}
    prefixes = {prefix for prefix in prefixes if os.path.isabs(prefix)} | {os.path.join(run_dir, _FLIGHT_NAME)}
    found = []
    for path in sorted({path for prefix in prefixes for path in glob.glob(glob.escape(prefix) + "*")})[:_MOST_FILES]:
        with contextlib.suppress(OSError):
            found.append({"path": path, "size_bytes": os.stat(path).st_size})
    return found
