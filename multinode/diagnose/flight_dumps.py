"""Dumps of torch's flight recorder in files: those that a watchdog left, or that a user took, one per rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from multinode.diagnose.desync import Desync, find_desync, find_stuck
from multinode.records.flight import MOST_BYTES, FlightDump, read_flight

# torch writes nccl_trace_rank_3, comm_lib_trace_rank_3, or any prefix and the rank.
_NAME = re.compile(r"^(?P<prefix>.*?)(?P<rank>\d{1,6})(?:\.(?:json|pickle|pkl))?$")
# A log that happens to end in a number begins with neither.
_BEGINNINGS = (b"\x80", b"{")


class FoundDump(msgspec.Struct, frozen=True, kw_only=True):
    """The dump in one file."""

    series: str  # the folder and the name without the rank: dumps of one series belong together
    rank: int
    dump: FlightDump


def read_dumps(names: Sequence[str]) -> dict[str, FoundDump]:
    """The dumps among these files, by file."""
    read = ((name, _read(Path(name))) for name in names)
    return {name: found for name, found in read if found is not None}


def _read(path: Path) -> FoundDump | None:
    name = _NAME.match(path.name)
    if name is None:
        return None
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(len(b"{"))
            data += file.read(MOST_BYTES) if data.startswith(_BEGINNINGS) else b""
    except OSError:
        return None
    dump = read_flight(data) if len(data) > 1 else None
    if dump is None:
        return None
    rank = dump.rank if dump.rank is not None else int(name["rank"])
    return FoundDump(series=str(path.parent / name["prefix"]), rank=rank, dump=dump)


def explain_dumps(dumps: Mapping[str, FoundDump]) -> tuple[str, Desync] | None:
    """What the dumps say of a hang, and a file that shows it; None if they show none."""
    for series in dict.fromkeys(found.series for found in dumps.values()):
        files = {found.rank: name for name, found in dumps.items() if found.series == series}
        ranks = {rank: dumps[name].dump for rank, name in sorted(files.items())}
        told = find_desync(ranks, {}) or find_stuck(ranks)
        if told is not None:
            return next(files[rank] for rank in (*told.ranks, *told.others) if rank in files), told
    return None
