"""The collectives that there are.

In a module named after that of torch in which a stack that waits for other ranks ends; not distributed_c10d, whose
functions the instrumentation replaces.
"""

from __future__ import annotations

import os

from .meeting import Member

_ranks: list[Member] = []


def get_rank() -> int:
    """This worker's rank."""
    return int(os.environ["RANK"])


def get_world_size() -> int:
    """How many workers there are."""
    return int(os.environ["WORLD_SIZE"])


def init_process_group(_backend: str = "gloo") -> None:
    """Meet all the other ranks; from then on they are waited for without end, or for $COLLECTIVE_TIMEOUT_S."""
    _ranks.append(Member("ranks", get_world_size(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    barrier()
    if "COLLECTIVE_TIMEOUT_S" in os.environ:
        _ranks[0].set_timeout(float(os.environ["COLLECTIVE_TIMEOUT_S"]))


def all_reduce(value: int) -> int:
    """The sum over all ranks."""
    return _ranks[0].add_up(value)


def barrier() -> None:
    """Wait for all ranks."""
    _ranks[0].add_up(0)


def destroy_process_group() -> None:
    """Leave."""
    _ranks.pop().close()
