"""Options that several verbs have alike, one type each, also in groups; and the script that stands after `--`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from multinode.cli.panels import PanelCommand
from multinode.cli.verbs import load_verb, usual_name
from multinode.errors import MultinodeError, UsageError
from multinode.job.engines import ENGINES
from multinode.records.invocation import Invocation
from multinode.secret_values import redact_words


def complete_runs(incomplete: str) -> list[str]:
    """Run ids, newest first, for shell completion."""
    from multinode.records.run_directory import list_runs, runs_root

    with contextlib.suppress(MultinodeError):
        names = ("last", *(path.name for path in reversed(list_runs(runs_root()))))
        return [name for name in names if name.startswith(incomplete)]
    return []


def complete_hosts(incomplete: str) -> list[str]:
    """`lab`, `auto`, and files named like hostfiles; otherwise the shell completes any file."""
    hostfiles = [
        str(path) for pattern in ("*host*", "hostfiles/*") for path in sorted(Path().glob(pattern)) if path.is_file()
    ]
    return [name for name in ("lab", "auto", *hostfiles) if name.startswith(incomplete)]


# Sections of a verb's help.
_NODES, _JOB, _RUN, _MEASURE = "Nodes", "Job", "Run control", "Measurement"
# Its value may be left out.
COPY_CODE = "--copy-code"

JobWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB.yaml [KEY=VALUE]...",
        help=(
            "LLaMA-Factory YAML, followed by keys to override (same as --set). For any other training job, put your "
            "usual command after --. Default: the job in the settings, or configs/default.yaml."
        ),
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        "-H",
        autocompletion=complete_hosts,
        rich_help_panel=_NODES,
        metavar="HOSTS",
        help=(
            "Nodes to use: a hostfile, `-` (a hostfile on stdin), a list such as a:8,b:8 or node[1-4], an Ansible"
            " INVENTORY:GROUP, `@NAME` (a cluster in the settings), `lab`, or `auto` (the nodes of this Slurm, "
            "dstack, SkyPilot, Kubeflow, PBS or OAR job). Default: $MULTINODE_HOSTS, the settings, or a lab "
            "started in this directory."
        ),
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="K", rich_help_panel=_NODES, help="Use the first K nodes of the hostfile.")
]
WorkersPerNode = Annotated[
    int | None,
    typer.Option(min=1, rich_help_panel=_NODES, metavar="N", help="Workers per node. Default: the slots of each node."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_JOB, help="Override a key of the job. Repeatable."),
]
With = Annotated[
    Path | None,
    typer.Option(
        "--with",
        metavar="FILE",
        rich_help_panel=_JOB,
        help="File with options and settings, written by multinode tune. Options on the command line override it.",
    ),
]
DeepspeedSet = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        rich_help_panel=_JOB,
        help=(
            "Change a key of the job's DeepSpeed JSON for this run only, and show the diff. Write a.b for key b "
            "in group a. Repeatable."
        ),
    ),
]
Synthetic = Annotated[
    bool,
    typer.Option(
        "--synthetic",
        rich_help_panel=_JOB,
        help="Train on synthetic data, as a benchmark. Every sample has exactly cutoff_len tokens.",
    ),
]
CopyCode = Annotated[
    Path | None,
    typer.Option(
        COPY_CODE,
        metavar="[DIR]",
        rich_help_panel=_JOB,
        help=(
            "Copy DIR (by default, this directory) to every node and run the job there. Skip files that git ignores "
            "or that a node already has."
        ),
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        rich_help_panel=_NODES,
        metavar="PORT",
        help="Rendezvous port on node 0. Default: a free port from 20000 to 29999, different for each run.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        rich_help_panel=_RUN,
        help="Measure everything again. By default, the same command resumes an interrupted measurement.",
    ),
]
Check = Annotated[
    bool,
    typer.Option("--check/--no-check", rich_help_panel=_RUN, help="First check for problems that would break the run."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
LinkMeasured = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Link rate during the runs, such as 1gbit. Needed only if the NICs did not report it."
    ),
]
Details = Annotated[bool, typer.Option("--details", help="Also print all tables and notes.")]
GracePeriod = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="SECONDS", rich_help_panel=_RUN, help="Time between SIGTERM and SIGKILL when stopping the run."
    ),
]
Fetch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=_RUN,
        help="At the end, copy this file or directory from node 0, including the ZeRO shards of all nodes. Repeatable.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        rich_help_panel=_JOB,
        help=f"Launcher: {', '.join(ENGINES[:-1])} or {ENGINES[-1]}. Default: llamafactory for a YAML, "
        "torchrun for a script.",
    ),
]
AccelerateConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_JOB,
        help="Configuration file for --engine accelerate. multinode overrides its machine rank, address and port.",
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        rich_help_panel=_JOB,
        help="Set an environment variable on every node. NAME alone forwards your local value without logging it. "
        "Repeatable.",
    ),
]
Setup = Annotated[
    str | None,
    typer.Option(
        metavar="SHELL",
        rich_help_panel=_JOB,
        help=(
            "Shell commands to run on every node before the job, such as conda activate or module load. Default: "
            "from the settings."
        ),
    ),
]
HangTimeout = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        rich_help_panel=_RUN,
        help="Time without a step, a result or a log line after which a run counts as hung. 0 disables this.",
    ),
]
OnHang = Annotated[
    Literal["report", "stop"],
    typer.Option(
        metavar="HOW",
        rich_help_panel=_RUN,
        help="What to do if the run hangs: `report` names the rank that is behind; `stop` names it and stops the run.",
    ),
]
Output = Annotated[
    Literal["none", "rank0", "all"] | None,
    typer.Option(
        metavar="WHAT",
        rich_help_panel=_RUN,
        help=(
            "Job output to print above the live table: `none`, `rank0` (the log of the node with rank 0, without "
            "lines from other ranks) or `all`. Default: rank0 on a terminal, otherwise none."
        ),
    ),
]
OnEnd = Annotated[
    str | None,
    typer.Option(
        metavar="CMD",
        rich_help_panel=_RUN,
        help="Shell command to run locally when the run ends, hangs or restarts. $MULTINODE_EVENT names the event.",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="MULTINODE_NOTIFY",
        show_envvar=False,
        rich_help_panel=_RUN,
        help=(
            "Webhook (https) that receives a JSON document when the run ends, hangs or restarts. Default: "
            "$MULTINODE_NOTIFY."
        ),
    ),
]
ExportTo = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar="KIND:WHERE,...",
        rich_help_panel=_RUN,
        help=(
            "Export metrics during the run (tensorboard:DIR, mlflow:DIR|URI, wandb:DIR, prometheus:FILE.prom) or "
            "at its end (csv:DIR, parquet:DIR). Repeatable."
        ),
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        metavar="PORT",
        rich_help_panel=_RUN,
        help="Serve Prometheus metrics on 127.0.0.1:PORT while multinode follows the run.",
    ),
]
GradCompress = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        rich_help_panel=_JOB,
        help=(
            "Compress the gradients of DDP with fp16 or bf16 (half the bytes of fp32), or with powersgd[:RANK[:START]]."
        ),
    ),
]
Balance = Annotated[
    str | None,
    typer.Option(
        "--balance",
        metavar="RUN|NODE=SPEED,...",
        autocompletion=complete_runs,
        rich_help_panel=_JOB,
        help=(
            "With DDP, give faster nodes more samples per step. The speeds come from a run's measurements or from "
            "the values given here."
        ),
    ),
]
Average = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD:H[:...]",
        rich_help_panel=_JOB,
        help=(
            "Average the parameters between nodes only every H steps, with local:H (local SGD) or "
            "diloco:H[:LR[:MOMENTUM]] (DiLoCo with an outer Nesterov optimizer, default 0.7:0.9). Append :fp16 or"
            " :bf16 to send 16-bit values."
        ),
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile/--no-profile",
        rich_help_panel=_MEASURE,
        help="Measure, inside the workers, how long each part of a step takes.",
    ),
]
Trace = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEPS",
        rich_help_panel=_MEASURE,
        help=(
            "Number of steps to trace with torch.profiler after the warm-up. multinode copies the traces to this "
            "machine."
        ),
    ),
]
NcclInspector = Annotated[
    bool,
    typer.Option(
        "--nccl-inspector",
        rich_help_panel=_MEASURE,
        help="Record every NCCL operation with NCCL's Inspector plugin (NCCL 2.28 or newer on the nodes).",
    ),
]
TraceRanks = Annotated[
    list[int] | None,
    typer.Option(
        "--trace-rank",
        min=0,
        metavar="RANK",
        rich_help_panel=_MEASURE,
        help="Rank to trace. Default: the first rank of each node. Repeatable.",
    ),
]
SampleHz = Annotated[
    float,
    typer.Option(
        "--sample-hz",
        min=1.0,
        max=10.0,
        rich_help_panel=_MEASURE,
        metavar="HZ",
        help="How many times per second to sample the NICs, CPUs and GPUs of each node.",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="CONDITION", help="Only show matching rows, such as method=lora or nodes>=2. Repeatable."),
]
PricesFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file of GPU or node prices. Default: the prices in the hostfile."),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Name the cheapest cell that finishes the full run within this time, such as 8h or 2d."
    ),
]
RunId = Annotated[
    str, typer.Argument(autocompletion=complete_runs, help="Run id, the beginning of a run id, or `last`.")
]
RunIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", autocompletion=complete_runs, help="Run ids, beginnings of run ids, or `last`."),
]

SCRIPT = "multinode.script"


class ScriptCommand(PanelCommand):
    """Keeps everything behind the first `--` in `ctx.meta[SCRIPT]`: a tuple, or None where there was no `--`.

    A program in the place of the YAML is answered with the line to type.
    """

    behind = "[-- COMMAND...]"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] [JOB.yaml [KEY=VALUE]...] [-- COMMAND...]`."""
        return [*super().collect_usage_pieces(ctx), self.behind]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split at `--`, and parse what stands before it, with a directory for --copy-code that names none."""
        ctx.meta[SCRIPT] = None
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT] = tuple(args[at + 1 :])
            args = args[:at]
        for at in reversed([at for at, word in enumerate(args) if word == COPY_CODE]):
            following = args[at + 1 : at + 2]
            # A file is the job.
            if not following or following[0].startswith("-") or Path(following[0]).is_file():
                args = [*args[: at + 1], ".", *args[at + 1 :]]
        if ctx.meta[SCRIPT] is None:
            self._refuse_program(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_program(self, ctx: Any, args: list[str]) -> None:
        """Answer `launch train.py` and `launch torchrun train.py` with the line that starts them.

        Raises:
            UsageError: the first argument starts a program.
        """
        from multinode.job.typed_command import starts_program

        options: list[Any] = [option for option in self.params if option.param_type_name == "option"]
        own = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
        front: list[str] = []
        command: list[str] = []
        rest = iter(args)
        for word in rest:
            option = own.get(_long_name(word, own))
            if option is None:
                command.append(word)
                continue
            front.append(word)
            if not option.is_flag and "=" not in word:
                front += itertools.islice(rest, 1)
        if command and starts_program(command[0]):
            line = shlex.join(redact_words(("multinode", ctx.info_name, *front, "--", *command)))
            raise UsageError(f"{command[0]} is not a YAML file: put your program after --", hint=line)


def _long_name(word: str, own: Collection[str]) -> str:
    """The name of an option of ours in a word, also as other launchers spell it."""
    name = word.partition("=")[0]
    return name if name in own or not name.startswith("--") else f"--{usual_name(name[2:])}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """How any job is started on its nodes."""

    env: Variables = None
    setup: Setup = None
    master_port: MasterPort = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(NodeOptions):
    """How a training is started."""

    deepspeed_set: DeepspeedSet = None
    grad_compress: GradCompress = None
    engine: EngineName = None
    accelerate_config: AccelerateConfig = None
    copy_code: CopyCode = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeverOptions:
    """What changes the training itself, beside the compression that every training has."""

    average: Average = None
    balance: Balance = None


def expand_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as Typer reads it: each group of options is replaced by its options."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _own_first(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        verb(**values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def read_invocation(ctx: Any) -> Invocation:
    """The command line of a verb as typed; a secret is left to the shell's variable of its name, or redacted."""
    options: list[tuple[str, ...]] = []
    arguments: list[str] = []
    alike: list[str] = []
    for parameter in ctx.command.params:
        source, value = ctx.get_parameter_source(parameter.name), ctx.params.get(parameter.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        values = [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
        if parameter.param_type_name == "argument":
            arguments += values
            continue
        if parameter.is_flag:
            options.append(tuple(parameter.opts[:1] if value else parameter.secondary_opts[:1]))
        else:
            options += [redact_words((parameter.opts[0], _without_secret(parameter.opts[0], each))) for each in values]
        if getattr(parameter, "rich_help_panel", None) == _JOB:
            alike.append(options[-1][0])
    command = ctx.meta.get(SCRIPT)
    job = (*arguments, *(("--", *command) if command is not None else ()))
    return Invocation(verb=ctx.info_name, options=tuple(options), job=redact_words(job), alike=tuple(alike))


def _without_secret(option: str, value: str) -> str:
    name = value.partition("=")[0]
    return name if option == "--env" and redact_words((value,)) != (value,) else value


def propose(
    invocation: Invocation,
    verb: str,
    *,
    first: Sequence[str] = (),
    without: Collection[str] = (),
    job: tuple[str, ...] | None = None,
) -> str:
    """The command line of another verb for the training of this one; see `Invocation.line`."""
    known = {name for option in load_verb(verb).params for name in (*option.opts, *option.secondary_opts)}
    return invocation.line(verb, known, first=first, without=without, job=job)


def given_options(ctx: Any, only: Collection[str] | None = None) -> str:
    """The arguments of the verb as typed, with a leading blank, or those options of them; secrets are redacted."""
    invocation = read_invocation(ctx)
    if only is None:
        return invocation.arguments
    options = tuple(option for option in invocation.options if option[0] in only)
    return Invocation(verb=invocation.verb, options=options, job=invocation.job).arguments


def _own_first(group: type) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    names = [name for base in group.__mro__ for name in inspect.get_annotations(base)]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=types[name])
        for name in names
    ]
