"""The collective benchmark: torchrun on the agent's own archive, with the request in the environment."""

from __future__ import annotations

import msgspec

from multinode.core.collective_test import CollectiveTest
from multinode.core.command import Command
from multinode.core.engines.place import Place
from multinode.core.engines.torchrun import torchrun_command

__all__ = ["collective_command"]


def collective_command(place: Place, test: CollectiveTest, env: dict[str, str]) -> Command:
    """The command of one node; NCCL writes down how it connects, unless the user settled what it writes."""
    request = msgspec.json.encode(test).decode()
    script = (place.agent or "agent.pyz", "collectives")
    return torchrun_command(place, script, env | {"MULTINODE_REQUEST": request}, None)
