"""Running something on the nodes from the command line: the transport, the live view, Ctrl-C, and how the run ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import typer

from multinode.cli.exit_codes import OF_RUNS, OF_STOPS
from multinode.cli.output import note, print_directory, print_document, print_failure, print_screen
from multinode.errors import ContactLost, Interrupted, MultinodeError
from multinode.launch.request import StopRequest
from multinode.records.run import SLOWER_THAN_ONE_NODE
from multinode.units import format_size

if TYPE_CHECKING:
    from multinode.cluster.cluster import Cluster
    from multinode.launch.context import Launched, RunContext
    from multinode.profile.summary import Summary
    from multinode.records.run import Run
    from multinode.records.run_directory import RunDirectory

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_SIGNALS = 3
# How long an agent has to end; of a frozen node, whoever interrupts waits for less.
_END_S, _HASTE_S = 2.0, 0.3


@contextlib.contextmanager
def open_context(
    cluster: Cluster, *, leaves: bool = False, quiet: bool = False, local: bool = False
) -> Iterator[RunContext]:
    """The connections to the nodes, with a live view on stderr, and Ctrl-C as a stop request.

    `leaves` says that Ctrl-C lets the run go on alone, `quiet` shows nothing, `local` takes this machine for the node.
    """
    from multinode import api

    with api.connect(cluster, local=local) as context:
        from multinode.cli.live import live_view

        with live_view(quiet=quiet) as view, stop_on_signals(context.stop, leaves=leaves):
            context.say, context.observe = view.say, view.show
            try:
                yield context
            finally:
                # While Ctrl-C is still a request; whoever has made one waits for no frozen node.
                with context.stop.heard():
                    context.agent.close(_HASTE_S if context.stop.count else _END_S)


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, *, leaves: bool = False) -> Iterator[None]:
    """While inside, Ctrl-C, SIGTERM and a closed terminal ask the run to stop rather than end us on the spot.

    Where nobody follows a run, what goes on is broken off; the third one ends us at once. A signal that was ignored
    when we began stays so: nohup ignores SIGHUP, and a script SIGINT of `command &`.

    Args:
        stop: is asked.
        leaves: what is asked for is to follow no more.

    Raises:
        Interrupted: a signal came while nobody followed a run.
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
            said = "ending; once more to end at once"
        elif leaves and stop.reason != SLOWER_THAN_ONE_NODE:
            said = "leaving; the run is still running"
        else:
            said = "stopping on all nodes; once more to kill at once" if stop.count == 1 else "killing at once"
        _say_at_once(said)

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
    """Handlers that say what Ctrl-Z does to a run that needs our word, and then suspend us."""
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        return {}

    def suspend(_number: int, _frame: FrameType | None) -> None:
        if stop.lease_s is not None:
            _say_at_once(
                f"suspended: the nodes stop the run once they have had no word for {stop.lease_s:.0f} s; fg goes on "
                "before that. A run that needs no word: launch --detach"
            )
        # As without us; it is caught again once we go on.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def go_on(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, suspend)

    return {signal.SIGTSTP: suspend, signal.SIGCONT: go_on}


def _say_at_once(text: str) -> None:
    """A line on stderr, unless that is closed, or takes no more: nobody waits for a terminal in a signal's handler."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [sys.stderr.fileno()], [], 0)[1]:
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


def _end_at_once() -> NoReturn:
    """Without waiting for anything; a terminal gets back the cursor that a live table hides."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")
    os._exit(Interrupted.exit_code)


def fetch_results(
    context: RunContext, launched: Launched, cluster: Cluster, paths: list[str] | None
) -> MultinodeError | None:
    """Copy what `--fetch` names from node 0 into the run's directory, unless the run goes on.

    Returns:
        Why it could not be copied: an error to raise once the user has been told how the run ended.
    """
    # A restart may have gone on without the hostfile's first node.
    run, place = launched.run, launched.plan.nodes[0]
    node = next(one for one in cluster.nodes if one.name == place.node)
    if not paths or run.status == "running":
        return None
    if run.nodes[0].state == "lost":
        return ContactLost("nothing was fetched: contact with it was lost", node=node.name)
    from multinode.launch.fetch import Wanted, fetch_files

    wanted = Wanted(node=node, paths=tuple(paths), cwd=place.output_cwd or place.command.cwd)
    try:
        fetched = fetch_files(context.agent, wanted, launched.directory.path / "fetched")
    except MultinodeError as error:
        return error
    note(f"fetched {len(fetched.files)} files, {format_size(fetched.size_bytes)}, into {fetched.directory}")
    return None


def tell_result(
    launched: Launched,
    *,
    as_json: bool,
    codes: dict[str, int] | None = None,
    not_fetched: MultinodeError | None = None,
    contrast: str | None = None,
) -> NoReturn:
    """Print how the run ended, or that it goes on, and exit; `codes` says otherwise for some of the states.

    Args:
        launched: the run.
        as_json: as one document.
        codes: exit codes by state, where they are not the usual ones.
        not_fetched: why its results were not fetched.
        contrast: the command that compares its nodes with one, empty where there is none; None takes it from what is
            stored.

    Raises:
        MultinodeError: the run went well, and this one is why its results were not fetched.
    """
    if as_json:
        print_document(launched)
    else:
        _print_result(launched, contrast)
    if not_fetched is not None:
        if launched.run.status == "succeeded":
            raise not_fetched
        typer.echo(str(not_fetched), err=True)
    usual = OF_STOPS.get(launched.run.stop_reason, OF_RUNS[launched.run.status])
    raise typer.Exit((codes or {}).get(launched.run.status, usual))


def _print_result(launched: Launched, contrast: str | None) -> None:
    from multinode.launch.outcome import run_parts

    run = launched.run
    if run.first_failure is not None:
        print_failure(run.first_failure, str(launched.directory))
    print_screen(run_parts(run, launched.summary, failure=False))
    directory = launched.directory
    print_next_step(run, launched.summary, directory, contrast)
    if run.status == "running":
        note(f"still running: multinode attach {run.run_id}; to end it: multinode stop {run.run_id}")
    print_directory(directory)


def print_next_step(run: Run, summary: Summary | None, directory: RunDirectory, contrast: str | None = None) -> None:
    """The next command after a run, where there is one; `contrast` as `tell_result` takes it."""
    from multinode.launch.outcome import next_step

    if run.status == "succeeded" and run.kind == "launch" and contrast != "":
        from multinode.contrast.compare import contrast_of_launch
        from multinode.predict.request import lacks_one_node

        contrast = (contrast or contrast_of_launch(directory)) if lacks_one_node(directory) else ""
    step = next_step(run, summary, hosts=directory.read_hosts(), contrast=contrast or "")
    if step is not None:
        typer.echo(step)
