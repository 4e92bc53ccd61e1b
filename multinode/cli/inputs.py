"""Reading what several verbs are given alike: the hostfile and the job. What an edit changes is told on stderr."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import typer

from multinode.cli.options import SCRIPT, NodeOptions, TrainingOptions, read_invocation
from multinode.cli.output import note
from multinode.errors import MultinodeError, UsageError
from multinode.job.engines.engine import Engine, choose_engine
from multinode.job.job import Job, JobEnvironment, LlamaFactoryJob, is_setting, parse_job_environment
from multinode.job.job_files import Change, parse_change
from multinode.job.shell_variables import unused_variables
from multinode.job.typed_command import TypedCommand, read_command, settle
from multinode.records.balance import Balance, parse_balance
from multinode.records.benchmark import Benchmark
from multinode.records.files import read_text
from multinode.records.invocation import Invocation
from multinode.secret_values import hides, redact_words

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree
    from multinode.job.launch_options import LaunchOptions
    from multinode.launch.context import ExecuteOptions, Launch, Nodes

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingInput:
    """What a verb is given to train with: the nodes, the job, and how it is started.

    Attributes:
        nodes: limited to `--nodes`.
        path: the YAML; None without one.
        settings: `KEY=VALUE` that follow it.
        command: the command behind `--`; empty without one.
        env: the command's variables.
        training: the options.
        invocation: the command line itself.
        workers_per_node: of `--workers-per-node`, or of the command if the hostfile is silent; None leaves it to the
            hostfile.
    """

    nodes: Nodes
    path: Path | None
    settings: tuple[str, ...]
    command: TypedCommand
    env: dict[str, str]
    training: TrainingOptions
    invocation: Invocation
    workers_per_node: int | None

    @property
    def names_job(self) -> bool:
        """Whether a job was given."""
        return self.path is not None or bool(self.settings) or self.command != TypedCommand()

    def read_job(self, overrides: Sequence[str]) -> Job:
        """The job: a script or a YAML after `--`, a YAML before it, or the default one.

        Edits of its DeepSpeed JSON are shown as a diff.

        Args:
            overrides: of `--set`; those that follow the YAML win.
        """
        from multinode import api
        from multinode.job.job_files import load_flags, load_script
        from multinode.records.settings import default_job, load_settings

        command, edits = self.command, self.training.deepspeed_set or []
        if command.script is not None:
            if overrides or edits:
                option = "--set" if overrides else "--deepspeed-set"
                raise UsageError(
                    f"{option} changes a YAML job; this is a script", hint="give the script its own arguments"
                )
            return load_script(command.script)
        settings = (*overrides, *self.settings)
        if command.flags:
            from multinode.job.deepspeed import parse_deepspeed_edits

            job = load_flags(command.flags, settings, parse_deepspeed_edits(edits))
        else:
            job = api.load_job(self.path or default_job(load_settings(Path.cwd()), Path.cwd()), settings, edits)
        _show_diff(job)
        return job

    def with_engine(self, job: Job, options: LaunchOptions) -> tuple[Job, LaunchOptions]:
        """With the engine, the compression, the code and the variables; and the job with the engine's JSON."""
        from multinode.job.job_files import with_accelerate_json

        training, engine = self.training, self._read_engine(job)
        options = msgspec.structs.replace(
            with_environment(options, training, self.env),
            engine=engine,
            grad_compress=training.grad_compress,
            code=read_copied_code(training.copy_code),
            command=self.invocation,
        )
        return with_accelerate_json(job, engine.accelerate), options

    def make_launch(self, job: Job, options: LaunchOptions, execute: ExecuteOptions, *, check: bool) -> Launch:
        """The launch of the job on these nodes."""
        job, options = self.with_engine(job, options)
        return make_launch(self.nodes, job, options, execute, check=check)

    def _read_engine(self, job: Job) -> Engine:
        command, path = self.command, self.training.accelerate_config
        if path is None and command.accelerate_config is not None:
            path = Path(command.accelerate_config)
        config = None
        if path is not None:
            from multinode.job.engines.accelerate import parse_accelerate

            config = parse_accelerate(read_text(path, "the accelerate configuration"), str(path))
        if command.accelerate:
            config = (config or {}) | command.accelerate
        engine = command.engine or self.training.engine
        return choose_engine(job, engine, config, passes_local_rank=command.passes_local_rank)


def read_training(
    ctx: typer.Context,
    words: list[str] | None,
    training: TrainingOptions,
    *,
    hosts: str | None,
    nodes: int | None = None,
    workers_per_node: int | None = None,
    limits_nodes: bool = True,
) -> TrainingInput:
    """The nodes and the job from what was typed before `--` and behind it; what is left out is told on stderr.

    Args:
        ctx: of the verb.
        words: its arguments: the YAML, and `KEY=VALUE` of it.
        training: its options.
        hosts: `--hosts`.
        nodes: `--nodes`.
        workers_per_node: `--workers-per-node`.
        limits_nodes: whether the verb runs on the first `nodes` only, and not on several numbers of nodes.

    Raises:
        UsageError: something is missing, wrong, or contradicts something else.
    """
    typed, invocation = ctx.meta[SCRIPT], read_invocation(ctx)
    command = TypedCommand()
    if typed is not None:
        if words:
            raise UsageError(f"both a job ({words[0]}) and a script after -- are given", hint="use only one of them")
        front = msgspec.structs.replace(invocation, job=()).arguments
        command = read_command(typed, training.engine, f"multinode {ctx.info_name}{front}")
    for text in command.notes:
        note(text)
    path, settings = _split_job(words or ())
    if command.config is not None:
        path, settings = Path(command.config), command.settings
    there = read_cluster(hosts or command.hosts, nodes if limits_nodes else None)
    settled = settle(command, there.cluster, nodes=nodes, workers=workers_per_node)
    if settled.replaced:
        note(f"the hostfile replaces: {' '.join(redact_words(settled.replaced))}")
    if command.python is not None:
        # A path in this directory, which the nodes have at the same place.
        python = command.python
        there = there.with_python(os.path.normpath(Path.cwd() / python) if "/" in python else python)
    if command.setup is not None and training.setup is None:
        training = dataclasses.replace(training, setup=command.setup)
    return TrainingInput(
        nodes=there,
        path=path,
        settings=settings,
        command=command,
        env=settled.env,
        training=training,
        invocation=invocation,
        workers_per_node=settled.workers_per_node,
    )


def _split_job(words: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """The YAML and its settings: `train.yaml learning_rate=1e-5`."""
    path = None if not words or (is_setting(words[0]) and not Path(words[0]).exists()) else Path(words[0])
    settings = tuple(words if path is None else words[1:])
    wrong = next((word for word in settings if not is_setting(word)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong!r} after {path} is not KEY=VALUE", hint="settings follow the YAML: train.yaml max_steps=100"
        )
    return path, settings


def _show_diff(job: LlamaFactoryJob) -> None:
    from multinode.render.sheet import sanitize
    from multinode.secret_values import redact_text

    if job.deepspeed_diff is None:
        return
    lines = (redact_text(job.deepspeed_diff) or "--deepspeed-set does not change the JSON").split("\n")
    for line in lines:
        typer.echo("\t".join(sanitize(part) for part in line.split("\t")), err=True)


def with_environment(
    options: LaunchOptions, given: NodeOptions, typed: Mapping[str, str] | None = None
) -> LaunchOptions:
    """With the port, the variables and the setup that were given; `typed` are variables in front of a command."""
    environment = read_job_environment(given.env, given.setup, typed)
    return msgspec.structs.replace(options, master_port=given.master_port, environment=environment)


def make_launch(
    nodes: Nodes, job: Job | Benchmark, options: LaunchOptions, execute: ExecuteOptions, *, check: bool
) -> Launch:
    """The launch of a job on the cluster of a hostfile, whose text comes with it."""
    from multinode.launch.context import Launch

    launch = Launch(
        cluster=nodes.cluster, hostfile=nodes.hostfile, job=job, options=options, execute=execute, check=check
    )
    _tell_unused_variables(launch)
    return launch


def _tell_unused_variables(launch: Launch) -> None:
    """Tell, on one line, which variables of this shell would change the run and do not reach it."""
    from multinode import api

    try:
        texts = unused_variables(os.environ, api.plan(launch))
    except MultinodeError:
        # The launch will say it.
        return
    if texts:
        note(f"variables of this shell do not reach the nodes: {', '.join(texts)}")


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


def read_job_environment(
    variables: list[str] | None, setup: str | None, typed: Mapping[str, str] | None = None
) -> JobEnvironment:
    """The variables and setup of `--env` and `--setup`; an empty `--setup` disables that of the settings.

    `typed` are variables in front of a command. They win; a secret among them is forwarded as `--env NAME` does.
    """
    from multinode.records.settings import load_settings

    text = setup if setup is not None else load_settings(Path.cwd()).defaults.setup
    typed = typed or {}
    words = [name if hides(name, value) else f"{name}={value}" for name, value in typed.items()]
    return parse_job_environment([*(variables or []), *words], text, {**os.environ, **typed})
