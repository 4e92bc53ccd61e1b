"""The order of evidence: what ended the first process, and what was survived, follows from it, or is noise."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import pytest

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.explanation import LogFailure, explain
from multinode.diagnose.log_words import read_log
from tests.golden import Golden

from .test_failure import ended, find
from .told import told_of

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TRACE = ["Traceback (most recent call last):", '  File "/w/train.py", line 88, in <module>', "    main()"]
HANDLING = ["", "During handling of the above exception, another exception occurred:", ""]
CAUSING = ["", "The above exception was the direct cause of the following exception:", ""]


def first(*lines: str) -> LogFailure | None:
    return explain([("log", read_log("\n".join(lines) + "\n"))]).first_failure


def told(*lines: str) -> LogFailure:
    found = first(*lines)
    assert found is not None
    return found


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
@pytest.mark.parametrize("link", [HANDLING, CAUSING])
def test_of_a_chain_the_exception_that_says_most_is_told_and_else_the_last(mark: str, link: list[str]) -> None:
    for one, two, said in (
        (OOM, "KeyError: 'state'", OOM),
        ("KeyError: 'state'", OOM, OOM),
        ("KeyError: 'state'", "RuntimeError: cannot load the state", "RuntimeError: cannot load the state"),
    ):
        lines = [f"{mark}{line}" for line in (*TRACE, one, *link, *TRACE, two)]
        found = told(*lines)
        assert found.message.endswith(said)
        assert found.rank == (1 if mark else None)
        failure = find(NodeEvidence(run=ended(0, exit_code=1, ended_s=9.0), log="\n".join(lines)))
        assert said in failure.message or failure.error_id == found.error_id


def test_an_exception_that_no_chain_links_to_a_later_one_was_survived() -> None:
    assert told(*TRACE, OOM, *TRACE, "KeyError: 'state'").message == "KeyError: 'state'"
    # What other ranks say of their lost peer ends no other process.
    peer = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
    )
    assert told(*TRACE, OOM, *TRACE, peer).error_id == "cuda-out-of-memory"


def test_an_exception_of_a_thread_ends_no_process() -> None:
    thread = ["Exception in thread Thread-3 (upload):", *TRACE, "OSError: [Errno 28] No space left on device"]
    assert told(*TRACE, "KeyError: 'labels'", *thread).message == "KeyError: 'labels'"


@pytest.mark.parametrize(
    "noise",
    [
        "[rank0]:[W112 14:00:00.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87): Failed to recv, got 0 bytes. Did the remote server shutdown or crash?",
        "/env/lib/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/a': [Errno 2] No such file or directory: '/a'",
    ],
)
def test_a_warning_alone_is_no_failure_but_may_be_the_noise_of_a_normal_end(noise: str) -> None:
    found = explain([("log", read_log(f"step 1 loss 0.5\nTraining completed\n{noise}\n"))])
    assert found.first_failure is None
    assert not found.is_unclear
    beside = told(noise, "srun: error: gpu-b: task 3: Exited with exit code 1")
    assert (beside.error_id, beside.node) == (None, "gpu-b")


def test_ranks_are_printed_only_where_a_line_or_the_end_of_its_process_names_them() -> None:
    report = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  host      : gpu-a",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : {} (pid: 7)",
    ]
    # The exception of a log without marks ended the process that the report names; any other line may be of another.
    exception = told(*TRACE, OOM, *(line.format(1) for line in report))
    assert (exception.rank, exception.node) == (3, "gpu-a")
    line = told("n1:1:2 [0] NCCL WARN NET/IB : Got async event : port error", *(each.format(1) for each in report))
    assert (line.rank, line.node) == (None, "n1")


def test_an_exit_code_does_not_hide_the_cause_of_another_rank_or_node() -> None:
    report = "srun: error: gpu-a: task 0: Exited with exit code 1"
    assert told(report, f"[rank9]: {OOM}").error_id == "cuda-out-of-memory"
    readings = [("a", read_log(f"step 1\n{report}\n")), ("b", read_log(f"[rank9]: {OOM}\n"))]
    for order in (readings, readings[::-1]):
        found = explain(order).first_failure
        assert found is not None
        assert (found.file, found.rank) == ("b", 9)


def test_a_signal_comes_before_what_other_ranks_say_and_shows_the_last_line_unless_it_stands_there_again_and_again() -> (
    None
):
    report = "mpirun noticed that process rank 1 with PID 4 on node gpu-b exited on signal 11 (Segmentation fault)."
    peer = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234"
    found = told("building the index", peer, report)
    assert (found.rank, found.node, found.of_peers) == (1, "gpu-b", False)
    assert "building the index" in told("step 1 loss 1", "building the index", report).message
    assert "the last line" not in told("building", "step 1 loss 0.5", report).message
    assert "the last line" not in told("part 1", "part 2", "part 3", report).message


def test_faulthandlers_first_frame_stands_beside_a_signal() -> None:
    lines = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007fd2 (most recent call first):"]
    found = told(*lines, '  File "/env/fbgemm/ops.py", line 912 in __init__', '  File "/w/a.py", line 1 in <module>')
    assert "SIGSEGV" in found.message
    assert "in __init__ (/env/fbgemm/ops.py:912)" in found.message


@pytest.mark.parametrize(
    ("frame", "error", "error_id"),
    [
        ("os.rename(a, b)", "FileNotFoundError: [Errno 2] No such file or directory: 'a'", "file-taken"),
        ("os.remove(path)", "FileNotFoundError: [Errno 2] No such file or directory: 'a'", "file-taken"),
        ("shutil.rmtree(path)", "FileNotFoundError: [Errno 2] No such file or directory: 'a'", "file-taken"),
        ("open(path)", "FileNotFoundError: [Errno 2] No such file or directory: 'a'", "missing-file"),
    ],
)
def test_a_file_that_another_process_took_first_is_told_from_one_that_was_never_there(
    frame: str, error: str, error_id: str
) -> None:
    assert told(*TRACE[:2], f"    {frame}", error).error_id == error_id


def test_an_nccl_warning_that_no_entry_knows_is_quoted_and_outranks_what_only_says_that_something_failed() -> None:
    warned = "gpu-a:1:2 [0] graph/x.cc:7 NCCL WARN Could not find NET with id 0"
    general = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5"
    found = told(warned, general)
    assert (found.message, found.node, found.of_peers) == ("Could not find NET with id 0", "gpu-a", False)
    last = told(general, "ncclSystemError: System call failed.", "Last error:", "Could not find NET with id 0")
    assert (last.message, last.of_peers) == ("Could not find NET with id 0", False)
    # NCCL that goes on after a warning can do without.
    assert (
        first(
            warned,
            "gpu-a:1:2 [0] NCCL INFO Using network Socket",
            "gpu-a:1:2 [0] NCCL INFO comm 0x7 rank 0 nranks 2 - Init COMPLETE",
        )
        is None
    )


def test_figures_and_addresses_are_read_from_the_log(golden: Golden) -> None:
    cases = {
        "a queue pair without an answer": "a:1:2 [0] NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        "a link-local address": "a:1:2 [0] NCCL WARN socketStartConnect: Connect to 169.254.3.7<38847> failed : No route",
        "an address of Docker's bridge": "a:1:2 [0] NCCL WARN socketStartConnect: Connect to 172.17.0.2<38847> failed : No route",
        "the first collective": "[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, Timeout(ms)=60000) ran for 60001 ms",
        "a wait of 300 s": "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
    }
    golden.check_findings("log_figures", {name: told_of(told(line)) for name, line in cases.items()})
    for line in cases.values():
        assert not any("169.254" in text or "172.17" in text for text in explain([("l", read_log(line))]).next)


def test_the_rank_that_others_name_as_late_is_told() -> None:
    said = "[rank{0}]:[E901 05:20:03.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 Rank {0}] Received a dump signal due to a collective timeout from  rank 34 and we will try our best to dump the debug info."
    found = told(
        said.format(5),
        said.format(1),
        "[rank7]:[E901 05:20:03.4 ProcessGroupNCCL.cpp:698] [Rank 7] To avoid data inconsistency, we are taking the entire process down.",
    )
    assert (found.rank, found.message) == (34, "rank 34: its collective timed out first, according to rank 5")


def test_the_lines_below_an_exception_belong_to_it() -> None:
    found = told(
        *TRACE,
        "ray.exceptions.ActorDiedError: The actor died.",
        "\tclass_name: Worker",
        "\tip: 10.0.0.9",
        "next program",
    )
    assert found.details[1:3] == ("class_name: Worker", "ip: 10.0.0.9")
    assert found.node == "10.0.0.9"


def test_what_nccls_proxy_passes_on_stands_behind_the_call_that_failed() -> None:
    connect = "n1:7:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : x"
    proxy = "n1:7:9 [0] proxy.cc:1519 NCCL WARN [Proxy Service 0] Failed to execute operation Connect from rank 0"
    assert told(connect, proxy).error_id == "nccl-cannot-connect"
    assert "Failed to execute operation Connect" in told(proxy).message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [
                "[1750835683.51] [n1:1392 :0]  select.c:649  UCX  ERROR  no active messages transport to x",
                "[1750835683.52] [n1:1392 :0] libperf.c:1183 UCX  ERROR ucp_ep_create() failed: unreachable",
            ],
            "no active messages transport to x",
        ),
        (["srun: error: task 0 launch failed: Unspecified error", "srun: Job step aborted"], "task 0 launch failed"),
        (["srun: unrecognized option '--container-image'", 'Try "srun --help" for more information'], "unrecognized"),
        (
            ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "/w/a.py", line 7, in load'],
            "load (/w/a.py:7)",
        ),
        (["step 3 loss 2.0", "ERROR cannot open the shard", "step 4 loss 1.9"], ""),
        (["ERROR cannot open the shard", "Training completed."], ""),
        (["2024-01-01 10:00:00 WARNING no ERROR here"], ""),
    ],
)
def test_a_log_that_ends_with_errors_or_inside_a_traceback_has_failed(lines: list[str], message: str) -> None:
    found = first("step 1 loss 2.1", *lines)
    assert message in found.message if found is not None else not message
    assert found is None or bool(message)


def test_a_traceback_is_of_whoever_printed_its_first_line() -> None:
    found = told("[2025-03-17 17:15:55 TP1] Scheduler hit an exception: " + TRACE[0], *TRACE[1:], "ValueError: no")
    assert found.message == "TP1: ValueError: no"


def test_what_a_launcher_says_is_no_part_of_an_exception() -> None:
    found = told(*TRACE, "OSError: bad shape", "srun: error: n1: task 0: Exited with exit code 1", "srun: Terminating")
    assert (found.message, found.details) == ("OSError: bad shape", ())
