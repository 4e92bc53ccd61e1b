"""Names of runs: the one that people use, and what it is called on each node."""

from __future__ import annotations

import secrets
import time

__all__ = ["make_run_id", "node_run_id"]


def make_run_id() -> str:
    """A name that sorts by date and that no two runs share."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def node_run_id(run_id: str, node_rank: int) -> str:
    """What a run is called on one node: nodes may share a home directory, and with it the place of their runs."""
    return f"{run_id}.{node_rank}"
