"""`multinode submit`: the batch script of Slurm that runs another verb on the nodes it gets, and its submission."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from multinode.cli.options import SCRIPT, Json, ScriptCommand
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root
from multinode.secret_values import redact_words

_SBATCH = "multinode.sbatch"
_OURS = frozenset({"--dry-run", "--json", "--help", "-h"})
# Beside the grace period: time for nodes to verify that nothing is left, and Slurm's resolution of a minute.
_VERIFY_S = 60
_GRACE_OPTION = "--grace-period"
_DEFAULT_GRACE_S = 10.0
_SUBMITTED = frozenset({"launch", "check", "nccl-test", "bench", "contrast", "sweep", "tune"})


class _SubmitCommand(ScriptCommand):
    """Keeps what stands before `--` and is none of our options in `ctx.meta[_SBATCH]`, for sbatch."""

    behind = "[SBATCH OPTIONS] -- VERB..."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take out what is sbatch's; the rest is parsed as ever."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_SBATCH] = tuple(word for word in args[:at] if word not in _OURS)
        return super().parse_args(ctx, [word for word in args[:at] if word in _OURS] + args[at:])


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=_SubmitCommand,
        epilog=examples(
            "submit -N2 -- launch job.yaml",
            note="Put sbatch options before --, such as -N2 --gpus-per-node=4 --time=4:00:00.",
        ),
    )(submit)


def submit(
    ctx: typer.Context,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a Slurm batch job that runs a multinode command, such as launch or nccl-test, on its nodes.

    Put sbatch options before --, and the multinode command after it, without --hosts.
    """
    runs = runs_root().absolute()
    script = batch_script(ctx.meta[_SBATCH], ctx.meta[SCRIPT] or (), python=sys.executable, runs=str(runs))
    if dry_run:
        if as_json:
            print_document({"schema": "multinode.submit/2", "job_id": None, "script": script, "runs": str(runs)})
        else:
            typer.echo(script, nl=False)
        return
    from multinode.transport.slurm import submit_script

    job_id = submit_script(script, os.environ)
    if as_json:
        print_document({"schema": "multinode.submit/2", "job_id": job_id, "script": script, "runs": str(runs)})
    else:
        typer.echo(f"submitted Slurm job {job_id}")
    note(
        f"once the job runs, use multinode attach, logs -f or stop. These commands read {runs}, which must be on a "
        "file system that the nodes of the job share"
    )
    note(f"until then, use squeue --job {job_id} or scancel {job_id}")


def batch_script(options: Sequence[str], command: Sequence[str], *, python: str, runs: str) -> str:
    """The script, which people can read, change and submit by hand.

    Args:
        options: of sbatch, as typed.
        command: the verb and its arguments.
        python: the controller's interpreter.
        runs: the directory of runs.

    Raises:
        UsageError: no command that runs on nodes, it names its nodes, or the script would contain a secret.
    """
    verb, *arguments = command or ("",)
    if verb not in _SUBMITTED:
        raise UsageError(
            f"{verb!r} cannot be submitted" if verb else "no command follows --",
            hint=f"multinode submit -N2 -- launch job.yaml; or {', '.join(sorted(_SUBMITTED - {'launch'}))}",
        )
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    taken = next((word for word in own if word == "--hosts" or word.startswith("--hosts=")), None)
    if taken is not None:
        raise UsageError(f"{taken}: a submitted command gets its nodes from Slurm", hint="remove --hosts")
    if redact_words(tuple(command)) != tuple(command):
        raise UsageError(
            "the command contains a secret, which others could read in the batch script",
            hint="export it, and pass only its name: --env HF_TOKEN",
        )
    lines = _directives(options)
    names = [line.split()[0].partition("=")[0] for line in lines]
    if "--job-name" not in names and not any(name.startswith("-J") for name in names):
        lines.insert(0, "--job-name=multinode")
    if "--signal" not in names:
        lines.append(f"--signal=B:TERM@{math.ceil(_grace_s(own)) + _VERIFY_S}")
    words = (python, "-m", "multinode", verb, "--hosts", "auto", *arguments)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "# The shell becomes the controller, so that Slurm's SIGTERM before the time limit stops the run cleanly.",
            f"export MULTINODE_RUNS={shlex.quote(runs)}",
            f"exec {shlex.join(words)}",
            "",
        ]
    )


def _directives(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if "\n" in word or "\r" in word:
            raise UsageError(f"{word!r}: an sbatch option cannot contain a line break")
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            lines.append(f"{name}={shlex.quote(value)}" if equals else shlex.quote(word))
        elif lines:
            lines[-1] += f" {shlex.quote(word)}"
        else:
            raise UsageError(
                f"{word!r} is not an sbatch option", hint="multinode submit -N2 --time=1:00:00 -- launch job.yaml"
            )
    return lines


def _grace_s(arguments: Sequence[str]) -> float:
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == _GRACE_OPTION:
            try:
                return max(0.0, min(float(value if equals else following), 86400.0))
            except ValueError:
                break
    return _DEFAULT_GRACE_S
