"""Notice: the message when an unattended run ends, hangs or is restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from multinode.records.progress import RunProgress
from multinode.records.run import Run, Stall
from multinode.render.escaping import sanitize
from multinode.secret_values import redact
from multinode.units import format_duration

_MOST_CHARACTERS = 1000
_PREFIX = "MULTINODE_"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run: the JSON document of `--notify`, and the `MULTINODE_*` environment of `--on-end`."""

    schema: str = "multinode.notice/1"
    event: Literal["end", "hang", "restart"]  # `end`, `hang` or `restart`
    text: str  # the event in one sentence, under the key that chat services show
    run: str  # the run's id
    job: str
    status: str  # as in `Run`; also `failed` if the controller itself could not continue
    directory: str  # the run's directory on the controller
    nodes: tuple[str, ...]
    world_size: int
    duration_s: float | None = None
    # where the run failed, or the node that the others wait for; None if unknown or none
    failed_node: str | None = None
    failed_rank: int | None = None  # the worker's global rank, likewise
    failure: str | None = None  # why it failed or hangs
    failure_kind: str | None = None  # as `Failure.kind`


def end_notice(run: Run, directory: Path) -> Notice:
    """A run has ended."""
    failure = run.first_failure
    duration_s = run.ended_s - run.started_s if run.ended_s is not None else None
    took = f" after {format_duration(duration_s)}" if duration_s is not None else ""
    why = f": {failure.node}: {failure.message}" if failure is not None else ""
    return Notice(
        event="end",
        text=f"run {run.run_id} {run.status}{took} ({run.job}, {run.extent}){why}",
        run=run.run_id,
        job=run.job,
        status=run.status,
        directory=str(directory),
        nodes=tuple(node.name for node in run.nodes),
        world_size=run.world_size,
        duration_s=duration_s,
        failed_node=failure.node if failure else None,
        failed_rank=failure.rank if failure else None,
        failure=failure.message if failure else None,
        failure_kind=failure.kind if failure else None,
    )


def hang_notice(progress: RunProgress, stall: Stall, directory: Path) -> Notice:
    """A run hangs; it may resume."""
    silent = format_duration(stall.silent_s)
    text = f"run {progress.run_id} hangs: no step and no log on any node for {silent}: {stall.message}"
    running = _of_progress("hang", text, "running", progress, directory)
    return msgspec.structs.replace(
        running, failed_node=stall.node, failed_rank=stall.rank, failure=stall.message, failure_kind="hang"
    )


def restart_notice(progress: RunProgress, directory: Path) -> Notice:
    """Another attempt of a run has started."""
    text = f"run {progress.run_id} was restarted: attempt {progress.attempt} of {progress.attempts}"
    return _of_progress("restart", text, "running", progress, directory)


def new_notices(before: RunProgress | None, now: RunProgress, directory: Path) -> list[Notice]:
    """The events between two looks at a run: restarts and standstills."""
    notices = []
    if before is not None and now.attempt != before.attempt:
        notices.append(restart_notice(now, directory))
    if now.stall is not None and (before is None or now.stall is not before.stall):
        notices.append(hang_notice(now, now.stall, directory))
    return notices


def interrupted_notice(progress: RunProgress, reason: str, directory: Path) -> Notice:
    """The controller could not follow a run to its end."""
    text = f"run {progress.run_id} failed: the controller could not continue: {reason}"
    return msgspec.structs.replace(_of_progress("end", text, "failed", progress, directory), failure=reason)


def notice_document(notice: Notice) -> dict[str, Any]:
    """The notice as plain data, without secrets and control characters, with texts of limited length."""
    document: dict[str, Any] = _shown(redact(msgspec.to_builtins(notice)))
    return document


def notice_environment(notice: Notice) -> dict[str, str]:
    """The same as variables, MULTINODE_EVENT and so on; unknown values are empty, nodes are comma-separated."""
    return {
        _PREFIX + name.upper(): "" if value is None else ",".join(value) if isinstance(value, list) else str(value)
        for name, value in notice_document(notice).items()
        if name != "schema"
    }


def _of_progress(
    event: Literal["end", "hang", "restart"], text: str, status: str, progress: RunProgress, directory: Path
) -> Notice:
    return Notice(
        event=event,
        text=text,
        run=progress.run_id,
        job=progress.job,
        status=status,
        directory=str(directory),
        nodes=tuple(node.name for node in progress.nodes),
        world_size=progress.world_size,
        duration_s=progress.elapsed_s,
    )


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return sanitize(value)[:_MOST_CHARACTERS] if isinstance(value, str) else value
