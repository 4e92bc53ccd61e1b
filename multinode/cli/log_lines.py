"""LogLines: what the job prints, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from multinode.records.log import LogCleaner, LogPiece
from multinode.render.sheet import sanitize

# Characters of a line that are shown.
_LONGEST_LINE = 2000


class LogLines:
    """Whole lines of the nodes' logs, each behind the node's name, without control codes.

    Args:
        rank: skip lines of other ranks.
    """

    def __init__(self, *, rank: int | None) -> None:
        self._rank = rank
        self._readers: dict[str, LogCleaner] = {}

    def feed(self, node: str, data: bytes) -> list[str]:
        """The lines of a node that have ended."""
        name = sanitize(node)
        return _named(name, self._readers.setdefault(name, LogCleaner(self._rank)).feed(data))

    def end(self) -> list[str]:
        """The last lines, if they have no end."""
        return [line for name, reader in self._readers.items() for line in _named(name, reader.end())]


def _named(name: str, pieces: Iterable[LogPiece]) -> list[str]:
    # A line of a node could pass for one of ours.
    return [f"{name} | {line[:_LONGEST_LINE]}" for piece in pieces for line in piece.text.split("\n")]
