"""Benchmark: what workers measure instead of training: collectives between them, or each its own device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import msgspec

from multinode.errors import UsageError

BACKENDS = ("nccl", "gloo", "xccl", "hccl")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
"""Named as in torch.distributed; sendrecv is nccl-tests' ring: each rank sends to the next while it receives."""
DTYPE_BYTES = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "half": 2, "bfloat16": 2, "float": 4, "double": 8}
REDOPS = ("sum", "prod", "max", "min", "avg")
LAUNCH_US = 30.0
"""A GPU call shorter than this ends before Python launches the next one: the time is that of the launch."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message to measure.

    Attributes:
        collective: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all` or `sendrecv`.
        size_bytes: size as in nccl-tests: size of the whole buffer that is reduced, gathered, scattered or sent.
        turns: number of parts into which to divide the iterations. The parts alternate with measurements of raw TCP
            from each node to the next. If 0, raw TCP is not measured.
    """

    collective: str = "all_reduce"
    size_bytes: int
    turns: int = 0


class CollectiveTest(msgspec.Struct, frozen=True, kw_only=True, tag="collective-test"):
    """A test of collectives over a list of message sizes.

    Attributes:
        messages: the messages to measure, in this order.
        dtype: `int8`, `uint8`, `int32`, `int64`, `half`, `bfloat16`, `float` or `double`.
        redop: `sum`, `prod`, `max`, `min` or `avg`. Only all_reduce and reduce_scatter use it.
        iters: timed iterations per message.
        min_iters: minimum number of timed iterations, if `iters` iterations would exceed `max_seconds`.
        max_seconds: time limit per message.
        warmup_iters: warm-up iterations per message.
        check: number of times to verify the result of each message. 0 disables this.
        backend: `nccl`, `gloo`, `xccl` (Intel) or `hccl` (Ascend). Default: the backend for the workers' accelerators.
    """

    training: ClassVar[None] = None  # it trains nothing
    messages: tuple[Message, ...]
    dtype: str = "float"
    redop: str = "sum"
    iters: int = 20
    min_iters: int = 5
    max_seconds: float = 5.0
    warmup_iters: int = 2
    check: int = 1
    backend: str | None = None


def check_choice(noun: str, choice: str, choices: Sequence[str]) -> str:
    """Return the choice.

    Raises:
        UsageError: it is not among the known ones.
    """
    if choice in choices:
        return choice
    hint = f"use one of {', '.join(choices)}"
    if noun != "collective" and choice in COLLECTIVES:
        hint += f"; to choose a collective, pass it without an option: multinode nccl-test {choice}"
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


class BenchedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest matrix product of a GPU that a bench measured."""

    gpu: str  # its name, as NVML or torch has it
    dtype: str  # of DEVICE_DTYPES
    tflops: float
    run_id: str  # of the bench


PHASES = ("alone", "together")
"""One worker at a time, node by node; or all at once."""


class DeviceTest(msgspec.Struct, frozen=True, kw_only=True, tag="device-test"):
    """What is measured on every worker's device."""

    training: ClassVar[None] = None  # it trains nothing
    kinds: tuple[str, ...] = TEST_KINDS  # of TEST_KINDS
    # of DEVICE_DTYPES; empty takes all that the device supports, and for layers the usual one for training
    dtypes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # rows of the square matrices; empty takes those that fit into the time
    seconds: float = 1.0  # time of each test
    repeats: int = 1  # number of passes over all tests
    turns: bool = False  # whether the workers of a node take turns, so that each measures alone


Benchmark: TypeAlias = CollectiveTest | DeviceTest


def describe_benchmark(test: Benchmark) -> str:
    """The benchmark in a few words, for people."""
    if isinstance(test, DeviceTest):
        return f"bench {' '.join(test.kinds)}"
    return f"nccl-test {' '.join(dict.fromkeys(message.collective for message in test.messages))}"
