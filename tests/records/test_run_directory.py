from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multinode.cluster.cluster import Node
from multinode.records.files import append
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs, runs_root
from tests import make
from tests.golden import Golden, error_of

RUN = make.run(status="running", started_s=1.5, world_size=2)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "20260102-030405-abcd")


def test_only_its_owner_may_read_a_run(directory: RunDirectory) -> None:
    directory.write("run.json", RUN)
    directory.append_log(0, b"secret")
    directory.append_samples(0, "rank-0.jsonl", b"{}\n")
    for path in [directory.path.parent, directory.path, *directory.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_noun_comes_back_as_it_was_written(directory: RunDirectory) -> None:
    directory.write("run.json", RUN)
    assert directory.read("run.json", Run) == RUN
    directory.write("run.json", None)
    assert (directory.path / "run.json").read_text() == "null\n"
    assert directory.read("summary.json", Run) is None
    assert {path.name for path in directory.path.iterdir()} == {"run.json", "logs", "samples"}


def test_writers_of_one_file_are_not_in_each_others_way(directory: RunDirectory) -> None:
    def write(number: int) -> None:
        for _ in range(20):
            directory.write("summary.json", [number] * 5000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert directory.read("summary.json", list[int]) in [[number] * 5000 for number in range(4)]
    assert {path.name for path in directory.path.iterdir()} == {"summary.json", "logs", "samples"}


def test_logs_and_samples_grow(directory: RunDirectory) -> None:
    assert (directory.log_tail(0), list(directory.sample_lines(0))) == ("", [])
    for part in (b"one\n", b"two\xff\n"):
        directory.append_log(0, part)
        directory.append_samples(1, "rank-2.jsonl", part)
    assert directory.log_path(0).read_bytes() == b"one\ntwo\xff\n"
    assert list(directory.sample_lines(1)) == [b"one\n", b"two\xff\n"]
    assert directory.log_tail(0) == "one\ntwo\ufffd\n"
    assert directory.log_tail(0, size_bytes=5) == "two\ufffd\n"
    assert directory.sizes(0) == {"log": 9}
    assert directory.sizes(1) == {"samples/rank-2.jsonl": 9}


@pytest.mark.parametrize("name", ["../run.json", "a/b.jsonl", ".hidden.jsonl", "x.json", "", "\n.jsonl"])
def test_a_node_cannot_choose_where_its_samples_lie(directory: RunDirectory, name: str) -> None:
    error_of(directory.append_samples, 0, name, b"{}\n")
    assert directory.sizes(0) == {}


def is_followed(directory: RunDirectory) -> bool:
    """Asked anew each time: mypy would take the first answer for all."""
    return directory.is_locked


def test_one_process_follows_a_run_at_a_time(directory: RunDirectory, golden: Golden) -> None:
    assert not is_followed(directory)
    with directory.lock():
        assert is_followed(directory)
        refused = error_of(directory.lock().__enter__)
    golden.check_errors("followed", {"the second": refused}, Path(str(os.getpid())))
    assert not is_followed(directory)
    with directory.lock():
        pass


def test_who_asks_whether_a_run_is_followed_turns_no_follower_away(directory: RunDirectory) -> None:
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            directory.is_locked  # noqa: B018 - asking is what is tested

    asking = threading.Thread(target=ask)
    with directory.lock():
        asking.start()
    try:
        for _ in range(500):
            with directory.lock():
                pass
    finally:
        over.set()
        asking.join()


def test_a_follower_that_was_killed_holds_nothing(directory: RunDirectory) -> None:
    script = (
        "import sys, time; from pathlib import Path; from multinode.records.run_directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).lock(): print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(directory.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert is_followed(directory)
        other.kill()
    assert not is_followed(directory)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_the_file_system_has_no_locks_the_run_goes_on_and_that_is_told(
    directory: RunDirectory, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with directory.lock():
        assert not directory.is_locked
    assert f"has no locks ({os.strerror(number)})" in caplog.text


def test_the_beginning_of_a_contrasts_name_means_the_contrast(tmp_path: Path) -> None:
    for name in ("20260102-1-aa", "20260102-1-aa-baseline", "20260102-1-aa-candidate-2"):
        RunDirectory.create(tmp_path, name).write("run.json", RUN)
    assert RunDirectory.open(tmp_path, "20260102-1").run_id == "20260102-1-aa"
    assert RunDirectory.open(tmp_path, "20260102-1-aa-c").run_id == "20260102-1-aa-candidate-2"


def test_runs_are_opened_by_a_unique_beginning_or_as_the_last(tmp_path: Path) -> None:
    for name in ("20260102-1-aa", "20260102-1-aab", "20260103-2-bb"):
        RunDirectory.create(tmp_path, name).write("run.json", RUN)
    (tmp_path / "20260104-no-run").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == ["20260102-1-aa", "20260102-1-aab", "20260103-2-bb"]
    assert RunDirectory.open(tmp_path, "20260103").run_id == "20260103-2-bb"
    assert RunDirectory.open(tmp_path, "last").run_id == "20260103-2-bb"
    assert RunDirectory.open(tmp_path, "20260102-1-aa").run_id == "20260102-1-aa"


def test_runs_are_kept_where_the_user_says_else_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for named, root in {
        "": tmp_path / "runs",
        "/data/runs": Path("/data/runs"),
        "~/runs": Path.home() / "runs",
    }.items():
        monkeypatch.setenv("MULTINODE_RUNS", named)
        assert runs_root() == root


def test_a_stored_cluster_holds_no_secret_and_everything_else(directory: RunDirectory) -> None:
    env = {"HF_TOKEN": "s3cret", "NCCL_DEBUG": "INFO"}
    directory.write_cluster(make.cluster(Node(name="a", env=env), Node(name="b", price=0.5)), "")
    text = (directory.path / "cluster.json").read_text()
    assert "s3cret" not in text
    assert '"NCCL_DEBUG": "INFO"' in text
    assert '"price": 0.5' in text


def test_where_no_run_was_ever_made_there_is_none(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "runs") == []


def test_what_cannot_be_read_or_written_is_an_error_that_names_it(tmp_path: Path, golden: Golden) -> None:
    for number in range(19):
        one = RunDirectory.create(tmp_path / "many", f"20260102-{number:02}")
        one.write("run.json", RUN)
        os.utime(one.path / "run.json", (1e9 + number, 1e9 + number))
    torn, other, closed = (RunDirectory.create(tmp_path, name) for name in ("torn", "other", "closed"))
    (torn.path / "run.json").write_text('{"run_id": 3')
    (other.path / "run.json").write_text('{"schema": "multinode.run/1\\u001b[31m", "id": 1}')
    (closed.path / "logs").rmdir()
    (closed.path / "run.json").mkdir()
    (tmp_path / "file").write_text("")
    golden.check_errors(
        "run_directory",
        {
            "it is torn": error_of(torn.read, "run.json", Run),
            "it is of another version": error_of(other.read_run),
            "the directory of its logs is gone": error_of(closed.append_log, 0, b"x"),
            "the disk is full": error_of(append, Path("/dev/full"), b"x"),
            "a directory has its name": error_of(closed.write, "run.json", RUN),
            "the runs cannot be kept in a file": error_of(RunDirectory.create, tmp_path / "file" / "runs", "r"),
            "a run of this name exists": error_of(RunDirectory.create, tmp_path, "torn"),
            "there are no runs": error_of(RunDirectory.open, tmp_path / "runs", "last"),
            "no run begins so": error_of(RunDirectory.open, tmp_path / "many", "x"),
            "9 runs begin so": error_of(RunDirectory.open, tmp_path / "many", "20260102-1"),
            "19 runs begin so": error_of(RunDirectory.open, tmp_path / "many", "2026"),
        },
        tmp_path,
    )
