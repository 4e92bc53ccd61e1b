"""DeepSpeed's per-node launcher with our ranks; its runner, which starts nodes through pdsh or ssh, is not used."""

from __future__ import annotations

import base64
import json

from multinode.cluster.accelerators import accelerator_named
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import program_words, run_module
from multinode.job.job import Job, ScriptJob
from multinode.records.plan import Place, Rendezvous
from multinode.units import format_count

_NO_RANK = "--no_local_rank"


class _DeepSpeed(EngineKind):
    sharded_by = "DeepSpeed"

    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        # As under `deepspeed`, a script gets `--local_rank=N` first. LLaMA-Factory would take that for its YAML.
        words = program_words(place, job)
        without = () if isinstance(job, ScriptJob) or _NO_RANK in words else (_NO_RANK,)
        # Node names and the devices of each, in node-rank order. The launcher sets CUDA_VISIBLE_DEVICES for its own
        # node and only counts those of the others.
        world: dict[str, list[int] | list[str]] = {
            f"node-{rank}": list(range(count)) for rank, count in enumerate(rendezvous.workers)
        }
        given = None if place.devices is None else ",".join(place.devices)
        variable = accelerator_named(place.accelerator).visible[0]
        if (devices := env.get(variable, given)) is not None:
            world[f"node-{place.node_rank}"] = _devices(place, variable, devices)
        return run_module(
            place,
            "deepspeed.launcher.launch",
            f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
            f"--node_rank={place.node_rank}",
            f"--master_addr={rendezvous.addr}",
            f"--master_port={rendezvous.port}",
            *without,
            *words,
        )


ENGINE = _DeepSpeed()


def _devices(place: Place, variable: str, visible: str) -> list[str]:
    named = [name.strip() for name in visible.split(",") if name.strip()]
    if len(named) < place.nproc:
        raise UsageError(
            f"{variable} names {format_count(len(named), 'device')} on node rank {place.node_rank}, but "
            f"{format_count(place.nproc, 'worker')} run there",
            hint=f"--workers-per-node {len(named)}" if named else "DeepSpeed's launcher needs one device per worker",
        )
    return named[: place.nproc]
