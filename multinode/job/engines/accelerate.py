"""accelerate: `accelerate launch` with a configuration for each node, on top of the user's own.

It then starts the workers through torchrun with a static rendezvous, as our torchrun engine does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import program_words, run_module
from multinode.job.job import Job, TrainingJob
from multinode.records.plan import Place, PlanFile, Rendezvous

_FILE = "accelerate.yaml"
# Accelerate starts one process per node for these, and expects mpirun to have started the others.
_ALONE = frozenset({"NO", "MULTI_CPU"})
# Numbers in accelerate's configuration, from 1.
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Without one in its configuration.
_ZERO_STAGE = 2
_Job = TypeVar("_Job")


class _Accelerate(EngineKind):
    takes_configuration = True

    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        config = ("--config_file", f"{place.run_dir}/{_FILE}")
        return run_module(place, "accelerate.commands.launch", *config, *program_words(place, job))

    def variables(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> dict[str, str]:
        # Of accelerate's two ways to start workers, the one with torchrun does not pass on the CPU setting.
        return {"ACCELERATE_USE_CPU": "true"} if engine.accelerate.get("use_cpu") is True else {}

    def files(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> tuple[PlanFile, ...]:
        return (_configuration(rendezvous, place, engine.accelerate),)


ENGINE = _Accelerate()


def parse_accelerate(text: str, source: str) -> dict[str, Any]:
    """The user's configuration, as written by `accelerate config`. `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or is for another kind of machine.
    """
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        config = parse_yaml(text)
    except YamlError as wrong:
        raise UsageError(wrong.at(source)) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{source} is not an accelerate configuration", hint="accelerate config --config_file FILE")
    place = config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise UsageError(f"{source}: compute_environment is {place}; only LOCAL_MACHINE runs on your own nodes")
    return config


def with_accelerate(job: _Job, accelerate: Mapping[str, Any]) -> _Job:
    """The job with the sharding of accelerate's configuration added, in the Trainer's keys. For reading only."""
    kind = accelerate.get("distributed_type")
    if not isinstance(job, TrainingJob) or kind not in {"FSDP", "DEEPSPEED"}:
        return job
    settings = accelerate.get(f"{kind.lower()}_config")
    settings = settings if isinstance(settings, dict) else {}
    if kind == "DEEPSPEED":
        own = job.config | job.own_keys({"deepspeed": _FILE})
        text = job.deepspeed_text or _zero_json(settings)
        return msgspec.structs.replace(job, config=own, deepspeed_text=text)
    version = fsdp_version(settings)
    strategy = str(settings.get("fsdp_sharding_strategy", _SHARDING[0])).upper()
    if strategy.isdigit():
        strategy = _SHARDING[min(int(strategy), len(_SHARDING)) - 1]
    if version != 1:
        strategy = "SHARD_GRAD_OP" if settings.get("fsdp_reshard_after_forward") is False else "FULL_SHARD"
    # Its launcher passes the strategy in the environment.
    config = {"version": version, "sharding_strategy": strategy}
    fsdp = {"fsdp": f"{strategy.lower()} auto_wrap", "fsdp_config": config}
    return msgspec.structs.replace(job, config=job.config | job.own_keys(fsdp))


def _zero_json(settings: Mapping[str, Any]) -> str:
    """The DeepSpeed configuration that accelerate makes of its own keys."""
    parts = {name: settings.get(f"{name}_device") for name in ("offload_optimizer", "offload_param")}
    zero = {name: {"device": device} for name, device in parts.items() if isinstance(device, str)}
    return json.dumps({"zero_optimization": {"stage": settings.get("zero_stage", _ZERO_STAGE), **zero}})


def fsdp_version(config: object) -> int:
    """The version of FSDP, 1 or 2, in a configuration of accelerate or of the Trainer."""
    version = (config.get("version") or config.get("fsdp_version")) if isinstance(config, dict) else None
    return 2 if str(version) == "2" else 1


def _configuration(rendezvous: Rendezvous, place: Place, base: dict[str, Any]) -> PlanFile:
    from multinode.strict_yaml import dump_yaml

    kind = base.get("distributed_type", "NO")
    config = base | {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if kind in _ALONE else kind,
        "machine_rank": place.node_rank,
        "num_machines": rendezvous.nnodes,
        # The total over all nodes; accelerate divides it by the number of machines.
        "num_processes": place.nproc * rendezvous.nnodes,
        "main_process_ip": rendezvous.addr,
        "main_process_port": rendezvous.port,
        "rdzv_backend": "static",
        # Without it accelerate uses a rendezvous endpoint, whose host torchrun looks up among its own names.
        "same_network": True,
        # The variable of visible devices has already selected them.
        "gpu_ids": "all",
    }
    deepspeed = config.get("deepspeed_config")
    if kind == "DEEPSPEED" or isinstance(deepspeed, dict):
        # Its default is pdsh, from the first node.
        own = deepspeed if isinstance(deepspeed, dict) else {}
        config["deepspeed_config"] = own | {"deepspeed_multinode_launcher": "standard"}
    return PlanFile(path=_FILE, text=dump_yaml(config))
