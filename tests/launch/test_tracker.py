from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.errors import AuthError, ContactLost, NodeFailed
from multinode.launch.session import Chunk, Ended, Event, Gone, Hello, Message, StatusReport
from multinode.launch.tracker import KeptLimits, Tracker
from multinode.profile.summary import summarise_run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import NoteSample, parse_samples
from multinode.records.status import Status
from tests import make

STEP = b'{"kind":"step","rank":%d,"step":%d,"time_s":1,"mono_ns":1,"step_time_us":1000}\n'
RAISED = b'{"kind":"exception","rank":2,"time_s":1,"type":"ValueError","message":"x"}\n'


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(make.plan("a", "b", workers=2), RunDirectory.create(tmp_path, "r"))


def tell(tracker: Tracker, message: Message, *, node_rank: int = 1) -> None:
    tracker.take(Event(node_rank=node_rank, message=message, over=isinstance(message, Ended)))


class Pieces:
    """Of the files of a node, each from where the one before ended."""

    def __init__(self, **offsets: int) -> None:
        self._offsets = offsets

    def next(self, file: str, data: bytes) -> Chunk:
        offset = self._offsets.get(file, 0)
        self._offsets[file] = offset + len(data)
        return Chunk(file=file, offset=offset, data=data)


@pytest.fixture
def piece() -> Callable[[str, bytes], Chunk]:
    return Pieces().next


def test_a_nodes_state_follows_what_it_says_and_the_others_is_untouched(tracker: Tracker) -> None:
    assert [node.state for node in tracker.progress.nodes] == ["waiting", "waiting"]
    told_in_turn: list[tuple[Message, str]] = [
        (Hello(time_s=0), "starting"),
        (StatusReport(state="running"), "running"),
    ]
    for message, state in told_in_turn:
        tell(tracker, message)
        assert [node.state for node in tracker.progress.nodes] == ["waiting", state]
        assert [node.state for node in tracker.node_runs] == ["waiting", state]


def test_until_the_first_step_a_node_shows_what_it_does_and_then_no_more(
    tracker: Tracker, piece: Callable[[str, bytes], Chunk]
) -> None:
    worker = b'{"kind":"worker","rank":2,"local_rank":0,"world_size":4,"time_s":1,"source":"trainer"}\n'
    told_in_turn: list[tuple[Message, str]] = [
        (Hello(time_s=0), "starting"),
        (StatusReport(state="running"), "running, importing"),
        (piece("log", b"Loading checkpoint shards:  50%"), "running, loading the model 50%"),
        (piece("samples/rank-2.jsonl", worker), "running, first step"),
        (piece("samples/rank-2.jsonl", STEP % (2, 1)), "running"),
        (piece("log", b"Loading checkpoint shards:  50%"), "running"),
        (Ended(state="ended", cause="exited", exit_code=0), "done"),
    ]
    assert tracker.progress.nodes[1].doing == "connecting"
    for message, doing in told_in_turn:
        tell(tracker, message)
        assert tracker.progress.nodes[1].doing == doing


def test_a_server_is_ready_from_when_it_listens_until_it_ends(
    tracker: Tracker, piece: Callable[[str, bytes], Chunk]
) -> None:
    told_in_turn: list[tuple[Message, str]] = [
        (StatusReport(state="running"), "running, importing"),
        (piece("samples/node.jsonl", b'{"kind":"listening","port":8000}\n'), "ready: listens on port 8000"),
        (piece("log", b"Loading checkpoint shards:  50%"), "ready: listens on port 8000"),
        (Ended(state="ended", cause="exited", exit_code=1), "exit code 1"),
    ]
    for message, doing in told_in_turn:
        tell(tracker, message)
        assert tracker.progress.nodes[1].doing == doing


def test_a_run_that_is_taken_up_shows_what_its_log_said_last(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    directory.append_log(1, b"Tokenizing\n")
    tracker = Tracker(make.plan("a", "b", workers=2), directory)
    tell(tracker, StatusReport(state="running"))
    assert tracker.progress.nodes[1].doing == "running, tokenizing the data"


@pytest.mark.parametrize(
    ("end", "words", "failed"),
    [
        (Ended(state="ended", cause="exited", exit_code=0), "done", False),
        (Ended(state="ended", cause="exited", exit_code=3), "exit code 3", True),
        (Ended(state="ended", cause="exited", signal="SIGSEGV"), "killed by SIGSEGV", True),
        (Ended(state="ended", cause="stopped", signal="SIGTERM"), "stopped", True),
        (Ended(state="ended", cause="lease_expired", signal="SIGTERM"), "lease expired", True),
        (Ended(state="ended", cause="supervisor_lost"), "supervisor lost", True),
    ],
)
def test_an_end_is_told_in_few_words(tracker: Tracker, end: Ended, words: str, *, failed: bool) -> None:
    tell(tracker, end)
    assert tracker.progress.nodes[1].message == words
    assert tracker.any_failed is failed
    assert not tracker.all_over
    tell(tracker, Ended(state="ended", cause="exited", exit_code=0), node_rank=0)
    assert tracker.all_over


def test_steps_become_progress_and_exceptions_become_evidence(
    tracker: Tracker, piece: Callable[[str, bytes], Chunk]
) -> None:
    tell(tracker, piece("samples/rank-2.jsonl", STEP % (2, 1) + STEP % (2, 2)))
    tell(tracker, piece("samples/rank-2.jsonl", RAISED))
    assert tracker.progress.nodes[1].step == 2
    first, second = tracker.evidence()
    assert first.exceptions == []
    assert [sample.type for sample in second.exceptions] == ["ValueError"]


def test_the_log_becomes_evidence(tracker: Tracker, piece: Callable[[str, bytes], Chunk]) -> None:
    tell(tracker, piece("log", b"boom\n"))
    assert [evidence.log for evidence in tracker.evidence()] == ["", "boom\n"]


def test_what_stands_before_the_end_of_a_long_log_is_evidence(
    tracker: Tracker, piece: Callable[[str, bytes], Chunk]
) -> None:
    tell(tracker, piece("log", b"RuntimeError: CUDA out of memory\n" + b"loading\n" * 20_000))
    evidence = tracker.evidence()[1]
    assert "memory" not in evidence.log
    word = evidence.read().cause()
    assert word is not None
    assert (word.line, word.text) == (1, "RuntimeError: CUDA out of memory")


def test_the_clock_offset_is_the_nodes_clock_minus_ours(tracker: Tracker) -> None:
    tell(tracker, Hello(time_s=time.time() + 3600))
    offset_s = tracker.evidence()[1].clock_offset_s
    assert offset_s is not None
    assert 3590 < offset_s <= 3600


def test_contact_that_comes_back_leaves_no_error_behind(tracker: Tracker) -> None:
    tell(tracker, StatusReport(state="running"))
    tracker.take(Event(node_rank=1, error=ContactLost("silent")))
    assert "reconnecting" in tracker.progress.nodes[1].message
    assert not tracker.any_failed
    tell(tracker, Hello(time_s=0))
    tell(tracker, StatusReport(state="running"))
    assert (tracker.progress.nodes[1].message, tracker.evidence()[1].error) == ("", None)


@pytest.mark.parametrize("error", [NodeFailed("/work does not exist"), AuthError("refused")])
def test_an_error_before_anything_was_asked_means_that_nothing_started(
    tracker: Tracker, error: NodeFailed | AuthError
) -> None:
    tracker.take(Event(node_rank=1, error=error, over=True))
    assert (tracker.node_runs[1].state, tracker.node_runs[1].status.cause) == ("ended", "not_started")
    assert tracker.any_failed


def test_a_lost_node_keeps_the_status_that_it_reported_last(tracker: Tracker) -> None:
    tell(tracker, StatusReport(state="running", message="supervised again", oom_kills=1))
    tracker.take(Event(node_rank=1, error=NodeFailed("no such run"), over=True))
    lost = tracker.node_runs[1]
    assert (lost.state, lost.status) == ("lost", Status(state="running", message="supervised again", oom_kills=1))
    assert msgspec.json.decode(msgspec.json.encode(lost))["status"]["state"] == "running"


def test_an_error_of_a_running_node_means_that_it_is_lost(tracker: Tracker) -> None:
    tell(tracker, StatusReport(state="running"))
    tracker.take(Event(node_rank=1, error=NodeFailed("no such run"), over=True))
    assert (tracker.node_runs[1].state, tracker.node_runs[1].status.cause) == ("lost", None)


def test_giving_up_loses_whoever_has_not_ended(tracker: Tracker) -> None:
    tell(tracker, Ended(state="ended", cause="stopped"), node_rank=0)
    tracker.note_stopping()
    assert [node.state for node in tracker.progress.nodes] == ["ended", "stopping"]
    tracker.give_up()
    assert [node.state for node in tracker.node_runs] == ["ended", "lost"]
    assert tracker.evidence()[1].error is not None


def test_why_a_job_was_not_started_is_the_evidence_of_its_node(tracker: Tracker) -> None:
    message = "the setup exited with code 1, so the job was not started: false"
    tell(tracker, Ended(state="ended", cause="not_started", exit_code=1, message=message))
    assert tracker.progress.nodes[1].message == "not started"
    evidence = tracker.evidence()[1]
    assert evidence.error is not None
    assert (evidence.error.node, evidence.error.message) == ("b", message)


def test_what_is_gone_on_the_node_is_said_in_its_place_and_counts_for_whoever_goes_on(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    tracker = Tracker(make.plan("a", "b", workers=2), directory)
    pieces = (b"begins\n", 3 << 30, b"Traceback\n", 5, b"ends\n")
    at = 0
    for part in pieces:
        length = part if isinstance(part, int) else len(part)
        gone = Gone(file="log", offset=at, size_bytes=length)
        tell(tracker, gone if isinstance(part, int) else Chunk(file="log", offset=at, data=part))
        at += length
        # By a controller that follows it from here on.
        assert directory.offsets(1) == {"log": at}
    said = "of the log is missing: it exceeded --log-limit, or the job truncated it"
    log = directory.log_path(1).read_text()
    assert log == f"begins\n\nmultinode: 3 GiB {said}\nTraceback\n\nmultinode: 5 B {said}\nends\n"
    assert directory.offsets(0) == directory.sizes(0) == {}


LIMITS = KeptLimits(log_bytes=100, samples_bytes=len(STEP) * 3, sample_files=4)
NOTED = "samples are no longer kept: the node "


def liar(tmp_path: Path, *chunks: tuple[str, bytes]) -> tuple[Tracker, RunDirectory]:
    directory = RunDirectory.create(tmp_path, "r")
    tracker, pieces = Tracker(make.plan("a", "b", workers=2), directory, LIMITS), Pieces()
    for name, data in chunks:
        tell(tracker, pieces.next(name, data))
    return tracker, directory


def size(directory: RunDirectory) -> int:
    return sum(path.stat().st_size for path in directory.path.rglob("*") if path.is_file())


def test_a_log_without_end_fills_no_disk_and_its_end_is_evidence_all_the_same(tmp_path: Path) -> None:
    chunks = [("log", b"%08d\n" % number) for number in range(100_000)]
    tracker, directory = liar(tmp_path, *chunks, ("log", b"ValueError: x\n"))
    assert size(directory) < 300
    log = directory.log_path(1).read_text()
    assert log.startswith("00000000\n00000001\n")
    assert log.endswith("\nmultinode: the log is truncated here, at 100 B; the node's copy: b:/r.1/log\n")
    assert tracker.evidence()[1].log.endswith("00099999\nValueError: x\n")
    assert len(tracker.evidence()[1].log) < 1 << 17
    # Taken up again, it is not noted again, and nothing of the other node is lost.
    again = Tracker(make.plan("a", "b", workers=2), directory, LIMITS)
    tell(again, Pieces(**directory.offsets(1)).next("log", b"more\n"))
    tell(again, Pieces().next("log", b"well\n"), node_rank=0)
    assert directory.log_path(1).read_text() == log
    assert directory.log_path(0).read_text() == "well\n"
    assert again.evidence()[1].log == "more\n"


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([("samples/rank-2.jsonl", STEP % (2, 1))] * 1000, f"sent more than {len(STEP) * 3} B of samples"),
        ([(f"samples/{n}.jsonl", b"\n") for n in range(1000)], "has more than 4 sample files"),
    ],
)
def test_samples_without_end_fill_no_disk_and_the_summary_says_so(
    tmp_path: Path, chunks: list[tuple[str, bytes]], reason: str
) -> None:
    tracker, directory = liar(tmp_path, *chunks, ("samples/rank-2.jsonl", STEP % (2, 7)))
    assert size(directory) < 1000
    assert len(list(directory.path.rglob("*.jsonl"))) <= 5
    (noted,) = [sample for sample in parse_samples(directory.sample_lines(1)) if isinstance(sample, NoteSample)]
    assert noted.message == NOTED + reason
    (note,) = summarise_run(directory, make.plan("a", "b", workers=2)).notes
    assert (note.code, note.node, note.message) == ("reported", "b", noted.message)
    # It is followed all the same.
    assert tracker.progress.nodes[1].step == 7


def test_devices_and_exceptions_without_end_fill_no_memory(
    tracker: Tracker, piece: Callable[[str, bytes], Chunk]
) -> None:
    nic = '{"kind":"nic","time_s":1,"mono_ns":1,"ifname":"e%d","rx_bytes":0,"tx_bytes":0,"rx_errors":1}\n'
    gpu = '{"kind":"gpu","time_s":1,"mono_ns":1,"index":%d,"ecc_uncorrected":1}\n'
    ddp = (
        b'{"kind":"ddp","rank":2,"step":1,"iteration":1,"bucket_sizes_bytes":[],"forward_us":1,"backward_us":1,'
        b'"comm_us":1,"overlap_us":1}\n'
    )
    lines = "".join((nic + gpu) % (number, number) for number in range(2000)).encode()
    tell(tracker, piece("samples/node.jsonl", lines))
    tell(tracker, piece("samples/rank-2.jsonl", (RAISED + ddp) * 2000))
    node, evidence = tracker.progress.nodes[1], tracker.evidence()[1]
    (step,) = node.workers[2].steps.values()
    kept = (node.nics, node.gpus, evidence.exceptions, step.ddp)
    assert [0 < len(one) <= 1000 for one in kept] == [True] * 4


@pytest.mark.parametrize(
    "name", ["../run.json", "samples/../run.jsonl", "samples/.x.jsonl", "log\n", "samples/a b.jsonl"]
)
def test_a_file_of_a_strange_name_is_passed_over_and_noted(tracker: Tracker, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for _ in range(3):
        tell(tracker, Chunk(file=name, offset=0, data=STEP % (2, 1)))
    tell(tracker, Chunk(file="log", offset=0, data=b"goes on\n"))
    (noted,) = parse_samples(RunDirectory(tmp_path / "r").sample_lines(1))
    assert isinstance(noted, NoteSample)
    assert "is not the name of a samples file" in noted.message
    new = [path.relative_to(tmp_path / "r") for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert [str(path) for path in new if path.suffix] == ["logs/node-1.log", "samples/node-1/controller.jsonl"]
    assert not tracker.missing_bytes


def test_what_could_not_be_written_leaves_no_gap_and_is_wanted_again_from_where_the_file_ends(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    tracker, pieces = Tracker(make.plan("a", "b", workers=2), directory), Pieces()
    # Even root cannot write into a directory.
    directory.log_path(1).mkdir()
    tell(tracker, pieces.next("log", b"first\n"))
    tell(tracker, pieces.next("samples/rank-2.jsonl", STEP % (2, 7)))
    assert "Is a directory" in str(tracker.trouble)
    directory.log_path(1).rmdir()
    tell(tracker, pieces.next("log", b"second\n"))
    assert tracker.missing_bytes == len(b"first\nsecond\n")
    assert not directory.log_path(1).exists()
    assert tracker.progress.nodes[1].step == 7
    assert [node.log for node in tracker.evidence()] == ["", "first\nsecond\n"]
    tell(tracker, Chunk(file="log", offset=0, data=b"first\nsecond\n"))
    assert (tracker.missing_bytes, tracker.trouble) == (0, None)
    assert directory.log_path(1).read_text() == "first\nsecond\n"


def test_a_log_that_somebody_removed_or_changed_is_wanted_again_as_a_whole(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    tracker, pieces = Tracker(make.plan("a", "b", workers=2), directory), Pieces()
    tell(tracker, pieces.next("log", b"first\n"))
    directory.log_path(1).write_text("x")
    tell(tracker, pieces.next("log", b"second\n"))
    assert "another program changed" in str(tracker.trouble)
    tell(tracker, Chunk(file="log", offset=0, data=b"first\nsecond\n"))
    assert (tracker.missing_bytes, directory.log_path(1).read_text()) == (0, "first\nsecond\n")
