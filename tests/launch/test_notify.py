"""Notifications: a real shell and a real server on loopback; whatever they do, the run is not disturbed."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from multinode.errors import UsageError
from multinode.launch.notice import Notifier, check_url

DEADLINE_S = 20.0


class Webhook(HTTPServer):
    """Answers with a status; 0 is never, until it is closed."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.received: list[tuple[str, Any]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-path"


class Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(body)))
        if self.server.status == 0:
            self.server.closing.wait(DEADLINE_S)
            return
        self.send_response(self.server.status)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def webhook(status: int) -> Iterator[Webhook]:
    with Webhook(status) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("status", "said"),
    [(200, None), (204, None), (302, "answered with status 302"), (500, "status 500"), (0, "timed out|TimeoutError")],
)
def test_a_webhook_gets_the_document_and_its_failure_names_the_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str | None
) -> None:
    # A proxy must not see what is meant for this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with webhook(status) as server:
        notifier = Notifier(url=server.url, url_s=0.2 if status == 0 else DEADLINE_S)
        notifier.tell({"event": "end"}, {}, tmp_path / "log")
        failures = notifier.close()
    assert server.received == [("/secret-path", {"event": "end"})]
    assert len(failures) == (said is not None)
    if said is not None:
        assert re.search(said, failures[0])
        assert "127.0.0.1" in failures[0]
        assert "secret-path" not in failures[0]


def test_nobody_listens(tmp_path: Path) -> None:
    with webhook(200) as server:
        url = server.url
    notifier = Notifier(url=url)
    notifier.tell({}, {}, tmp_path / "log")
    (failure,) = notifier.close()
    assert "is unreachable" in failure


@pytest.mark.parametrize(
    ("command", "output", "said"),
    [
        ('echo "$MULTINODE_TEXT"', "it ended; $(touch injected) `touch injected`\n", None),
        ("echo before; exit 3", "before\n", "exited with code 3"),
        ("echo begun; sleep 600 & wait", "begun\n", "killed after 1 s"),
        ("/no/such/program", None, "exited with code 127"),
    ],
)
def test_a_command_gets_the_variables_and_its_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str | None, said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "on-end.log"
    notifier = Notifier(command, command_s=1.0 if "sleep" in command else DEADLINE_S)
    notifier.tell({}, {"MULTINODE_TEXT": "it ended; $(touch injected) `touch injected`"}, log)
    failures = notifier.close()
    assert [path.name for path in tmp_path.iterdir()] == ["on-end.log"]
    assert log.stat().st_mode & 0o077 == 0
    if output is not None:
        assert log.read_text() == output
    assert len(failures) == (said is not None)
    assert (said or "") in "".join(failures)


def test_telling_waits_for_nobody_and_is_bounded(tmp_path: Path) -> None:
    """Events come faster than the command ends: the run goes on, and the surplus is said."""
    gate = tmp_path / "gate"
    notifier = Notifier(f"until [ -e {gate} ]; do sleep 0.05; done; echo told", command_s=DEADLINE_S)
    began = time.monotonic()
    for _ in range(10):
        notifier.tell({}, {}, tmp_path / "log")
    assert time.monotonic() - began < DEADLINE_S / 2
    gate.touch()
    assert notifier.close() == ("a notification was dropped: earlier ones have not finished yet",) * 2
    assert (tmp_path / "log").read_text() == "told\n" * 8


def test_a_run_directory_that_cannot_be_written_is_a_failed_notification(tmp_path: Path) -> None:
    notifier = Notifier("true")
    notifier.tell({}, {}, tmp_path / "missing" / "log")
    (failure,) = notifier.close()
    assert "a notification failed" in failure


@pytest.mark.parametrize(
    "url",
    ["https://hooks.example.com/a?b=c", "http://localhost:8080/x", "http://127.0.0.1/", "http://[::1]:80/hook"],
)
def test_urls_that_are_taken(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://hooks.example.com/", "https"),
        ("http://localhost.example.com/", "https"),
        ("http://10.0.0.1/", "https"),
        ("ftp://localhost/", "https"),
        ("file:///etc/passwd", "needs a URL"),
        ("hooks.example.com", "needs a URL"),
        ("https://", "needs a URL"),
        ("https://a:99999/", "needs a URL"),
        ("https://a/\r\nX: y", "needs a URL"),
        ("https://me:hunter2@hooks.example.com/", "no user or password"),
    ],
)
def test_urls_that_are_refused_without_being_repeated(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        check_url(url)
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"
