"""LLaMA-Factory: `llamafactory-cli train`, which starts torchrun itself from the variables set here."""

from __future__ import annotations

import re

from multinode.core.command import Command
from multinode.core.engines.place import STRAY_VARIABLES, Place, network_environment

__all__ = ["JOB_FILE", "llamafactory_command", "reads_rank"]

JOB_FILE = "job.yaml"

# From this release on the node's rank is read from NODE_RANK; before it from RANK (LLaMA-Factory's launcher).
_NODE_RANK_SINCE = (0, 9, 1)


def llamafactory_command(place: Place, env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `env` is the user's and wins.

    FORCE_TORCHRUN is always set: with one GPU a node, LLaMA-Factory otherwise ignores NNODES without a word and every
    node trains alone (LlamaFactory#8729). It runs a bare `torchrun`, so the interpreter's directory goes first on PATH.
    """
    variables = network_environment(place)
    variables["NNODES"] = str(place.nnodes)
    variables["NODE_RANK"] = str(place.node_rank)
    if reads_rank((place.packages or {}).get("llamafactory")):
        variables["RANK"] = str(place.node_rank)
    variables["NPROC_PER_NODE"] = str(place.nproc)
    variables["FORCE_TORCHRUN"] = "1"
    return Command(
        argv=("llamafactory-cli", "train", f"{place.run_dir}/{JOB_FILE}"),
        env=variables | env,
        unset=tuple(name for name in STRAY_VARIABLES if name not in variables),
        path_first=_directory(place.python),
        cwd=cwd,
    )


def reads_rank(version: str | None) -> bool:
    """Whether this release reads the node's rank from RANK, or might (unknown version)."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is None or tuple(int(n) for n in numbers.groups()) < _NODE_RANK_SINCE


def _directory(python: str | None) -> str | None:
    return python.rsplit("/", 1)[0] if python is not None and "/" in python else None
