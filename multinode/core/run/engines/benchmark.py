"""A benchmark: torchrun on the agent's own archive, with the request in the environment."""

from __future__ import annotations

import msgspec

from multinode.core.measure.benchmark import Benchmark, DeviceTest
from multinode.core.run.command import Command
from multinode.core.run.engines.place import Place
from multinode.core.run.engines.torchrun import torchrun_command

__all__ = ["benchmark_command"]


def benchmark_command(place: Place, test: Benchmark, env: dict[str, str]) -> Command:
    """The command of one node; NCCL writes down how it connects, unless the user settled what it writes."""
    request = msgspec.json.encode(test).decode()
    program = "devices" if isinstance(test, DeviceTest) else "collectives"
    return torchrun_command(place, (place.agent or "agent.pyz", program), env | {"MULTINODE_REQUEST": request}, None)
