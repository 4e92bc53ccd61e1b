"""Variables of the controller's shell that would change a training, and that its plan does not take over."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multinode.cluster.accelerators import ACCELERATORS, VISIBLE_DEVICES
from multinode.records.plan import LaunchPlan

# Read by torch and the libraries for communication; where something is installed on this machine is no setting.
_LIBRARIES = re.compile(r"(?:NCCL|RCCL|GLOO|HCCL|CCL|TORCH|PYTORCH|CUDA)_\w+|OMP_NUM_THREADS")
_INSTALLED = re.compile(r"\w+_(?:HOME|PATH|ROOT|DIR|VERSION|CACHE|FILE|LIB|INCLUDE|BIN|ARCH_LIST)|CUDA_INC_\w+")
_SOCKETS = frozenset(name for accelerator in ACCELERATORS for name in accelerator.sockets) | {"GLOO_SOCKET_IFNAME"}


def unused_variables(environ: Mapping[str, str], plan: LaunchPlan) -> list[str]:
    """Each as `NAME=VALUE (what sets it)`, in the order of `environ`.

    Args:
        environ: of the controller.
        plan: of the run; its variables, GPUs, workers and port are what the run uses.
    """
    own = {
        "MASTER_PORT": ([str(plan.rendezvous.port)], "--master-port {}"),
        "NNODES": ([str(len(plan.nodes))], "--nodes {}"),
        "NPROC_PER_NODE": (list(map(str, plan.workers)), "--workers-per-node {}"),
        **dict.fromkeys(
            VISIBLE_DEVICES,
            ([",".join(map(str, node.gpus or ())) for node in plan.nodes], "gpus={} in the hostfile"),
        ),
        **dict.fromkeys(_SOCKETS, ([], "ifname={} in the hostfile")),
    }
    shown = []
    for name, value in environ.items():
        used, way = own.get(name, ([], f"--env {name}" if _is_setting(name) else ""))
        plain = value.removeprefix("=")
        given = used or [node.command.env.get(name, "").removeprefix("=") for node in plan.nodes]
        if way and plain and any(text != plain for text in given):
            shown.append(f"{name}={value} ({way.format(plain)})")
    return shown


def _is_setting(name: str) -> bool:
    return _LIBRARIES.fullmatch(name) is not None and _INSTALLED.fullmatch(name) is None
