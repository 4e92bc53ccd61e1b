"""Step estimate: which messages of a step are worth measuring, and what its communication takes by measured times.

Owns neither the messages nor the measuring; how a time between two measured sizes is read is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from multinode.analyse.job.step_messages import StepMessages
from multinode.core.measure.benchmark import Message

__all__ = ["estimate_step_us", "messages_to_test"]

# Sizes that differ by less take the same time, as far as a measurement tells.
_ALIKE = 0.05
# Above this a collective's bandwidth no longer changes, and the buffers of a test crowd the memory of a node.
_LARGEST_BYTES = 1 << 30


def messages_to_test(
    step: StepMessages, *, most: int, largest_bytes: int = _LARGEST_BYTES, multiple: int = 1
) -> tuple[Message, ...]:
    """The messages to measure for a step: each collective's sizes, ascending, those that are alike as one.

    Of alike sizes the commonest is taken. Where there are too many, the one of each collective that carries most bytes
    in all is kept, then of the others those that carry most.

    Args:
        step: what a step sends.
        most: how many messages there may be.
        largest_bytes: messages above it are measured at this size.
        multiple: of bytes, that each size is rounded up to: element size times workers makes every collective even.
    """
    times: dict[str, Counter[int]] = {}
    for one in step.messages:
        size = -(-min(one.size_bytes, largest_bytes) // multiple) * multiple
        times.setdefault(one.collective, Counter())[size] += one.times
    totals = {
        Message(collective=collective, size_bytes=size): size * count
        for collective, counts in times.items()
        for size, count in _merged(counts).items()
    }
    heaviest = sorted(totals, key=lambda message: totals[message], reverse=True)
    # The heaviest of each collective before the second of any: without one, its time could not even be guessed.
    firsts = list({message.collective: message for message in reversed(heaviest)}.values())
    kept = sorted(heaviest, key=lambda message: message not in firsts)[:most]
    order = list(times)
    return tuple(sorted(kept, key=lambda message: (order.index(message.collective), message.size_bytes)))


def estimate_step_us(step: StepMessages, time_of: Callable[[str, int], float | None]) -> float | None:
    """Communication of one step if nothing hid behind the computation, in us: the sum of what its calls take alone.

    Args:
        step: what a step sends.
        time_of: what a collective of so many bytes takes, in us; None where that cannot be told.

    Returns:
        None where the time of a message cannot be told.
    """
    total_us = 0.0
    for one in step.messages:
        time_us = time_of(one.collective, one.size_bytes)
        if time_us is None:
            return None
        total_us += one.times * time_us
    return total_us


def _merged(counts: Counter[int]) -> Counter[int]:
    """Counts by size, those of alike sizes at the commonest of them; of equally common ones, at the largest."""
    merged: Counter[int] = Counter()
    for size, count in sorted(counts.items(), key=lambda each: (each[1], each[0]), reverse=True):
        merged[_alike(size, merged)] += count
    return merged


def _alike(size: int, others: Iterable[int]) -> int:
    return next((other for other in others if abs(other - size) < _ALIKE * max(other, size)), size)
