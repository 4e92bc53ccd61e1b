"""Names of runs: the one that people use, and what it is called on each node."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence


def make_run_id() -> str:
    """A name that sorts by date and that no two runs share."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def node_run_id(run_id: str, node_rank: int) -> str:
    """What a run is called on one node: nodes may share a home directory, and with it the place of their runs."""
    return f"{run_id}.{node_rank}"


def parse_node_run_id(name: str) -> str:
    """The run id in what a run is called on a node."""
    return re.sub(r"\.\d+$", "", name)


def match_runs(names: Sequence[str], begin: str) -> list[str]:
    """Those of the names that somebody means who gives an id, or the beginning of one; one is what it should be.

    Parts of a run are named after it, as attempts or what is compared: whoever names it means it.
    """
    if begin in names:
        return [begin]
    matching = [name for name in names if name.startswith(begin)]
    first = min(matching, key=len, default="")
    return [first] if matching and all(name == first or name.startswith(f"{first}-") for name in matching) else matching
