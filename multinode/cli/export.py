"""`multinode export`: figures of a stored run where other tools show them."""

from __future__ import annotations

from typing import Annotated

import typer

from multinode.cli.options import Json, MetricsPort, RunId
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("export last tensorboard:tb", "export last csv:tables"))(export)


def export(
    run_id: RunId,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help=(
                "Where to export to: tensorboard:DIR, mlflow:DIR|URI, wandb:DIR, prometheus:FILE.prom, csv:DIR or "
                "parquet:DIR."
            ),
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Keep exporting until the run ends. Another command on this machine must be following the run.",
        ),
    ] = False,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Export the metrics and samples of a run to TensorBoard, MLflow, Weights & Biases, Prometheus or tables.

    multinode exports each run of a contrast, a sweep or a launch with restarts.
    """
    from multinode.export.target import parse_targets
    from multinode.launch.export import export_runs, follow_export

    where = parse_targets(targets or (), metrics_port)
    if not where:
        raise UsageError("no target was given", hint=f"multinode export {run_id} tensorboard:DIR")
    if follow:
        if len(where) > 1:
            raise UsageError("--follow takes one target", hint="start one export per target")
        follow_export(runs_root(), run_id, where[0])
        return
    done = []
    for run, target, failure in export_runs(runs_root(), run_id, where):
        done.append({"run_id": run, "target": str(target), "error": failure})
        if failure is not None:
            typer.echo(f"error: {target}, run {run}: {failure}", err=True)
        else:
            note(f"{run} -> {target}")
    if as_json:
        print_document({"schema": "multinode.export/2", "exports": done})
    raise typer.Exit(1 if any(run["error"] for run in done) else 0)
