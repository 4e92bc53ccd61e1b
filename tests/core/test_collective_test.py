from __future__ import annotations

import pytest

from multinode.core.collective_test import check_backend, sweep_sizes
from multinode.errors import UsageError


def test_sizes_go_from_begin_to_end_by_the_factor() -> None:
    assert sweep_sizes(8, 128, 2) == (8, 16, 32, 64, 128)
    assert sweep_sizes(8, 100, 4) == (8, 32)
    assert sweep_sizes(64, 64, 2) == (64,)


@pytest.mark.parametrize(
    ("begin", "end", "factor", "said"),
    [
        (0, 8, 2, "above zero"),
        (16, 8, 2, "below the smallest"),
        (8, 1 << 40, 2, "above 16 GiB"),
        (8, 16, 1, "2 or more"),
    ],
)
def test_a_range_that_is_none(begin: int, end: int, factor: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sweep_sizes(begin, end, factor)


def test_a_backend_is_nccl_or_gloo_or_left_open() -> None:
    assert [check_backend(name) for name in ("nccl", "gloo", None)] == ["nccl", "gloo", None]
    with pytest.raises(UsageError, match="unknown backend 'mpi'"):
        check_backend("mpi")
