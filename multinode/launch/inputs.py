"""What was asked for, as options of the command or keywords of the API, and the launch that it makes.

A value is what is typed behind the option: a size, a time and a list are text. Contacts no node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from multinode.decoding import parse_option
from multinode.errors import MultinodeError, UsageError
from multinode.job.engines.engine import Engine, choose_engine
from multinode.job.job import Job, JobEnvironment, TrainingJob, is_setting, parse_job_environment
from multinode.job.job_files import Change, parse_change
from multinode.job.launch_options import LaunchOptions
from multinode.job.shell_variables import unused_variables
from multinode.job.typed_command import TypedCommand, read_command, settle
from multinode.launch.context import ExecuteOptions, Launch, Nodes, load_nodes, local_nodes
from multinode.levers.balance import Balance
from multinode.levers.levers import NONE, Levers, read_levers
from multinode.records.files import read_text
from multinode.records.invocation import Invocation
from multinode.records.plan import Observation, TraceWindow
from multinode.secret_values import hides, redact_words
from multinode.transport.choice import choose_transport
from multinode.units import parse_duration, parse_size

if TYPE_CHECKING:
    from multinode.check.check import CheckOptions
    from multinode.job.code_tree import CodeTree
    from multinode.launch.restart import RestartOptions

_MOST_NOTES = 10
_LEAST_LOG_BYTES = 1 << 20
# What is recorded unless something else is asked for.
_USUAL = Observation()

_Options = TypeVar("_Options", bound=LaunchOptions)

Note = Callable[[str], None]
"""Is told, in a line, what was decided or left out."""
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0)]
OnHang = Literal["report", "stop"]
YamlWords = Annotated[tuple[str, ...], Meta(extra={"values": "yaml"})]
"""`KEY=VALUE` whose value is YAML."""
YamlAxes = Annotated[tuple[str, ...], Meta(extra={"values": "axis"})]
"""`KEY=VALUE,...` whose values are YAML."""


class NodeInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every job."""

    hosts: str | None = None
    env: tuple[str, ...] = ()
    setup: str | None = None
    master_port: Annotated[int, Meta(ge=1, le=65535)] | None = None


class TrainingInput(NodeInput, frozen=True, kw_only=True, rename={"set_": "set"}):
    """Options of every training, and what is trained.

    Attributes:
        words: the YAML and `KEY=VALUE` of it, in front of `--`.
        typed: the command behind `--`; None without `--`.
        invocation: the command line itself; None from Python.
        measures: whether the verb compares runs, each of which must come to an end.
    """

    measures: ClassVar[bool] = True

    words: tuple[str, ...] = ()
    typed: tuple[str, ...] | None = None
    invocation: Invocation | None = None
    set_: YamlWords = ()
    deepspeed_set: YamlWords = ()
    grad_compress: str | None = None
    engine: str | None = None
    accelerate_config: str | None = None
    copy_code: str | None = None

    @property
    def concerns_job(self) -> bool:
        """Whether something was given that changes how a job starts."""
        given = (self.deepspeed_set, self.engine, self.accelerate_config, self.copy_code)
        return any(given) or self.read_levers() != NONE

    def read_levers(self) -> Levers:
        """The levers among the options.

        Raises:
            UsageError: an option is wrong, or contradicts another.
        """
        return read_levers(self)


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb trains with, read: the nodes, the job, and how it is started.

    Attributes:
        given: what was asked for.
        nodes: those that are used.
        path: the YAML; None without one.
        settings: `KEY=VALUE` that follow it.
        command: the command behind `--`; empty without one.
        env: the command's variables.
        workers_per_node: as asked for, or of the command if the hostfile is silent; None leaves it to the hostfile.
        levers: what changes the training itself.
        note: is told what is decided or left out later.
    """

    given: TrainingInput
    nodes: Nodes
    path: Path | None
    settings: tuple[str, ...]
    command: TypedCommand
    env: dict[str, str]
    workers_per_node: int | None
    levers: Levers
    note: Note

    @property
    def names_job(self) -> bool:
        """Whether a job was given."""
        return self.path is not None or bool(self.settings) or self.command != TypedCommand()

    def read_job(self, overrides: Sequence[str]) -> Job:
        """The job: a script or a YAML after `--`, a YAML before it, or the default one.

        Edits of its DeepSpeed JSON are noted as a diff.

        Args:
            overrides: of `--set`; those that follow the YAML win.
        """
        from multinode.job.job_files import load_command, load_job, load_script

        command, edits = self.command, self.given.deepspeed_set
        if command.script is not None:
            changed = (*overrides, *self.settings)
            if not edits:
                return load_script(command.script, changed)
            from multinode.job.deepspeed import parse_deepspeed_edits

            return load_script(command.script, changed, parse_deepspeed_edits(edits))
        from multinode.job.deepspeed import parse_deepspeed_edits
        from multinode.records.settings import default_job, load_settings

        settings = (*overrides, *self.settings)
        if command.training is not None and command.training.framework is not None:
            job = load_command(command.training, settings, parse_deepspeed_edits(edits))
        else:
            path = self.path or default_job(load_settings(Path.cwd()), Path.cwd())
            job = load_job(path, settings, parse_deepspeed_edits(edits), like=command.training)
        _note_diff(job, self.note)
        return job

    def with_engine(self, job: Job, options: _Options) -> tuple[Job, _Options]:
        """With the engine, the levers, the code and the variables; and the job with the engine's JSON."""
        from multinode.job.job_files import with_accelerate_json

        given, engine = self.given, self._read_engine(job)
        options = msgspec.structs.replace(
            with_environment(options, given, self.env),
            engine=engine,
            levers=self.levers,
            code=_read_copied_code(given.copy_code, self.note),
            command=given.invocation,
        )
        return with_accelerate_json(job, engine.accelerate), options

    def make_launch(
        self,
        job: Job,
        execute: ExecuteOptions,
        *,
        check: bool,
        workers_per_node: int | None = None,
        observation: Observation = _USUAL,
    ) -> Launch:
        """The launch of the job on these nodes."""
        launch = Launch(
            cluster=self.nodes.cluster,
            hostfile=self.nodes.hostfile,
            job=job,
            workers_per_node=workers_per_node,
            observation=observation,
            execute=execute,
            check=check,
        )
        job, launch = self.with_engine(job, launch)
        if self.given.measures and launch.engine is not None and not launch.engine.kind.ends:
            raise UsageError(
                "a server does not exit on its own, so its runs cannot be compared", hint="use multinode launch"
            )
        launch = msgspec.structs.replace(launch, job=job)
        note_unused_variables(launch, self.note)
        return launch

    def _read_engine(self, job: Job) -> Engine:
        command, path = self.command, self.given.accelerate_config or self.command.accelerate_config
        if path is None:
            path = job.kind.accelerate_file(job.arguments)
        config = None
        if path is not None:
            from multinode.job.engines.accelerate import parse_accelerate

            config = parse_accelerate(read_text(Path(path), "the accelerate configuration"), path)
        if command.accelerate:
            config = (config or {}) | command.accelerate
        engine = command.engine or self.given.engine
        return choose_engine(job, engine, config, passes_local_rank=command.passes_local_rank)


def read_training(
    given: TrainingInput,
    note: Note,
    *,
    nodes: int | None = None,
    workers_per_node: int | None = None,
    limits_nodes: bool = True,
) -> Training:
    """The nodes and the job of what was asked for.

    Args:
        given: what was asked for.
        note: is told what is left out.
        nodes: how many nodes are used; None is all.
        workers_per_node: on each; None leaves it to the hostfile and the command.
        limits_nodes: whether only the first `nodes` are used, and not several numbers of nodes.

    Raises:
        UsageError: something is missing, wrong, or contradicts something else.
    """
    command, line = TypedCommand(), given.invocation
    if given.typed is not None:
        if given.words:
            raise UsageError(
                f"both a job ({given.words[0]}) and a script after -- are given", hint="use only one of them"
            )
        front = "launch" if line is None else f"{line.verb}{msgspec.structs.replace(line, job=()).arguments}"
        command = read_command(given.typed, given.engine, f"multinode {front}")
    for found in command.notes:
        note(found.message)
    path, settings = _split_job(given.words)
    if command.training is not None:
        path, settings = Path(command.training.config or command.training.name), command.settings
    there = load_nodes(given.hosts or command.hosts, nodes if limits_nodes else None, note)
    settled = settle(command, there.cluster, nodes=nodes, workers=workers_per_node)
    if settled.replaced:
        note(f"the hostfile overrides {' '.join(redact_words(settled.replaced))}")
    if command.python is not None:
        # A path in this directory, which the nodes have at the same place.
        python = command.python
        there = there.with_python(os.path.normpath(Path.cwd() / python) if "/" in python else python)
    if command.setup is not None and given.setup is None:
        given = msgspec.structs.replace(given, setup=command.setup)
    return Training(
        given=given,
        nodes=there,
        path=path,
        settings=settings,
        command=command,
        env=settled.env,
        workers_per_node=settled.workers_per_node,
        levers=given.read_levers(),
        note=note,
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


def _note_diff(job: TrainingJob, note: Note) -> None:
    from multinode.render.sheet import sanitize
    from multinode.secret_values import redact_text

    if job.deepspeed_diff is None:
        return
    lines = (redact_text(job.deepspeed_diff) or "--deepspeed-set does not change the JSON").split("\n")
    for line in lines:
        note("\t".join(sanitize(part) for part in line.split("\t")))


def with_environment(options: _Options, given: NodeInput, typed: Mapping[str, str] | None = None) -> _Options:
    """With the port, the variables and the setup that were given; `typed` are variables in front of a command.

    They win; a secret among them is forwarded as `--env NAME` does. An empty `--setup` disables that of the settings.
    """
    from multinode.records.settings import load_settings

    text = given.setup if given.setup is not None else load_settings(Path.cwd()).defaults.setup
    typed = typed or {}
    words = [name if hides(name, value) else f"{name}={value}" for name, value in typed.items()]
    environment: JobEnvironment = parse_job_environment([*given.env, *words], text, {**os.environ, **typed})
    return msgspec.structs.replace(options, master_port=given.master_port, environment=environment)


def note_unused_variables(launch: Launch, note: Note) -> None:
    """Tell, on one line, which variables of this shell would change the run and do not reach it."""
    from multinode.launch.offline import plan_offline

    try:
        texts = unused_variables(os.environ, plan_offline(launch))
    except MultinodeError:
        # The launch will say it.
        return
    if texts:
        note(f"variables of this shell do not reach the nodes: {', '.join(texts)}")


def _read_copied_code(directory: str | None, note: Note) -> CodeTree | None:
    """The files of the directory that `--copy-code` names; `note` is told what is left out of them."""
    if directory is None:
        return None
    from multinode.job.code_tree import read_code
    from multinode.records.run_directory import runs_root

    code = read_code(Path(directory), Path.cwd(), without=[runs_root()])
    for found in code.notes[:_MOST_NOTES]:
        note(f"--copy-code: {found.message}{f' ({found.hint})' if found.hint else ''}")
    if len(code.notes) > _MOST_NOTES:
        note(f"--copy-code: {len(code.notes) - _MOST_NOTES} more files are left out or are Git LFS pointers")
    return code


def read_nodes(hosts: str | None, nodes: int | None, local: int | None, note: Note) -> Nodes:
    """The nodes of a measurement: those of `--hosts`, or with `--local` this machine, for that many workers."""
    if local is None:
        return load_nodes(hosts, nodes, note)
    if hosts is not None or nodes is not None:
        raise UsageError("--local uses no nodes, but --hosts or --nodes is given", hint="use only one of them")
    return local_nodes(local)


class CheckInput(TrainingInput, frozen=True, kw_only=True):
    """Options of `check`."""

    nodes: Count | None = None
    workers_per_node: Count | None = None
    synthetic: bool = False
    bandwidth: bool | None = None
    force: bool = False

    def read(self, note: Note) -> tuple[Nodes, Job | None, CheckOptions]:
        """The nodes, the job if one is checked, and how it would be launched."""
        from multinode.check.check import CheckOptions

        training = read_training(self, note, nodes=self.nodes, workers_per_node=self.workers_per_node)
        if self.hosts is None and not self.force and training.nodes.cluster.nodes[0].is_virtual:
            from multinode.lab.cluster import require_idle

            require_idle(training.nodes.cluster)
        options = CheckOptions(workers_per_node=training.workers_per_node, bandwidth=self.bandwidth)
        options = with_environment(options, self, training.env)
        job: Job | None = None
        if training.names_job or self.set_ or self.synthetic or self.concerns_job:
            job, options = training.with_engine(
                with_data(training.read_job(self.set_), synthetic=self.synthetic), options
            )
        return training.nodes, job, options


class LaunchInput(TrainingInput, frozen=True, kw_only=True, rename={"set_": "set", "trace_ranks": "trace_rank"}):
    """Options of `launch`."""

    measures: ClassVar[bool] = False

    nodes: Count | None = None
    workers_per_node: Count | None = None
    with_: str | None = None
    synthetic: bool = False
    average: str | None = None
    balance: str | None = None
    check: bool = True
    lease: Annotated[float, Meta(ge=5)] = 120.0
    grace_period: Seconds = 10.0
    log_limit: str = "2G"
    detach: bool = False
    hang_timeout: Seconds = 300.0
    on_hang: OnHang = "report"
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 0
    node_wait: str = "10m"
    min_nodes: Count | None = None
    scale_batch: bool = False
    shard_copies: Annotated[int, Meta(ge=0, le=1000)] = 1
    restart_after_oom: bool = False
    profile: bool = True
    trace: Count | None = None
    trace_ranks: tuple[Rank, ...] = ()
    nccl_inspector: bool = False
    sample_hz: Annotated[float, Meta(ge=1, le=10)] = 1.0
    fetch: tuple[str, ...] = ()
    on_end: str | None = None
    notify: str | None = None
    export: tuple[str, ...] = ()
    metrics_port: Annotated[int, Meta(ge=1, le=65535)] | None = None

    def read(self, note: Note) -> tuple[Launch, RestartOptions | None]:
        """The launch, and whether and how it is restarted."""
        self._require_followed()
        given, levers = self._with_file() if self.with_ is not None else (self, self.read_levers())
        # The levers have the speeds of nodes, which may come from a stored run.
        once = msgspec.structs.replace(given, balance=None)
        training = read_training(once, note, nodes=given.nodes, workers_per_node=given.workers_per_node)
        training = msgspec.structs.replace(training, levers=levers)
        if self.detach and (refusal := choose_transport(training.nodes.cluster, None).why_no_detach()) is not None:
            raise refusal
        job = with_data(training.read_job(given.set_), synthetic=self.synthetic)
        observation = Observation(
            profile=self.profile,
            trace=TraceWindow(steps=self.trace, ranks=self.trace_ranks) if self.trace is not None else None,
            sample_interval_s=1 / self.sample_hz,
            nccl_inspector=self.nccl_inspector,
        )
        execute = ExecuteOptions(
            lease_s=None if self.detach else self.lease,
            grace_s=self.grace_period,
            leave_when_running=self.detach,
            stall_s=self.hang_timeout or None,
            on_stall=self.on_hang,
            log_limit_bytes=parse_option("--log-limit", self.log_limit, _parse_log_limit),
        )
        launch = training.make_launch(
            job, execute, check=self.check, workers_per_node=training.workers_per_node, observation=observation
        )
        return launch, self._restart_options()

    def read_levers(self) -> Levers:
        """The levers among the options; `--balance` may name a run.

        Raises:
            UsageError: an option is wrong, or contradicts another; or the run is unknown, or measured no speeds.
        """

        def load(run: str) -> Balance:
            from multinode.launch.node_runs import load_balance
            from multinode.records.run_directory import runs_root

            return load_balance(runs_root(), run)

        return read_levers(self, load)

    def _with_file(self) -> tuple[Self, Levers]:
        """What was asked for over what the file of `--with` says."""
        typed = Change(
            overrides=self.set_,
            deepspeed=self.deepspeed_set,
            levers=self.read_levers(),
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
        )
        path = Path(self.with_ or "")
        file = parse_change(read_text(path, "the file of options", "create one with multinode tune"), path)
        change = file.joined(typed)
        given = msgspec.structs.replace(
            self,
            set_=change.overrides,
            deepspeed_set=change.deepspeed,
            # What is typed comes last, and wins.
            env=(*(f"{name}={value}" for name, value in file.env.items()), *self.env),
            nodes=change.nodes,
            workers_per_node=change.workers_per_node,
        )
        return given, change.levers

    def _require_followed(self) -> None:
        """Refuse destinations that are wrong, or that a run which is left alone cannot have."""
        if self.notify is not None:
            from multinode.launch.notice import check_url

            check_url(self.notify)
        if not self.export and self.metrics_port is None:
            return
        if self.detach:
            raise UsageError(
                "--export and --metrics-port need this command to keep running",
                hint="remove --detach, or attach with --export",
            )
        from multinode.export.target import parse_targets

        parse_targets(self.export, self.metrics_port)

    def _restart_options(self) -> RestartOptions | None:
        """The options; None where the run is not restarted.

        Raises:
            UsageError: they do not go together, or the time is none.
        """
        if self.min_nodes is not None and not self.restarts:
            raise UsageError("--min-nodes needs --restarts")
        if self.scale_batch and self.min_nodes is None:
            raise UsageError("--scale-batch needs --min-nodes")
        if self.restarts and self.detach:
            raise UsageError(
                "--restarts needs this command to keep running; a detached run is not restarted",
                hint="remove --detach; in Slurm, use multinode submit",
            )
        node_wait_s = parse_option("--node-wait", self.node_wait, parse_duration)
        if not self.restarts:
            return None
        from multinode.launch.restart import RestartOptions

        return RestartOptions(
            restarts=self.restarts,
            node_wait_s=node_wait_s,
            after_oom=self.restart_after_oom,
            min_nodes=self.min_nodes,
            scale_batch=self.scale_batch,
            shard_copies=self.shard_copies,
        )


def with_data(job: Job, *, synthetic: bool) -> Job:
    """The job, with `--synthetic` on synthetic data."""
    if not synthetic:
        return job
    from multinode.job.synthetic import with_synthetic

    return with_synthetic(job)


def _parse_log_limit(text: str) -> int | None:
    limit_bytes = parse_size(text)
    if 0 < limit_bytes < _LEAST_LOG_BYTES:
        raise ValueError(f"{text!r} is less than the minimum log size, 1M")
    return limit_bytes or None
