"""torchrun: a script under torch.distributed.run with a static rendezvous.

Static with an IP by default: c10d with an IP endpoint fails where the hostname maps to loopback (docs/adr/0005).
"""

from __future__ import annotations

from multinode.core.run.command import Command
from multinode.core.run.engines.place import STRAY_VARIABLES, Place, directory_of, network_environment

__all__ = ["torchrun_command"]


def torchrun_command(place: Place, script: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `script` is the script and its arguments, `env` is the user's and wins.

    The interpreter is named in full rather than `torchrun`: which of several torchruns PATH finds is then no question.
    """
    variables = network_environment(place)
    return Command(
        argv=(
            place.python or "python3",
            "-m",
            "torch.distributed.run",
            f"--nnodes={place.nnodes}",
            f"--node-rank={place.node_rank}",
            f"--nproc-per-node={place.nproc}",
            f"--master-addr={place.master_addr}",
            f"--master-port={place.master_port}",
            *script,
        ),
        env=variables | env,
        unset=tuple(name for name in STRAY_VARIABLES if name not in variables),
        path_first=directory_of(place.python),
        cwd=cwd,
    )
