from __future__ import annotations

import pytest

from multinode.core.run import Failure, NodeRun
from multinode.launch.diagnosis import WorkerDeath, classify, find_worker_death
from multinode.launch.failure import Evidence, first_failure

# What torch 2.13's torchrun prints when one of its workers was killed; two lines of a traceback left out.
REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
==========================================================
train.py FAILED
----------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
----------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_08:00:00
  host      : node1
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
==========================================================
"""


def failure(message: str = "the job ended with exit code 1", log: str = "", signal: str | None = None) -> Failure:
    return Failure(node="node1", node_rank=1, message=message, log_tail=log, signal=signal)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("rank 0 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_gpu_memory"),
        ("rank 0 raised MemoryError", "out_of_memory"),
        ("rank 1 raised OSError: [Errno 28] No space left on device", "disk_full"),
        ("rank 0 raised ModuleNotFoundError: No module named 'flash_attn'", "missing_module"),
        ("rank 0 raised FileNotFoundError: [Errno 2] No such file or directory: '/m'", "missing_file"),
        ("rank 0 raised OSError: /m is not a local folder and is not a valid model identifier", "missing_file"),
        ("rank 0 raised DistBackendError: Mismatched NCCL version detected", "version_mismatch"),
        ("rank 2 raised DistStoreError: wait timeout after 300000ms, keys: /default_pg/0", "timeout"),
        ("rank 2 raised RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer", "connection"),
    ],
)
def test_a_failure_is_told_by_kind_with_what_mends_it(text: str, kind: str) -> None:
    for found in (classify(failure(text)), classify(failure(log=f"much else\n{text}\n"))):
        assert found.kind == kind
        assert found.hint


def test_an_error_that_is_none_of_these_stays_without_a_kind() -> None:
    found = classify(failure("rank 0 raised ValueError: labels must be integers"))
    assert (found.kind, found.hint) == (None, None)


def test_the_sentence_counts_for_more_than_the_log() -> None:
    assert classify(failure("rank 0 raised MemoryError", log="NCCL INFO Connection closed")).kind == "out_of_memory"


def test_a_kill_for_lack_of_memory_is_told_from_one_by_somebody() -> None:
    killed = failure("rank 3 was ended by SIGKILL", signal="SIGKILL")
    node = NodeRun(name="node1", node_rank=1, oom_kills=0)
    assert classify(killed).kind == classify(killed, node).kind == "killed"
    starved = classify(killed, NodeRun(name="node1", node_rank=1, oom_kills=1))
    assert (starved.kind, "dmesg" in str(starved.hint)) == ("out_of_memory", True)
    assert classify(failure(signal="SIGSEGV")).kind == "crashed"
    assert "/dev/shm" in str(classify(failure(signal="SIGBUS")).hint)


def test_a_full_disk_is_told_although_the_job_could_write_nothing_of_it() -> None:
    full = NodeRun(name="node1", node_rank=1, disk_free_bytes=4096)
    assert classify(failure(), full).kind == "disk_full"
    assert classify(failure(), NodeRun(name="node1", node_rank=1, disk_free_bytes=1 << 30)).kind is None
    assert classify(failure("rank 0 raised MemoryError"), full).kind == "out_of_memory"


def test_a_hint_that_is_there_is_kept() -> None:
    found = Failure(node="n", node_rank=0, message="FileNotFoundError", hint="rsync it")
    assert classify(found).hint == "rsync it"


def test_torchruns_report_names_the_worker_that_died_first() -> None:
    assert find_worker_death(REPORT.format(code=-9)) == WorkerDeath(rank=3, signal="SIGKILL")
    assert find_worker_death("x\n" * 1000 + REPORT.format(code=17)) == WorkerDeath(rank=3, exit_code=17)
    assert find_worker_death(REPORT.format(code=-64)) == WorkerDeath(rank=3, signal="signal 64")
    assert find_worker_death("rank : 3 exitcode : 1") is None


def test_a_killed_worker_is_the_first_failure_with_its_rank_and_signal() -> None:
    def ended(rank: int, log: str) -> Evidence:
        run = NodeRun(
            name=f"node{rank}", node_rank=rank, state="ended", cause="exited", exit_code=1, ended_s=10.0 + rank
        )
        return Evidence(run=run, log=log)

    found = first_failure([ended(0, "Connection closed by peer"), ended(1, REPORT.format(code=-9))])
    assert found is not None
    assert (found.node, found.rank, found.signal, found.kind) == ("node1", 3, "SIGKILL", "killed")
    assert found.message == "rank 3 was ended by SIGKILL"
