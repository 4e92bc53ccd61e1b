"""Running something on the nodes from the command line: transport, live view, Ctrl-C, restarts, messages, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from multinode.cli.options import ExportTo, MetricsPort, Notify, OnEnd, propose
from multinode.cli.output import (
    OF_RUNS,
    OF_STOPS,
    is_quiet,
    note,
    print_blocks,
    print_directory,
    print_document,
    shown_directory,
)
from multinode.errors import Interrupted, MultinodeError
from multinode.launch.context import StopRequest
from multinode.records.run import SLOWER_THAN_ONE_NODE

if TYPE_CHECKING:
    from multinode.cluster.cluster import Cluster
    from multinode.export.target import Target
    from multinode.launch.context import Launched, RunContext
    from multinode.profile.summary import Summary
    from multinode.records.run import Run
    from multinode.records.run_directory import RunDirectory
    from multinode.render.sheet import NextCommand

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_SIGNALS = 3
# How long an agent has to end; of a frozen node, whoever interrupts waits for less.
_END_S, _HASTE_S = 2.0, 0.3


@contextlib.contextmanager
def open_context(
    cluster: Cluster,
    *,
    leaves: bool = False,
    quiet: bool = False,
    local: bool = False,
    output: Literal["none", "rank0", "all"] = "none",
) -> Iterator[RunContext]:
    """The connections to the nodes, with a live view on stderr, and Ctrl-C as a stop request.

    `output` is what of the job's output the view shows.
    """
    from multinode import api

    with api.connect(cluster, local=local) as context:
        from multinode.cli.live import live_view

        with (
            live_view(quiet=quiet, output=output) as view,
            stop_on_signals(context.stop, leaves=leaves, say=view.say_at_once),
        ):
            context.say, context.observe, context.observe_log = view.say, view.show, view.show_log
            try:
                yield context
            finally:
                # While Ctrl-C is still a request; whoever has made one waits for no frozen node.
                with context.stop.heard():
                    context.agent.close(_HASTE_S if context.stop.count else _END_S)


def default_output() -> Literal["none", "rank0"]:
    """What a run shows of the job's output where nothing is asked for."""
    return "rank0" if sys.stderr.isatty() and not is_quiet() else "none"


def _say_at_once(text: str) -> None:
    """Write a line to stderr, without ever waiting for the terminal in a signal handler."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [sys.stderr.fileno()], [], 0)[1]:
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


@contextlib.contextmanager
def stop_on_signals(
    stop: StopRequest, *, leaves: bool = False, say: Callable[[str], None] = _say_at_once
) -> Iterator[None]:
    """Inside the block, Ctrl-C, SIGTERM and a closed terminal ask the run to stop instead of ending us at once.

    `say` tells of it in the signal handler, so it must not wait.
    """
    counted = 0

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal counted
        counted += 1
        stop.ask(signal.Signals(number).name)
        if counted >= _MOST_SIGNALS:
            _end_at_once()
        if not stop.is_heard:
            if counted == 1:
                raise Interrupted("interrupted")
            sentence = "ending; press Ctrl-C again to end immediately"
        elif leaves and stop.reason != SLOWER_THAN_ONE_NODE:
            sentence = "leaving; the run is still running"
        else:
            sentence = (
                ("stopping on all nodes; press Ctrl-C again to kill immediately")
                if stop.count == 1
                else "killing immediately"
            )
        say(sentence)

    before = {
        number: signal.signal(number, handler)
        for number, handler in (dict.fromkeys(_SIGNALS, ask) | _suspending(stop)).items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _suspending(stop: StopRequest) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
    """Handlers for Ctrl-Z that print what the nodes will do, and then suspend this process."""
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        return {}

    def suspend(_number: int, _frame: FrameType | None) -> None:
        if stop.lease_s is not None:
            _say_at_once(
                f"suspended: resume with fg, because the nodes stop the run after {stop.lease_s:.0f} s without "
                "contact; to start a run that needs no contact: multinode launch --detach"
            )
        # As without us; it is caught again once we go on.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def go_on(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, suspend)

    return {signal.SIGTSTP: suspend, signal.SIGCONT: go_on}


def _end_at_once() -> NoReturn:
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")
    os._exit(Interrupted.exit_code)


def fetch_results(
    context: RunContext, launched: Launched, cluster: Cluster, paths: list[str] | None
) -> MultinodeError | None:
    """Copy the files of `--fetch` from node 0 into the run's directory, unless the run continues."""
    if not paths:
        return None
    from multinode.launch.launch import fetch_results as fetch

    try:
        fetch(context, launched, cluster, paths, note)
    except MultinodeError as error:
        return error
    return None


def tell_result(
    launched: Launched,
    *,
    as_json: bool,
    codes: dict[str, int] | None = None,
    not_fetched: MultinodeError | None = None,
) -> NoReturn:
    """Print the outcome of the run, or that it continues, and exit; `codes` overrides exit codes of states."""
    if as_json:
        print_document(launched)
    else:
        _print_result(launched)
    if not_fetched is not None:
        if launched.run.status == "succeeded":
            raise not_fetched
        typer.echo(str(not_fetched), err=True)
    usual = OF_STOPS.get(launched.run.stop_reason, OF_RUNS[launched.run.status])
    raise typer.Exit((codes or {}).get(launched.run.status, usual))


def _print_result(launched: Launched) -> None:
    from multinode.launch.outcome import has_ending

    run, directory = launched.run, launched.directory
    err = has_ending(run)
    print_run(run, launched.summary, directory, err=err)
    if run.status == "running":
        note(f"still running; follow it: multinode attach {run.run_id}; stop it: multinode stop {run.run_id}")
    if not err:
        print_directory(directory)


def print_run(
    run: Run, summary: Summary | None, directory: RunDirectory, *, details: bool = False, err: bool = False
) -> None:
    """What is shown of a run, and the next command."""
    from multinode.launch.outcome import show

    blocks = (*show(run, summary, shown_directory(directory)), *next_commands(run, summary, directory))
    print_blocks(blocks, details=details, err=err)


def print_ending(run_id: str) -> bool:
    """What is shown of a stored run that did not end well, on stderr; False if its record does not say why."""
    from multinode.launch.outcome import has_ending
    from multinode.records.run_directory import runs_root
    from multinode.runs.stored_run import load_run

    try:
        stored = load_run(runs_root(), run_id)
    except MultinodeError:
        return False
    if has_ending(stored.run):
        print_run(stored.run, stored.summary, stored.directory, err=True)
    return has_ending(stored.run)


def next_commands(run: Run, summary: Summary | None, directory: RunDirectory) -> tuple[NextCommand, ...]:
    """The next command after a run, if any."""
    from multinode.launch.outcome import next_step

    contrast = one_node = ""
    if run.command is not None and run.command.verb == "launch" and len(run.nodes) > 1:
        from multinode.launch.one_node import lacks_one_node

        without = ("--nodes",)
        one_node = propose(run.command, "launch", first=("--nodes", "1"), without=without)
        if run.status == "succeeded" and lacks_one_node(directory):
            contrast = propose(run.command, "contrast", first=("--nodes", f"1,{len(run.nodes)}"), without=without)
    step = next_step(run, summary, hosts=directory.read_hosts(), contrast=contrast, one_node=one_node)
    return (step,) if step is not None else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoticeOptions:
    """Who is told of a run."""

    on_end: OnEnd = None
    notify: Notify = None

    def __post_init__(self) -> None:
        """Refuse a wrong URL before anything is done."""
        if self.notify is not None:
            from multinode.launch.notice import check_url

            check_url(self.notify)

    @property
    def are_wanted(self) -> bool:
        """Whether anyone is told."""
        return self.on_end is not None or self.notify is not None

    @contextlib.contextmanager
    def watch(self, context: RunContext) -> Iterator[Callable[[Run], None]]:
        """Tell of hangs and of what ends the following while inside, and of the end when it is called."""
        if not self.are_wanted:
            yield lambda _: None
            return
        from multinode.launch.notice import tell_of

        with tell_of(context, self.on_end, self.notify, functools.partial(typer.echo, err=True)) as tell_end:
            yield tell_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Where a run is exported to while it is followed."""

    export: ExportTo = None
    metrics_port: MetricsPort = None

    def __post_init__(self) -> None:
        """Refuse a wrong target before anything is done."""
        if self.are_wanted:
            self._targets()

    @property
    def are_wanted(self) -> bool:
        """Whether it is exported at all."""
        return bool(self.export) or self.metrics_port is not None

    @contextlib.contextmanager
    def watch(self, context: RunContext) -> Iterator[None]:
        """Export the runs that are followed while inside; at the end wait until all is written."""
        if not self.are_wanted:
            yield
            return
        from multinode.launch.export import export_while

        with export_while(context, self._targets(), functools.partial(typer.echo, err=True)):
            yield

    def _targets(self) -> tuple[Target, ...]:
        from multinode.export.target import parse_targets

        return parse_targets(self.export or (), self.metrics_port)


_PANEL = "Run control"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often, after what, and on which nodes."""

    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            rich_help_panel=_PANEL,
            help="Restart a failed run from its last complete checkpoint, at most N times.",
        ),
    ] = 0
    node_wait: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            rich_help_panel=_PANEL,
            help="Time, such as 90s, 10m or 2h, that a restart waits for a node that is unreachable or fails a check.",
        ),
    ] = "10m"
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            rich_help_panel=_PANEL,
            help=(
                "If nodes do not come back, restart without them, on at least K nodes and with the same global batch "
                "size."
            ),
        ),
    ] = None
    scale_batch: Annotated[
        bool,
        typer.Option(
            "--scale-batch",
            rich_help_panel=_PANEL,
            help="With --min-nodes, allow a smaller global batch if no number of accumulation steps can keep its size.",
        ),
    ] = False
    shard_copies: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            rich_help_panel=_PANEL,
            help=(
                "With --restarts, copy the ZeRO shards of each node to the next N nodes after every save. 0 disables "
                "this."
            ),
        ),
    ] = 1
    restart_after_oom: Annotated[
        bool,
        typer.Option("--restart-after-oom", rich_help_panel=_PANEL, help="Also restart a run that ran out of memory."),
    ] = False
