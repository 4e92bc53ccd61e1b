from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.explanation import LogFailure, explain
from multinode.diagnose.failure import WorkerDeath, classify, explain_timeout, find_worker_death, link_share
from multinode.diagnose.log_words import read_log
from multinode.records.progress import NodeProgress
from multinode.records.run import Failure
from multinode.records.samples import NicSample, StepSample
from multinode.records.status import Status
from tests.golden import Golden
from tests.launch.scripted import HELLO, RUNNING, Execution, Talk

from .test_failure import ended, find
from .told import told_of

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

# What comes before it: the worker's own words, and torchrun's first one.
SPOKEN = """\
step 3 of 10: loss 0.5
error: the data set has no samples
E1122 15:40:00.123000 4710 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) \
local_rank: 1 (pid: 4711) of binary: /usr/bin/python
Traceback (most recent call last):
"""

# What DeepSpeed 0.19's launcher prints on the second of two nodes with two workers each; four lines left out.
DEEPSPEED_REPORT = """\
[2026-11-21 22:45:33,204] [INFO] [launch.py:158:main] nnodes=2, num_local_procs=2, node_rank=1
[2026-11-21 22:45:33,204] [INFO] [launch.py:170:main] dist_world_size=4
[2026-11-21 22:45:34,214] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 16474
[2026-11-21 22:45:34,226] [ERROR] [launch.py:259:sigkill_handler] ['/usr/bin/python', '-u', 'die.py', \
'--local_rank=1', 'a'] exits with return code = {code}
"""

# Texts as their authors print them: torch 2.5 and later, torch 2.0, ROCm, cuBLAS, NCCL 2.20 through torch.
GPU_MEMORY = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.39 GiB. GPU 1 has a total capacity of 79.32 GiB",
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 978.00 MiB (GPU 0; 4.00 GiB total capacity)",
    "OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "DistBackendError: NCCL error in: NCCLUtils.hpp, unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
    "ins-7:301:301 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
]
# Seen under `ulimit -v` with torch 2.13 and numpy 2.
NODE_MEMORY = [
    "MemoryError",
    "MemoryError: Unable to allocate 74.5 GiB for an array with shape (10000000000,) and data type float64",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: std::bad_alloc",
]


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
        ("ConnectionError: Tried to launch distributed communication on port `29500`, but another", "connection"),
    ],
)
def test_a_failure_is_told_by_kind_with_what_mends_it(text: str, kind: str) -> None:
    for found in (classify(failure(text)), classify(failure(log=f"much else\n{text}\n"))):
        assert found.kind == kind
        assert found.hint


@pytest.mark.parametrize(
    ("text", "kind"),
    [*[(text, "out_of_gpu_memory") for text in GPU_MEMORY], *[(text, "out_of_memory") for text in NODE_MEMORY]],
)
def test_memory_of_the_gpu_is_told_from_memory_of_the_node(text: str, kind: str) -> None:
    for found in (classify(failure(f"rank 0 raised {text}")), classify(failure(log=f"Traceback\n{text}\n"))):
        assert found.kind == kind


@pytest.mark.parametrize(
    ("message", "log"),
    [
        ("rank 0 raised RuntimeError: DataLoader worker (pid 2637) is killed by signal: Killed.", ""),
        ("the job ended with exit code 137", "train.sh: line 3: 4711 Killed  python train.py"),
        ("the job ended with exit code 247", ""),
    ],
)
def test_a_death_that_only_words_tell_is_for_lack_of_memory_where_the_kernel_has_killed(message: str, log: str) -> None:
    node = Status(oom_kills=1)
    assert classify(failure(message, log), node).kind == "out_of_memory"
    assert classify(failure(message, log)).kind == "killed"


def test_a_kill_on_the_node_does_not_make_another_error_one_of_memory() -> None:
    node = Status(oom_kills=1)
    assert classify(failure("rank 0 raised ValueError: labels must be integers"), node).kind is None
    assert classify(failure("rank 0 raised OutOfMemoryError: CUDA out of memory."), node).kind == "out_of_gpu_memory"
    assert classify(failure("rank 3 was killed by SIGTERM", signal="SIGTERM"), node).kind == "killed"


def test_an_error_that_is_none_of_these_stays_without_a_kind() -> None:
    found = classify(failure("rank 0 raised ValueError: labels must be integers"))
    assert (found.kind, found.hint) == (None, None)


def test_the_sentence_counts_for_more_than_the_log() -> None:
    assert classify(failure("rank 0 raised MemoryError", log="NCCL INFO Connection closed")).kind == "out_of_memory"


def test_a_worker_that_a_signal_ended_is_told_with_what_mends_it(golden: Golden) -> None:
    killed = failure("rank 3 was killed by SIGKILL", signal="SIGKILL")
    cases = {
        "SIGKILL": classify(killed),
        "SIGKILL, and the kernel killed no process": classify(killed, Status(oom_kills=0)),
        "SIGKILL, and the kernel killed a process": classify(killed, Status(oom_kills=1)),
        "SIGSEGV": classify(failure(signal="SIGSEGV")),
        "SIGBUS": classify(failure(signal="SIGBUS")),
        "the GPU ran out of memory": classify(failure(f"rank 0 raised {GPU_MEMORY[0]}")),
        "out of memory of the node": classify(failure(f"rank 0 raised {NODE_MEMORY[0]}")),
    }
    golden.check_findings("failure_signals", {name: told_of(found) for name, found in cases.items()})


def test_a_full_disk_is_told_although_the_job_could_write_nothing_of_it() -> None:
    full = Status(disk_free_bytes=4096)
    assert classify(failure(), full).kind == "disk_full"
    assert classify(failure(), Status(disk_free_bytes=1 << 30)).kind is None
    assert classify(failure("rank 0 raised MemoryError"), full).kind == "out_of_memory"


def test_a_hint_that_is_there_is_kept() -> None:
    found = Failure(node="n", node_rank=0, message="FileNotFoundError", hint="rsync it")
    assert classify(found).hint == "rsync it"


def test_torchruns_report_names_the_worker_that_died_first() -> None:
    assert find_worker_death(REPORT.format(code=-9)) == WorkerDeath(rank=3, signal="SIGKILL")
    assert find_worker_death("x\n" * 1000 + REPORT.format(code=17)) == WorkerDeath(rank=3, exit_code=17)
    assert find_worker_death(REPORT.format(code=-40)) == WorkerDeath(rank=3, signal="signal 40")
    assert find_worker_death("rank : 3 exitcode : 1") is None


def test_deepspeeds_launcher_names_the_worker_by_its_local_rank() -> None:
    assert find_worker_death(DEEPSPEED_REPORT.format(code=-9)) == WorkerDeath(rank=3, signal="SIGKILL")
    assert find_worker_death(DEEPSPEED_REPORT.format(code=1)) == WorkerDeath(rank=3, exit_code=1)
    late = DEEPSPEED_REPORT.format(code=-9).partition("\n")[2]
    assert find_worker_death(late) == WorkerDeath(signal="SIGKILL")


@pytest.mark.parametrize("report", [REPORT, DEEPSPEED_REPORT])
def test_of_two_nodes_the_one_whose_worker_the_kernel_killed_is_to_blame(report: str) -> None:
    found = find(
        NodeEvidence(run=ended(0, exit_code=1, ended_s=10.0), log="Connection closed by peer"),
        NodeEvidence(run=ended(1, exit_code=247, ended_s=9.0, oom_kills=1), log=report.format(code=-9)),
    )
    assert (found.node, found.rank, found.signal, found.kind) == ("node1", 3, "SIGKILL", "out_of_memory")


def test_a_killed_worker_is_the_first_failure_with_its_rank_and_signal() -> None:
    found = find(
        NodeEvidence(run=ended(0, exit_code=1, ended_s=10.0), log="Connection closed by peer"),
        NodeEvidence(run=ended(1, exit_code=1, ended_s=11.0), log=REPORT.format(code=-9)),
    )
    assert (found.node, found.rank, found.signal, found.kind) == ("node1", 3, "SIGKILL", "killed")
    assert found.message == "rank 3 was killed by SIGKILL"


def test_what_a_worker_said_before_it_ended_is_shown_and_not_what_torchrun_says_of_it() -> None:
    run = ended(1, exit_code=1, ended_s=10.0)
    frames = '  File "run.py", line 1, in main\n' * 30
    for before in ("", f"{SPOKEN}{frames}{REPORT.format(code=1)}"):
        found = find(NodeEvidence(run=run, log=f"{before}{SPOKEN}{frames}{REPORT.format(code=1)}"))
        assert (found.message, found.rank) == ("rank 3 exited with code 1", 3)
        assert found.log_tail.splitlines()[-2:] == ["step 3 of 10: loss 0.5", "error: the data set has no samples"]
    silent = find(NodeEvidence(run=run, log=SPOKEN[SPOKEN.index("E1122") :] + REPORT.format(code=1)))
    assert "ChildFailedError" in silent.log_tail


NODE = NodeProgress(name="node0", node_rank=0, ranks=(0, 1), ifname="eth0", link_gbit_per_s=1.0)
STEPPED = replace(NODE, step=3)
TIMEOUT = Failure(node="node0", node_rank=0, message="timed out", kind="timeout", hint="multinode check")
WATCHDOG = (
    "[rank3]:[E1122 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(Seq=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
ABORT_REPORT = (
    "Root Cause (first observed failure):\n[0]:\n  rank : 3 (local_rank: 1)\n  exitcode : -6 (pid: 7)\n"
    "  traceback : Signal 6 (SIGABRT) received by PID 7\n"
)


def nic(second: float, sent_gbit: float, *, ifname: str = "eth0") -> NicSample:
    """A reading of a NIC that has sent so much by then."""
    return NicSample(
        time_s=second, mono_ns=int(second * 1e9), ifname=ifname, rx_bytes=0, tx_bytes=int(sent_gbit * 1e9 / 8)
    )


def test_a_worker_that_nccls_watchdog_aborted_is_a_timeout_and_says_of_what() -> None:
    log = WATCHDOG + "frame\n" * 60 + ABORT_REPORT
    failure = find(NodeEvidence(run=ended(0, exit_code=1), log=log))
    assert (failure.kind, failure.rank) == ("timeout", 3)
    assert failure.message == "rank 3 was killed by SIGABRT: the collective timed out: allreduce took longer than 600 s"


def test_the_hint_of_a_timeout_names_what_the_figures_tell_of(golden: Golden) -> None:
    cases: dict[str, tuple[tuple[NodeProgress, ...], float | None]] = {
        "a step was finished": ((STEPPED,), 0.3),
        "no worker had finished a step": ((NODE, NODE), None),
        "one of two nodes had finished a step": ((NODE, STEPPED), None),
        "a step was finished, and the link was full": ((STEPPED,), 0.97),
        "no step, and the link was more than full": ((NODE,), 1.3),
        "no step, and the data is still being prepared": ((replace(NODE, stage="tokenizing the data 45%"),), None),
    }
    golden.check_findings(
        "timeout",
        {
            name: told_of(explain_timeout(TIMEOUT, nodes, {"node0": share, "node1": None}))
            for name, (nodes, share) in cases.items()
        },
    )


def test_any_other_failure_keeps_its_hint() -> None:
    other = replace(TIMEOUT, kind="disk_full")
    assert explain_timeout(other, (NODE,), {"node0": 1.0}) == other


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([nic(100 + s, 0.9 * s) for s in range(11)], 0.9),
        # Before the minute, after the failure, of another NIC, of a kind of its own: none of it counts.
        ([nic(10, 0), *(nic(100 + s, 50 + 0.5 * s) for s in range(11)), nic(111, 500), nic(105, 900, ifname="x")], 0.5),
        ([StepSample(rank=0, step=1, time_s=105, mono_ns=1)], None),
        ([nic(108, 0), nic(109, 1)], None),
        ([nic(100, 9), nic(110, 1)], None),
        ([], None),
    ],
)
def test_the_share_is_of_the_minute_before(samples: list[NicSample | StepSample], share: float | None) -> None:
    found = link_share(samples, NODE, 110.0)
    assert found == (pytest.approx(share) if share is not None else None)
    assert link_share(samples, replace(NODE, link_gbit_per_s=None), 110.0) is None


def test_a_run_whose_collective_times_out_before_its_first_step_says_so(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            talk.chunk("log", 0, b"Running tokenizer on dataset:  45%|##\n" + (WATCHDOG + ABORT_REPORT).encode())
            talk.end(exit_code=1)
        else:
            talk.stop()

    failure = Execution(tmp_path, "a", "b").run(play).first_failure
    assert failure is not None
    assert failure.kind == "timeout"
    assert "(a: tokenizing the data 45%)" in str(failure.hint)


def explained(log: str) -> LogFailure | None:
    return explain([("log", read_log(log))]).first_failure


def raised(exception: str, source: str = "run()") -> str:
    return (
        f'Traceback (most recent call last):\n  File "/srv/job/train.py", line 7, in build\n    {source}\n{exception}\n'
    )


RAYLET = "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"


@pytest.mark.parametrize(
    "before",
    [
        "(TaskRunner pid=7) Training Progress: 100%|##########| 290/290 [1:02:03<00:00, 12.8s/it]\n",
        "100%|##########| 290/290 [1:02:03<00:00, 12.8s/it]\n",
        "(TaskRunner pid=7) step:290 - critic/loss:0.1\n(TaskRunner pid=7) Final validation metrics: {'a': 1}\n",
    ],
)
def test_a_worker_of_ray_that_ends_after_the_training_is_no_failure(before: str) -> None:
    assert explained(before + RAYLET) is None
    assert explained(before + RAYLET + raised("ValueError: cannot save")) is not None


def test_a_worker_of_ray_that_ends_before_the_training_does_is_a_failure() -> None:
    assert explained("Training Progress:  40%|####      | 116/290 [10:00<20:00,  7s/it]\n" + RAYLET) is not None
    assert explained("Loading checkpoint shards: 100%|##########| 4/4 [00:10<00:00,  2s/it]\n" + RAYLET) is not None


@pytest.mark.parametrize(
    ("exception", "source"),
    [
        ("AssertionError", "assert a.shape == b.shape"),
        ("queue.Full", "self.queue.put(batch)"),
        ("StopIteration", "batch = next(batches)"),
        ("queue.Empty", "item = results.get(timeout=60)"),
    ],
)
def test_an_exception_without_a_message_is_told_with_its_source(exception: str, source: str) -> None:
    told = explained(raised(exception, source))
    assert told is not None
    assert told.message == f"{exception}: {source} (in build, train.py:7)"


def test_an_exception_with_a_message_is_told_as_it_is() -> None:
    told = explained(raised("AssertionError: too short", "assert n"))
    assert told is not None
    assert told.message == "AssertionError: too short"


def test_an_exception_that_says_nothing_yields_to_the_one_before_it() -> None:
    told = explained(raised("ValueError: vocab of 7 tokens") + "Traceback (most recent call last):\nRuntimeError\n")
    assert told is not None
    assert "vocab of 7 tokens" in told.message


def watchdog(rank: int, number: int, operation: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:523] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600410 "
        "milliseconds before timing out.\n"
    )


def test_of_several_watchdogs_the_rank_that_is_behind_is_named_and_else_the_first(golden: Golden) -> None:
    cases = {
        "rank 2 is one collective behind": watchdog(0, 90) + watchdog(1, 90) + watchdog(2, 89) + watchdog(3, 90),
        "rank 2 is in another collective": watchdog(0, 90) + watchdog(1, 90) + watchdog(2, 90, "BROADCAST"),
        "all are in the same collective": watchdog(1, 90) + watchdog(0, 90),
    }
    golden.check_findings("watchdogs", {name: told_of(explained(log)) for name, log in cases.items()})


def test_what_nccl_says_for_one_gpu_is_not_survived_as_another_of_its_process_goes_on() -> None:
    told = explained(
        "n1:7:9 [0] misc/cudawrap.cc:30 NCCL WARN Failed to find CUDA library libcuda.so.1\n"
        "n1:7:9 [0] NCCL INFO init.cc:1397 -> 2 [Async thread]\nn1:7:8 [1] NCCL INFO Using network IB\n"
        "n1: Test NCCL failure common.cu:1119 'unhandled system error (run with NCCL_DEBUG=INFO for details) / '\n"
    )
    assert told is not None
    assert "libcuda.so.1" in told.message


def test_an_error_of_mpi_comes_before_an_assertion_at_the_exit_of_its_process() -> None:
    told = explained(
        "[n1:77] *** An error occurred in MPI_Allreduce\n[n1:77] *** MPI_ERR_TRUNCATE: message truncated\n"
        "app: util/monitor.c:177: monitor_cleanup: Assertion `empty(list)' failed.\n"
    )
    assert told is not None
    assert "MPI_" in told.message


DROPPED = [
    "Exception ignored in atexit callback: <function save at 0x7ff7225efe20>",
    "Exception ignored while calling deallocator <function Manager.__del__ at 0x7f7071300a90>:",
    "Exception ignored while closing generator <generator object batches at 0x7f70713>:",
    "Exception ignored in: <generator object batches at 0x7f70713>",
    "Error in atexit._run_exitfuncs:",
    "--- Logging error ---",
]


@pytest.mark.parametrize("before", DROPPED)
@pytest.mark.parametrize("mark", ["", "0: ", "[rank0]: ", "[default0]:"])
@pytest.mark.parametrize("exception", ["FileNotFoundError: [Errno 2] No such file or directory: 'a'", "KeyError: 'a'"])
def test_an_exception_that_python_prints_and_drops_is_no_failure(before: str, mark: str, exception: str) -> None:
    lines = f"Iteration 29: loss=8.1\n{before}\n{raised(exception)}".splitlines()
    log = "".join(f"{mark}{line}\n" for line in lines * 2)
    assert explained(log) is None
    told = explained(log + "".join(f"{mark}{line}\n" for line in raised("RuntimeError: bad batch").splitlines()))
    assert told is not None
    assert "bad batch" in told.message
    same = f"{raised(exception)}{before}\n{raised(exception)}".splitlines()
    told = explained("".join(f"{mark}{line}\n" for line in same))
    assert told is not None
    assert told.line == 4


SHUTDOWN = [
    raised("OSError: [Errno 5] Input/output error").replace("in build", "in __del__"),
    raised("RuntimeError: cannot join").replace("in build", "in _python_exit"),
    raised("RuntimeError: can't create new thread at interpreter shutdown"),
    raised("ImportError: sys.meta_path is None, Python is likely shutting down"),
]


def test_a_failure_after_the_end_of_a_training_or_by_a_signal_is_told_with_its_cause(golden: Golden) -> None:
    cases = {
        "torchrun reports an exception at the shutdown": f"Training completed\n{SHUTDOWN[1]}{REPORT.format(code=1)}",
        "SIGTERM": "step 9: loss 1.2\n" + stopped(15, 1),
        "SIGHUP": "step 9: loss 1.2\n" + stopped(1, 15),
        "SIGINT": "step 9: loss 1.2\n" + stopped(2),
        "KeyboardInterrupt": "step 9: loss 1.2\n" + raised("KeyboardInterrupt"),
    }
    golden.check_findings("log_ends", {name: told_of(explained(log)) for name, log in cases.items()})


@pytest.mark.parametrize("shutdown", SHUTDOWN)
def test_what_the_shutdown_after_a_training_raises_is_no_failure_unless_a_launcher_says_so(shutdown: str) -> None:
    assert explained("step 9: loss 1.2\nTraining completed\n" + shutdown) is None
    for failed in (
        "step 9: loss 1.2\n" + shutdown,
        "Training completed\n" + raised("RuntimeError: cannot save"),
        f"Training completed\n{shutdown}{REPORT.format(code=1)}",
    ):
        assert explained(failed) is not None
    told = explained(f"Training completed\n{shutdown}{REPORT.format(code=1)}")
    assert told is not None
    assert shutdown.splitlines()[-1] in told.message


TRACKERS = [
    "wandb: Run summary:\nwandb:   train/global_step 260\nwandb:          train/loss 1.4358\nwandb: View run at: https://x\n",
    "COMET INFO:   Metrics:\nCOMET INFO:     loss [26]       : (0.69, 2.3)\nCOMET INFO:     step: 9\n",
    "swanlab: step 260, loss: 1.4\nswanlab: run finished\n",
    "[neptune] [info   ] Shutting down\n[neptune] [info   ] epoch: 3, loss: 0.2\n",
]


@pytest.mark.parametrize("summary", TRACKERS)
@pytest.mark.parametrize("mark", ["", "[rank0]: ", "(main_task pid=7) "])
def test_what_an_experiment_tracker_prints_at_the_exit_is_no_progress_and_no_end(summary: str, mark: str) -> None:
    lines = f"step 9: loss 1.2\n{raised('RuntimeError: no such bucket')}{summary * 2}".splitlines()
    told = explained("".join(f"{mark}{line}\n" for line in lines))
    assert told is not None
    assert "no such bucket" in told.message
    assert told.cause is None


AGENT = "W1212 16:00:50.496000 17688 torch/distributed/elastic/agent/server/api.py:725] "
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 17688 got signal: "
THEN = "\nDuring handling of the above exception, another exception occurred:\n\n"


def stopped(*numbers: int) -> str:
    """What torchrun prints that gets these signals one after the other."""
    tracebacks = (raised(f"{SIGNALLED}{number}") for number in numbers)
    return f"{AGENT}Received {numbers[0]} death signal, shutting down workers\n{THEN.join(tracebacks)}"


@pytest.mark.parametrize(
    ("numbers", "error_id"), [((15, 1), "sigterm"), ((1, 15), "sighup"), ((2, 15), "sigint"), ((2, 1, 15), "sigint")]
)
def test_of_several_signals_to_stop_the_first_counts(numbers: tuple[int, ...], error_id: str) -> None:
    told = explained("step 9: loss 1.2\n" + stopped(*numbers))
    assert told is not None
    assert told.error_id == error_id


@pytest.mark.parametrize("exception", ["torch.OutOfMemoryError: CUDA out of memory.", "ValueError: bad batch"])
@pytest.mark.parametrize("stop", [stopped(15, 1), stopped(1), stopped(2), raised("KeyboardInterrupt")])
def test_a_signal_to_stop_after_an_exception_is_its_consequence_unless_the_run_went_on(
    exception: str, stop: str
) -> None:
    for mark in ("", "[rank1]: "):
        failed = "".join(f"{mark}{line}\n" for line in raised(exception).splitlines())
        told = explained(failed + stop)
        assert told is not None
        assert exception in told.message
        told = explained(f"{failed}{mark}step 8: loss 1.3\n{mark}step 9: loss 1.2\n{stop}")
        assert told is not None
        assert told.error_id in {"sigint", "sigterm", "sighup"}


@pytest.mark.parametrize(
    "said",
    [
        "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting\n",
        "srun: interrupt (one more within 1 sec to abort)\nsrun: sending Ctrl-C to StepId=7.0\n",
        raised("KeyboardInterrupt"),
        "".join(f"[rank{rank}]: {line}\n" for rank in (0, 1) for line in raised("KeyboardInterrupt").splitlines()),
        stopped(2),
    ],
)
def test_a_run_that_somebody_interrupted_is_told_as_such(said: str) -> None:
    told = explained("step 9: loss 1.2\n" + said)
    assert told is not None
    assert told.error_id == "sigint"
    assert explained("step 9: loss 1.2\nTraining completed\n" + said) is None
