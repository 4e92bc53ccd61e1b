"""DeviceTest: what `bench` asks each worker to measure of its own device. A job like any other, run on the agent.

How the devices are compared, and what their data sheets say, is the analysis' business.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from multinode.core.measure.collective_test import check_choice
from multinode.errors import UsageError

__all__ = ["DEVICE_DTYPES", "PHASES", "TEST_KINDS", "DeviceTest", "describe_device_test", "make_device_test"]

TEST_KINDS = ("matmul", "memory", "layers")
"""Matrix products; memory bandwidth; one layer each of BERT-large, GPT-2 medium and T5-large."""
DEVICE_DTYPES = ("fp32", "tf32", "fp16", "bf16")
"""tf32 are fp32 matrices that a GPU's tensor cores multiply with the precision of tf32."""
PHASES = ("alone", "together")
"""One worker after the other, on one node after the other; or all of them at once."""

_LARGEST_SIZE = 1 << 16
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 600.0
_MOST_REPEATS = 1000


class DeviceTest(msgspec.Struct, frozen=True, kw_only=True, tag="device-test"):
    """What is measured on every worker's device.

    Attributes:
        kinds: of TEST_KINDS.
        dtypes: of DEVICE_DTYPES; empty takes all that the device has, and for layers the one that trainings use there.
        sizes: rows of the square matrices; empty takes those that fit into the time.
        seconds: for which each test is timed.
        repeats: how often all tests are gone through.
        turns: whether the workers of a node wait for each other, so that each measures alone.
    """

    kinds: tuple[str, ...] = TEST_KINDS
    dtypes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    seconds: float = 1.0
    repeats: int = 1
    turns: bool = False


def make_device_test(
    *, kinds: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int], seconds: float, repeats: int
) -> DeviceTest:
    """The test of what the command line asks for; nothing of kinds, dtypes or sizes takes what DeviceTest has.

    Raises:
        UsageError: one of them is not known, or is out of bounds.
    """
    chosen = tuple(check_choice("test", kind, TEST_KINDS) for kind in dict.fromkeys(kinds))
    wrong = next((size for size in sizes if not 0 < size <= _LARGEST_SIZE), None)
    if wrong is not None:
        raise UsageError(
            f"--size {wrong}: matrices have from 1 to {_LARGEST_SIZE} rows", hint="for example --size 4096"
        )
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds {seconds:g}: each test takes from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} s")
    if not 0 < repeats <= _MOST_REPEATS:
        raise UsageError(f"--repeats {repeats}: from 1 to {_MOST_REPEATS}")
    return DeviceTest(
        kinds=chosen or TEST_KINDS,
        dtypes=tuple(check_choice("dtype", dtype, DEVICE_DTYPES) for dtype in dict.fromkeys(dtypes)),
        sizes=tuple(sorted(set(sizes))),
        seconds=seconds,
        repeats=repeats,
    )


def describe_device_test(test: DeviceTest) -> str:
    """The test in a few words, for people."""
    return f"bench {' '.join(test.kinds)}"
