"""What torch's flight recorder holds of this worker, in torch's own form, cut to the last collectives of each group.

torch records the collectives of gloo and NCCL by default, in a ring of 2000 entries. The members of each group are
added, which torch's JSON form leaves out, and the time, by which a reader knows how long a collective has been waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import time
from typing import Any, Dict, List, Optional

from ..node.flight import FIELDS, MOST_BYTES_AT_END, MOST_OF_GROUP_AT_END, fit, last_of_groups
from .recorder import Recorder

_MOST_OF_GROUP = 32
_MOST_ENTRIES = 512
# torch 2.8 has the older name, of NCCL alone.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

MOST_BYTES = 1 << 18
"""Size limit of `dump`."""


def dump(rank: int) -> Optional[bytes]:
    """JSON of this worker's last collectives; None before the first, or if torch has no recorder.

    It can be called from any thread, even while the main thread waits in a collective.
    """
    text = _text(rank, _MOST_OF_GROUP, MOST_BYTES)
    return None if text is None else text.encode()


def record_at_end(recorder: Recorder, rank: int) -> None:
    """Record the last collectives when this worker ends: peers may then fail, and which rank came late is in them."""

    def record() -> None:
        # torch may be half gone.
        with contextlib.suppress(Exception):
            text = _text(rank, MOST_OF_GROUP_AT_END, MOST_BYTES_AT_END)
            if text is not None:
                recorder.write("flight", {"flight": text})
                recorder.flush()

    atexit.register(record)


def _text(rank: int, most_of_group: int, most_bytes: int) -> Optional[str]:
    told = _read(most_of_group)
    return None if told is None else fit({"rank": rank, **told}, most_bytes)


def _read(most_of_group: int) -> Optional[Dict[str, Any]]:
    # Only look at a module that the training has imported.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    torch = sys.modules.get("torch._C._distributed_c10d")
    read = next((getattr(torch, name) for name in _DUMPS if hasattr(torch, name)), None)
    if c10d is None or read is None:
        return None
    entries = last_of_groups(json.loads(read()).get("entries", []), most_of_group)
    return {
        "time_ns": time.time_ns(),
        "pg_config": {group["name"]: group for group in _groups(c10d)},
        "entries": [{field: entry[field] for field in FIELDS if field in entry} for entry in entries[-_MOST_ENTRIES:]],
    }


def _groups(c10d: Any) -> List[Dict[str, Any]]:
    groups = list(c10d._world.pg_map)  # noqa: SLF001 - no public list
    return [
        {
            "name": str(group.group_name),
            "desc": str(getattr(group, "group_desc", "")),
            "ranks": c10d.get_process_group_ranks(group),
        }
        for group in groups
    ]
