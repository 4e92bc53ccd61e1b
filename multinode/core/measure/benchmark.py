"""Benchmark: what workers measure instead of training: the collectives between them, or each its own device."""

from __future__ import annotations

from typing import TypeAlias

from multinode.core.measure.collective_test import CollectiveTest, describe_test
from multinode.core.measure.device_test import DeviceTest, describe_device_test

__all__ = ["Benchmark", "describe_benchmark"]

Benchmark: TypeAlias = CollectiveTest | DeviceTest


def describe_benchmark(test: Benchmark) -> str:
    """The benchmark in a few words, for people."""
    return describe_device_test(test) if isinstance(test, DeviceTest) else describe_test(test)
