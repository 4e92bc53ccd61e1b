"""Notices: the run as any command prints it, and what happened to it in a sentence and in variables."""

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

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.api import document
from multinode.cli.main import build_app
from multinode.launch.notice import (
    Notice,
    Notifier,
    check_url,
    end_notice,
    hang_notice,
    interrupted_notice,
    notice_document,
    notice_environment,
    restart_notice,
)
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import Attempt, Failure, Run, Stall
from multinode.runs.document import RunDocument
from multinode.runs.stored_run import StoredRun
from tests import make
from tests.golden import Golden, error_of
from tests.profile.observing import RUN, SUMMARY

FAILURE = Failure(node="node1", node_rank=1, rank=3, message="rank 3 raised OSError", kind="disk_full", log_tail="a\nb")
FAILED = msgspec.structs.replace(RUN, status="failed", started_s=10.0, ended_s=75.0, first_failure=FAILURE)
RUNNING = msgspec.structs.replace(RUN, status="running", started_s=10.0, ended_s=None)
STOPPED = msgspec.structs.replace(RUN, status="stopped", started_s=10.0, ended_s=75.0)
PROGRESS = RunProgress(
    run_id="r", job="train.py", world_size=2, nodes=(NodeProgress(name="a", node_rank=0, ranks=(0,)),), elapsed_s=12.5
)
STALL = Stall(message="rank 1 is behind", node="b", rank=1, time_s=0.0, silent_s=300.0, stack="long")


def told(run: Run) -> RunDocument:
    return RunDocument(**{name: getattr(run, name) for name in Run.__struct_fields__[1:]}, directory="/runs/r")


def variables(notice: Notice) -> dict[str, str]:
    """Those that say something, without the prefix."""
    return {
        name.removeprefix("MULTINODE_").lower(): value for name, value in notice_environment(notice).items() if value
    }


@pytest.mark.parametrize(
    ("notice", "expected"),
    [
        (
            end_notice(told(FAILED)),
            {
                "event": "end",
                "status": "failed",
                "duration_s": "65.0",
                "failed_node": "node1",
                "failed_rank": "3",
                "failure": "rank 3 raised OSError",
                "failure_kind": "disk_full",
                "text": f"run {RUN.run_id} failed after 1 min 05 s ({RUN.job}, {RUN.extent}): "
                "node1: rank 3 raised OSError",
            },
        ),
        (
            hang_notice(told(RUNNING), STALL),
            {
                "event": "hang",
                "status": "running",
                "failed_node": "b",
                "failed_rank": "1",
                "failure": "rank 1 is behind",
                "failure_kind": "hang",
                "text": f"run {RUN.run_id} hangs: no new step or log line on any node for 5 min 00 s; rank 1 is behind",
            },
        ),
        (
            restart_notice(told(RUNNING), msgspec.structs.replace(PROGRESS, attempt=2, attempts=3)),
            {"event": "restart", "status": "running", "text": f"run {RUN.run_id} was restarted: attempt 2 of 3"},
        ),
        (
            interrupted_notice(told(RUNNING), "the disk is full"),
            {
                "event": "end",
                "status": "failed",
                "failure": "the disk is full",
                "text": f"run {RUN.run_id} failed: the controller could not continue: the disk is full",
            },
        ),
    ],
)
def test_a_notice_describes_the_run(notice: Notice, expected: dict[str, str]) -> None:
    whole = {
        "run": RUN.run_id,
        "job": RUN.job,
        "directory": "/runs/r",
        "nodes": ",".join(node.name for node in RUN.nodes),
        "world_size": str(RUN.world_size),
    }
    shown = variables(notice)
    duration_s = shown.pop("duration_s")
    assert float(duration_s) > 0
    assert shown == whole | {name: value for name, value in expected.items() if name != "duration_s"}
    assert duration_s == expected.get("duration_s", duration_s)


def test_a_stopped_hang_is_to_blame() -> None:
    shown = variables(end_notice(told(msgspec.structs.replace(STOPPED, stalls=(STALL,)))))
    assert (shown["failed_node"], shown["failure"], shown["failure_kind"]) == ("b", "rank 1 is behind", "hang")


def test_the_run_is_what_show_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make.store(tmp_path, RUN.run_id, run=STOPPED, summary=SUMMARY)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    sent = notice_document(end_notice(StoredRun(directory).document()))
    shown: dict[str, Any] = msgspec.json.decode(CliRunner().invoke(build_app(), ["show", RUN.run_id, "--json"]).stdout)
    assert sent["run"] == shown == document(StoredRun(directory).document())
    assert sent["run"]["summary"]["steps"] == SUMMARY.steps


def test_logs_and_stacks_are_not_sent() -> None:
    attempt = Attempt(run_id="r-1", status="failed", started_s=1.0, first_failure=FAILURE)
    failed = msgspec.structs.replace(FAILED, attempts=(attempt,), stalls=(STALL,))
    run = notice_document(end_notice(told(failed)))["run"]
    assert (run["first_failure"]["message"], run["first_failure"]["log_tail"]) == (FAILURE.message, "")
    assert (run["attempts"][0]["first_failure"]["log_tail"], run["stalls"][0]["stack"]) == ("", "")


def test_what_a_node_said_is_made_harmless_and_a_secret_is_not_sent() -> None:
    hostile = Failure(node="node1", node_rank=1, message="\x1b[31m\0 HF_TOKEN=hf_abcdef\n" + "x" * 5000)
    notice = end_notice(told(msgspec.structs.replace(FAILED, first_failure=hostile)))
    sent = notice_document(notice)
    for text in (
        sent["text"],
        sent["run"]["first_failure"]["message"],
        notice_environment(notice)["MULTINODE_FAILURE"],
    ):
        assert text.isprintable()
        assert "hf_abcdef" not in text
        assert len(text) <= 1000


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


def test_urls_are_refused_without_being_repeated(golden: Golden) -> None:
    urls = (
        *("http://hooks.example.com/", "http://localhost.example.com/", "http://10.0.0.1/", "ftp://localhost/"),
        *("file:///etc/passwd", "hooks.example.com", "https://", "https://a:99999/", "https://a/\r\nX: y"),
        "https://me:hunter2@hooks.example.com/",
    )
    refused = {ascii(url): error_of(check_url, url) for url in urls}
    assert "hunter2" not in " ".join(f"{error} {error.hint}" for error in refused.values())
    golden.check_errors("refused_urls", refused)
