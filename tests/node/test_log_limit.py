"""The limit of a run's log: what is given back, what is kept, and what a reader is told, with and without holes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from multinode.node.run import job_log
from multinode.node.run.job_log import INDEX, KEPT, TAIL, LogIndex, LogLimit, LogReader, Piece, punch_hole
from multinode.node.rundir import RunDir

MIB = 1 << 20
LIMIT = 8 * MIB
# In blocks of the file system, with what index and a step may take beyond it.
SLACK = MIB
TRACEBACK = (
    b"[rank3]: Traceback (most recent call last):\n"
    b'[rank3]:   File "train.py", line 7, in <module>\n'
    b"[rank3]: ValueError: the reason %d\n"
)
WORDS = [
    TRACEBACK,
    b"terminate called after throwing an instance of 'c10::Error' %d\n",
    b"node7:1:2 [0] net.cc:99 NCCL WARN NET/Socket: connection %d closed\n",
]


class Job:
    """Writes a log as a job does, at its end wherever that is, and remembers all of it."""

    def __init__(self, run: RunDir) -> None:
        self.fd = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.written = bytearray()
        self.words: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written += data
        assert os.write(self.fd, data) == len(data)

    def chatter(self, size_bytes: int) -> None:
        line = b"step %d of many: loss 0.123, and whatever else a training has to say\n" % len(self.written)
        self.write(line * (size_bytes // len(line)))

    def complain(self) -> None:
        said = WORDS[len(self.words) % len(WORDS)] % len(self.words)
        self.words.append(said)
        self.write(said)


def no_holes(_fd: int, _offset: int, _length: int) -> None:
    raise OSError(errno.EOPNOTSUPP, "as on NFS before 4.2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDir("r")
    Path(run.path).mkdir(parents=True)
    run.write(INDEX, LogIndex().record())
    return run


def read_all(run: RunDir, offset: int = 0) -> tuple[bytes, dict[int, int]]:
    """What is left, with zeros where something is gone; and that: offset and length."""
    log, found, gaps = LogReader(run, offset), bytearray(offset), {}
    while True:
        piece = log.read(65536)
        assert piece.offset == len(found)
        if piece.gone_bytes:
            assert not piece.data
            gaps[len(found)] = piece.gone_bytes
        elif not piece.data:
            return bytes(found), gaps
        found += piece.data or bytes(piece.gone_bytes)


def expect_kept(run: RunDir, job: Job) -> int:
    """All that a reader gets is what the job wrote, at its place; how much of it is gone."""
    found, gaps = read_all(run)
    assert len(found) == len(job.written)
    expected = bytearray(job.written)
    for offset, length in gaps.items():
        expected[offset : offset + length] = bytes(length)
    assert found == expected
    return sum(gaps.values())


def used_bytes(run: RunDir) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(run.path).iterdir())


@pytest.mark.parametrize("punch", [punch_hole, no_holes])
def test_a_log_stays_within_its_limit_and_keeps_its_beginning_its_end_and_every_error(
    run: RunDir, punch: Callable[[int, int, int], None]
) -> None:
    job, limit = Job(run), LogLimit(run, LIMIT, punch)
    for number in range(120):
        job.chatter(MIB // 2 + number * 97)
        job.complain()
        limit.look()
        assert used_bytes(run) <= LIMIT + MIB + SLACK
    gone = expect_kept(run, job)
    assert gone == limit.gone_bytes > 3 * len(job.written) // 4
    found, gaps = read_all(run)
    assert found[: LIMIT // 4] == job.written[: LIMIT // 4]
    assert found[-MIB:] == job.written[-MIB:]
    assert [word for word in job.words if word not in found] == []
    assert len(gaps) > 50, "between the errors"
    index = run.read(INDEX) or {}
    assert (index["base_bytes"] > 0) == (punch is no_holes)
    # Who has some of it already hears no more and no less from there on.
    for offset in (0, 1, LIMIT // 4, LIMIT, len(found) - MIB, len(found)):
        assert read_all(run, offset)[0][offset:] == found[offset:]


@pytest.mark.parametrize("punch", [punch_hole, no_holes])
def test_an_error_that_lies_across_any_boundary_is_kept(
    run: RunDir, punch: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "_READ_BYTES", 4096)
    monkeypatch.setattr(job_log, "_LOOK_BYTES", 1 << 16)
    dice = random.Random(7)  # noqa: S311 - for texts
    job, limit = Job(run), LogLimit(run, LIMIT, punch)
    for _ in range(300):
        job.write(bytes(dice.randrange(97, 123) for _ in range(dice.randrange(4096))) * 24 + b"\n")
        if dice.random() < 0.3:
            job.complain()
        for _ in range(2):
            limit.look()
    assert limit.gone_bytes > 0
    expect_kept(run, job)
    found, _ = read_all(run)
    assert [word for word in job.words if word not in found] == []


class WrittenMeanwhile(RunDir):
    """Its job complains whenever the log is about to be cut."""

    job: Job | None = None

    def write(self, name: str, record: dict[str, object]) -> None:
        super().write(name, record)
        if self.job is not None and record.get("busy"):
            self.job.chatter(1 << 12)
            self.job.complain()


def test_an_error_that_comes_while_the_log_is_being_cut_is_kept_at_the_next_cut_too(run: RunDir) -> None:
    meanwhile = WrittenMeanwhile("r")
    meanwhile.job = job = Job(run)
    limit = LogLimit(meanwhile, LIMIT, no_holes)
    for _ in range(120):
        job.chatter(MIB // 2)
        limit.look()
    assert len(job.words) > 4
    expect_kept(run, job)
    found, _ = read_all(run)
    assert [word for word in job.words if word not in found] == []


def test_errors_without_end_do_not_take_all_of_the_limit(run: RunDir) -> None:
    job, limit = Job(run), LogLimit(run, LIMIT)
    for _ in range(200):
        job.write(WORDS[2] % 0 * 4000)
        limit.look()
    assert used_bytes(run) <= LIMIT + MIB + SLACK
    assert Path(run.path, KEPT).stat().st_size <= LIMIT // 2 + 4096
    expect_kept(run, job)


@pytest.mark.parametrize("punch", [punch_hole, no_holes])
def test_a_disk_that_takes_no_copies_still_gets_its_blocks_back(
    run: RunDir, punch: Callable[[int, int, int], None]
) -> None:
    for name in (KEPT, TAIL):
        Path(run.path, name).mkdir()
    job, limit = Job(run), LogLimit(run, LIMIT, punch)
    for _ in range(60):
        job.chatter(MIB // 2)
        job.complain()
        limit.look()
        assert used_bytes(run) <= LIMIT + MIB + SLACK
    assert expect_kept(run, job) == limit.gone_bytes > len(job.written) // 2


def test_without_a_limit_or_below_it_nothing_is_touched(run: RunDir) -> None:
    job = Job(run)
    for size in (None, 1 << 40):
        limit = LogLimit(run, size)
        job.chatter(2 * LIMIT)
        assert not limit.look()
    assert expect_kept(run, job) == 0
    assert not Path(run.path, KEPT).exists()


def test_a_job_that_empties_its_own_log_loses_what_was_in_it_and_nothing_that_follows(run: RunDir) -> None:
    """As a shell's `> /dev/stderr` does."""
    job, limit = Job(run), LogLimit(run, None)
    job.chatter(3 * MIB)
    limit.look()
    follower = LogReader(run)
    first = follower.read(1000)
    os.truncate(run.log, 0)
    job.chatter(MIB)
    assert limit.look()
    found, gaps = read_all(run)
    assert first == Piece(0, bytes(job.written[:1000]))
    assert follower.read(10) == Piece(1000, gone_bytes=limit.gone_bytes - 1000)
    assert gaps == {0: limit.gone_bytes}
    assert found[limit.gone_bytes :] == job.written[limit.gone_bytes :]


@pytest.mark.parametrize("name", ["log", KEPT, INDEX, TAIL])
def test_a_file_that_the_job_takes_away_or_leads_elsewhere_ends_nothing(run: RunDir, name: str, tmp_path: Path) -> None:
    job, limit = Job(run), LogLimit(run, LIMIT)
    for _ in range(12):
        job.chatter(MIB)
        job.complain()
        limit.look()
    path = Path(run.path) / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"not of this run" * 1000)
    for _ in range(12):
        job.chatter(MIB)
        job.complain()
        limit.look()
    assert b"not of this run" not in read_all(run)[0]
    assert (tmp_path / "elsewhere").read_bytes() == b"not of this run" * 1000
