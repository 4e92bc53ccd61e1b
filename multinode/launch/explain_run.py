"""A run of ours for `explain`: what its record says of a failure or a hang; otherwise the logs in its directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from multinode.diagnose.explanation import Explanation, LogFailure
from multinode.errors import UsageError
from multinode.launch.ending import hang_words, log_path
from multinode.runs.stored_run import StoredRun, load_run

RECORD = "run.json"


def find_run(name: str, root: Path) -> StoredRun | None:
    """The run of this directory, id or beginning of an id, or `last`; None where a file or another directory has it."""
    path = Path(name)
    if (path / RECORD).is_file():
        return load_run(path.absolute().parent, path.absolute().name)
    if path.exists() or name == "-":
        return None
    try:
        return load_run(root, name)
    except UsageError:
        return None


def log_paths(name: str) -> Sequence[str]:
    """The logs of all runs in a directory; else the path itself.

    Raises:
        UsageError: the runs there have no logs.
    """
    path = Path(name)
    records = sorted(path.rglob(RECORD)) if path.is_dir() else []
    if not records:
        return (name,)
    logs = [str(log) for record in records for log in sorted((record.parent / "logs").glob("*.log"))]
    if not logs:
        raise UsageError(f"{name} has no logs", hint=f"see what the run consists of: multinode show {path.name}")
    return logs


def explain_run(stored: StoredRun) -> Explanation | None:
    """What the record says of its failure or hang; None where it has neither."""
    run, failure, hang = stored.run, stored.run.first_failure, stored.run.hang
    if failure is not None:
        first = LogFailure(
            file=str(log_path(run, stored.directory.path, failure.node_rank)),
            line=None,
            node=failure.node,
            rank=failure.rank,
            time=_clock(failure.time_s),
            message=failure.message,
            kind=failure.kind,
            error_id=failure.error_id,
            cause=failure.cause,
            hint=failure.hint,
            of_peers=False,
            details=(),
            is_own=False,
        )
    elif hang is not None:
        first = LogFailure(
            file=str(stored.directory.path / "stall.json"),
            line=None,
            node=hang.node,
            rank=hang.rank,
            time=_clock(hang.time_s),
            message=hang_words(run, hang),
            kind="hang",
            error_id=None,
            cause=hang.message,
            hint=hang.hint,
            of_peers=False,
            details=(),
            is_own=False,
        )
    elif run.status == "succeeded":
        first = None
    else:
        return None
    return Explanation(first_failure=first, other_failures=(), order_known=True, next=(), files={})


def _clock(time_s: float | None) -> str | None:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) if time_s is not None else None
