"""DeepSpeed's per-node launcher with our ranks; its runner, which starts nodes through pdsh or ssh, is not used."""

from __future__ import annotations

import base64
import json

from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import Place, program_words, run_module
from multinode.job.job import Job, ScriptJob


class _DeepSpeed(EngineKind):
    sharded_by = "DeepSpeed"

    def argv(self, engine: Engine, place: Place, job: Job, env: dict[str, str]) -> tuple[str, ...]:
        # As under `deepspeed`, a script gets `--local_rank=N` first. LLaMA-Factory would take that for its YAML.
        without = () if isinstance(job, ScriptJob) else ("--no_local_rank",)
        # Node names and the devices of each, in node-rank order. The launcher sets CUDA_VISIBLE_DEVICES for its own
        # node and only counts those of the others.
        world: dict[str, list[int] | list[str]] = {
            f"node-{rank}": list(range(count)) for rank, count in enumerate(place.workers)
        }
        given = None if place.devices is None else ",".join(place.devices)
        if (devices := env.get(place.accelerator.visible[0], given)) is not None:
            world[f"node-{place.node_rank}"] = _devices(place, devices)
        return run_module(
            place,
            "deepspeed.launcher.launch",
            f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
            f"--node_rank={place.node_rank}",
            f"--master_addr={place.master_addr}",
            f"--master_port={place.master_port}",
            *without,
            *program_words(place, job),
        )


ENGINE = _DeepSpeed()


def _devices(place: Place, visible: str) -> list[str]:
    named = [name.strip() for name in visible.split(",") if name.strip()]
    variable = place.accelerator.visible[0]
    if len(named) < place.nproc:
        raise UsageError(
            f"{variable} names {len(named)} devices on node rank {place.node_rank}, but {place.nproc} workers run "
            "there",
            hint=f"--workers-per-node {len(named)}" if named else "DeepSpeed's launcher needs one device per worker",
        )
    return named[: place.nproc]
