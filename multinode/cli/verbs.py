"""The verbs of multinode: where each is, how it is listed, and its command, imported when it is asked for."""

from __future__ import annotations

import copy
import importlib
import os
from typing import Annotated, Any, Literal, NamedTuple

import typer
import typer.main

from multinode.cli.panels import PanelApp


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
    "check": Verb("check", "Prepare", "Before a training job starts, find problems that would break it."),
    "completion": Verb("completion", "Prepare", "Print the completion script for bash, zsh or fish."),
    "copy": Verb("copy", "Prepare", "Copy a model or dataset to all nodes, from node to node."),
    "launch": Verb("launch", "Run", "Run a training job on every node, and follow it to the end.", ("run",)),
    "submit": Verb("submit", "Run", "Submit a Slurm batch job that runs a multinode command."),
    "attach": Verb("attach", "Run", "Follow a run that is still running."),
    "stop": Verb("attach", "Run", "Stop a run on all its nodes."),
    "clean": Verb("attach", "Run", "Remove the files of old runs from their nodes."),
    "nccl-test": Verb("nccl_test", "Measure", "Measure all-reduce and other collectives over the network."),
    "bench": Verb("bench", "Measure", "Measure every GPU or CPU, and find the slow ones."),
    "contrast": Verb("contrast", "Measure", "Find out whether several nodes are faster than one, and why."),
    "sweep": Verb("sweep", "Measure", "Measure a job over a grid of settings, nodes and workers."),
    "tune": Verb("tune", "Measure", "Find the change that makes a job reach a given loss fastest."),
    "compare": Verb("contrast", "Decide", "Compare two stored runs of the same kind."),
    "predict": Verb("predict", "Decide", "Predict the speed with other networks, nodes and settings."),
    "advise": Verb("advise", "Decide", "Rank changes that would make a training job faster."),
    "import": Verb("table", "Decide", "Import a table of benchmarks measured elsewhere."),
    "runs": Verb("runs", "Inspect", "List the runs.", ("ps",)),
    "show": Verb("runs", "Inspect", "Show the results of a run, or the table of a sweep.", ("status", "table")),
    "explain": Verb("explain", "Inspect", "Find the first failure in the logs of a run, and how to fix it."),
    "logs": Verb("runs", "Inspect", "Print the logs of a run."),
    "report": Verb("report", "Inspect", "Write a run as an HTML page, Markdown or CSV."),
    "export": Verb("export", "Inspect", "Export a run to TensorBoard, MLflow, W&B or Prometheus."),
    "lab": Verb("lab", "Lab", "Create virtual nodes on this machine."),
}


def dashed(name: str) -> str:
    """An option's name with dashes."""
    return name.replace("_", "-")


def usual_name(name: str) -> str:
    """The name of an option for one as torchrun, DeepSpeed and accelerate spell it: `nproc_per_node`."""
    from multinode.job.launchers import find_meaning

    meaning = find_meaning(dashed(name))
    return (meaning.option if meaning is not None else "") or dashed(name)


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
        app = typer.Typer(add_completion=False)
        app.callback()(common_options)
        for option in typer.main.get_group(app).params:
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


def common_options(
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
            "--verbose", "-v", callback=_set_verbosity, help="Also print every step and request with a timestamp."
        ),
    ] = False,
    ssh: Annotated[  # noqa: ARG001 - its callback has done it
        Literal["openssh", "fabric"] | None,
        typer.Option(
            "--ssh",
            callback=_set_ssh,
            show_default=False,
            help="Connect with the ssh program or with the Fabric library. Default: ssh if it is installed.",
        ),
    ] = None,
) -> None:
    """The options of `multinode` itself, which every verb takes too."""
    if not (quiet or verbose):
        from multinode.cli.output import set_verbosity

        set_verbosity()
