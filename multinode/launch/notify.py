"""Notifications of a run: a command and a webhook, in threads with deadlines. Their failure does not affect the run."""

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
from pathlib import Path
from typing import Any

from multinode.errors import UsageError, printable
from multinode.records.files import open_private
from multinode.transport.base import time_left

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

        Args:
            document: the JSON for the webhook.
            environment: additional variables for the command.
            log: the file for its output.
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
