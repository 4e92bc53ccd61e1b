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
from msgspec.structs import replace

from multinode.errors import MultinodeError, UsageError, printable
from multinode.records.files import open_private
from multinode.records.progress import RunProgress
from multinode.records.run import Failure, NodeRun, Run, Stall
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import sanitize
from multinode.runs.document import RunDocument
from multinode.runs.stored_run import StoredRun
from multinode.secret_values import redact, redacted
from multinode.transport.base import time_left
from multinode.units import format_duration

if TYPE_CHECKING:
    from multinode.launch.context import RunContext

_MOST_CHARACTERS = 1000
_PREFIX = "MULTINODE_"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run: the JSON document of `--notify`, and the `MULTINODE_*` environment of `--on-end`."""

    schema: str = "multinode.notice/2"
    event: Literal["end", "hang", "restart"]  # `end`, `hang` or `restart`
    text: str  # the event in one sentence, under the key that chat services show
    error: str | None = None  # why the controller could not follow the run to its end; None if it could
    run: RunDocument  # as `multinode show --json` prints it then, without logs


def end_notice(run: RunDocument) -> Notice:
    """A run has ended."""
    failure = run.first_failure
    took = f" after {format_duration(run.ended_s - run.started_s)}" if run.ended_s is not None else ""
    why = f": {failure.node}: {failure.message}" if failure is not None else ""
    if run.hang is not None:
        from multinode.launch.ending import hang_words

        why = f": {hang_words(run, run.hang)}"
    text = f"run {run.run_id} {run.status}{took} ({run.job}, {run.extent}){why}"
    return Notice(event="end", text=text, run=run)


def hang_notice(run: RunDocument, stall: Stall) -> Notice:
    """A run hangs; it may resume."""
    silent = format_duration(stall.silent_s)
    text = f"run {run.run_id} hangs: no new step or log line on any node for {silent}; {stall.message}"
    return Notice(event="hang", text=text, run=replace(run, stalls=(*run.stalls, stall)))


def restart_notice(run: RunDocument, progress: RunProgress) -> Notice:
    """Another attempt of a run has started."""
    text = f"run {run.run_id} was restarted: attempt {progress.attempt} of {progress.attempts}"
    return Notice(event="restart", text=text, run=run)


def interrupted_notice(run: RunDocument, reason: str) -> Notice:
    """The controller could not follow a run to its end."""
    text = f"run {run.run_id} failed: the controller could not continue: {reason}"
    return Notice(event="end", text=text, error=reason, run=replace(run, status="failed"))


def new_notices(before: RunProgress | None, now: RunProgress, document: Callable[[], RunDocument]) -> list[Notice]:
    """The events between two looks at a run: restarts and standstills."""
    notices = []
    if before is not None and now.attempt != before.attempt:
        notices.append(restart_notice(document(), now))
    if now.stall is not None and (before is None or now.stall is not before.stall):
        notices.append(hang_notice(document(), now.stall))
    return notices


def notice_document(notice: Notice) -> dict[str, Any]:
    """The notice as plain data, without logs, secrets and control characters, with texts of limited length."""
    run = notice.run
    attempts = (replace(attempt, first_failure=_without_log(attempt.first_failure)) for attempt in run.attempts)
    stalls = (replace(stall, stack="") for stall in run.stalls)
    run = replace(run, first_failure=_without_log(run.first_failure), attempts=tuple(attempts), stalls=tuple(stalls))
    document: dict[str, Any] = _shown(redacted(replace(notice, run=run)))
    return document


def _without_log(failure: Failure | None) -> Failure | None:
    return replace(failure, log_tail="") if failure is not None else None


def notice_environment(notice: Notice) -> dict[str, str]:
    """The notice as variables, MULTINODE_EVENT and so on; unknown values are empty, nodes are comma-separated."""
    run = notice.run
    stall = run.stalls[-1] if notice.event == "hang" else run.hang
    blamed = run.first_failure or stall
    values = {
        "event": notice.event,
        "text": notice.text,
        "run": run.run_id,
        "job": run.job,
        "status": run.status,
        "directory": run.directory,
        "nodes": ",".join(node.name for node in run.nodes),
        "world_size": run.world_size,
        "duration_s": max(0.0, (run.ended_s if run.ended_s is not None else time.time()) - run.started_s),
        # where the run failed, or the node that the others wait for
        "failed_node": blamed.node if blamed is not None else None,
        "failed_rank": blamed.rank if blamed is not None else None,
        "failure": blamed.message if blamed is not None else notice.error,
        "failure_kind": blamed.kind if isinstance(blamed, Failure) else "hang" if blamed is not None else None,
    }
    shown = _shown(redact(values))
    return {_PREFIX + name.upper(): "" if value is None else str(value) for name, value in shown.items()}


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
        raise UsageError("--notify needs an https URL; http is allowed only for this machine", hint=hint)
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

    def document(run: Run) -> RunDocument:
        return StoredRun(RunDirectory(context.runs / run.run_id)).document(run)

    def tell(notice: Notice) -> None:
        notifier.tell(notice_document(notice), notice_environment(notice), Path(notice.run.directory) / LOG)

    def observe_and_tell(progress: RunProgress) -> None:
        nonlocal latest
        for notice in new_notices(latest, progress, lambda: document(_record(context, progress))):
            tell(notice)
        latest = progress
        observe(progress)

    def tell_end(run: Run) -> None:
        if run.status != "running":
            tell(end_notice(document(run)))

    context.observe = observe_and_tell
    try:
        yield tell_end
    except MultinodeError as error:
        if latest is not None:
            tell(interrupted_notice(document(_record(context, latest)), str(error)))
        raise
    finally:
        for failure in notifier.close():
            warn(f"warning: {failure}")


def _record(context: RunContext, progress: RunProgress) -> Run:
    """The record of a run in progress; if it cannot be read, what its progress says."""
    with contextlib.suppress(MultinodeError):
        run = RunDirectory(context.runs / progress.run_id).read_run()
        if run is not None:
            return run
    return Run(
        run_id=progress.run_id,
        job=progress.job,
        engine="",
        status="running",
        started_s=time.time() - progress.elapsed_s,
        world_size=progress.world_size,
        nodes=tuple(NodeRun(name=node.name, node_rank=node.node_rank, state=node.state) for node in progress.nodes),
    )
