"""Reading what several verbs are given alike: the hostfile and the job. What an edit changes is told on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import typer

from multinode.cli.output import note
from multinode.errors import UsageError
from multinode.job.engine_commands import Engine, choose_engine, parse_accelerate
from multinode.job.job import Job, JobEnvironment, LlamaFactoryJob, parse_job_environment
from multinode.job.job_files import Change, parse_change
from multinode.records.balance import Balance, parse_balance
from multinode.records.files import read_text

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree
    from multinode.launch.context import Nodes

T = TypeVar("T")
_MOST_NOTES = 10


def read_cluster(hosts: str | None, nodes: int | None = None) -> Nodes:
    """The nodes named by `--hosts` or its alternatives, limited to `--nodes`."""
    from multinode import api

    return api.load_nodes(hosts, nodes, note)


def read_nodes(hosts: str | None, nodes: int | None, local: int | None) -> Nodes:
    """As `read_cluster`; with `--local` this machine, for that many workers."""
    from multinode import api

    if local is None:
        return read_cluster(hosts, nodes)
    if hosts is not None or nodes is not None:
        raise UsageError("--local uses no nodes, but --hosts or --nodes is given", hint="use only one of them")
    return api.local_nodes(local)


def parse_option(name: str, text: str, parse: Callable[[str], T]) -> T:
    """An option's value, parsed.

    Raises:
        UsageError: it cannot be.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def read_change(path: Path | None) -> Change:
    """The change in the file of `--with`; empty without one."""
    if path is None:
        return Change()
    return parse_change(read_text(path, "the file of options", "create one with multinode tune"), path)


def read_balance(text: str | None) -> Balance | None:
    """`--balance`: speeds that are stated, or those that a run has measured.

    Raises:
        UsageError: they are wrong, there is no such run, or it does not tell how fast its nodes are.
    """
    if text is None or "=" in text:
        return parse_balance(text) if text is not None else None
    from multinode.profile.summary import Summary
    from multinode.records.run_directory import RunDirectory, runs_root

    directory = RunDirectory.open(runs_root(), text)
    summary = directory.read("summary.json", Summary)
    if summary is None or summary.balance is None:
        raise UsageError(
            f"--balance {text}: run {directory.run_id} does not tell how fast its nodes are",
            hint="a run on several nodes whose stragglers multinode show knows, or --balance NODE=SPEED,...",
        )
    return msgspec.structs.replace(summary.balance.balance, run_id=directory.run_id)


def read_job(
    path: Path | None,
    script: tuple[str, ...] | None,
    overrides: list[str],
    deepspeed_edits: list[str] | None = None,
) -> Job:
    """The job: a script after `--`, a YAML, or the default one; edits of its DeepSpeed JSON are shown as a diff."""
    from multinode import api
    from multinode.job.job_files import load_script
    from multinode.records.settings import default_job, load_settings

    if script is not None:
        if path is not None:
            raise UsageError(f"both a job ({path}) and a script after -- are given", hint="use only one of them")
        if not script:
            raise UsageError("no script follows --", hint="multinode launch -- train.py --its --arguments")
        if overrides or deepspeed_edits:
            option = "--set" if overrides else "--deepspeed-set"
            raise UsageError(f"{option} changes a YAML job; this is a script", hint="give the script its own arguments")
        return load_script(script)
    job = api.load_job(path or default_job(load_settings(Path.cwd()), Path.cwd()), overrides, deepspeed_edits or ())
    _show_diff(job)
    return job


def _show_diff(job: LlamaFactoryJob) -> None:
    from multinode.render.sheet import sanitize
    from multinode.secret_values import redact_text

    if job.deepspeed_diff is None:
        return
    lines = (redact_text(job.deepspeed_diff) or "--deepspeed-set does not change the JSON").split("\n")
    for line in lines:
        typer.echo("\t".join(sanitize(part) for part in line.split("\t")), err=True)


def read_engine(job: Job, name: str | None, accelerate: Path | None) -> Engine:
    """The engine in `--engine`, or the job's default."""
    config = None
    if accelerate is not None:
        config = parse_accelerate(read_text(accelerate, "the accelerate configuration"), str(accelerate))
    return choose_engine(job, name, config)


def read_copied_code(directory: Path | None) -> CodeTree | None:
    """The files of the directory that `--copy-code` names; what is left out of them is told on stderr."""
    if directory is None:
        return None
    from multinode import api

    code = api.read_code(directory)
    for text in code.notes[:_MOST_NOTES]:
        note(f"--copy-code: {text}")
    if len(code.notes) > _MOST_NOTES:
        note(f"--copy-code: {len(code.notes) - _MOST_NOTES} more files are left out, or pointers of git LFS")
    return code


def read_job_environment(variables: list[str] | None, setup: str | None) -> JobEnvironment:
    """The variables and setup of `--env` and `--setup`; an empty `--setup` disables that of the settings."""
    from multinode.records.settings import load_settings

    text = setup if setup is not None else load_settings(Path.cwd()).defaults.setup
    return parse_job_environment(variables or [], text, os.environ)
