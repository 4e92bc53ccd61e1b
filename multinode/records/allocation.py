"""The nodes that a scheduler gave this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from multinode.cluster.allocation import MPI_HOSTFILE, scheduled_hostfile
from multinode.cluster.cluster import Cluster
from multinode.errors import UsageError
from multinode.records.files import read_text
from multinode.records.hostfile import HINT
from multinode.transport.slurm import read_allocation

# More would push away what follows; a run keeps them all.
_SHOWN_NODES = 32


def load_allocation(environ: Mapping[str, str], note: Callable[[str], None]) -> tuple[Cluster, str]:
    """The nodes that a scheduler gave this process, and their hostfile, which `note` is told.

    Raises:
        UsageError: none did, or what it says cannot be understood.
        ConnectError: slurmctld does not answer.
    """
    in_slurm = read_allocation(environ)
    scheduled = (
        ("Slurm", *in_slurm)
        if in_slurm is not None
        else scheduled_hostfile(
            environ,
            lambda path: Path(path).expanduser().exists(),
            lambda path: read_text(Path(path), "the scheduler's list of nodes", HINT),
        )
    )
    if scheduled is None:
        raise UsageError(
            "--hosts auto: this shell has no nodes from a scheduler: SLURM_JOB_ID, DSTACK_NODES_IPS, "
            f"SKYPILOT_NODE_IPS, PBS_NODEFILE and OAR_NODEFILE are not set, and there is no {MPI_HOSTFILE}",
            hint="in Slurm: salloc -N2 multinode ..., or: multinode submit -N2 -- launch ...",
        )
    scheduler, cluster, text = scheduled
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    more = [f"... and {len(lines) - _SHOWN_NODES} more"] if len(lines) > _SHOWN_NODES else []
    note("\n  ".join([f"hostfile from {scheduler}:", *lines[:_SHOWN_NODES], *more]))
    return cluster, text
