"""logs -f: a run's logs as they grow, whoever writes them: another multinode on this machine, or a follower of ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from multinode.core.run.run import Run
from multinode.errors import MultinodeError
from multinode.store.run_directory import RunDirectory
from multinode.workflows.run.attach import Known, attach
from multinode.workflows.run.context import RunContext

__all__ = ["follow_logs", "needs_follower"]

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 16
_JOIN_S = 30.0


def needs_follower(known: Known) -> bool:
    """Whether the run goes on and nobody on this machine brings its logs home."""
    return known.run.status == "running" and not RunDirectory(known.directory).is_locked


def follow_logs(known: Known, ranks: tuple[int, ...], context: RunContext | None) -> Iterator[tuple[str, bytes]]:
    """Name of the node, and what its log has gained; from the beginning of the logs to the end of the run.

    Args:
        known: the run.
        ranks: node ranks whose logs are wanted.
        context: the way to the nodes, where a follower is needed; it leaves the run alone when this ends.
    """
    directory = RunDirectory(known.directory)
    follower = _Follower(known, context) if context is not None else None
    places = dict.fromkeys(ranks, 0)
    names = {node.node_rank: node.name for node in known.run.nodes}
    try:
        while True:
            # Asked first: what was written before the end is then read after it.
            over = not _goes_on(directory) or (follower is not None and not follower.is_alive)
            for rank in ranks:
                for data in _read(directory.log_path(rank), places[rank]):
                    places[rank] += len(data)
                    yield names[rank], data
            if over:
                break
            time.sleep(_POLL_S)
    finally:
        if follower is not None:
            follower.leave()
    if follower is not None and follower.error is not None:
        raise follower.error


class _Follower:
    """Follows the run in a thread, for its files."""

    def __init__(self, known: Known, context: RunContext) -> None:
        self.error: MultinodeError | None = None
        self._stop = context.stop
        self._known = known
        self._context = context
        self._thread = threading.Thread(target=self._follow, name="follow-logs", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        self._stop.ask("leave")
        self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        try:
            attach(self._known, self._context, leave=True)
        except MultinodeError as error:
            self.error = error


def _goes_on(directory: RunDirectory) -> bool:
    run = directory.read("run.json", Run)
    return run is not None and run.status == "running"


def _read(path: Path, offset: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                yield data
    except FileNotFoundError:
        return
