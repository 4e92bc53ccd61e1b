"""The test of each device, as the command line gives it."""

from __future__ import annotations

from typing import Any

import pytest

from multinode.bench.measure import make_device_test
from multinode.errors import UsageError
from multinode.records.benchmark import DeviceTest, describe_benchmark


def make(**asked: Any) -> DeviceTest:
    defaults: dict[str, Any] = {"kinds": (), "dtypes": (), "sizes": (), "seconds": 1.0, "repeats": 1}
    return make_device_test(**(defaults | asked))


def test_nothing_asked_for_is_everything_that_the_device_has() -> None:
    assert make() == DeviceTest()
    assert describe_benchmark(make()) == "bench matmul memory layers"


def test_what_is_asked_for_twice_is_measured_once_and_small_matrices_come_first() -> None:
    test = make(kinds=("memory", "matmul", "memory"), dtypes=("bf16", "bf16"), sizes=(4096, 512, 4096))
    assert (test.kinds, test.dtypes, test.sizes) == (("memory", "matmul"), ("bf16",), (512, 4096))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kinds": ("matmuls",)}, "unknown test 'matmuls'"),
        ({"dtypes": ("fp8",)}, "unknown dtype 'fp8'"),
        ({"sizes": (0,)}, "--size 0: matrices have 1 to 65536 rows"),
        ({"sizes": (1 << 20,)}, "--size 1048576: matrices have"),
        ({"seconds": 0.0}, "--seconds 0: each test takes 0.05 to 600 s"),
        ({"seconds": float("nan")}, "--seconds nan: each test takes"),
        ({"repeats": 0}, "--repeats 0: expected 1 to 1000"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**asked)
    assert said in caught.value.message
