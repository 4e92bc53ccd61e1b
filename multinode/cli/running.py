"""Running something on the nodes from the command line: the transport, the live view and the signals around it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from multinode.launch.request import StopRequest
from multinode.store.run_directory import runs_root

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.transport.agent import AgentTransport
    from multinode.transport.base import Transport
    from multinode.workflows.run.context import RunContext

__all__ = ["open_agent", "open_context", "stop_on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def open_context(
    cluster: Cluster, *, leaves: bool = False, quiet: bool = False, local: bool = False
) -> Iterator[RunContext]:
    """The outside of a workflow: SSH, the directory of runs, a live view on stderr, and Ctrl-C as a stop request.

    `leaves` says that Ctrl-C lets the run go on alone, `quiet` shows nothing, `local` takes this machine for the node.
    """
    transport = _open_transport(cluster, local=local)
    try:
        from multinode.cli.live import live_view
        from multinode.workflows.run.context import RunContext

        stop = StopRequest()
        with live_view(quiet=quiet) as view, stop_on_signals(stop, leaves=leaves):
            context = RunContext(transport, runs_root(), stop=stop, observe=view.show, say=view.say)
            try:
                yield context
            finally:
                context.agent.close()
    finally:
        transport.close()


@contextlib.contextmanager
def open_agent(cluster: Cluster) -> Iterator[AgentTransport]:
    """The way to the nodes alone."""
    transport = _open_transport(cluster, local=False)
    try:
        from multinode.transport.agent import AgentTransport

        agent = AgentTransport(transport)
        try:
            yield agent
        finally:
            agent.close()
    finally:
        transport.close()


def _open_transport(cluster: Cluster, *, local: bool) -> Transport:
    if local:
        from multinode.transport.local import LocalTransport

        return LocalTransport()
    from multinode.transport.ssh import SshTransport

    transport = SshTransport()
    # The nodes' side of a login takes as long as what else is imported: both go on at once.
    transport.open_early(cluster.nodes)
    return transport


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, *, leaves: bool = False) -> Iterator[None]:
    """While inside, Ctrl-C, SIGTERM and a closed terminal ask the run to stop rather than end us on the spot.

    `leaves` says that what is asked for is to follow no more.
    """

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.ask(signal.Signals(number).name)
        said = "stopping on all nodes; once more to kill at once" if stop.count == 1 else "killing at once"
        said = "leaving; the run goes on" if leaves else said
        # A closed terminal takes stderr with it; the nodes must be stopped all the same.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\n{said}\n")

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
