"""The first cause in logs as people publish them: what speaks is found wherever it stands in the log."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.explanation import explain
from multinode.diagnose.failure import WorkerDeath, find_worker_death, first_failure
from multinode.diagnose.hang import find_hang
from multinode.diagnose.known_errors import find_error
from multinode.diagnose.log_words import read_log
from multinode.records.run import NodeDiagnosis
from multinode.records.samples import ExceptionSample
from tests.golden import Golden
from tests.launch.scripted import HELLO, RUNNING, Execution, Talk

from .test_failure import GLOO, ended, find, raised

FRAMES = [f"frame #{number}: c10::Error::Error() + 0x96 (0x7f in libc10.so)" for number in range(12)]
# As torch 2.1 to 2.13 word it; the last is LOG(FATAL), which prints no "terminate called".
ABORTS = {
    "illegal-memory-access": "CUDA error: an illegal memory access was encountered",
    "uncorrectable-ecc": "CUDA error: uncorrectable ECC error encountered",
    "device-assert": "CUDA error: device-side assert triggered",
    "nccl-peer-gone": "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
}


def aborted(rank: int, words: str) -> list[str]:
    """What a worker prints whose watchdog meets an error."""
    return [
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        (
            f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with "
            f"exception: {words}"
        ),
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be wrong.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "",
        "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):",
        *FRAMES,
        "",
        "Exception raised from ncclCommWatchdog at ProcessGroupNCCL.cpp:1418 (most recent call first):",
        *FRAMES[:5],
    ]


def stuck(rank: int) -> list[str]:
    return [
        (
            f"[rank{rank}]:[F1122 10:00:00.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] [PG ID "
            f"0 PG GUID 0(default_pg) Rank {rank}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making "
            "progress in monitoring enqueued collectives."
        ),
        *FRAMES,
    ]


def torchrun(rank: int, code: int, workers: int) -> list[str]:
    """What torchrun prints when one of its workers has failed."""
    return [
        *(
            f"W1122 10:00:01.0 99 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {number} "
            "closing signal SIGTERM"
            for number in range(101, 100 + workers)
        ),
        (
            f"E1122 10:00:02.0 99 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) "
            f"local_rank: {rank} (pid: 100) of binary: /usr/bin/python"
        ),
        "Traceback (most recent call last):",
        *(f'  File "run.py", line {line}, in main' for line in range(30)),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-22_10:00:02",
        "  host      : gpu-a",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {code} (pid: 100)",
    ]


def text(*parts: list[str]) -> str:
    return "\n".join(itertools.chain.from_iterable(parts)) + "\n"


def interleaved(parts: list[list[str]]) -> list[str]:
    return [line for lines in itertools.zip_longest(*parts) for line in lines if line is not None]


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("error_id", ABORTS)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_worker_that_nccls_watchdog_aborted_gets_its_cause(error_id: str, workers: int, *, mixed: bool) -> None:
    peers = [aborted(rank, ABORTS["nccl-peer-gone"]) for rank in range(1, workers)]
    said = [aborted(0, ABORTS[error_id]), *peers]
    words = interleaved(said) if mixed else list(itertools.chain.from_iterable(said))
    log = text(["step 3: loss 0.5"] * 30, words, torchrun(0, -6, workers))
    failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log))
    assert (failure.rank, failure.signal, failure.error_id) == (0, "SIGABRT", error_id)
    assert ABORTS[error_id] in failure.message
    assert "frame #" not in failure.log_tail
    assert "closing signal" not in failure.log_tail


@pytest.mark.parametrize("workers", [1, 8])
def test_a_watchdog_that_got_stuck_aborts_without_a_c_plus_plus_exception(workers: int) -> None:
    log = text(interleaved([stuck(rank) for rank in range(workers)]), torchrun(0, -6, workers))
    failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log))
    assert (failure.error_id, failure.kind) == ("watchdog-stuck", "timeout")
    job = NodeEvidence(run=ended(0, exit_code=None, signal="SIGABRT", ended_s=9.0), log=text(stuck(0)))
    assert find(job).error_id == "watchdog-stuck"


def test_deepspeeds_launcher_and_a_signal_of_its_worker() -> None:
    log = text(
        ["[2026-11-21 22:45:33,204] [INFO] [launch.py:158:main] nnodes=1, num_local_procs=8, node_rank=0"],
        aborted(3, ABORTS["uncorrectable-ecc"]),
        [
            (
                "[2026-11-21 22:45:34,226] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', "
                "'--local_rank=3'] exits with return code = -6"
            )
        ],
    )
    failure = find(NodeEvidence(run=ended(0, exit_code=250, ended_s=9.0), log=log))
    assert (failure.rank, failure.signal, failure.error_id) == (3, "SIGABRT", "uncorrectable-ecc")


SERVICE = {
    "ConnectionError": "HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded with url: /graphql "
    "(Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))",
    "ConnectionRefusedError": "[Errno 111] Connection refused",
    "BrokenPipeError": "[Errno 32] Broken pipe",
    "CommError": "Run initialization has timed out after 90.0 sec.",
    "TimeoutExpired": "Command '['git', 'fetch']' timed out after 60 seconds",
    "ValueError": "unknown option backend='gloo'",
    "KeyError": "'gloo_timeout'",
    "TypeError": "f() got an unexpected keyword argument 'nccl_opts'",
    "OSError": "bad shape in /home/gloomy/train.py",
}


@pytest.mark.parametrize(("kind", "message"), SERVICE.items())
def test_what_is_no_message_of_a_communication_library_is_a_cause_of_its_own(kind: str, message: str) -> None:
    own = NodeEvidence(run=ended(1, exit_code=1, ended_s=6.0), exceptions=[raised(8, 5.0, kind, message)])
    log = text(aborted(0, ABORTS["nccl-peer-gone"]), torchrun(0, -6, 8))
    peer = NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log)
    failure = find(own, peer)
    assert (failure.node, failure.rank) == ("node1", 8)
    assert "peer" not in str(failure.cause)
    error = find_error(f"{kind}: {message}")
    assert error is None or not error.of_peers


def test_a_peers_abort_is_a_consequence_of_a_failure_that_only_a_log_tells() -> None:
    log = text(aborted(0, ABORTS["nccl-peer-gone"]), torchrun(0, -6, 2))
    peer = NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log)
    said = "[rank8]: Traceback (most recent call last):\n[rank8]: ValueError: labels must be integers\n"
    own = NodeEvidence(run=ended(1, exit_code=1, ended_s=9.5), log=said)
    assert find(own, peer).node == "node1"


# What torch says at the end of every worker that does not call destroy_process_group, and names in ordinary text.
BARE = [
    (
        "[rank0]:[W1122 10:00:00.1 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not called "
        "before program exit, which can leak resources."
    ),
    "Could not override 'ddp.backend'. Key 'nccl' is not in struct",
    "TrainingArguments(ddp_backend=nccl, ddp_timeout=1800)",
    "process group: gloo",
    "ValueError: unknown backend 'NCCL2'",
]


@pytest.mark.parametrize("line", BARE)
def test_a_bare_name_of_a_library_is_no_error(line: str) -> None:
    log = f"Error: dataset has 0 rows after filtering\n{line}\n"
    failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log))
    assert (failure.kind, failure.error_id) == (None, None)


def test_an_exception_that_was_survived_is_not_the_cause() -> None:
    log = text(
        ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'apex'"],
        ["using torch's own layer norm"],
        ["Traceback (most recent call last):", "ValueError: labels must be integers"],
    )
    failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=log))
    assert failure.error_id is None


def test_of_several_workers_in_one_log_the_one_with_a_cause_of_its_own_is_told() -> None:
    peer = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a"
    log = "".join(f"[rank{rank}]: {peer} network error\n" for rank in (0, 2, 3))
    log = log.replace("[rank2]", "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n[rank2]")
    assert find(NodeEvidence(run=ended(0, exit_code=1), log=log)).error_id == "cuda-out-of-memory"


def test_words_of_an_attempt_that_torchrun_repeated_do_not_count() -> None:
    again = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
    log = text(aborted(0, ABORTS["device-assert"]), [again], aborted(0, ABORTS["uncorrectable-ecc"]))
    log += text(torchrun(0, -6, 1))
    assert find(NodeEvidence(run=ended(0, exit_code=1), log=log)).error_id == "uncorrectable-ecc"


def test_what_a_worker_without_a_record_raised_stands_in_the_sentence() -> None:
    said = ["[rank0]: Traceback (most recent call last):", "[rank0]: ValueError: labels must be integers"]
    failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log=text(said, torchrun(0, 1, 2))))
    assert failure.message == "rank 0 exited with code 1: ValueError: labels must be integers"
    recorded = NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), exceptions=[raised(0, 5.0)], log=text(said))
    assert find(recorded).message == "rank 0 raised ValueError: bad data"


def test_what_nccl_tries_again_ends_nothing() -> None:
    again = "gpu-a:7:9 [0] NCCL INFO socketPollConnect: connect to 10.0.0.2<7> returned Connection refused, retrying (3/34) after sleep for 300 msec"
    assert read_log(f"{again}\nstep 1\n").cause() is None


def test_mpirun_names_the_process_that_a_signal_ended() -> None:
    said = "mpirun noticed that process rank 3 with PID 4711 on node gpu-b exited on signal 9 (Killed)."
    assert find_worker_death(said) == WorkerDeath(rank=3, signal="SIGKILL")


def test_a_signal_number_is_no_part_of_another() -> None:
    for number in (10, 12, 14):
        error = find_error(
            f"torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: {number}"
        )
        assert error is None or error.id not in {"sighup", "sigterm"}


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_a_line_is_found_wherever_it_stands_in_the_blocks_that_are_read(step: int) -> None:
    line = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    for before in ("x" * step + "\n", "loss 0.5\r" * step, "y" * (step + (1 << 20))):
        reading = read_log(before + line)
        word = reading.cause()
        assert word is not None
        assert word.error is not None
        assert (word.error.id, word.line) == ("uncorrectable-ecc", before.count("\n") + 1)


def test_a_peers_exception_counts_by_its_type() -> None:
    later = ExceptionSample(rank=2, time_s=9.0, type="DistBackendError", message="something new", traceback="t")
    both = [
        NodeEvidence(run=ended(0, exit_code=1), exceptions=[GLOO]),
        NodeEvidence(run=ended(1, exit_code=1), exceptions=[later]),
    ]
    assert find(*both).node == "node0"
    both[1].exceptions = [replace(later, type="ValueError", message="NCCL error in: my own words")]
    failure = first_failure(both)
    assert failure is not None
    assert failure.node == "node1"


WARNED = (
    "gpu-a:7:9 [0] misc/ibvwrap.cc:291 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev"
)


@pytest.mark.parametrize(
    ("said", "error_id"),
    [
        # An exception that names no cause, NCCL's general ones, and the abort of a watchdog, which carries no last error.
        ("NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)", "nccl-ib-connect"),
        ("NCCL error in: x.cpp:1, remote process exited or there was a network error", "nccl-ib-connect"),
        ("NCCL error in: x.cpp:1\nLast error:\nDuplicate GPU detected : rank 1 and rank 0", "nccl-duplicate-gpu"),
    ],
)
def test_what_nccl_warned_of_in_its_own_log_names_the_cause(said: str, error_id: str) -> None:
    run = ended(0, exit_code=1, ended_s=9.0)
    exception = raised(0, 5.0, "DistBackendError", said)
    failure = find(NodeEvidence(run=run, exceptions=[exception], nccl_warnings=[WARNED]))
    assert failure.error_id == error_id
    if error_id == "nccl-ib-connect":
        assert "Call to ibv_modify_qp failed with 110" in failure.message
        assert WARNED in failure.log_tail
    log = text(aborted(0, said.rsplit("\n", maxsplit=1)[-1]), torchrun(0, -6, 1))
    assert find(NodeEvidence(run=run, log=log, nccl_warnings=[WARNED])).error_id == error_id


def test_nccls_warnings_of_a_peer_do_not_explain_a_failure_of_its_own() -> None:
    run = ended(0, exit_code=1, ended_s=9.0)
    assert find(NodeEvidence(run=run, exceptions=[raised(0, 5.0)], nccl_warnings=[WARNED])).error_id is None


def test_a_warning_that_no_entry_knows_is_shown_beside_a_general_error() -> None:
    exception = raised(
        0,
        5.0,
        "DistBackendError",
        "NCCL error in: x.cpp:1, internal error - please report this issue to the NCCL developers",
    )
    odd = "gpu-a:7:9 [0] x.cc:7 NCCL WARN Rank 3 has no transport for send peer 2 on channel 0/1"
    failure = find(NodeEvidence(run=ended(0, exit_code=1), exceptions=[exception], nccl_warnings=[odd]))
    assert failure.error_id == "nccl-internal-error"
    assert failure.message.endswith(": Rank 3 has no transport for send peer 2 on channel 0/1")


def test_the_telling_line_of_an_nccl_error_stands_in_the_sentence(golden: Golden) -> None:
    said = "NCCL error in: x.cpp:1, unhandled system error\nncclSystemError: System call\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<7> failed : Network is unreachable"
    failure = find(NodeEvidence(run=ended(0, exit_code=1), exceptions=[raised(0, 5.0, "DistBackendError", said)]))
    golden.check("nccl_last_error.txt", f"{failure.error_id}\n{failure.message}\n> {failure.hint}\n")


def test_a_hang_without_a_rank_to_blame_tells_what_nccl_warned_of(golden: Golden) -> None:
    node = NodeDiagnosis(node="gpu-a", node_rank=0, ranks=(0,), nccl_warnings=(WARNED,))
    cause = find_hang([node], 0.0, 300.0)
    golden.check("hang_nccl_warned.txt", f"{cause.message}\n> {cause.hint}\n")


def test_a_launch_finds_what_speaks_far_before_the_end_of_a_log(tmp_path: Path) -> None:
    """Eight workers' stack frames alone are more than the end of a log that is shown."""

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            log = text(aborted(0, ABORTS["uncorrectable-ecc"]), FRAMES * 400, torchrun(0, -6, 8)).encode()
            assert len(log) > 200_000
            for place in range(0, len(log), 1 << 16):
                talk.chunk("log", place, log[place : place + (1 << 16)])
            talk.end(exit_code=1)
        else:
            talk.stop()

    failure = Execution(tmp_path, "a", "b").run(play).first_failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.error_id) == ("a", 0, "uncorrectable-ecc")


def test_warnings_of_nccl_that_a_node_sends_reach_the_analysis(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if talk.node.name == "a":
            sample = json.dumps({"kind": "nccl_warning", "time_s": 1.0, "message": WARNED}).encode() + b"\n"
            talk.chunk("samples/nccl.jsonl", 0, sample)
            talk.chunk("log", 0, text(aborted(0, ABORTS["nccl-peer-gone"]), torchrun(0, -6, 1)).encode())
            talk.end(exit_code=1)
        else:
            talk.stop()

    failure = Execution(tmp_path, "a", "b").run(play).first_failure
    assert failure is not None
    assert failure.error_id == "nccl-ib-connect"
    assert "NCCL_DEBUG=INFO" not in str(failure.hint)


@pytest.mark.parametrize(
    ("mark", "rank", "host"),
    [
        ("2024-05-12T10:12:01.123 gpu003: ", None, "gpu003"),
        ("2024-05-12T10:12:01.123456789Z [rank1]: ", 1, None),
        ("2024-05-12T10:12:01.123456789Z stderr F ", None, None),
        ("2022-05-21 09:28:21.116 [ERROR] ", None, None),
        ("[2024-03-05 07:01:51,123][__main__][ERROR] - ", None, None),
        ("09/18/2024 20:16:26 - ERROR - ", None, None),
        ("May 12 10:12:01 gpu003 python[4123]: ", None, "gpu003"),
        ("E0228 00:35:58.954000 724855 site-packages/torch/elastic/multiprocessing/api.py:732] ", None, None),
        ("2024-05-12 10:00:01,000 ERROR ", None, None),
        ("2024-05-12 10:00:01.000 | ERROR    | trainer.loop:run:12 - ", None, None),
        ("stderr: ", None, None),
        ("rank3: ", 3, None),
        ("GPU0: ", None, None),
        ("[trainer2]:", None, None),
        ("[pod/train-worker-1/pytorch] ", None, "train-worker-1"),
        ("(RayTrainWorker pid=2312, ip=10.0.0.7) ", None, "10.0.0.7"),
        ("(worker1, rank=5, pid=2312, ip=10.0.0.7) ", 5, "10.0.0.7"),
    ],
)
def test_an_exception_is_one_behind_whatever_a_platform_puts_in_front_of_it(
    mark: str, rank: int | None, host: str | None
) -> None:
    said = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>', "KeyError: 'input_ids'"]
    peer = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was"
    word = read_log("".join(f"{mark}{line}\n" for line in [*said, peer])).cause()
    assert word is not None
    assert (word.line, word.text, word.rank, word.host) == (3, "KeyError: 'input_ids'", rank, host)


def test_a_date_in_the_words_of_an_exception_is_not_its_time() -> None:
    word = read_log("[rank0]: KeyError: '2024-05-12 00:00:00'\n").cause()
    assert word is not None
    assert word.time is None


@pytest.mark.parametrize(
    ("report", "signal", "code"),
    [
        ("E0 api.py:826] failed (exitcode: -7) local_rank: 2 (pid: 94) of binary: /opt/python3", "SIGBUS", None),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 2) local_rank: 2 (pid: 9)", None, 2),
        (
            "subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGSEGV: 11>.",
            "SIGSEGV",
            None,
        ),
        ("srun: error: node-2: task 5: Killed\nsrun: error: node-1: tasks 0-3: Terminated", "SIGKILL", None),
        ("srun: error: n1: task 0: Exited with exit code 3\nsrun: error: n2: tasks 4-7: Aborted", None, 3),
    ],
)
def test_a_launchers_line_tells_how_a_worker_ended_and_invents_no_rank(
    report: str, signal: str | None, code: int | None
) -> None:
    assert find_worker_death(report) == WorkerDeath(signal=signal, exit_code=code)
    found = explain([("job.out", read_log(f"step 1\n{report}\n"))]).first_failure
    assert found is not None
    assert found.rank is None
    assert found.node == {"Killed": "node-2", "Exited": "n1"}.get(report.split()[5] if "srun" in report else "")


@pytest.mark.parametrize("mark", ["", "[1,0]<stdout>:", "2024-05-12T10:12:01.1Z ", "stderr: "])
def test_torchruns_report_names_node_and_time_behind_any_mark(mark: str) -> None:
    lines = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2024-03-05_07:01:51",
        "  host      : gpu-17",
        "  rank      : 9 (local_rank: 1)",
        "  exitcode  : -11 (pid: 7)",
    ]
    found = explain([("job.out", read_log("".join(f"{mark}{line}\n" for line in lines)))]).first_failure
    assert found is not None
    assert (found.node, found.rank, found.time, found.kind) == ("gpu-17", 9, "2024-03-05_07:01:51", "crashed")


@pytest.mark.parametrize(
    "line",
    [
        "WARNING CUDA out of memory with batch size 32, using 16",
        "2024-01-01 10:00:00 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA out of memory.",
        "CUDA out of memory, retrying with half of the batch",
        "| CUDA out of memory in forward pass, skipping batch",
    ],
)
def test_memory_that_a_program_got_over_is_not_the_cause(line: str) -> None:
    assert explain([("job.out", read_log(f"{line}\nstep 2 loss 1.9\n"))]).first_failure is None
    found = explain([("job.out", read_log(f"{line}\nFloatingPointError: Minimum loss scale reached\n"))])
    assert found.first_failure is not None
    assert found.first_failure.message == "FloatingPointError: Minimum loss scale reached"


@pytest.mark.parametrize(
    ("lines", "error_id"),
    [
        (
            [
                "/var/spool/slurmd/job123/slurm_script: line 12: 12345 Killed                  python train.py",
                "slurmstepd: error: Detected 3 oom-kill event(s) in StepId=123.batch. Some of your processes may have",
            ],
            "slurm-out-of-memory",
        ),
        (
            ["pdsh@master: gpu02: ssh exited with exit code 255", "gpu02: Host key verification failed."],
            "ssh-host-key-unknown",
        ),
    ],
)
def test_what_only_says_that_something_ended_gives_way_to_why(lines: list[str], error_id: str) -> None:
    for order in itertools.permutations(lines):
        found = explain([("job.out", read_log("\n".join(order)))]).first_failure
        assert found is not None
        assert found.error_id == error_id


def test_a_socket_that_torch_got_over_is_no_failure() -> None:
    log = (
        "[W socket.cpp:401] [c10d] The server socket has failed to bind to [::]:29500 (errno: 97 - Address family not "
    )
    assert explain([("job.out", read_log(f"{log}supported by protocol).\nstep 1\n"))]).first_failure is None


def test_what_a_program_went_on_without_is_no_failure_and_what_it_ended_with_is_told_by_its_line() -> None:
    log = "WARNING: apex is not there: No module named 'apex'\nstep 1\nstep 2\nstep 3\n"
    assert explain([("job.out", read_log(log))]).first_failure is None
    ended = explain([("job.out", read_log("step 1\n/bin/sh: 1: torchrun: not found\njob done\n"))]).first_failure
    assert ended is not None
    assert (ended.error_id, ended.line) == ("command-not-found", 2)
    assert ended.message == "/bin/sh: 1: torchrun: not found"


def test_the_rank_of_one_nodes_report_is_not_given_to_what_another_node_said() -> None:
    log = (
        "gpu002: [2024-01-08 16:13:56,462] [INFO] [launch.py:146:main] nnodes=2, num_local_procs=2, node_rank=1\n"
        "gpu001: FileNotFoundError: [Errno 2] No such file or directory: '/data/cifar'\n"
        "gpu002: [2024-01-08 16:14:56,462] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py', "
        "'--local_rank=1'] exits with return code = 1\n"
    )
    found = explain([("job.out", read_log(log))]).first_failure
    assert found is not None
    assert (found.node, found.rank, found.error_id) == ("gpu001", None, "missing-file")


@pytest.mark.parametrize(
    "line",
    [
        "E0 a.py:8] failed (exitcode: -11) local_rank: 0 (pid: 5)\nI0 a.py:9] 2/3 attempts left; will restart worker group",
        "gpu-1:10:10 [0] NCCL INFO Call to connect failed : Connection refused",
        '    raise RuntimeError("NCCL error: unhandled system error")',
    ],
)
def test_what_a_run_went_on_after_is_no_failure(line: str) -> None:
    assert explain([("job.out", read_log(f"{line}\nstep 10\ntraining done\n"))]).first_failure is None


REPORT = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_22:18:00
  host      : node0
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 991)
"""


def test_a_worker_that_exits_without_a_word_is_told_and_not_the_peer_on_its_node_that_lost_it() -> None:
    left = NodeEvidence(run=ended(0, exit_code=1), exceptions=[GLOO], log=REPORT)
    peer = NodeEvidence(run=ended(1, exit_code=1), exceptions=[raised(2, 5.5, "RuntimeError", GLOO.message)])
    failure = find(left, peer)
    assert (failure.node, failure.rank, failure.message, failure.kind) == (
        "node0",
        1,
        "rank 1 exited with code 3",
        None,
    )
    assert failure.cause is not None
    # One that raised something says more, and so does whatever else is no lost connection.
    told = find(replace(left, exceptions=[GLOO, raised(1, 4.0)]), peer)
    assert (told.rank, told.cause) == (1, None)
    assert find(left, replace(peer, exceptions=[raised(2, 9.0)])).message == "rank 2 raised ValueError: bad data"


FRAME = '  File "/work/train.py", line 7, in main\n    step(batch)\n    ^^^^^^^^^^^\n'


@pytest.mark.parametrize("line", ["torch._dynamo.exc.Unsupported: no print", "socket.gaierror: [Errno -2]", "Diverged"])
@pytest.mark.parametrize("mark", ["", "[rank1]: ", "[default1]:", "node-3: "])
def test_what_ends_a_traceback_is_an_exception_whatever_it_is_called(mark: str, line: str) -> None:
    text = "".join(f"{mark}{each}\n" for each in ("Traceback (most recent call last):", *FRAME.splitlines(), line))
    (word,) = read_log(f"Epoch: 1\n{text}Epoch: 2\n").words
    assert (word.text, word.is_exception, word.line) == (line, True, 6)
    # Anywhere else it is a line like any other.
    assert read_log(f"Epoch: 1\n{mark}{line}\n").words == ()


def test_tracebacks_of_several_ranks_end_each_by_its_own_line() -> None:
    lines = [
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in <module>',
        "step 7 of 100",
        "[rank0]: step 7 of 100",
        '[rank1]:   File "a.py", line 1, in <module>',
        "[rank1]: pyarrow.lib.ArrowInvalid: bad shard",
        "[rank0]: lib.Late",
    ]
    assert [(word.rank, word.text) for word in read_log("\n".join(lines)).words] == [
        (1, "pyarrow.lib.ArrowInvalid: bad shard"),
        (0, "lib.Late"),
    ]


def test_a_traceback_that_never_ends_does_not_make_every_later_line_its_own() -> None:
    lines = ["[rank1]: Traceback (most recent call last):", *["step done"] * 60, "[rank1]: lib.Later"]
    assert read_log("\n".join(lines)).words == ()


EXIT_REPORT = """\
E1127 23:00:20.367000 29555 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 0 (pid: 29569) of binary: /env/bin/python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_23:00:20
  host      : node-1
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 29569)
  error_file: <N/A>
"""
# What Python 3.11 and torch 2.13 printed.
IGNORED = """\
Exception ignored in: <function A.__del__ at 0x7f7f13ebd580>
Traceback (most recent call last):
  File "/work/train.py", line 4, in __del__
    def __del__(s): 1/0
                    ~^~
ZeroDivisionError: division by zero
Traceback (most recent call last):
  File "/work/train.py", line 5, in <module>
    raise ValueError('real one')
ValueError: real one
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/work/train.py", line 3, in <module>
  |     raise ExceptionGroup('two',[ValueError('a'),OSError('b')])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | OSError: b
    +------------------------------------
"""
QUOTED = """\
Traceback (most recent call last):
  File "/work/train.py", line 5, in <module>
    if "CUDA out of memory" in str(error):
KeyError: 'loss'
"""
ARGUMENTS = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --lrr 1\n"


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        (IGNORED, 1, "rank 0: ValueError: real one"),
        (GROUP, 1, "rank 0: OSError: b"),
        (QUOTED, 1, "rank 0: KeyError: 'loss'"),
        (
            ARGUMENTS,
            2,
            "rank 0 exited with code 2; the last line of the log before that: train.py: error: unrecognized arguments: --lrr 1",
        ),
        (
            "loading\nconfig.json is missing\n",
            1,
            "rank 0 exited with code 1; the last line of the log before that: config.json is missing",
        ),
        ("step 7: loss 0.5\n", -11, "rank 0 was killed by SIGSEGV"),
        ("", 1, "rank 0 exited with code 1"),
    ],
)
def test_what_a_worker_ended_with_is_told_by_its_own_words(said: str, code: int, message: str) -> None:
    first = explain([("log", read_log(said + EXIT_REPORT.format(code=code)))]).first_failure
    assert first is not None
    assert (first.message, first.error_id) == (message, None)


OF_PEERS = "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited\n"


@pytest.mark.parametrize(
    ("own", "code", "error_id"),
    [
        (
            "Traceback (most recent call last):\n  File 'a'\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n",
            1,
            "cuda-out-of-memory",
        ),
        ("Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n", 1, None),
        ("run.sh: line 3: 1234 Killed python train.py\n", 137, None),
    ],
)
def test_a_worker_of_which_an_unmarked_line_may_speak_has_not_left_in_silence(
    own: str, code: int, error_id: str | None
) -> None:
    first = explain([("log", read_log(own + OF_PEERS + EXIT_REPORT.format(code=code)))]).first_failure
    assert first is not None
    assert first.cause is None or "exited on its own" not in first.cause
    if error_id is not None:
        assert first.error_id == error_id


@pytest.mark.parametrize(
    ("log", "texts"),
    [
        # What another worker prints meanwhile is no exception, though it has the form of one.
        (
            "Traceback (most recent call last):\n  File 'a'\n    f()\nINFO: step 3 done\n    g()\nlib.Unsupported: x\n",
            ["lib.Unsupported: x"],
        ),
        ('{"exc": "Traceback (most recent call last):\\n  File x"}\nEpoch: 3\n', []),
        ("Traceback (most recent call last):\nEpoch: 3\n", []),
        # Each exception that Python ignores is one, and one with its cause as well.
        (
            "Exception ignored in: <a>\nException ignored in: <b>\nAttributeError: x\nAttributeError: x\nValueError: y\n",
            ["ValueError: y"],
        ),
        (
            "Exception ignored in: <a>\nKeyError: x\n\nDuring handling of the above exception, another\n\nTypeError: y\n",
            [],
        ),
    ],
)
def test_only_what_ends_a_traceback_that_counts_is_told(log: str, texts: list[str]) -> None:
    assert [word.text for word in read_log(log).words if not word.is_noise] == texts


def test_the_last_line_is_no_launchers() -> None:
    log = "step 2 loss 3.1\nsrun: error: node1: task 0: Exited with exit code 1\nsrun: launch/slurm: Terminating\n"
    first = explain([("log", read_log(log))]).first_failure
    assert first is not None
    assert first.message == "a worker exited with code 1; the last line of the log before that: step 2 loss 3.1"
