"""following: the commands below an answer on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.render.sheet import NextCommand


def _next_command(command: str) -> NextCommand:
    """The command that follows, and what it is for where its name does not say it."""
    is_tune = command.startswith("multinode tune ")
    return NextCommand(
        "Next", command, "measures the best changes that need no new hardware, in short runs" if is_tune else ""
    )


def following(details: str, command: str = "") -> Iterator[NextCommand]:
    """The commands below an answer: that of its details, and the next one; each is empty if there is none."""
    if details:
        yield NextCommand("Details", details, detail="brief")
    if command:
        yield _next_command(command)
