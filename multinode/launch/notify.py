"""Telling others of a run: a command and a webhook, in threads with deadlines. What fails there disturbs no run."""

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

# What the commands print goes into this file of the run's directory.
LOG = "on-end.log"
# A run tells few events; one that hangs again and again is not told of without end.
_MOST_UNDER_WAY = 8


class Notifier:
    """Tells a command, a webhook, or both; `tell` does not wait.

    Args:
        command: a shell's; None is none.
        url: as `check_url` wants it; None is none.
        command_s: how long the command may run until it is killed.
        url_s: how long each wait for the webhook may last.
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
        """Start to tell of an event.

        Args:
            document: what the webhook gets, as JSON.
            environment: what the command gets besides our own variables.
            log: the file that its output is appended to.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _MOST_UNDER_WAY:
            self._failures.append("an event was not told: earlier notifications have not ended yet")
            return
        if self._command is not None:
            self._start(self._run, self._command, environment, log)
        if self._url is not None:
            self._start(self._post, self._url, document)

    def close(self) -> tuple[str, ...]:
        """Wait until all is told or its time is over; what failed, a sentence each."""
        end = time.monotonic() + self._command_s + self._url_s
        for thread in self._threads:
            thread.join(time_left(end))
        if any(thread.is_alive() for thread in self._threads):
            self._failures.append("a notification did not end in time")
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
            # Its session is its own: what it started goes with it. It is not reaped yet, so the id is its.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(1.0)
            self._failures.append(f"the command of --on-end was killed after {self._command_s:g} s; its output: {log}")
            return
        if code != 0:
            self._failures.append(f"the command of --on-end ended with code {code}; its output: {log}")

    def _post(self, url: str, document: dict[str, Any]) -> None:
        # The address may be the secret that lets one post: only its host is ever said.
        host = urllib.parse.urlsplit(url).hostname
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if url.startswith("http:"):
            # What is meant for this machine goes through no proxy.
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
            self._failures.append(f"the webhook of --notify at {host} was not reached: {reason}")
        except Exception as error:  # noqa: BLE001 - some of them quote the address
            self._failures.append(f"the webhook of --notify at {host} failed: {type(error).__name__}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which might leave https."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check_url(url: str) -> str:
    """The address of a webhook: https, or http on this machine.

    Raises:
        UsageError: it is neither, or has a user or a password in it.
    """
    hint = "for example --notify https://hooks.example.com/multinode"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("--notify is not given a URL", hint=hint)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise UsageError("--notify takes an https URL; http only to this machine", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise UsageError("--notify takes no user or password in the URL", hint=hint)
    return url


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
