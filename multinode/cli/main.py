"""The multinode command: lists the verbs, imports the one that is asked for, and alone prints errors."""

from __future__ import annotations

import contextlib
import copy
import errno
import importlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import typer
import typer.core
import typer.main

from multinode.cli.panels import PanelApp, PanelGroup
from multinode.errors import Interrupted, MultinodeError, UsageError


class Verb(NamedTuple):
    """Where a verb is, and how `multinode --help` lists it: nothing of it needs to be imported for that.

    `also` are other names under which it is typed.
    """

    module: str
    panel: str
    summary: str
    also: tuple[str, ...] = ()


# In the order of `multinode --help`; a summary fits a line of 80 columns.
VERBS = {
    "init": Verb("init", "Prepare", "Probe the nodes and write a hostfile."),
    "check": Verb("check", "Prepare", "Find problems that would break a training before it starts."),
    "completion": Verb("completion", "Prepare", "Print the completion script of bash, zsh or fish."),
    "copy": Verb("copy", "Prepare", "Copy a model or dataset to all nodes, from node to node."),
    "launch": Verb("launch", "Run", "Run a training on every node and follow it to the end.", ("run",)),
    "submit": Verb("submit", "Run", "Submit a batch job to Slurm that runs a verb on its nodes."),
    "attach": Verb("attach", "Run", "Follow a run that is still running."),
    "stop": Verb("attach", "Run", "Stop a run on all its nodes."),
    "clean": Verb("attach", "Run", "Remove what old runs left on their nodes."),
    "nccl-test": Verb("nccl_test", "Measure", "Measure all-reduce and other collectives over the network."),
    "bench": Verb("bench", "Measure", "Measure every GPU or CPU and find slow ones."),
    "contrast": Verb("contrast", "Measure", "Compare one node with many: which is faster, and why."),
    "sweep": Verb("sweep", "Measure", "Measure a job over a grid of settings, nodes and workers."),
    "tune": Verb("tune", "Measure", "Find the change that reaches a given loss fastest."),
    "compare": Verb("contrast", "Decide", "Compare two stored runs of any kind."),
    "predict": Verb("predict", "Decide", "Predict the speed with other networks, nodes and settings."),
    "advise": Verb("advise", "Decide", "Rank changes that would make a training faster."),
    "import": Verb("table", "Decide", "Import benchmarks measured elsewhere, as a table."),
    "runs": Verb("runs", "Inspect", "List the runs.", ("ps",)),
    "show": Verb("runs", "Inspect", "Show the results of a run, or the table of a sweep.", ("status", "table")),
    "explain": Verb("explain", "Inspect", "Find the first failure in any run's logs, with a fix."),
    "logs": Verb("runs", "Inspect", "Print a run's logs."),
    "report": Verb("report", "Inspect", "Write a run as an HTML page, Markdown or CSV."),
    "export": Verb("export", "Inspect", "Export a run to TensorBoard, MLflow, W&B, Prometheus."),
    "lab": Verb("lab", "Lab", "Create virtual nodes on this machine."),
}

# Of writing to a file that names none: its disk is full or gone.
_STDOUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE, errno.EBADF}
_COMPLETE = "_MULTINODE_COMPLETE"
# Columns of a help, however wide the terminal is.
_WIDEST = 100
# Of verbs that compute from stored runs.
_TRIED = "multinode tune --from RUN --candidates N measures the advised changes"
_OF_VERBS = {"advise": dict.fromkeys(("--try", "--pick", "--job", "--repeats", "--steps", "--hosts"), _TRIED)}


# What Typer says of a command line, of which Typer exports the kinds alone.
_ParseError: Any = typer.BadParameter.__base__
_KIND = re.compile(r"is not a valid (int|float)\b(?: range)?")
_NEIGHBOURS = re.compile(r"\.? Did you mean (\S+?)(?:,.*)?\?$")


class _Verbs(PanelGroup):
    """Lists the verbs from `VERBS`, and imports one when it is run or completed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(typer.core.TyperCommand(name, short_help=verb.summary, rich_help_panel=verb.panel))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`help`, `help VERB` and `version` are what people type for --help and --version."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """As Typer does, with errors in our own form."""
        with _as_ours():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Likewise: the options of a verb are read here."""
        with _as_ours(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself in the place of its listing.

        Raises:
            UsageError: it is one of another launcher, or has become part of another.
        """
        if args[0] not in self.commands:
            from multinode.job.typed_command import starts_program

            other = next((name for name, verb in VERBS.items() if args[0] in verb.also), None)
            if other is None and starts_program(args[0]):
                import shlex

                line = shlex.join(("multinode", "launch", "--", *args))
                raise UsageError(f"{args[0]} is no verb: a command goes after --", hint=line)
            args = [other or args[0], *args[1:]]
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, listed, rest
        verb = load_verb(listed.name or "")
        _answer_others(verb, rest)
        return name, verb, rest


@contextlib.contextmanager
def _as_ours(ctx: Any = None) -> Iterator[None]:
    """Raise what Typer says of a command line as UsageError, with the option or verb that was meant, or the help."""
    try:
        yield
    except _ParseError as error:
        if type(error).show is not _ParseError.show:
            # A help in place of a message.
            raise
        names = getattr(error, "possibilities", None)
        text = error.message if names else error.format_message()
        meant = _NEIGHBOURS.search(text)
        nearest = names[0] if names else meant[1].strip("'") if meant is not None else None
        text = _KIND.sub(lambda kind: "is not a whole number" if kind[1] == "int" else "is not a number", text)
        text = _NEIGHBOURS.sub("", text).rstrip(".")
        verb = error.ctx.command_path if error.ctx else f"multinode {ctx.invoked_subcommand}" if ctx else "multinode"
        hint = f"did you mean {nearest}?" if nearest else f"{verb} --help"
        raise UsageError(f"{text[:1].lower()}{text[1:]}", hint=hint) from None


def _answer_others(verb: Any, args: list[str]) -> None:
    """Refuse the options of other launchers that a verb does not have, with what does it here."""
    own = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    # What stands behind -- is the script's.
    given = args[: args.index("--")] if "--" in args else args
    for word in given:
        name = word.partition("=")[0]
        if not name.startswith("-") or name in own or f"--{usual_name(name.lstrip('-'))}" in own:
            continue
        hint = _OF_VERBS.get(verb.name, {}).get(name) or (_hint_elsewhere(name) if "--hosts" in own else None)
        if hint is not None:
            raise UsageError(f"no such option: {word}", hint=hint)


def _hint_elsewhere(option: str) -> str | None:
    """What does here what an option of another launcher does."""
    from multinode.job.launchers import find_meaning, option_name

    meaning = find_meaning(option_name(option))
    return meaning.hint if meaning is not None else None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def usual_name(name: str) -> str:
    """The name of an option for one as torchrun, DeepSpeed and accelerate spell it: `nproc_per_node`."""
    from multinode.job.launchers import find_meaning

    meaning = find_meaning(_dashed(name))
    return (meaning.option if meaning is not None else "") or _dashed(name)


def load_verb(name: str) -> Any:
    """The command of a verb, from its module, with the common options."""
    app = PanelApp(rich_markup_mode=None)
    importlib.import_module(f"multinode.cli.{VERBS[name].module}").register(app)
    command = typer.main.get_group(app).commands[name]
    _add_common(command)
    return command


def _add_common(command: Any) -> None:
    for inner in getattr(command, "commands", {}).values():
        _add_common(inner)
    if not hasattr(command, "commands"):
        command.context_settings["token_normalize_func"] = usual_name
        for option in typer.main.get_group(build_app()).params:
            if option.name in {"quiet", "verbose"} or (option.name == "ssh" and _connects(command)):
                command.params.append(copy.copy(option))
                command.params[-1].expose_value = False


def _connects(command: Any) -> bool:
    return command.name in {"init", "attach", "stop", "logs"} or any(
        parameter.name == "hosts" for parameter in command.params
    )


def _set_verbosity(param: typer.CallbackParam, value: bool) -> bool:
    if value:
        from multinode.cli.output import set_verbosity

        set_verbosity(**{str(param.name): True})
    return value


def _set_ssh(value: str | None) -> str | None:
    if value is not None:
        os.environ["MULTINODE_SSH"] = value
    return value


def _version(value: bool) -> None:
    if value:
        from multinode import __version__

        typer.echo(f"multinode {__version__}")
        raise typer.Exit


def _main(
    *,
    version: Annotated[  # noqa: ARG001 - its callback has done it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", callback=_set_verbosity, help="Print only results, warnings and errors.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", callback=_set_verbosity, help="Also print each step and request with its time."
        ),
    ] = False,
    ssh: Annotated[  # noqa: ARG001 - likewise
        Literal["openssh", "fabric"] | None,
        typer.Option(
            "--ssh",
            callback=_set_ssh,
            show_default=False,
            help="Connect with the ssh program or with the Fabric library. Default: ssh if installed.",
        ),
    ] = None,
) -> None:
    if not (quiet or verbose):
        from multinode.cli.output import set_verbosity

        set_verbosity()


def build_app() -> typer.Typer:
    """The command with all its verbs."""
    app = typer.Typer(
        cls=_Verbs,
        name="multinode",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        # Inherited by every verb.
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": _dashed,
            "max_content_width": _WIDEST,
        },
        help="Launch a training on several nodes over SSH or Slurm, and measure the cost of the network.",
        epilog="For the options of a verb: multinode VERB --help",
    )
    app.callback()(_main)
    return app


def run() -> None:
    """Entry point: run the command, print what went wrong, exit with its code."""
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        try:
            build_app()()
        finally:
            # At the interpreter's end a failure would be a traceback that nobody can put right.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _STDOUT_ERRORS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print_error(MultinodeError(f"cannot write to stdout: {error.strerror}"))
        sys.exit(MultinodeError.exit_code)
    except MultinodeError as error:
        from multinode.cli.output import print_traceback

        print_traceback(error)
        if error.run_id is None or not _print_ending(error.run_id):
            print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error(Interrupted("interrupted"))
        sys.exit(Interrupted.exit_code)


def _print_ending(run_id: str) -> bool:
    from multinode.cli.running import print_ending

    return print_ending(run_id)


def print_error(error: MultinodeError) -> None:
    """One message on stderr: what, where, the command that failed, the fix; details above it."""
    lines = []
    if error.detail:
        lines += [f"  {line}" for line in error.detail.splitlines()]
    lines.append(f"error: {error}")
    if error.ran:
        lines.append(f"  ran:  {error.ran}")
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")
