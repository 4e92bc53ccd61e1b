"""Why the sides of a contrast are laid out as they are, in words."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.units import format_count, format_list

ASKED = "asked for with --mode"


def compared_words(candidate: str, baseline: str) -> str:
    """Of two stored runs, by their ids."""
    return f"run {candidate} against run {baseline}"


def named_words(gpus: int) -> str:
    """So many GPUs are named for the baseline."""
    return f"--baseline-gpus names {gpus} GPUs of node 0"


def enough_words(first: Sequence[int], most: int) -> str:
    """The slots of the first nodes suffice for the workers of all."""
    where = "node 0 has" if len(first) == 1 else f"the first {len(first)} nodes have"
    return f"{where} {sum(first)} slots, enough for the workers of all {most} nodes"


def too_few_words(first: Sequence[int], workers: int, most: int) -> str:
    """They do not."""
    one = len(first) == 1
    where = f"node 0 has slots={first[0]}" if one else f"the first {len(first)} nodes have {sum(first)} slots"
    return f"{where}, too few for {format_count(workers, 'worker')} of each of the {most} nodes"


def uneven_words(counts: Sequence[int]) -> str:
    """No number of workers divides among these numbers of nodes."""
    numbers = format_list([str(count) for count in counts])
    return f"no number of workers that these nodes can have divides among {numbers} nodes"
