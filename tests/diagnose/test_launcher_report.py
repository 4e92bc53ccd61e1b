"""What launchers print about a worker that ended, each as it prints it."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import pytest

from multinode.diagnose.explanation import explain
from multinode.diagnose.launcher_report import first_report, read_reports
from multinode.diagnose.log_words import read_log
from tests.golden import Golden

from .told import told_of

TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : {host}
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 19414)
  error_file: <N/A>
============================================================
"""
# The rank, code, signal and node that stand in it.
REPORTS = {
    "mpirun noticed that process rank 3 with PID 4711 on node gpu-b exited on signal 9 (Killed).": (
        3,
        None,
        "SIGKILL",
        "gpu-b",
    ),
    "prterun noticed that process rank 48 with PID 613162 on node gpu-node07 exited on\nsignal 11 (Segmentation fault).": (
        48,
        None,
        "SIGSEGV",
        "gpu-node07",
    ),
    "the job to be terminated. The first process to do so was:\n\n  Process name: [[50161,1],5]\n  Exit code:    2\n": (
        5,
        2,
        None,
        None,
    ),
    "the job to be terminated. The first process to do so was:\n\n   Process name: [prterun-gpu-a-4711@1,6]\n   Exit code:    2\n": (
        6,
        2,
        None,
        None,
    ),
    "The first process to do so was:\nProcess name: worker-1[2]\nExit code: 137\n": (None, 137, None, "worker-1"),
    "srun: error: gpu12: task 3: Out Of Memory": (None, None, None, "gpu12"),
    "  rank      : 0 (local_rank: 0)\n  exitcode  : -11 (pid: 6421)\n": (0, None, "SIGSEGV", None),
    "  traceback : Signal 7 (SIGBUS) received by PID 986": (None, None, "SIGBUS", None),
    "Failures:\n[1]:\n  time      : 2023-04-25_13:29:47\n  host      : node1\n  rank      : 1 (local_rank: 1)\n  exitcode  : 2 (pid: 7)\n": (
        None,
        2,
        None,
        "node1",
    ),
    "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 7.\n": (3, 7, None, None),
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 7 RUNNING AT node1\n=   EXIT CODE: 9\n=   CLEANING UP\n": (
        None,
        9,
        None,
        "node1",
    ),
    "= BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 2 PID 7 RUNNING AT node1\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n": (
        2,
        None,
        "SIGSEGV",
        "node1",
    ),
    "ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.": (2, None, "SIGBUS", None),
    "Global rank 5 (PID 4711) exited with code -9": (5, None, "SIGKILL", None),
    "Process 1 exit with status code 134.": (1, 134, None, None),
    "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGSEGV": (
        2,
        None,
        "SIGSEGV",
        None,
    ),
    "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with exit code 3": (2, 3, None, None),
    "srun: error: nid04277: task 1: Segmentation fault (core dumped)": (None, None, "SIGSEGV", "nid04277"),
    "srun: error: Task launch for StepId=4711.0 failed on node gpu-b: Socket timed out": (None, None, None, "gpu-b"),
    "[gpu-b:332629:0:332629] Caught signal 11 (Segmentation fault: address not mapped)": (
        None,
        None,
        "SIGSEGV",
        "gpu-b",
    ),
    "[gpu-b:4711] *** Process received signal ***\n[gpu-b:4711] Signal: Bus error (7)\n[gpu-b:4711] Signal code:  (2)\n": (
        None,
        None,
        "SIGBUS",
        "gpu-b",
    ),
    "<info>    [2021-12-07 10:43:22] ef45fdce || INFO: container failed with non-zero exit code:  (exit code 137)": (
        None,
        137,
        None,
        "ef45fdce",
    ),
    "run.sh: line 3:  4711 Bus error               (core dumped) python train.py": (None, None, "SIGBUS", None),
    "[rank2]: Fatal Python error: Segmentation fault": (2, None, "SIGSEGV", None),
}


@pytest.mark.parametrize("text", REPORTS)
def test_a_report_names_the_worker_and_how_it_ended(text: str) -> None:
    report = first_report(read_reports(text.split("\n")))
    assert report is not None
    assert (report.death.rank, report.death.exit_code, report.death.signal, report.host) == REPORTS[text]
    first = explain([("log", read_log(f"loading\n{text}\n"))]).first_failure
    assert first is not None
    assert (first.rank, first.node) == (report.death.rank, report.host)


def told(*reports: tuple[str, int, str]) -> tuple[int | None, str | None]:
    text = "".join(TORCHRUN.format(time=time, rank=rank, host=host) for time, rank, host in reports)
    first = explain([("log", read_log(text))]).first_failure
    assert first is not None
    return first.rank, first.node


def test_of_two_agents_the_one_with_the_earlier_time_is_told() -> None:
    assert told(("2023-06-03_22:45:52", 0, "a"), ("2023-06-03_22:45:01", 4, "b")) == (4, "b")
    assert told(("2023-06-03_22:45:01", 4, "b"), ("2023-06-03_22:45:52", 0, "a")) == (4, "b")


STEPS = "".join(f"step {number} loss 0.5\n" for number in range(6))


@pytest.mark.parametrize(
    "begin", [STEPS, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"]
)
def test_of_an_appended_log_the_last_attempt_counts(begin: str) -> None:
    earlier = "torch.OutOfMemoryError: CUDA out of memory.\n" + TORCHRUN.format(
        time="2023-06-03_10:00:00", rank=0, host="a"
    )
    later = "KeyError: 'labels'\n" + TORCHRUN.format(time="2023-06-04_10:00:00", rank=3, host="b")
    first = explain([("log", read_log(earlier + begin + later))]).first_failure
    assert first is not None
    assert (first.message, first.rank, first.time) == ("rank 3: KeyError: 'labels'", 3, "2023-06-04_10:00:00")
    # As long as nothing fails in it, the earlier one is told.
    again = explain([("log", read_log(earlier + begin))]).first_failure
    assert again is not None
    assert again.error_id == "cuda-out-of-memory"


def test_exit_codes_and_signals_have_a_meaning(golden: Golden) -> None:
    codes = (1, 126, 127, 134, 135, 136, 137, 138, 139, 143)
    cases = {f"exit code {code}": f"srun: error: node-1: task 5: Exited with exit code {code}\n" for code in codes} | {
        "a launcher that ended": "subprocess.CalledProcessError: Command '['torchrun', '--nnodes', '2', '--node_rank', "
        "'1', 'a.py']' returned non-zero exit status 1.\n"
    }
    golden.check_findings(
        "exit_codes", {name: told_of(explain([("log", read_log(log))]).first_failure) for name, log in cases.items()}
    )


def test_the_address_of_all_interfaces_is_no_node() -> None:
    line = "(raylet) A worker died or was killed while executing a task. Worker IP address: {}"
    reports = [read_reports([line.format(address)])[0] for address in ("0.0.0.0", "10.0.0.9")]
    assert [report.host for report in reports] == [None, "10.0.0.9"]
