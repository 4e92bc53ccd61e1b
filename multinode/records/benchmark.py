"""Benchmark: what workers measure instead of training: collectives between them, or each its own device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from multinode.errors import UsageError

BACKENDS = ("nccl", "gloo", "xccl", "hccl")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
"""Named as in torch.distributed; sendrecv is nccl-tests' ring: each rank sends to the next while it receives."""
DTYPE_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4, "double": 8}
REDOPS = ("sum", "prod", "max", "min", "avg")
LAUNCH_US = 30.0
"""A GPU call shorter than this ends before Python launches the next one: the time is that of the launch."""

_MOST_BYTES = 16 << 30
_MOST_SIZES = 1000
_TURNS = 5


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        collective: one of COLLECTIVES.
        size_bytes: S as nccl-tests counts it: of the whole buffer that is reduced, gathered, scattered or sent.
        turns: parts into which its iterations are split, each after raw TCP around the ring of nodes; 0 is none.
    """

    collective: str = "all_reduce"
    size_bytes: int
    turns: int = 0


class CollectiveTest(msgspec.Struct, frozen=True, kw_only=True, tag="collective-test"):
    """A size scan: collectives over messages.

    Attributes:
        messages: what is measured, in order.
        dtype: element type, a key of DTYPE_BYTES.
        redop: the reduction, one of REDOPS; used only by all_reduce and reduce_scatter.
        iters: timed iterations of each; fewer if they would exceed `max_seconds`, but at least `min_iters`.
        warmup_iters: iterations before them.
        check: how often the values of each are verified; 0 is never.
        backend: `nccl`, `gloo`, Intel's `xccl`, Ascend's `hccl`, or None for that of the worker's accelerator.
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
    """Reject a reduction that the element type does not support.

    Raises:
        UsageError: an average of integers, which backends round differently or reject.
    """
    if redop == "avg" and "int" in dtype:
        raise UsageError(
            f"avg is not defined for {dtype}", hint="use --op sum, or a floating-point type: --dtype float"
        )


def scan_sizes(begin_bytes: int, end_bytes: int, *, factor: int = 2, step_bytes: int | None = None) -> tuple[int, ...]:
    """Sizes from begin to end, each `factor` times the previous, or `step_bytes` more (nccl-tests' -b -e -f -i).

    Raises:
        UsageError: the range is empty, too long, or contains invalid sizes.
    """
    if begin_bytes <= 0:
        raise UsageError("the smallest size (-b) must be positive", hint="for example -b 8")
    if end_bytes < begin_bytes:
        raise UsageError("the largest size (-e) is smaller than the smallest (-b)", hint="for example -b 64K -e 64M")
    if end_bytes > _MOST_BYTES:
        raise UsageError("the largest size (-e) is above 16 GiB", hint="for example -e 128M")
    if step_bytes is not None and step_bytes <= 0:
        raise UsageError("the step (-i) must be positive", hint="for example -i 1M, or -f 2 instead")
    if factor < 2:  # noqa: PLR2004 - any smaller one would never end
        raise UsageError("the factor (-f) must be 2 or more", hint="for steps of equal size: -i 1M")
    if step_bytes is not None and (end_bytes - begin_bytes) // step_bytes >= _MOST_SIZES:
        raise UsageError(f"the step (-i) gives more than {_MOST_SIZES} sizes", hint="use a larger step, or -f 2")
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
    """The messages; the largest of each collective alternates with raw TCP, as the network is judged by it."""
    largest = {message.collective: message for message in sorted(messages, key=lambda message: message.size_bytes)}
    return tuple(
        msgspec.structs.replace(message, turns=_TURNS) if message is largest[message.collective] else message
        for message in messages
    )


def check_choice(noun: str, choice: str, choices: Sequence[str]) -> str:
    """Return the choice.

    Raises:
        UsageError: it is not among the known ones.
    """
    if choice in choices:
        return choice
    hint = f"one of {', '.join(choices)}"
    if noun != "collective" and choice in COLLECTIVES:
        hint += f"; give a collective without an option: multinode nccl-test {choice}"
    raise UsageError(f"unknown {noun} {choice!r}", hint=hint)


def time_left_s(test: CollectiveTest, done: int, time_us: float) -> float:
    """Estimated time for the remaining messages.

    A message takes longer than the last one in proportion to its size, and never less.

    Args:
        test: the test.
        done: number of messages measured, at least one.
        time_us: time of one iteration of the last one.
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
"""tf32: fp32 matrices multiplied by a GPU's tensor cores at tf32 precision."""
PHASES = ("alone", "together")
"""One worker at a time, node by node; or all at once."""

_LARGEST_SIZE = 1 << 16
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 600.0
_MOST_REPEATS = 1000


class DeviceTest(msgspec.Struct, frozen=True, kw_only=True, tag="device-test"):
    """What is measured on every worker's device."""

    kinds: tuple[str, ...] = TEST_KINDS  # of TEST_KINDS
    # of DEVICE_DTYPES; empty takes all that the device supports, and for layers the usual one for training
    dtypes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # rows of the square matrices; empty takes those that fit into the time
    seconds: float = 1.0  # time of each test
    repeats: int = 1  # number of passes over all tests
    turns: bool = False  # whether the workers of a node take turns, so that each measures alone


def make_device_test(
    *, kinds: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int], seconds: float, repeats: int
) -> DeviceTest:
    """The test that the command line asks for; empty kinds, dtypes or sizes take DeviceTest's defaults.

    Raises:
        UsageError: one is unknown or out of bounds.
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
