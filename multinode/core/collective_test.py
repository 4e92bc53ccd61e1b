"""CollectiveTest: what `nccl-test` asks the workers to measure. A job like any other, run by torchrun on the agent."""

from __future__ import annotations

import msgspec

from multinode.errors import UsageError

__all__ = ["BACKENDS", "CollectiveTest", "check_backend", "sweep_sizes"]

BACKENDS = ("nccl", "gloo")

_MOST_BYTES = 16 << 30


class CollectiveTest(msgspec.Struct, frozen=True, kw_only=True, tag="collective-test"):
    """A sweep of one collective.

    Attributes:
        sizes_bytes: the message sizes.
        iters: timed iterations of each; fewer where they would take longer than `max_seconds`, never under `min_iters`.
        warmup_iters: iterations before them.
        backend: `nccl`, `gloo`, or None: nccl where the worker has a GPU.
    """

    sizes_bytes: tuple[int, ...]
    iters: int = 20
    min_iters: int = 5
    max_seconds: float = 5.0
    warmup_iters: int = 2
    backend: str | None = None


def sweep_sizes(begin_bytes: int, end_bytes: int, factor: int) -> tuple[int, ...]:
    """Sizes from begin to end, each `factor` times the one before, as nccl-tests' -b -e -f.

    Raises:
        UsageError: the range is empty, or holds what no message can be.
    """
    if begin_bytes <= 0:
        raise UsageError("the smallest size must be above zero", hint="for example -b 8")
    if end_bytes < begin_bytes:
        raise UsageError("the largest size (-e) is below the smallest (-b)", hint="for example -b 64K -e 64M")
    if end_bytes > _MOST_BYTES:
        raise UsageError("the largest size is above 16 GiB", hint="for example -e 128M")
    if factor < 2:  # noqa: PLR2004 - any smaller one would never end
        raise UsageError("the factor (-f) must be 2 or more")
    sizes = []
    size = begin_bytes
    while size <= end_bytes:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def check_backend(backend: str | None) -> str | None:
    """The backend that was asked for.

    Raises:
        UsageError: it is neither nccl nor gloo.
    """
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    return backend
