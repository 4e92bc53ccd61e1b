"""`multinode contrast`: one node against many, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.options import (
    AccelerateConfig,
    Check,
    EngineName,
    Hosts,
    Json,
    MasterPort,
    Nodes,
    Overrides,
    Prelude,
    Variables,
)
from multinode.cli.script_command import SCRIPT, ScriptCommand

if TYPE_CHECKING:
    from multinode.workflows.contrast import Contrasted

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(cls=ScriptCommand)(contrast)


def contrast(
    ctx: typer.Context,
    job: Annotated[Path | None, typer.Argument(help="LLaMA-Factory YAML; else the default job.")] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    mode: Annotated[
        str | None, typer.Option(help="same-workers or scale-out; else what node 0's slots allow, and it says why.")
    ] = None,
    baseline_gpus: Annotated[
        str | None, typer.Option(metavar="1,2,3,5", help="GPUs of node 0 for the baseline: same workers.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=6, help="Run this many steps on each side (max_steps).")] = None,
    set_: Overrides = None,
    engine: EngineName = None,
    accelerate_config: AccelerateConfig = None,
    env: Variables = None,
    prelude: Prelude = None,
    master_port: MasterPort = 29500,
    check: Check = True,
    as_json: Json = False,
) -> None:
    """Run a job on node 0 alone and on all nodes, and say which is faster, by how much."""
    from multinode.cli.inputs import parse_option, read_cluster, read_engine, read_job, read_surroundings
    from multinode.cli.output import print_document
    from multinode.cli.running import outside
    from multinode.core.planning import LaunchOptions
    from multinode.launch.request import ExecuteOptions
    from multinode.workflows.contrast import contrast as measure
    from multinode.workflows.launch import Launch

    cluster, text = read_cluster(hosts, nodes)
    overrides = [*(set_ or []), *([f"max_steps={steps}"] if steps is not None else [])]
    what_job = read_job(job, ctx.meta[SCRIPT], overrides)
    what = Launch(
        cluster=cluster,
        hostfile=text,
        job=what_job,
        options=LaunchOptions(
            master_port=master_port,
            engine=read_engine(what_job, engine, accelerate_config),
            surroundings=read_surroundings(env, prelude),
        ),
        execute=ExecuteOptions(kind="contrast"),
        check=check,
    )
    gpus = parse_option("--baseline-gpus", baseline_gpus, _parse_gpus) if baseline_gpus is not None else None
    with outside(cluster) as around:
        contrasted = measure(what, around, mode=mode, baseline_gpus=gpus)
    if as_json:
        print_document(contrasted.contrast)
    else:
        _print_contrast(contrasted)


def _parse_gpus(text: str) -> tuple[int, ...]:
    return tuple(int(gpu) for gpu in text.split(","))


def _print_contrast(contrasted: Contrasted) -> None:
    from multinode.cli.output import print_table
    from multinode.report.contrast_table import contrast_table

    print_table(contrast_table(contrasted.contrast))
    typer.echo(contrasted.contrast.verdict)
    typer.echo(f"everything of it: {contrasted.directory}", err=True)
