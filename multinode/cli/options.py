"""Options that several verbs have alike, one type each, also in groups; and the script that stands after `--`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
import typer
import typer.core

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.core.job.job import Job
    from multinode.core.measure.benchmark import Benchmark
    from multinode.core.run.planning import LaunchOptions
    from multinode.launch.request import ExecuteOptions
    from multinode.workflows.run.context import Launch

__all__ = [
    "SCRIPT",
    "AccelerateConfig",
    "Check",
    "Deadline",
    "DeepspeedSet",
    "EngineName",
    "Fetch",
    "Grace",
    "GradCompress",
    "Hosts",
    "JobFile",
    "Json",
    "MasterPort",
    "NodeOptions",
    "Nodes",
    "OnStall",
    "Overrides",
    "Prelude",
    "PricesFile",
    "Profile",
    "RunId",
    "SampleHz",
    "ScriptCommand",
    "StallAfter",
    "Synthetic",
    "Trace",
    "TraceRanks",
    "TrainingOptions",
    "Variables",
    "Where",
    "WorkersPerNode",
    "expand_options",
]

JobFile = Annotated[Path | None, typer.Argument(help="LLaMA-Factory YAML; else the default job.")]
Hosts = Annotated[
    str | None, typer.Option(help="Hostfile, or `lab`; else $MULTINODE_HOSTS, multinode.toml, a running lab.")
]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="K", help="Use the first K nodes of the hostfile.")]
WorkersPerNode = Annotated[int | None, typer.Option(min=1, help="Workers on each node; else its slots.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job. Repeatable.")
]
DeepspeedSet = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Change the DeepSpeed JSON of the job for this run alone, and show the diff; a.b is b in the group a. "
        "Repeatable.",
    ),
]
Synthetic = Annotated[
    bool,
    typer.Option(
        "--synthetic",
        help="Train on made-up data, for the figures alone: every sample has exactly cutoff_len tokens.",
    ),
]
MasterPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of the rendezvous on node 0.")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Check first what would break the run.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Grace = Annotated[float, typer.Option(min=0.0, help="Seconds between TERM and KILL when the run is stopped.")]
Fetch = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Copy this file or directory of node 0 home at the end. Repeatable."),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="torchrun, llamafactory, deepspeed, accelerate or command; else llamafactory for a YAML, torchrun for a "
        "script.",
    ),
]
AccelerateConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A configuration for --engine accelerate; what places a node is set anew."),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="Set a variable on every node; NAME alone takes its value from here, and shows it nowhere. Repeatable.",
    ),
]
Prelude = Annotated[
    str | None,
    typer.Option(
        metavar="SHELL",
        help="Shell text to run on every node before the job: conda, modules; else the settings'.",
    ),
]
StallAfter = Annotated[
    float,
    typer.Option(
        "--stall", min=0.0, metavar="SECONDS", help="Without a step or log on any node for so long, it hangs; 0: never."
    ),
]
OnStall = Annotated[
    Literal["report", "stop"],
    typer.Option(metavar="HOW", help="When it hangs: `report` says which rank is behind, `stop` also stops the run."),
]
GradCompress = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Send DDP's gradients as fp16 or bf16: half the bytes of fp32 ones."),
]
Profile = Annotated[
    bool,
    typer.Option("--profile/--no-profile", help="Record in the workers where the time of their steps goes."),
]
Trace = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="STEPS", help="Record so many steps with torch.profiler after the warm-up, and bring them home."
    ),
]
TraceRanks = Annotated[
    list[int] | None,
    typer.Option(
        "--trace-rank", min=0, metavar="RANK", help="Trace this worker; else the first of each node. Repeatable."
    ),
]
SampleHz = Annotated[
    float,
    typer.Option(
        "--sample-hz", min=1.0, max=10.0, help="Samples a second of network cards, processors and GPUs on each node."
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="CONDITION", help="Show rows of which it is true: method=lora, nodes>=2. Repeatable."),
]
PricesFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What GPUs or nodes cost, a YAML; else the hostfile's prices.")
]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="Name the cheapest cell that ends the whole job in 8h, 2d, ...")
]
RunId = Annotated[str, typer.Argument(help="A run's id, the beginning of one, or `last`.")]

SCRIPT = "multinode.script"


class ScriptCommand(typer.core.TyperCommand):
    """Keeps everything behind the first `--` in `ctx.meta[SCRIPT]`: a tuple, or None where there was no `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split at `--`, and parse what stands before it."""
        ctx.meta[SCRIPT] = None
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """How any job is started on its nodes."""

    env: Variables = None
    prelude: Prelude = None
    master_port: MasterPort = 29500
    check: Check = True

    def make_launch(
        self, nodes: tuple[Cluster, str], job: Job | Benchmark, options: LaunchOptions, execute: ExecuteOptions
    ) -> Launch:
        """The launch of a job on the cluster of a hostfile, whose text comes with it.

        Raises:
            UsageError: as `read_engine` and `read_job_environment`.
        """
        from multinode.cli.inputs import read_job_environment
        from multinode.workflows.run.context import Launch

        environment = read_job_environment(self.env, self.prelude)
        options = msgspec.structs.replace(options, master_port=self.master_port, environment=environment)
        return Launch(cluster=nodes[0], hostfile=nodes[1], job=job, options=options, execute=execute, check=self.check)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(NodeOptions):
    """How a training is started."""

    deepspeed_set: DeepspeedSet = None
    grad_compress: GradCompress = None
    engine: EngineName = None
    accelerate_config: AccelerateConfig = None

    def make_training(
        self, nodes: tuple[Cluster, str], job: Job, options: LaunchOptions, execute: ExecuteOptions
    ) -> Launch:
        """As of any job, with its engine and the compression of its gradients."""
        from multinode.cli.inputs import read_engine

        engine = read_engine(job, self.engine, self.accelerate_config)
        options = msgspec.structs.replace(options, engine=engine, grad_compress=self.grad_compress)
        return self.make_launch(nodes, job, options, execute)


def expand_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as Typer reads it: each parameter that is a group of options stands as the options in it."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _own_first(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        verb(**values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _own_first(group: type) -> list[inspect.Parameter]:
    """A group's options, before those of the group that it extends."""
    types = get_type_hints(group, include_extras=True)
    names = [name for one in group.__mro__ for name in inspect.get_annotations(one)]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=types[name])
        for name in names
    ]
