"""Workers of one of the agent's benchmarks on this machine, under torchrun or as torchrun starts them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.warm import ColdProcess, WarmProcess, free_port

DEADLINE_S = 600.0


def records_of(run_dir: Path, kind: str, rank: int) -> list[dict[str, Any]]:
    """What a worker wrote down of this kind."""
    lines = (run_dir / "samples" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def run_workers(
    archive: Path,
    verb: str,
    count: int,
    environ: Mapping[str, str],
    *,
    torchrun: bool = False,
    first_of_nodes: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run so many workers to their end; all that they said, and the status of the first that failed.

    Those that are `first_of_nodes` believe to be alone on a node each.
    """
    port = free_port()
    if torchrun:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", f"--master-port={port}"]
        started: list[WarmProcess] = [ColdProcess([*launcher, archive, verb], environ)]
    else:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1" if first_of_nodes else str(count)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": "0" if first_of_nodes else str(rank)} for rank in range(count)]
        started = [WarmProcess([archive, verb], {**environ, **meeting, **sizes, **mine}) for mine in ranks]
    try:
        statuses = [process.wait(DEADLINE_S) for process in started]
    finally:
        for process in started:
            # torchrun ends its workers when it is asked to; killed, it would leave them.
            process.kill(signal.SIGTERM)
            process.wait(DEADLINE_S)
    failed = next((status for status in statuses if status), 0)
    said = [process.output() for process in started]
    return subprocess.CompletedProcess(
        [verb], failed, "".join(stdout for stdout, _ in said), "".join(stderr for _, stderr in said)
    )
