"""Notices that an unattended run has ended, hangs or was restarted, and their delivery to a command or webhook."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from multinode.errors import MultinodeError, UsageError, printable
from multinode.records.files import open_private
from multinode.records.progress import RunProgress
from multinode.records.run import Run, Stall
from multinode.render.sheet import sanitize
from multinode.secret_values import redact
from multinode.transport.base import time_left
from multinode.units import format_duration

if TYPE_CHECKING:
    from multinode.launch.context import RunContext

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
    if run.hang is not None:
        from multinode.launch.ending import hang_words

        why = f": {hang_words(run, run.hang)}"
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
        **_blamed(run),
    )


def _blamed(run: Run) -> dict[str, Any]:
    failure, hang = run.first_failure, run.hang
    if failure is not None:
        return _of_failure(failure.node, failure.rank, failure.message, failure.kind)
    return _of_failure(hang.node, hang.rank, hang.message, "hang") if hang is not None else {}


def _of_failure(node: str | None, rank: int | None, message: str, kind: str | None) -> dict[str, Any]:
    return {"failed_node": node, "failed_rank": rank, "failure": message, "failure_kind": kind}


def hang_notice(progress: RunProgress, stall: Stall, directory: Path) -> Notice:
    """A run hangs; it may resume."""
    silent = format_duration(stall.silent_s)
    text = f"run {progress.run_id} hangs: no step and no log on any node for {silent}: {stall.message}"
    running = _of_progress("hang", text, "running", progress, directory)
    return msgspec.structs.replace(running, **_of_failure(stall.node, stall.rank, stall.message, "hang"))


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
    """The notice as variables, MULTINODE_EVENT and so on; unknown values are empty, nodes are comma-separated."""
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
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return sanitize(value)[:_MOST_CHARACTERS] if isinstance(value, str) else value


# Output of the commands, in the run directory.
LOG = "on-end.log"
# A run has few events; one that hangs repeatedly must not notify without end.
_MOST_UNDER_WAY = 8


class Notifier:
    """Notifies a command, a webhook, or both; `tell` does not wait.

    Args:
        command: a shell command; None is none.
        url: as for `check_url`; None is none.
        command_s: time limit of the command.
        url_s: timeout of the webhook.
    """

    def __init__(
        self, command: str | None = None, url: str | None = None, *, command_s: float = 60.0, url_s: float = 10.0
    ) -> None:
        self._command = command
        self._url = url
        self._command_s = command_s
        self._url_s = url_s
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    def tell(self, document: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """Start to notify of an event.

        `document` is for the webhook, `environment` for the command, `log` takes the command's output.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _MOST_UNDER_WAY:
            self._failures.append("a notification was dropped: earlier ones have not finished yet")
            return
        if self._command is not None:
            self._start(self._run, self._command, environment, log)
        if self._url is not None:
            self._start(self._post, self._url, document)

    def close(self) -> tuple[str, ...]:
        """Wait for all notifications, up to their limits; returns a sentence per failure."""
        end = time.monotonic() + self._command_s + self._url_s
        for thread in self._threads:
            thread.join(time_left(end))
        if any(thread.is_alive() for thread in self._threads):
            self._failures.append("a notification did not finish in time")
        return tuple(self._failures)

    def _start(self, deliver: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                deliver(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here must not reach the run
                self._failures.append(printable(f"a notification failed: {error}").replace("\n", " "))

        thread = threading.Thread(target=run, name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, command: str, environment: dict[str, str], log: Path) -> None:
        with open(log, "ab", opener=open_private) as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(self._command_s)
        except subprocess.TimeoutExpired:
            # Its own session: child processes end with it. It is not reaped yet, so the id is valid.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(1.0)
            self._failures.append(f"the command of --on-end was killed after {self._command_s:g} s; its output: {log}")
            return
        if code != 0:
            self._failures.append(f"the command of --on-end exited with code {code}; its output: {log}")

    def _post(self, url: str, document: dict[str, Any]) -> None:
        # The URL may be the secret: only its host is ever printed.
        host = urllib.parse.urlsplit(url).hostname
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if url.startswith("http:"):
            # Requests to this machine use no proxy.
            handlers.append(urllib.request.ProxyHandler({}))
        data = json.dumps(document).encode()
        request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
        try:
            urllib.request.build_opener(*handlers).open(request, timeout=self._url_s).close()
        except urllib.error.HTTPError as error:
            error.close()
            self._failures.append(f"the webhook of --notify at {host} answered with status {error.code}")
        except urllib.error.URLError as error:
            reason = printable(str(error.reason)).replace("\n", " ")
            self._failures.append(f"the webhook of --notify at {host} is unreachable: {reason}")
        except Exception as error:  # noqa: BLE001 - some of them quote the address
            self._failures.append(f"the webhook of --notify at {host} failed: {type(error).__name__}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which might leave https."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check_url(url: str) -> str:
    """The URL of a webhook: https, or http on this machine.

    Raises:
        UsageError: it is neither, or contains a user or a password.
    """
    hint = "for example --notify https://hooks.example.com/multinode"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("--notify needs a URL", hint=hint)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise UsageError("--notify needs an https URL; http is allowed to this machine only", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise UsageError("--notify accepts no user or password in the URL", hint=hint)
    return url


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def tell_of(
    context: RunContext, on_end: str | None, url: str | None, warn: Callable[[str], None]
) -> Iterator[Callable[[Run], None]]:
    """Tell of hangs and of what ends the following while inside, and of the end when it is called.

    Args:
        context: what the run is followed with.
        on_end: a shell command; None without one.
        url: of a webhook; None without one.
        warn: is told of what was not delivered, at the end.
    """
    notifier = Notifier(on_end, url)
    observe = context.observe
    latest: RunProgress | None = None

    def tell(notice: Notice) -> None:
        log = context.runs / notice.run / LOG
        notifier.tell(notice_document(notice), notice_environment(notice), log)

    def observe_and_tell(progress: RunProgress) -> None:
        nonlocal latest
        for notice in new_notices(latest, progress, context.runs / progress.run_id):
            tell(notice)
        latest = progress
        observe(progress)

    def tell_end(run: Run) -> None:
        if run.status != "running":
            tell(end_notice(run, context.runs / run.run_id))

    context.observe = observe_and_tell
    try:
        yield tell_end
    except MultinodeError as error:
        if latest is not None:
            tell(interrupted_notice(latest, str(error), context.runs / latest.run_id))
        raise
    finally:
        for failure in notifier.close():
            warn(f"warning: {failure}")
