"""command: any program, started once on each node, with its place in the cluster in the environment.

Names are torchrun's. RANK, LOCAL_RANK and WORLD_SIZE are a worker's, and whoever starts the workers sets them.
"""

from __future__ import annotations

from multinode.core.run.command import Command
from multinode.core.run.engines.place import STRAY_VARIABLES, Place, directory_of, network_environment

__all__ = ["program_command"]


def program_command(place: Place, argv: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `env` is the user's and wins."""
    variables = network_environment(place)
    variables["NNODES"] = str(place.nnodes)
    variables["NODE_RANK"] = str(place.node_rank)
    variables["NPROC_PER_NODE"] = str(place.nproc)
    return Command(
        argv=argv,
        env=variables | env,
        unset=tuple(name for name in STRAY_VARIABLES if name not in variables),
        path_first=directory_of(place.python),
        cwd=cwd,
    )
