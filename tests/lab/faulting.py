"""Faults of the lab while a test runs, and a client that sees whether a node answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess

from multinode.lab.cluster import require_lab
from multinode.lab.nodes import SSH_CONFIG
from tests.equipment.faults import Fault, clear_faults, make_fault

from .conftest import DEADLINE_S

Command = Callable[..., CompletedProcess[str]]
Make = Callable[[Fault], None]


def quick_ssh(node: str) -> CompletedProcess[str]:
    """A client that does not wait long."""
    options = ["-F", str(SSH_CONFIG), "-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
    return subprocess.run(
        ["ssh", *options, node, "hostname"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@contextmanager
def faults(*made: Fault) -> Iterator[None]:
    """While inside, the lab has these faults."""
    lab = require_lab()
    try:
        for fault in made:
            make_fault(lab, fault)
        yield
    finally:
        clear_faults(lab)
