"""Place: where a node's workers stand in the job; what every engine lays out. Also what all engines set and unset."""

from __future__ import annotations

import msgspec

__all__ = ["STRAY_VARIABLES", "Place", "directory_of", "network_environment"]

# Left over in a profile, each of these changes a run behind the launcher's back (torchrun reads PET_* as its options).
STRAY_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_*",
    "TORCHELASTIC_*",
)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a job.

    Attributes:
        nproc: workers on each node.
        master_addr: address of node 0.
        master_port: port of the rendezvous there.
        ifname: this node's data-plane interface; None is unknown.
        gpus: GPU ids for its workers; None leaves the choice to the engine.
        run_dir: the run's directory on the node.
        python: the job's interpreter on the node; None is `python3` of its PATH.
        packages: versions in the job's environment; None is unknown.
        agent: the agent's archive on the node, where the job runs it.
    """

    node_rank: int
    nnodes: int
    nproc: int
    master_addr: str
    master_port: int
    ifname: str | None
    gpus: tuple[int, ...] | None
    run_dir: str
    python: str | None
    packages: dict[str, str] | None
    agent: str | None = None


def network_environment(place: Place) -> dict[str, str]:
    """Variables that every engine needs: devices, rendezvous, and the interface of NCCL and gloo.

    `NCCL_SOCKET_IFNAME` without `=` is a prefix (eth1 would take eth10); gloo takes the plain name.
    """
    env: dict[str, str] = {}
    if place.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in place.gpus)
    if place.ifname is not None:
        env["NCCL_SOCKET_IFNAME"] = f"={place.ifname}"
        env["GLOO_SOCKET_IFNAME"] = place.ifname
    env["NCCL_DEBUG"] = "INFO"
    env["NCCL_DEBUG_FILE"] = f"{place.run_dir}/nccl.%h.%p.log"
    env["MASTER_ADDR"] = place.master_addr
    env["MASTER_PORT"] = str(place.master_port)
    env["PYTHONUNBUFFERED"] = "1"
    return env


def directory_of(python: str | None) -> str | None:
    """The interpreter's directory, where its programs are; None where it is a bare name, or not known."""
    return python.rsplit("/", 1)[0] if python is not None and "/" in python else None
