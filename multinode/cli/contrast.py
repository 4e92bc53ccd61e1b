"""`multinode contrast`: one node against many, measured; `multinode compare`: two stored runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.inputs import parse_option, read_cluster, read_job
from multinode.cli.options import (
    SCRIPT,
    Hosts,
    JobFile,
    Json,
    Overrides,
    ScriptCommand,
    Synthetic,
    TrainingOptions,
    expand_options,
)
from multinode.cli.output import print_directory, print_document, print_table
from multinode.cli.running import open_context
from multinode.core.run.planning import LaunchOptions
from multinode.launch.request import ExecuteOptions
from multinode.store.run_directory import runs_root

if TYPE_CHECKING:
    from multinode.analyse.comparison.contrast_figures import Contrast

__all__ = ["print_contrast", "register"]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command(cls=ScriptCommand)(expand_options(contrast))
    app.command()(compare)


def contrast(
    ctx: typer.Context,
    *,
    job: JobFile = None,
    hosts: Hosts = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="1,2,4", help="How many of the hostfile's first nodes, each in turn; else one and all."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="same-workers, scale-out (every node full, the same batch a worker) or fixed-global-batch (every node "
            "full, the same samples a step); else what node 0's slots allow, and it says why."
        ),
    ] = None,
    baseline_gpus: Annotated[
        str | None, typer.Option(metavar="1,2,3,5", help="GPUs of node 0 for the baseline: same workers.")
    ] = None,
    each_node: Annotated[
        bool, typer.Option("--each-node", help="Measure each node alone, too: a slow node is not a slow network.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            min=3, help="Steps that count on each side, warm-up apart (max_steps); else 30, or all there are."
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Train the whole job on each side.")] = False,
    repeats: Annotated[
        int, typer.Option(min=1, max=20, help="Measure each side so often, in turns: what drifts hits all alike.")
    ] = 1,
    set_: Overrides = None,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    as_json: Json = False,
) -> None:
    """Run a job on one node and on many, say which is faster, by how much and why, and what would change that."""
    from multinode.core.run.synthetic import with_synthetic
    from multinode.workflows.comparison.contrast import Wish, cut_job
    from multinode.workflows.comparison.contrast import contrast as measure

    nodes_and_text = read_cluster(hosts)
    what_job = cut_job(read_job(job, ctx.meta[SCRIPT], set_ or [], training.deepspeed_set), steps, whole=whole)
    if synthetic:
        what_job = with_synthetic(what_job)
    wish = Wish(
        mode=mode,
        counts=parse_option("--nodes", nodes, _parse_numbers) if nodes is not None else (),
        each_node=each_node,
        baseline_gpus=parse_option("--baseline-gpus", baseline_gpus, _parse_numbers) if baseline_gpus else None,
    )
    what = training.make_training(nodes_and_text, what_job, LaunchOptions(), ExecuteOptions(kind="contrast"))
    with open_context(what.cluster) as context:
        contrasted = measure(what, context, wish, repeats=repeats)
    _tell(contrasted.contrast, as_json=as_json)
    print_directory(contrasted.directory)
    typer.echo(f"the same as a page: multinode report {contrasted.directory.name}", err=True)


def compare(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The baseline: an id, or the beginning of one.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="What is held against it; `last` is the newest run.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare runs that did not train the same; what differs is marked.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two stored runs as `contrast` compares its sides."""
    from multinode.workflows.comparison.compare import compare_runs

    _tell(compare_runs(runs_root(), run_a, run_b, anyway=anyway), as_json=as_json)


def _parse_numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers.

    Raises:
        ValueError: it is something else.
    """
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ValueError(f"{text!r} is not a list of numbers such as 1,2,4")
    return tuple(int(part) for part in text.split(","))


def _tell(contrast: Contrast, *, as_json: bool) -> None:
    if as_json:
        print_document(contrast)
    else:
        print_contrast(contrast)


def print_contrast(contrast: Contrast) -> None:
    """The table and what it means, on stdout."""
    from multinode.report.comparison.contrast_table import contrast_lines, contrast_table

    print_table(contrast_table(contrast))
    for line in contrast_lines(contrast):
        typer.echo(line)
