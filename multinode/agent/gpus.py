"""The GPUs of this node, as nvidia-smi lists them."""

from __future__ import annotations

from typing import Optional

from .channel import Record
from .queries import Query

__all__ = ["parse_gpus", "query_gpus"]

_DEADLINE_S = 5.0
_FIELDS = "index,name,memory.total,memory.used,driver_version"


def query_gpus(nvidia_smi: str) -> Query:
    """Ask nvidia-smi; without its persistence daemon it may take a second for each GPU."""
    arguments = [f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    return Query([nvidia_smi, *arguments], deadline_s=_DEADLINE_S)


def parse_gpus(text: str) -> list[Record]:
    """One record for each line of its CSV.

    Raises:
        ValueError: a line is something else.
    """
    gpus: list[Record] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != _FIELDS.count(",") + 1:
            raise ValueError(f"not a line of nvidia-smi's table: {line}")
        index, name, total, used, driver = columns
        gpus.append(
            {
                "index": int(index),
                "name": name,
                "memory_total_mib": _number(total),
                "memory_used_mib": _number(used),
                "driver": driver,
            }
        )
    return gpus


def _number(text: str) -> Optional[float]:
    # [N/A] and [Not Supported] stand for what a card does not tell.
    return None if text.startswith("[") else float(text)
