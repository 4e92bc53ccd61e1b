"""Running something on the nodes from the command line: the transport, the live view and the signals around it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.transport.base import Transport
    from multinode.workflows.run.context import RunContext

__all__ = ["open_context"]


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
        from multinode.cli.signals import stop_on_signals
        from multinode.launch.stop_request import StopRequest
        from multinode.store.run_directory import runs_root
        from multinode.workflows.run.context import RunContext

        stop = StopRequest()
        with live_view(quiet=quiet) as view, stop_on_signals(stop, leaves=leaves):
            root = runs_root(dict(os.environ), Path.cwd())
            context = RunContext(transport, root, stop=stop, observe=view.show, say=view.say)
            try:
                yield context
            finally:
                context.agent.close()
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
