"""accelerate: `accelerate launch` with a configuration made for each node, on top of the user's own.

Accelerate then starts the workers by torchrun with a static rendezvous, as our own engine of that name does.
"""

from __future__ import annotations

from typing import Any

from multinode.core.run.command import Command
from multinode.core.run.engines.place import STRAY_VARIABLES, Place, directory_of, network_environment
from multinode.core.run.plan import PlanFile
from multinode.core.text.strict_yaml import YamlError, dump_yaml, parse_yaml
from multinode.errors import UsageError

__all__ = ["accelerate_command", "accelerate_file", "parse_accelerate"]

_FILE = "accelerate.yaml"
# Accelerate starts one process a node for these, and expects mpirun to have started the others.
_ALONE = frozenset({"NO", "MULTI_CPU"})


def parse_accelerate(text: str, source: str) -> dict[str, Any]:
    """The user's configuration, as `accelerate config` writes it. `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or not for machines of one's own.
    """
    try:
        config = parse_yaml(text)
    except YamlError as wrong:
        raise UsageError(wrong.at(source)) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{source} is not an accelerate configuration", hint="accelerate config --config_file FILE")
    place = config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise UsageError(f"{source}: compute_environment is {place}, and only LOCAL_MACHINE runs on nodes of one's own")
    return config


def accelerate_command(
    place: Place, program: tuple[str, ...], base: dict[str, Any], env: dict[str, str], cwd: str | None
) -> Command:
    """The command of one node; `program` is options of `accelerate launch`, if any, the script and its arguments."""
    variables = network_environment(place)
    if base.get("use_cpu") is True:
        # Of the two ways in which accelerate starts workers, the one with torchrun does not tell them.
        variables["ACCELERATE_USE_CPU"] = "true"
    return Command(
        argv=(
            place.python or "python3",
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            f"{place.run_dir}/{_FILE}",
            *program,
        ),
        env=variables | env,
        unset=tuple(name for name in STRAY_VARIABLES if name not in variables),
        path_first=directory_of(place.python),
        cwd=cwd,
    )


def accelerate_file(place: Place, base: dict[str, Any]) -> PlanFile:
    """The configuration of one node: the user's, with the keys that place it in the cluster set anew."""
    kind = base.get("distributed_type", "NO")
    config = base | {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if kind in _ALONE else kind,
        "machine_rank": place.node_rank,
        "num_machines": place.nnodes,
        # The total over all nodes.
        "num_processes": place.nproc * place.nnodes,
        "main_process_ip": place.master_addr,
        "main_process_port": place.master_port,
        "rdzv_backend": "static",
        # Without it accelerate rendezvouses through an endpoint, whose host torchrun then looks for among its names.
        "same_network": True,
        # CUDA_VISIBLE_DEVICES has chosen already.
        "gpu_ids": "all",
    }
    if isinstance(config.get("deepspeed_config"), dict):
        # Its default is pdsh, from the first node.
        config["deepspeed_config"] = config["deepspeed_config"] | {"deepspeed_multinode_launcher": "standard"}
    return PlanFile(path=_FILE, text=dump_yaml(config))
