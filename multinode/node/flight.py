"""Dumps of torch's flight recorder: which part of one is told, and those that a watchdog left in files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Dict, List, Optional

from .channel import Record

FIELDS = (
    "collective_seq_id",
    "input_dtypes",
    "input_sizes",
    "is_p2p",
    "output_sizes",
    "process_group",
    "profiling_name",
    "retired",
    "state",
    "time_created_ns",
)
"""The fields of a collective that are told."""
MOST_OF_GROUP_AT_END = 4
"""Last collectives of each group that are told of a worker that has ended."""
MOST_BYTES_AT_END = 16_000
"""Of their text: a reader cuts a longer one of a record."""
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "multinode_agent/")
"""Parts of paths to code that is not the user's own."""

_RANK = re.compile(r"(\d{1,6})$")
_MOST_FILE_BYTES = 1 << 24


def fit(dump: Record, most_bytes: int) -> Optional[str]:
    """JSON of a dump with as many of its last collectives as it may have; None without any."""
    while dump["entries"]:
        text = json.dumps(dump)
        if len(text) <= most_bytes:
            return text
        entries = dump["entries"]
        dump = {**dump, "entries": entries[(len(entries) + 1) // 2 :]}
    return None


def last_of_groups(entries: List[Dict[str, Any]], most_of_group: int) -> List[Dict[str, Any]]:
    """The last collectives of each group, in their order."""
    counts: Dict[str, int] = {}
    kept = []
    for entry in reversed(entries):
        name = str(entry.get("process_group"))
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= most_of_group:
            kept.append(entry)
    return kept[::-1]


def read_watchdog_dumps(paths: Iterable[str]) -> Iterator[Record]:
    """A record `flight` for each of these files that is a dump, by the rank at the end of its name.

    A worker may have written anything.
    """
    for path in paths:
        rank = _RANK.search(path)
        if rank is None:
            continue
        try:
            with open(path, "rb") as file:
                text = _shorten(file.read(_MOST_FILE_BYTES))
        except Exception:  # noqa: BLE001, S112 - pickle raises anything for data that is no pickle
            continue
        if text is not None:
            yield {"kind": "flight", "rank": int(rank[1]), "flight": text, "source": "watchdog"}


def _shorten(data: bytes) -> Optional[str]:
    # Most jobs leave none.
    from .plain_pickle import read_plain

    told = read_plain(data) if data.startswith(b"\x80") else json.loads(data)
    entries = [
        {**{field: entry[field] for field in FIELDS if field in entry}, "frames": _own_frames(entry)}
        for entry in last_of_groups(told["entries"], MOST_OF_GROUP_AT_END)
    ]
    groups = told.get("pg_config") or {}
    return fit({"pg_config": groups, "entries": entries}, MOST_BYTES_AT_END)


def _own_frames(entry: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """The innermost frame of the user's own code."""
    frames = entry.get("frames") or []
    return [frame for frame in frames if not any(part in frame["filename"] for part in LIBRARIES)][:1]
