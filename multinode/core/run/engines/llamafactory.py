"""LLaMA-Factory: `llamafactory-cli train`, which starts torchrun itself from the variables set here.

Also how the other engines start its workers: its launcher is a module that trains when a worker runs it.
"""

from __future__ import annotations

import re

from multinode.core.run.command import Command
from multinode.core.run.engines.place import STRAY_VARIABLES, Place, directory_of, network_environment

__all__ = ["JOB_FILE", "llamafactory_command", "llamafactory_worker", "reads_rank"]

JOB_FILE = "job.yaml"

# torchrun, accelerate and DeepSpeed's launcher all take a module after `--module`.
_WORKER = ("--module", "llamafactory.launcher")

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
        path_first=directory_of(place.python),
        cwd=cwd,
    )


def llamafactory_worker(place: Place) -> tuple[str, ...]:
    """What another engine is given in place of a script."""
    return (*_WORKER, f"{place.run_dir}/{JOB_FILE}")


def reads_rank(version: str | None) -> bool:
    """Whether this release reads the node's rank from RANK, or might (unknown version)."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is None or tuple(int(n) for n in numbers.groups()) < _NODE_RANK_SINCE
