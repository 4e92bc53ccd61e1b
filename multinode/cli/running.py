"""Running something on the nodes from the command line: the transport, the live view, Ctrl-C, and how the run ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import typer

from multinode.cli.exit_codes import OF_RUNS
from multinode.cli.output import note, print_directory, print_document, print_failure, print_screen
from multinode.errors import ContactLost, MultinodeError, UsageError
from multinode.launch.request import StopRequest
from multinode.store.run_directory import runs_root
from multinode.units import format_size

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.transport.agent import AgentTransport
    from multinode.transport.base import Transport
    from multinode.workflows.run.context import Launched, RunContext

__all__ = ["fetch_results", "open_agent", "open_context", "stop_on_signals", "tell_result"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def open_context(
    cluster: Cluster, *, leaves: bool = False, quiet: bool = False, local: bool = False
) -> Iterator[RunContext]:
    """The outside of a workflow: transport, directory of runs, a live view on stderr, and Ctrl-C as a stop request.

    `leaves` says that Ctrl-C lets the run go on alone, `quiet` shows nothing, `local` takes this machine for the node.
    """
    _bound_fan_out()
    transport = _open_transport(cluster, local=local)
    try:
        agent = _start_agents(transport, cluster, early=not local)
        from multinode.cli.live import live_view
        from multinode.workflows.run.context import RunContext

        stop = StopRequest()
        with live_view(quiet=quiet) as view, stop_on_signals(stop, leaves=leaves):
            context = RunContext(agent, runs_root(), stop=stop, observe=view.show, say=view.say)
            try:
                yield context
            finally:
                context.agent.close()
    finally:
        transport.close()


@contextlib.contextmanager
def open_agent(cluster: Cluster) -> Iterator[AgentTransport]:
    """The way to the nodes alone."""
    _bound_fan_out()
    transport = _open_transport(cluster, local=False)
    try:
        agent = _start_agents(transport, cluster, early=True)
        try:
            yield agent
        finally:
            agent.close()
    finally:
        transport.close()


def _start_agents(transport: Transport, cluster: Cluster, *, early: bool) -> AgentTransport:
    """The agents of the nodes; they start `early`, while what else is needed here is still imported."""
    from multinode.transport.agent import AgentTransport

    agent = AgentTransport(transport)
    if early:
        # A step of Slurm's has to know what it is for, and each costs slurmctld some work.
        agent.start_early([node for node in cluster.nodes if node.slurm_job is None])
    return agent


def _open_transport(cluster: Cluster, *, local: bool) -> Transport:
    """Steps of the nodes' Slurm job where they have one, else SSH.

    Raises:
        UsageError: some are in a Slurm job, and some are not.
    """
    if local:
        from multinode.transport.local import LocalTransport

        return LocalTransport()
    in_slurm = {node.slurm_job is not None for node in cluster.nodes}
    if len(in_slurm) > 1:
        raise UsageError(f"{cluster.source}: slurm_job= has to be on the lines of all nodes, or of none")
    if in_slurm == {True}:
        from multinode.transport.slurm import SlurmTransport

        return SlurmTransport()
    from multinode.transport.ssh import SshTransport

    transport = SshTransport()
    # The nodes' side of a login takes as long as what else is imported: both go on at once.
    transport.open_early(cluster.nodes)
    return transport


def _bound_fan_out() -> None:
    """Ask as many nodes at the same time as the settings say.

    Raises:
        UsageError: $MULTINODE_FAN_OUT is no such number.
    """
    from multinode.store.settings import find_fan_out, load_settings
    from multinode.transport.fan_out import set_fan_out

    most = find_fan_out(os.environ, load_settings(Path.cwd()))
    if most is not None:
        set_fan_out(most)


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, *, leaves: bool = False) -> Iterator[None]:
    """While inside, Ctrl-C, SIGTERM and a closed terminal ask the run to stop rather than end us on the spot.

    `leaves` says that what is asked for is to follow no more.
    """

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.ask(signal.Signals(number).name)
        said = "stopping on all nodes; once more to kill at once" if stop.count == 1 else "killing at once"
        said = "leaving; the run is still running" if leaves else said
        # A closed terminal takes stderr with it; the nodes must be stopped all the same.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\n{said}\n")

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fetch_results(
    context: RunContext, launched: Launched, cluster: Cluster, paths: list[str] | None
) -> MultinodeError | None:
    """Copy what `--fetch` names from node 0 into the run's directory, unless the run goes on.

    Returns:
        Why it could not be copied: an error to raise once the user has been told how the run ended.
    """
    run, node = launched.run, cluster.nodes[0]
    if not paths or run.status == "running":
        return None
    if run.nodes[0].state == "lost":
        return ContactLost("nothing was fetched: contact with it was lost", node=node.name)
    from multinode.workflows.run.fetch import Wanted, fetch_files

    wanted = Wanted(node=node, paths=tuple(paths), cwd=launched.plan.nodes[0].command.cwd)
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
) -> NoReturn:
    """Print how the run ended, or that it goes on, and exit; `codes` says otherwise for some of the states.

    Raises:
        MultinodeError: the run went well, and this one is why its results were not fetched.
    """
    if as_json:
        from multinode.report.run.outcome import launch_document

        print_document(launch_document(launched.run, launched.summary, str(launched.directory)))
    else:
        _print_result(launched)
    if not_fetched is not None:
        if launched.run.status == "succeeded":
            raise not_fetched
        typer.echo(str(not_fetched), err=True)
    raise typer.Exit((OF_RUNS | (codes or {}))[launched.run.status])


def _print_result(launched: Launched) -> None:
    from multinode.report.run.outcome import next_step, run_parts

    run = launched.run
    if run.first_failure is not None:
        print_failure(run.first_failure, str(launched.directory))
    print_screen(run_parts(run, launched.summary, failure=False))
    if (step := next_step(run, launched.summary)) is not None:
        typer.echo(step)
    if run.status == "running":
        note(f"still running: multinode attach {run.run_id}; to end it: multinode stop {run.run_id}")
    print_directory(launched.directory)
