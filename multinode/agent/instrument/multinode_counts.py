"""Counts the tokens of a batch that are no padding, without ever making the host wait for the device.

A count on a GPU is asked for at once and known later; whoever asked looks again (`poll`).
"""

from __future__ import annotations

from typing import Any, Callable, Optional

__all__ = ["Poll", "start_count"]

Poll = Callable[[], Optional[int]]
"""Returns the count, or None while it is not known yet."""


def start_count(torch: Any, mask: Any) -> Optional[Poll]:
    """Begin to count what is not zero in an attention mask; None where that cannot be had for nothing.

    A mask of more than a plain tensor (one spread over workers, as DTensor is) is left alone: to add it up could be a
    collective.
    """
    if type(mask) is not torch.Tensor:
        return None
    if mask.device.type == "cpu":
        count = int(torch.count_nonzero(mask))
        return lambda: count
    if mask.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return _start_on_gpu(torch, mask)
    return None


def _start_on_gpu(torch: Any, mask: Any) -> Poll:
    # Pinned memory, for without it the copy would wait; torch keeps it for the next such count.
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_(mask.ne(0).sum(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(mask.device))
    return lambda: int(host) if copied.query() else None
