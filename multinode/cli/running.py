"""Running something on the nodes from the command line: the transport, the live view and the signals around it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from multinode.cli.live import live_view
from multinode.cli.signals import stop_on_signals
from multinode.launch.stop_request import StopRequest
from multinode.store.run_directory import runs_root
from multinode.transport.ssh import SshTransport
from multinode.workflows.launch import Outside

__all__ = ["outside"]


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """The outside of a workflow: SSH, the directory of runs, a live view on stderr, and Ctrl-C as a stop request."""
    transport = SshTransport()
    stop = StopRequest()
    try:
        with live_view() as view, stop_on_signals(stop):
            root = runs_root(dict(os.environ), Path.cwd())
            yield Outside(transport, root, stop=stop, observe=view.show, say=view.say)
    finally:
        transport.close()
