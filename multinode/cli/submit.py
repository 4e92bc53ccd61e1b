"""`multinode submit`: a batch job of Slurm that runs another verb on the nodes it gets."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from multinode.cli.options import SCRIPT, Json, ScriptCommand
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.cluster.allocation import BatchJob, batch_script
from multinode.records.run_directory import runs_root

_SBATCH = "multinode.sbatch"
_OURS = frozenset({"--dry-run", "--json", "--help", "-h"})


class _SubmitCommand(ScriptCommand):
    """Keeps what stands before `--` and is none of our options in `ctx.meta[_SBATCH]`, for sbatch."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take out what is sbatch's; the rest is parsed as ever."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_SBATCH] = tuple(word for word in args[:at] if word not in _OURS)
        return super().parse_args(ctx, [word for word in args[:at] if word in _OURS] + args[at:])


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=_SubmitCommand,
        options_metavar="[SBATCH OPTIONS] [OPTIONS] -- VERB ...",
        epilog=examples(
            "submit -N2 -- launch job.yaml",
            note="Options of sbatch go before --: -N2 --gpus-per-node=4 --time=4:00:00.",
        ),
    )(submit)


def submit(
    ctx: typer.Context,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a Slurm batch job that runs a verb on its nodes: launch, contrast, nccl-test, ...

    Give sbatch options before --, and the verb without --hosts after it.
    """
    runs = runs_root().absolute()
    job = BatchJob(options=ctx.meta[_SBATCH], command=ctx.meta[SCRIPT] or (), python=sys.executable, runs=str(runs))
    script = batch_script(job)
    if dry_run:
        if as_json:
            print_document({"schema": "multinode.submit/1", "job_id": None, "script": script, "runs": str(runs)})
        else:
            typer.echo(script, nl=False)
        return
    from multinode.transport.slurm import submit_script

    job_id = submit_script(script, os.environ)
    if as_json:
        print_document({"schema": "multinode.submit/1", "job_id": job_id, "script": script, "runs": str(runs)})
    else:
        typer.echo(f"submitted Slurm job {job_id}")
    note(f"once it runs: multinode attach, logs -f or stop; they read {runs}, which its nodes must share")
    note(f"before that: squeue --job {job_id}; scancel {job_id}")
