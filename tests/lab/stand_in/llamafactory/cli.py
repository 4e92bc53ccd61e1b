"""Stands in for llamafactory-cli: starts torchrun with the variables of this node, and a worker for the YAML."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

_OPTIONS = {
    "--nnodes": "NNODES",
    "--node-rank": "NODE_RANK",
    "--nproc-per-node": "NPROC_PER_NODE",
    "--master-addr": "MASTER_ADDR",
    "--master-port": "MASTER_PORT",
}


def main() -> NoReturn:
    """`llamafactory-cli train job.yaml`."""
    _, verb, job = sys.argv
    if verb != "train" or os.environ.get("FORCE_TORCHRUN") != "1":
        sys.exit(f"{verb}: nothing but a training under torchrun has a stand-in")
    options = [f"{option}={os.environ[variable]}" for option, variable in _OPTIONS.items()]
    argv = [sys.executable, "-m", "torch.distributed.run", *options, str(Path(__file__).with_name("worker.py")), job]
    os.execv(sys.executable, argv)  # noqa: S606 - the process is to become torchrun
