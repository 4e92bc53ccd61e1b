"""`multinode contrast`: one node against many, measured; `multinode compare`: two stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multinode.cli.inputs import fill
from multinode.cli.options import (
    Average,
    Check,
    Details,
    Fresh,
    HangTimeout,
    Hosts,
    JobWords,
    Json,
    OnHang,
    Overrides,
    ScriptCommand,
    Synthetic,
    TrainingOptions,
    WorkersPerNode,
    complete_runs,
    expand_options,
    given_options,
    propose,
    read_invocation,
)
from multinode.cli.output import fail_gate, is_quiet, note, print_blocks, print_directory, print_document
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.cli.table import print_cells
from multinode.records.invocation import Invocation
from multinode.records.run_directory import RunDirectory, runs_root

# Options that apply to the measured runs, and not to a command that is proposed after them.
_OF_RUNS = ("--nodes", "--workers-per-node", "--steps")

if TYPE_CHECKING:
    from multinode.contrast.figures import Contrast
    from multinode.contrast.measure import ContrastRequest
    from multinode.launch.context import Launch


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples("contrast --hosts hosts.txt train.yaml", "contrast --hosts hosts.txt --repeats 3 -- train.py"),
    )(expand_options(contrast))
    app.command(epilog=examples("compare 20260104 last"))(compare)


def contrast(
    ctx: typer.Context,
    *,
    job: JobWords = None,
    hosts: Hosts = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4",
            help=(
                "Numbers of nodes to compare, such as 1,2,4, counted from the top of the hostfile. Default: one node "
                "and all nodes."
            ),
        ),
    ] = None,
    mode: Annotated[
        Literal["same-workers", "scale-out", "fixed-global-batch"] | None,
        typer.Option(
            help=(
                "What to keep the same on all sides: the number of workers (same-workers), the batch per worker "
                "(scale-out), or the samples per step (fixed-global-batch). With the last two modes, every node runs "
                "its full number of workers. Default: chosen from the slots of node 0."
            )
        ),
    ] = None,
    baseline_gpus: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,3,5",
            help="GPUs of node 0 to use for the baseline, so that both sides have the same number of workers.",
        ),
    ] = None,
    workers_per_node: WorkersPerNode = None,
    each_node: Annotated[
        bool,
        typer.Option(
            "--each-node", help="Also measure each node alone, to distinguish a slow node from a slow network."
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            min=3,
            help=(
                "Measured steps per side, after the warm-up (sets max_steps). Default: 30, or all if the job has fewer."
            ),
        ),
    ] = None,
    full_run: Annotated[bool, typer.Option("--full-run", help="Run all steps of the job on each side.")] = False,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="Number of repeats per side. They are interleaved, so that drift affects all sides."
        ),
    ] = 1,
    set_: Overrides = None,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    average: Average = None,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "stop",
    min_efficiency: Annotated[
        float | None,
        typer.Option(min=0.0, help="Exit with code 1 if the efficiency is below this value, such as 0.8."),
    ] = None,
    fresh: Fresh = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands of each side and node, and exit.")
    ] = False,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Run a job on one node and on several nodes, and report which is faster, by how much and why.

    If the command is interrupted, run it again to resume.
    """
    from multinode import api
    from multinode.contrast.inputs import ContrastInput

    given = fill(
        ContrastInput,
        ctx,
        job,
        training,
        hosts=hosts,
        nodes=nodes,
        mode=mode,
        baseline_gpus=baseline_gpus,
        workers_per_node=workers_per_node,
        each_node=each_node,
        steps=steps,
        full_run=full_run,
        repeats=repeats,
        set_=set_,
        synthetic=synthetic,
        average=average,
        check=check,
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        fresh=fresh,
    )
    launch, request = given.read(note)
    if dry_run:
        _print_plan(launch, request, as_json=as_json)
        return
    with open_context(launch.cluster) as context:
        contrasted = api.contrast(launch, context, request, repeats=repeats, fresh=fresh)
    name = contrasted.directory.name
    following = next_command(contrasted.contrast, name, given.invocation) or f"multinode report {name}"
    if as_json:
        print_document(contrasted)
        note(f"Next        {following}")
    else:
        print_contrast(
            contrasted.contrast, details=details, more=f"multinode show {name} --details", next_command=following
        )
    print_directory(contrasted.directory)
    note(f"write a page: multinode report {name}")
    if min_efficiency is not None and contrasted.contrast.efficiency < min_efficiency:
        fail_gate(f"the efficiency is {contrasted.contrast.efficiency:.3f}, below --min-efficiency {min_efficiency:g}")


# With two repeats, Student's t is 12.7; with four, 3.2.
_REPEATS = 4


def next_command(contrast: Contrast, name: str, invocation: Invocation | None) -> str:
    """What follows; empty if nothing does.

    More repeats if it is inconclusive; the launch on one node if that was measured to be faster; else changes to try.

    Args:
        contrast: the result.
        name: its run.
        invocation: the command line that measured it; None if none did.
    """
    from multinode.contrast.judge import judge, prefers_one_node

    if judge(contrast) == "inconclusive" and invocation is not None:
        repeats = max(_REPEATS, 2 * min(len(side.run_ids) for side in contrast.measured))
        return propose(invocation, "contrast", first=("--repeats", str(repeats)), without=("--repeats", "--fresh"))
    if prefers_one_node(contrast):
        workers = str(contrast.baseline.workers_per_node)
        first, places = ("--nodes", "1", "--workers-per-node", workers), ("--nodes", "--workers-per-node")
        return propose(invocation, "launch", first=first, without=places) if invocation is not None else ""
    return tune_command(invocation, [name]) if contrast.advice else ""


def stored_command(directory: RunDirectory) -> Invocation | None:
    """The command line of a stored run; None if none started it."""
    run = directory.read_run()
    return run.command if run is not None else None


def resume_command(directory: RunDirectory) -> str:
    """The command line of a stored run, which goes on with it; empty if none started it."""
    invocation = stored_command(directory)
    return propose(invocation, invocation.verb) if invocation is not None else ""


def tune_command(invocation: Invocation | None, runs: Sequence[str], more: Sequence[str] = ()) -> str:
    """The measurement of changes that are advised for these runs; empty if nobody typed what it would train."""
    if invocation is None:
        return ""
    sources = (word for run in runs for word in ("--from", run))
    first = ("--judge", "speed", *sources, "--candidates", "2", *more)
    if invocation.is_script:
        return propose(invocation, "tune", first=first, without=_OF_RUNS)
    # Otherwise the YAML is kept with its runs, with what was set in it.
    return propose(invocation, "tune", first=first, without=(*_OF_RUNS, "--set", "--synthetic"), job=())


def _print_plan(launch: Launch, request: ContrastRequest, *, as_json: bool) -> None:
    from multinode.contrast.measure import plan_offline_sides
    from multinode.records.plan import plan_text

    sides, plans = plan_offline_sides(launch, request)
    if as_json:
        documents = [
            {"role": side.role, "label": side.label, "plan": plan.document()}
            for side, plan in zip(sides.sides, plans, strict=True)
        ]
        print_document(
            {"schema": "multinode.contrast-plan/3", "mode": sides.mode, "why": sides.why, "sides": documents}
        )
        return
    typer.echo(f"{sides.mode}: {sides.why.message}")
    for side, plan in zip(sides.sides, plans, strict=True):
        typer.echo(f"\n{side.label}: {side.description}\n{plan_text(plan)}")


def compare(
    ctx: typer.Context,
    run_a: Annotated[
        str,
        typer.Argument(
            metavar="RUN_A", autocompletion=complete_runs, help="Baseline run: a run id or the beginning of one."
        ),
    ],
    run_b: Annotated[
        str,
        typer.Argument(
            metavar="RUN_B",
            autocompletion=complete_runs,
            help="The run to compare with the baseline. `last` is the newest run.",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs with different settings and mark the differences.")
    ] = False,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Compare two stored runs of the same kind. Training runs are compared as in `contrast`."""
    from multinode.contrast.figures import Contrast
    from multinode.network.screen import show
    from multinode.network.size_scan import ScanReport
    from multinode.results.compared import ComparedRecords, compare_records
    from multinode.results.compared import show as show_compared

    comparison = compare_records(runs_root(), run_a, run_b, anyway=force)
    again = f"multinode compare{given_options(ctx)} --details"
    if as_json:
        print_document(comparison)
    elif isinstance(comparison, Contrast):
        print_contrast(comparison, details=details, more=again, next_command=propose(read_invocation(ctx), "report"))
    elif isinstance(comparison, ScanReport):
        print_blocks(show(comparison), details=details)
    elif isinstance(comparison, ComparedRecords):
        print_blocks(show_compared(comparison), details=details)
    else:
        print_cells(comparison, details=details)


def print_contrast(contrast: Contrast, *, details: bool = False, more: str = "", next_command: str = "") -> None:
    """What is shown of a contrast, on stdout."""
    from multinode.contrast.screen import show
    from multinode.render.following import following

    commands = following(more, "" if is_quiet() else next_command)
    print_blocks((*show(contrast), *commands), details=details)
