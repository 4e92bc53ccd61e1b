"""Files of one node, brought to another one over the training network."""

from __future__ import annotations

from collections.abc import Callable

from multinode.copy.chain import CopyProgress, CopyRound, Participant, find_failures, make_credentials


def copy_files(
    source: Participant,
    target: Participant,
    observe: Callable[[CopyProgress], None] = lambda _: None,
    *,
    share: float = 1.0,
) -> int:
    """Make the target's paths equal to the source's; returns the bytes that the target received.

    `observe` and `share` are those of `CopyRound`.

    Raises:
        NodeError: a node cannot be reached.
        NodeFailed: one of them cannot do its part, or has no room.
    """
    copy_round = CopyRound((source, target), make_credentials(), delete=False, observe=observe, share=share)
    copy_round.run()
    failures = find_failures(copy_round.members)
    errors = (*failures.certain.values(), *(() if failures.suspect is None else (failures.suspect[1],)))
    if errors:
        raise errors[0]
    return copy_round.members[-1].progress.moved_bytes
