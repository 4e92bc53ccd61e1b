"""Launcher: a program that people put in front of their training, and what each of its options becomes here.

The options are those of the launchers' own parsers (torch 2.13, accelerate 1.11, DeepSpeed 0.19), with which
`tests/job/test_launchers.py` compares them. `typed_command` reads commands with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from multinode.job.job import Form

_ORDER = "the order of lines in the hostfile sets the node rank; run this command on one machine only"
_FIRST = "the first line of the hostfile is node rank 0; set its address with addr="
_STATIC = "the rendezvous is static and runs on node 0; set its port with --master-port"


@dataclasses.dataclass(frozen=True, eq=False)
class OptionMeaning:
    """What an option of a launcher is about.

    Attributes:
        kind: `place` and `size` say where and on how many workers a job runs, which the hostfile does here; `own` is
            passed to the launcher; `refused` cannot be.
        hint: what does it here.
        option: the option of multinode with the same meaning, without dashes; empty if none has.
        form: what it makes of the program behind the options, as in `ScriptJob`.
        configures: keys of accelerate's configuration that do the same in the engine.
    """

    kind: Literal["place", "size", "own", "refused"]
    hint: str = ""
    option: str = ""
    form: Form | None = None
    configures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_passed(self) -> bool:
        """Whether the launcher is given it as it was typed."""
        return self.kind == "own" and self in {OWN, RESTARTS}


NODES = OptionMeaning("place", "use --nodes N for the first N lines of the hostfile", "nodes")
RANK = OptionMeaning("place", _ORDER)
ADDRESS = OptionMeaning("place", _FIRST)
PORT = OptionMeaning("place", "set it with --master-port", "master-port")
RENDEZVOUS = OptionMeaning("place", _STATIC)
STANDALONE = OptionMeaning("place", "a hostfile with one line is one node")
HOSTS = OptionMeaning("place", "pass the hostfile with --hosts", "hosts")
INCLUDE = OptionMeaning("place", "use --nodes N for the first N lines of the hostfile; name GPUs there: node1 gpus=0,1")
EXCLUDE = OptionMeaning(
    "place",
    "remove the node's line from the hostfile; to exclude GPUs, name the others there: node1 gpus=0,1",
)
SSH = OptionMeaning("place", "use ~/.ssh/config, or user=, port=, key= and jump= in the hostfile")
WORKERS = OptionMeaning("size", "use --workers-per-node K, or slots=K in the hostfile", "workers-per-node")
PROCESSES = OptionMeaning(
    "size", "use --workers-per-node K, a number per node; this option counts the processes of all nodes"
)
DEVICES = OptionMeaning("size", "name GPUs in the hostfile: node1 gpus=0,1")
OWN = OptionMeaning("own")
RESTARTS = OptionMeaning("own", "use --restarts N", "restarts")
CONFIG = OptionMeaning("own", "pass it with --accelerate-config", "accelerate-config")
MODULE = OptionMeaning("own", form="module")
NO_PYTHON = OptionMeaning("own", form="executable")
USE_ENV = OptionMeaning("own")
# With a configuration file, accelerate starts one process for `--cpu`, and DeepSpeed through pdsh.
USE_CPU = OptionMeaning("own", configures={"use_cpu": True})
USE_DEEPSPEED = OptionMeaning("own", configures={"distributed_type": "DEEPSPEED"})
SETUP = OptionMeaning("refused", "use --setup 'source SCRIPT'")
UNSUPPORTED = OptionMeaning("refused", "remove it")


class Option(NamedTuple):
    """An option of a launcher, and whether a value follows its name."""

    meaning: OptionMeaning
    takes_value: bool


class Launcher(NamedTuple):
    """A launcher for which one of our engines stands.

    Attributes:
        engine: the engine.
        options: its options by name, without leading dashes and with `-` between words.
        passes_local_rank: whether scripts get `--local-rank=N`, unless `--use-env` is given.
        is_program: whether it starts no other program: its options may stand anywhere, and those that the table lacks
            are its own.
    """

    engine: str
    options: Mapping[str, Option]
    passes_local_rank: bool = False
    is_program: bool = False


def _options(names: dict[OptionMeaning, str]) -> dict[str, Option]:
    """Options by name; `=` behind a name says that a value follows."""
    return {
        name.removesuffix("="): Option(meaning, name.endswith("="))
        for meaning, text in names.items()
        for name in text.split()
    }


_TORCHRUN = _options(
    {
        NODES: "nnodes=",
        RANK: "node-rank=",
        ADDRESS: "master-addr= local-addr=",
        PORT: "master-port=",
        RENDEZVOUS: "rdzv-backend= rdzv-endpoint= rdzv-id= rdzv-conf=",
        STANDALONE: "standalone",
        WORKERS: "nproc-per-node=",
        RESTARTS: "max-restarts=",
        MODULE: "module m",
        NO_PYTHON: "no-python",
        OWN: "monitor-interval= start-method= event-log-handler= role= run-path log-dir= redirects= r= tee= t= "
        "local-ranks-filter= duplicate-stdout-filters= duplicate-stderr-filters= logs-specs= numa-binding= "
        "signals-to-handle= shutdown-timeout= virtual-local-rank",
    }
)
_ACCELERATE = _options(
    {
        NODES: "num-machines=",
        RANK: "machine-rank=",
        ADDRESS: "main-process-ip=",
        PORT: "main-process-port=",
        RENDEZVOUS: "rdzv-backend= rdzv-conf= same-network",
        HOSTS: "deepspeed-hostfile= mpirun-hostfile=",
        INCLUDE: "deepspeed-inclusion-filter=",
        EXCLUDE: "deepspeed-exclusion-filter=",
        SSH: "deepspeed-multinode-launcher= mpirun-ccl=",
        PROCESSES: "num-processes=",
        DEVICES: "gpu-ids=",
        CONFIG: "config-file=",
        RESTARTS: "max-restarts=",
        MODULE: "module m",
        NO_PYTHON: "no-python",
        USE_CPU: "cpu",
        USE_DEEPSPEED: "use-deepspeed",
        OWN: "quiet q multi-gpu mixed-precision= num-cpu-threads-per-process= enable-cpu-affinity dynamo-backend= "
        "dynamo-mode= dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation use-fsdp "
        "use-parallelism-config use-megatron-lm use-xpu tee= t= log-dir= role= monitor-interval= downcast-bf16 "
        "deepspeed-config-file= zero-stage= offload-optimizer-device= offload-param-device= "
        "offload-optimizer-nvme-path= offload-param-nvme-path= gradient-accumulation-steps= gradient-clipping= "
        "zero3-init-flag= zero3-save-16bit-model= deepspeed-moe-layer-cls-names= fsdp-version= fsdp-offload-params= "
        "fsdp-min-num-params= fsdp-sharding-strategy= fsdp-reshard-after-forward= fsdp-auto-wrap-policy= "
        "fsdp-transformer-layer-cls-to-wrap= fsdp-backward-prefetch= fsdp-state-dict-type= fsdp-forward-prefetch= "
        "fsdp-use-orig-params= fsdp-cpu-ram-efficient-loading= fsdp-sync-module-states= fsdp-activation-checkpointing= "
        "megatron-lm-tp-degree= megatron-lm-pp-degree= megatron-lm-num-micro-batches= "
        "megatron-lm-sequence-parallelism= megatron-lm-recompute-activations= megatron-lm-use-distributed-optimizer= "
        "megatron-lm-gradient-clipping= fp8-backend= fp8-use-autocast-during-eval fp8-margin= fp8-interval= "
        "fp8-format= fp8-amax-history-len= fp8-amax-compute-algo= fp8-override-linear-precision= fp8-opt-level= debug "
        "parallelism-config-dp-replicate-size= parallelism-config-dp-shard-size= parallelism-config-tp-size= "
        "parallelism-config-cp-size= parallelism-config-cp-comm-strategy=",
        UNSUPPORTED: "tpu tpu-cluster no-tpu-cluster tpu-use-sudo vm= env= main-training-function= aws-access-key-id= "
        "aws-secret-access-key=",
    }
)
# Options of the program `deepspeed`; OWN: DeepSpeed's launcher of one node, which the engine starts, has them too.
_DEEPSPEED = _options(
    {
        NODES: "num-nodes=",
        RANK: "node-rank=",
        ADDRESS: "master-addr=",
        PORT: "master-port=",
        HOSTS: "hostfile= H=",
        INCLUDE: "include= i=",
        EXCLUDE: "exclude= e=",
        SSH: "launcher= launcher-args= no-ssh no-ssh-check force-multi ssh-port=",
        WORKERS: "num-gpus= num-accelerators=",
        MODULE: "module",
        NO_PYTHON: "no-python",
        OWN: "no-local-rank enable-each-rank-log= bind-cores-to-rank bind-core-list= log-level= quiet q",
        SETUP: "venv-script=",
        UNSUPPORTED: "autotuning= save-pid",
    }
)
# Of servers, those that place them (vLLM 0.12, SGLang 0.5).
_VLLM = _options({NODES: "nnodes= n=", RANK: "node-rank= r= headless", ADDRESS: "master-addr=", PORT: "master-port="})
_SGLANG = _options({NODES: "nnodes=", RANK: "node-rank=", ADDRESS: "dist-init-addr= nccl-init-addr="})
# Of mpirun, horovodrun and the like, which are refused; named for whoever gives them to multinode itself.
_MPI = _options({HOSTS: "host= machinefile=", PROCESSES: "np= n="})

_TORCHRUN_LAUNCHER = Launcher("torchrun", _TORCHRUN)
_ACCELERATE_LAUNCHER = Launcher("accelerate", _ACCELERATE)
_DEEPSPEED_LAUNCHER = Launcher("deepspeed", _DEEPSPEED)
LAUNCHERS = {
    "torchrun": _TORCHRUN_LAUNCHER,
    "python -m torch.distributed.run": _TORCHRUN_LAUNCHER,
    "python -m torch.distributed.launch": Launcher(
        "torchrun", _TORCHRUN | {"use-env": Option(USE_ENV, takes_value=False)}, passes_local_rank=True
    ),
    "accelerate launch": _ACCELERATE_LAUNCHER,
    "accelerate-launch": _ACCELERATE_LAUNCHER,
    "python -m accelerate.commands.launch": _ACCELERATE_LAUNCHER,
    "python -m accelerate.commands.accelerate_cli launch": _ACCELERATE_LAUNCHER,
    "deepspeed": _DEEPSPEED_LAUNCHER,
    "ds": _DEEPSPEED_LAUNCHER,
    "python -m deepspeed.launcher.runner": _DEEPSPEED_LAUNCHER,
    "vllm serve": Launcher("serve", _VLLM, is_program=True),
    "python -m sglang.launch_server": Launcher("serve", _SGLANG, is_program=True),
}
"""By the words with which a command starts it."""

OF_ENGINE = {launcher.engine: launcher for launcher in reversed(LAUNCHERS.values())}
"""The launcher whose options stand before the script, by engine: the first of its launchers."""


class NotStarted(NamedTuple):
    """A program that is not started, and what to type instead.

    Attributes:
        why: the reason.
        line: the arguments of a verb of multinode that do work: `{program}` is the training behind it, `{command}` all
            that was typed. Empty if none does.
        option: options of the verb to add before `--`.
    """

    why: str
    line: str = "-- {program}"
    option: str = ""


_STARTS_THEM = "multinode starts the workers itself, on every node of the hostfile"
NO_TRAINING = "it does not train a model; run it on one machine, without multinode"
_ELSEWHERE = "multinode starts no containers; list nodes that run inside them, each with its own sshd"
_ENVIRONMENT = "the environment of the nodes is chosen with --setup, or with python= in the hostfile"

NOT_STARTED = {
    **dict.fromkeys(
        ("mpirun", "mpiexec", "orterun", "prterun", "horovodrun", "srun", "torchx", "ray"), NotStarted(_STARTS_THEM)
    ),
    **dict.fromkeys(("docker", "podman", "nerdctl", "singularity", "apptainer", "enroot"), NotStarted(_ELSEWHERE)),
    "sudo": NotStarted("the job runs as the user of the SSH connection: set user= in the hostfile"),
    "poetry": NotStarted(_ENVIRONMENT, option="--setup 'eval \"$(poetry env activate)\"'"),
    "numactl": NotStarted(
        "it would bind the launcher of each node instead of its workers; torchrun has --numa-binding"
    ),
    "accelerate": NotStarted(NO_TRAINING, ""),
}
"""By the name of the program."""


def find_option(launcher: Launcher, word: str) -> Option | None:
    """An option as typed: `--nproc_per_node=2`, `-m`; an unambiguous beginning is enough. None if it is not known.

    As argparse does, which all of these launchers use.
    """
    name = option_name(word)
    if not word.startswith("--"):
        return launcher.options.get(word[1:2]) if len(name) == 1 else None
    near = [known for known in launcher.options if len(known) > 1 and known.startswith(name)]
    exact = name if name in near else None
    return launcher.options.get(exact or (near[0] if len(near) == 1 else ""))


def same_option(launcher: Launcher, word: str) -> str | None:
    """The option of a launcher that does what this one does for another; None if no launcher has it."""
    others = (find_option(other, word) for other in OF_ENGINE.values())
    meanings = [option.meaning for option in others if option is not None and option.meaning is not OWN]
    return next((f"--{name}" for name, option in launcher.options.items() if option.meaning in meanings), None)


def option_name(word: str) -> str:
    """The name of an option in the form of the tables: `--nproc_per_node=2` is `nproc-per-node`."""
    return word.partition("=")[0].lstrip("-").replace("_", "-")


def find_meaning(name: str) -> OptionMeaning | None:
    """What an option of this name means to one of the launchers, if multinode has a counterpart or a word on it."""
    tables = (_TORCHRUN, _ACCELERATE, _DEEPSPEED, _MPI)
    meanings = (table[name].meaning for table in tables if name in table)
    return next((meaning for meaning in meanings if meaning.hint), None)
