"""The multinode command: lists the verbs, imports the one that is asked for, and alone prints errors."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import sys
from typing import Annotated, Any, Literal, NamedTuple

import typer
import typer.core
import typer.main

from multinode.cli.panels import PanelApp, PanelGroup
from multinode.errors import Interrupted, MultinodeError, UsageError


class Verb(NamedTuple):
    """Where a verb is, and how `multinode --help` lists it: nothing of it needs to be imported for that."""

    module: str
    panel: str
    summary: str


# In the order of `multinode --help`; a summary fits a line of 80 columns.
VERBS = {
    "init": Verb("init", "Prepare", "Probe the nodes and write a hostfile."),
    "check": Verb("check", "Prepare", "Find problems that would break a training before it starts."),
    "completion": Verb("completion", "Prepare", "Print the completion script of bash, zsh or fish."),
    "copy": Verb("copy", "Prepare", "Copy a model or dataset to all nodes, from node to node."),
    "launch": Verb("launch", "Run", "Run a training on every node and follow it to the end."),
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
    "runs": Verb("runs", "Inspect", "List the runs."),
    "show": Verb("runs", "Inspect", "Show the results of a run, or the table of a sweep."),
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
# What other launchers call our options.
_ALIASES = {
    "hostfile": "hosts",
    "host": "hosts",
    "nnodes": "nodes",
    "num-nodes": "nodes",
    "num-machines": "nodes",
    "nproc-per-node": "workers-per-node",
    "num-gpus": "workers-per-node",
    "main-process-port": "master-port",
    "max-restarts": "restarts",
}


# Verbs of other launchers, and of ours that are part of another.
_VERBS_ELSEWHERE = {
    "table": "multinode show RUN --sort COLUMN: show replaces table",
    "run": "multinode launch train.yaml, or: multinode launch -- train.py",
    "torchrun": "multinode launch -- train.py",
    "status": "multinode show for a run, multinode lab status for the lab",
    "ps": "multinode runs",
}
_TRIED = "multinode tune --from RUN --candidates N measures the advised changes"
# What has no option here, by the names that other launchers have for it.
_ELSEWHERE = {
    "--include": "use --nodes N for the first N lines of the hostfile; name GPUs there: node1 gpus=0,1",
    "--exclude": "remove the node's line from the hostfile; to exclude GPUs, name the others there: node1 gpus=0,1",
    "-np": "use --nodes N and --workers-per-node K, or slots=K in the hostfile",
    "-n": "use --nodes N and --workers-per-node K, or slots=K in the hostfile",
    "--num-processes": "use --workers-per-node K for each node; accelerate counts all nodes together",
    "--gpu-ids": "name GPUs in the hostfile: node1 gpus=0,1",
    "--master-addr": "the first line of the hostfile is node rank 0; set its address with addr=",
    "--main-process-ip": "the first line of the hostfile is node rank 0; set its address with addr=",
    "--node-rank": "the order of lines in the hostfile sets the node rank; run this command on one machine only",
    "--machine-rank": "the order of lines in the hostfile sets the node rank; run this command on one machine only",
    "--rdzv-endpoint": "the rendezvous is static, on node 0: set --master-port",
    "--rdzv-backend": "the rendezvous is static, on node 0: set --master-port",
    "--rdzv-id": "the rendezvous is static, on node 0: set --master-port",
    "--standalone": "a hostfile with one line is one node",
}
_OF_VERBS = {"advise": dict.fromkeys(("--try", "--pick", "--job", "--repeats", "--steps", "--hosts"), _TRIED)}


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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself in the place of its listing.

        Raises:
            UsageError: it is one of another launcher, or has become part of another.
        """
        if args[0] not in self.commands and (way := _VERBS_ELSEWHERE.get(args[0])) is not None:
            raise UsageError(f"no such verb: {args[0]}", hint=way)
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, listed, rest
        verb = load_verb(listed.name or "")
        _answer_others(verb, rest)
        return name, verb, rest


def _answer_others(verb: Any, args: list[str]) -> None:
    """Refuse the options of other launchers that a verb does not have, with what does it here."""
    own = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    elsewhere = _OF_VERBS.get(verb.name, _ELSEWHERE if "--hosts" in own else {})
    # What stands behind -- is the script's.
    given = args[: args.index("--")] if "--" in args else args
    for word in given:
        name = word.partition("=")[0].replace("_", "-")
        if name in elsewhere and name not in own:
            raise UsageError(f"no such option: {word}", hint=elsewhere[name])


def _usual_name(name: str) -> str:
    """The name of an option or verb for one as torchrun, DeepSpeed and accelerate spell it: `nproc_per_node`."""
    dashed = name.replace("_", "-")
    return _ALIASES.get(dashed, dashed)


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
            "token_normalize_func": _usual_name,
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
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error(Interrupted("interrupted"))
        sys.exit(Interrupted.exit_code)


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
