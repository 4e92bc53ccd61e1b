"""DeepSpeed: its per-node launcher, with our ranks. Its runner, which starts nodes through pdsh or ssh, is left out."""

from __future__ import annotations

import base64
import json

from multinode.core.run.command import Command
from multinode.core.run.engines.place import STRAY_VARIABLES, Place, directory_of, network_environment
from multinode.errors import UsageError

__all__ = ["deepspeed_command"]

_DEVICES = "CUDA_VISIBLE_DEVICES"


def deepspeed_command(place: Place, program: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `program` is the launcher's options, if any, the script and its arguments.

    As under `deepspeed`, the script is given `--local_rank=N` first; `--no_local_rank` before it switches that off.

    Raises:
        UsageError: the user's own CUDA_VISIBLE_DEVICES has too few devices.
    """
    variables = network_environment(place) | env
    return Command(
        argv=(
            place.python or "python3",
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={_world_info(place, variables)}",
            f"--node_rank={place.node_rank}",
            f"--master_addr={place.master_addr}",
            f"--master_port={place.master_port}",
            *program,
        ),
        env=variables,
        unset=tuple(name for name in STRAY_VARIABLES if name not in variables),
        path_first=directory_of(place.python),
        cwd=cwd,
    )


def _world_info(place: Place, env: dict[str, str]) -> str:
    """Node names and the devices of each, in node-rank order, as the launcher reads them.

    The launcher sets CUDA_VISIBLE_DEVICES to the devices of its own node and counts those of the others, nothing more.
    """
    others = list(range(place.nproc))
    world = {f"node-{rank}": others for rank in range(place.nnodes)} | {f"node-{place.node_rank}": _devices(place, env)}
    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()


def _devices(place: Place, env: dict[str, str]) -> list[int] | list[str]:
    """As many devices as workers: those that the environment names, which may be UUIDs, else the first ones."""
    if _DEVICES not in env:
        return list(range(place.nproc))
    named = [name.strip() for name in env[_DEVICES].split(",") if name.strip()]
    if len(named) < place.nproc:
        raise UsageError(
            f"{_DEVICES} names {len(named)} devices on node rank {place.node_rank}, which has {place.nproc} workers",
            hint=f"--workers-per-node {len(named)}" if named else "DeepSpeed's launcher wants a device for each worker",
        )
    return named[: place.nproc]
