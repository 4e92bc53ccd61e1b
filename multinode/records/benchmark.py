"""Benchmark: what workers measure instead of training: the collectives between them, or each its own device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from multinode.errors import UsageError

BACKENDS = ("nccl", "gloo", "xccl", "hccl")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
"""As torch.distributed has them; sendrecv is nccl-tests' ring: each rank sends to the next, and receives meanwhile."""
DTYPE_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4, "double": 8}
REDOPS = ("sum", "prod", "max", "min", "avg")
LAUNCH_US = 30.0
"""A call on a GPU that takes less than this is over before Python has launched the next: the time is the launch's."""

_MOST_BYTES = 16 << 30
_MOST_SIZES = 1000
_TURNS = 5


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure.

    Attributes:
        collective: one of COLLECTIVES.
        size_bytes: S as nccl-tests counts it: of the whole buffer that is reduced, gathered, scattered or sent.
        turns: parts into which its iterations are cut, with raw TCP around the ring of nodes before each; 0 is none.
    """

    collective: str = "all_reduce"
    size_bytes: int
    turns: int = 0


class CollectiveTest(msgspec.Struct, frozen=True, kw_only=True, tag="collective-test"):
    """A size scan: collectives over messages.

    Attributes:
        messages: what is measured, in this order.
        dtype: element type, a key of DTYPE_BYTES.
        redop: the reduction, one of REDOPS; it matters to all_reduce and reduce_scatter alone.
        iters: timed iterations of each; fewer where they would take longer than `max_seconds`, never under `min_iters`.
        warmup_iters: iterations before them.
        check: how many times the values of each are verified; 0 does not.
        backend: `nccl`, `gloo`, Intel's `xccl`, Ascend's `hccl`, or None: that of the worker's accelerator.
    """

    messages: tuple[Message, ...]
    dtype: str = "float"
    redop: str = "sum"
    iters: int = 20
    min_iters: int = 5
    max_seconds: float = 5.0
    warmup_iters: int = 2
    check: int = 1
    backend: str | None = None


def check_reduction(redop: str, dtype: str) -> None:
    """Refuse a reduction that the element type does not have.

    Raises:
        UsageError: an average of integers, which backends round in ways of their own or refuse.
    """
    if redop == "avg" and "int" in dtype:
        raise UsageError(f"there is no avg of {dtype}", hint="--op sum, or a type with fractions: --dtype float")


def scan_sizes(begin_bytes: int, end_bytes: int, *, factor: int = 2, step_bytes: int | None = None) -> tuple[int, ...]:
    """Sizes from begin to end, each `factor` times the one before, or `step_bytes` more (nccl-tests' -b -e -f -i).

    Raises:
        UsageError: the range is empty, holds what no message can be, or more sizes than anyone waits for.
    """
    if begin_bytes <= 0:
        raise UsageError("the smallest size (-b) must be above zero", hint="for example -b 8")
    if end_bytes < begin_bytes:
        raise UsageError("the largest size (-e) is below the smallest (-b)", hint="for example -b 64K -e 64M")
    if end_bytes > _MOST_BYTES:
        raise UsageError("the largest size (-e) is above 16 GiB", hint="for example -e 128M")
    if step_bytes is not None and step_bytes <= 0:
        raise UsageError("the step (-i) must be above zero", hint="for example -i 1M, or -f 2 instead")
    if factor < 2:  # noqa: PLR2004 - any smaller one would never end
        raise UsageError("the factor (-f) must be 2 or more", hint="for steps of equal size: -i 1M")
    if step_bytes is not None and (end_bytes - begin_bytes) // step_bytes >= _MOST_SIZES:
        raise UsageError(f"the step (-i) makes more than {_MOST_SIZES} sizes", hint="a larger one, or -f 2 instead")
    sizes = []
    size = begin_bytes
    while size <= end_bytes:
        sizes.append(size)
        size = size * factor if step_bytes is None else size + step_bytes
    return tuple(sizes)


def scan_messages(collectives: Iterable[str], sizes_bytes: Sequence[int]) -> tuple[Message, ...]:
    """Every size of every collective.

    Raises:
        UsageError: a collective is unknown.
    """
    names = [check_choice("collective", name, COLLECTIVES) for name in dict.fromkeys(collectives)]
    return tuple(Message(collective=name, size_bytes=size) for name in names for size in sizes_bytes)


def in_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, the largest of each collective in turns with raw TCP: it is what the network is judged by."""
    largest = {message.collective: message for message in sorted(messages, key=lambda message: message.size_bytes)}
    return tuple(
        msgspec.structs.replace(message, turns=_TURNS) if message is largest[message.collective] else message
        for message in messages
    )


def check_choice(what: str, asked: str, known: Sequence[str]) -> str:
    """What was asked for.

    Raises:
        UsageError: it is not one of those that are known.
    """
    if asked in known:
        return asked
    hint = f"one of {', '.join(known)}"
    if what != "collective" and asked in COLLECTIVES:
        hint += f"; a collective is named without an option: multinode nccl-test {asked}"
    raise UsageError(f"unknown {what} {asked!r}", hint=hint)


def time_left_s(test: CollectiveTest, done: int, time_us: float) -> float:
    """A guess of how long the messages take that are still to be measured.

    A message is taken to need as much longer than the last one as it is larger, and never less.

    Args:
        test: the test.
        done: how many messages are measured, at least one.
        time_us: what one iteration of the last of them took.
    """
    total_us = 0.0
    last = test.messages[done - 1]
    for message in test.messages[done:]:
        one_us = time_us * max(1.0, message.size_bytes / last.size_bytes)
        iters = min(test.iters, max(test.min_iters, int(test.max_seconds * 1e6 / one_us))) if one_us > 0 else test.iters
        total_us += one_us * (iters + test.warmup_iters + test.check + 1)
    return total_us / 1e6


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


Benchmark: TypeAlias = CollectiveTest | DeviceTest


def describe_benchmark(test: Benchmark) -> str:
    """The benchmark in a few words, for people."""
    if isinstance(test, DeviceTest):
        return f"bench {' '.join(test.kinds)}"
    return f"nccl-test {' '.join(dict.fromkeys(message.collective for message in test.messages))}"
