"""TensorBoard: scalars in an event file, written without libraries: TFRecord frames of `Event` messages.

Formats, in tensorflow/core: util/event.proto, framework/summary.proto, lib/io/record_writer.h.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from multinode.export.exporter import Exporter
from multinode.export.figures import StepFigures, Value, summary_values
from multinode.records.run import Run
from multinode.runs.stored_run import StoredRun

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class TensorBoard(Exporter):
    """Scalars in DIR/RUN as float32; tags begin with `multinode/`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory
        self._file: BinaryIO | None = None
        self._last = 0

    def begin(self, run: Run) -> None:
        """Create an event file with a name that TensorBoard looks for."""
        folder = self._directory / run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.multinode"
        self._path = folder / name
        self._file = self._path.open("wb", buffering=0)
        self._write(_event(time.time(), 0, _field(3, _BYTES, b"brain.Event:2")))

    def steps(self, steps: Sequence[StepFigures]) -> None:
        """One event per step."""
        for step in steps:
            self._write(_scalars(step.time_s, step.step, "multinode", step.values))
            self._last = step.step

    def end(self, ended: StoredRun) -> None:
        """The summary at the last step; the file takes the place of those of earlier exports."""
        if ended.summary is not None:
            time_s = ended.run.ended_s or time.time()
            self._write(_scalars(time_s, self._last, "multinode/summary", summary_values(ended.summary)))
        if self._file is not None:
            self._file.close()
            # TensorBoard draws the points of all files of a directory as one curve.
            for other in self._path.parent.glob("events.out.tfevents.*.multinode"):
                if other != self._path:
                    other.unlink(missing_ok=True)

    def _write(self, event: bytes) -> None:
        if self._file is not None:
            length = struct.pack("<Q", len(event))
            self._file.write(length + _checksum(length) + event + _checksum(event))


def _scalars(time_s: float, step: int, prefix: str, values: Iterable[Value]) -> bytes:
    """An Event whose Summary has one Value each: tag and `simple_value`."""
    summary = b"".join(
        _field(
            1, _BYTES, _field(1, _BYTES, f"{prefix}/{value.path}".encode()) + _field(2, _FIXED32, _float(value.value))
        )
        for value in values
    )
    return _event(time_s, step, _field(5, _BYTES, summary))


def _event(time_s: float, step: int, content: bytes) -> bytes:
    return _field(1, _FIXED64, struct.pack("<d", time_s)) + _field(2, _VARINT, _varint(step)) + content


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf"))


def _field(number: int, wire_type: int, data: bytes) -> bytes:
    length = _varint(len(data)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _make_table() -> tuple[int, ...]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C (RFC 3720, B.4), masked as in TFRecord, so that checksums of data with checksums differ."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
