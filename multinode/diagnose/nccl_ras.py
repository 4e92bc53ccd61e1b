"""What NCCL's RAS service says of the ranks of a communicator that launched fewer collectives than others. Pure.

The text is `verbose status` of NCCL 2.24 and later (NCCL documentation, "RAS"; src/ras/client_support.cc). Launch
counts are those of the host, so they tell a late rank even where all GPUs spin in a kernel.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DIFFERENT = re.compile(r"^ *Communicator ranks have different (.+) operation counts$")
_LAUNCHED = r"(?:launched up to operation (?P<count>\d+)|not launched any operations)"
_SEVERAL = re.compile(rf"^ *\d+ ranks have {_LAUNCHED}$")
_PROCESS = r" -- (?:GPU .* managed by process (?P<pid>\d+) on node .*|\[process information not found\])$"
_ONE = re.compile(rf"^ *Rank (?P<rank>\d+) has {_LAUNCHED}{_PROCESS}")
_OF_SEVERAL = re.compile(rf"^ *Rank (?P<rank>\d+){_PROCESS}")


class LaggingRank(NamedTuple):
    """A rank that launched fewer operations than another of its communicator.

    Attributes:
        rank: in the communicator, which need not be the global rank.
        pid: of its process as that knows it; None where RAS does not say.
        operation: `AllReduce`; releases before NCCL counted by operation say `collective`.
        launched: by this rank.
        most: launched by any rank of the communicator.
    """

    rank: int
    pid: int | None
    operation: str
    launched: int
    most: int


def find_lagging(text: str) -> tuple[LaggingRank, ...]:
    """Of each mismatch that RAS reports, the ranks that it lists with the smallest count.

    RAS lists small groups of ranks alone: a rank that lags with most others is not among them.
    """
    found: list[LaggingRank] = []
    operation: str | None = None
    counts: list[int] = []
    listed: list[tuple[int, int | None, int]] = []

    def close() -> None:
        if operation is not None and counts:
            fewest, most = min(counts), max(counts)
            behind = [one for one in listed if one[2] == fewest < most]
            found.extend(LaggingRank(rank, pid, operation, count, most) for rank, pid, count in behind)

    for line in text.splitlines():
        if match := _DIFFERENT.match(line):
            close()
            operation, counts, listed = match[1], [], []
        elif match := _SEVERAL.match(line):
            counts.append(int(match["count"] or 0))
        elif match := _ONE.match(line):
            counts.append(int(match["count"] or 0))
            listed.append((int(match["rank"]), _number(match["pid"]), counts[-1]))
        elif (match := _OF_SEVERAL.match(line)) and counts:
            listed.append((int(match["rank"]), _number(match["pid"]), counts[-1]))
        elif not line.strip():
            close()
            operation, counts, listed = None, [], []
    close()
    return tuple(found)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None
