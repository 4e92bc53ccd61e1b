"""Options that several verbs have alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
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
    "Nodes",
    "OnStall",
    "Overrides",
    "Prelude",
    "PricesFile",
    "Profile",
    "SampleHz",
    "StallAfter",
    "Synthetic",
    "Trace",
    "TraceRanks",
    "Variables",
    "Where",
    "WorkersPerNode",
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
