"""`multinode explain` on logs of launchers that are not ours, as they print them."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from multinode.cli import explain
from multinode.diagnose.translation import chinese_meanings
from tests.diagnose.test_first_cause import ABORTS, aborted, text, torchrun
from tests.golden import Golden, error_of

UNREACHED = """\
[rank8]: Traceback (most recent call last):
[rank8]:   File "train.py", line 3, in <module>
[rank8]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2252, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
[rank8]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank8]: Last error:
[rank8]: socketPollConnect: Connect to 10.0.0.2<33212> returned 113(No route to host) errno 115(Operation now in progress)
"""
DEEPSPEED = """\
worker-1: [2026-11-21 22:45:33,204] [INFO] [launch.py:158:main] nnodes=2, num_local_procs=8, node_rank=1
worker-0: [rank3]: torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0]
worker-1: [rank11]: Traceback (most recent call last):
worker-1: [rank11]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB
worker-1: [2026-11-21 22:45:34,226] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=3'] exits with return code = 1
pdsh@head: worker-1: ssh exited with exit code 1
"""
SLURM = """\
1: gpu-b: step 12 of 100
slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.
srun: error: gpu-b: task 1: Out Of Memory
srun: Terminating StepId=4711.0
slurmstepd: error: *** STEP 4711.0 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 ***
"""
TIME_LIMIT = (
    "step 12\nslurmstepd: error: *** JOB 4711 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 DUE TO TIME LIMIT ***\n"
)
ACCELERATE = """\
Traceback (most recent call last):
  File "/train.py", line 9, in <module>
ValueError: labels must be integers
Traceback (most recent call last):
  File "/bin/accelerate", line 8, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.
"""
NCCL_LOG = """\
gpu-b:4711:4790 [3] NCCL INFO Channel 00/0 : 3[3] -> 11[3] [send] via NET/IB/0
gpu-b:4711:4790 [3] misc/ibvwrap.cc:291 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_3:1, curr state INIT, next state RTR
gpu-b:4711:4790 [3] NCCL INFO transport/net_ib.cc:1045 -> 2
"""
LIGHTNING = """\
Epoch 0:  12%|#2        | 12/100 [00:10<01:00]\rEpoch 0:  13%|#3        | 13/100 [00:10<01:00]
[rank: 1] Child process with PID 4711 terminated with code 1. Forcefully terminating all other processes to avoid zombies
[rank1]: RuntimeError: CUDA error: device-side assert triggered
"""


def run(*arguments: str | Path, stdin: str | None = None) -> str:
    app = typer.Typer()
    explain.register(app)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str | Path, stdin: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--json", *arguments, stdin=stdin))
    return found


def write(folder: Path, **logs: str) -> list[Path]:
    paths = []
    for name, words in logs.items():
        paths.append(folder / f"{name}.log")
        paths[-1].write_text(words)
    return paths


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (UNREACHED, (6, None, 8, "nccl-timed-out")),
        (DEEPSPEED, (4, "worker-1", 11, "cuda-out-of-memory")),
        (SLURM, (2, "gpu-b", None, "slurm-out-of-memory")),
        (TIME_LIMIT, (2, None, None, "slurm-time-limit")),
        (ACCELERATE, (3, None, None, None)),
        (NCCL_LOG, (2, "gpu-b", None, "nccl-ib-connect")),
        (LIGHTNING, (3, None, 1, "device-assert")),
        (text(aborted(0, ABORTS["device-assert"]), torchrun(0, -6, 8)), (2, "gpu-a", 0, "device-assert")),
        ("step 3\nKilled\n", (2, None, None, "killed")),
        # Killed without a word: the launcher's report alone tells.
        (text(["step 3"], torchrun(5, -9, 8)), (44, "gpu-a", 5, "killed")),
    ],
)
def test_the_first_failure_of_a_log_with_what_the_text_says_and_no_more(log: str, expected: tuple[object, ...]) -> None:
    found = document(stdin=log)["first_failure"]
    assert (found["line"], found["node"], found["rank"], found["error_id"]) == expected


def test_of_two_nodes_the_one_with_a_cause_of_its_own_is_told_and_the_other_beside_it(
    tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = text(["step 3"], aborted(0, ABORTS["uncorrectable-ecc"]), torchrun(0, -6, 8))
    peer, cause = write(tmp_path, peer=UNREACHED, cause=own)
    for order in ((peer, cause), (cause, peer)):
        found = document(*order)
        assert (found["first_failure"]["file"], found["first_failure"]["error_id"]) == (str(cause), "uncorrectable-ecc")
        assert [(one["file"], one["of_peers"]) for one in found["other_failures"]] == [(str(peer), True)]
        assert found["order_known"]
        assert found["next"][0].endswith(f"p' {cause}")
    monkeypatch.chdir(tmp_path)
    golden.check("explain_two_nodes.txt", run(peer.name, cause.name))


def test_a_directory_of_logs_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "attempt_0").mkdir()
    write(tmp_path / "attempt_0", stderr=UNREACHED)
    write(tmp_path, stdout="step 3\n")
    found = document(tmp_path)
    assert found["files"] == {f"{tmp_path}/attempt_0/stderr.log": 6, f"{tmp_path}/stdout.log": 1}
    assert found["first_failure"]["error_id"] == "nccl-timed-out"


def test_clocks_in_the_texts_say_which_of_two_causes_came_first(tmp_path: Path) -> None:
    early, late = (
        text(aborted(0, words), [line.replace("10:00:02", clock) for line in torchrun(0, -6, 1)])
        for words, clock in ((ABORTS["device-assert"], "10:00:01"), (ABORTS["uncorrectable-ecc"], "10:00:09"))
    )
    late_path, early_path = write(tmp_path, a=late, b=early)
    found = document(late_path, early_path)
    assert (found["first_failure"]["file"], found["order_known"]) == (str(early_path), True)
    first, second = write(tmp_path, c="ValueError: one\n", d="KeyError: 'two'\n")
    assert not document(first, second)["order_known"]


def test_a_consequence_alone_asks_for_the_log_that_has_the_cause(golden: Golden) -> None:
    said = (
        "gpu-a:1:2 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.2<43211>\n"
    )
    found = document(stdin=said)
    assert found["first_failure"]["of_peers"]
    golden.check("explain_peer.txt", run("-", stdin=said))


def test_where_nccls_own_words_are_missing_they_are_asked_for() -> None:
    said = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, internal error - please report this issue to the NCCL developers\n"
    assert any("NCCL_DEBUG=WARN" in words for words in document(stdin=said)["next"])
    with_words = said + "a:1:2 [0] x.cc:7 NCCL WARN something else\n"
    assert not any("NCCL_DEBUG=WARN" in words for words in document(stdin=with_words)["next"])


def test_a_log_without_a_failure_is_none() -> None:
    assert document(stdin="step 1\nstep 2\n")["first_failure"] is None


def test_the_output_of_a_network_test_is_passed_on_to_the_verb_that_judges_it(
    tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "# nThread 1 nGpus 1 minBytes 8\n# Out of bounds values : 2 FAILED\n# Avg bus bandwidth    : 84.8558\n"
    stream = "[  5]   0.00-10.00  sec  10.9 GBytes  9.39 Gbits/sec                  receiver\n"
    paths = write(tmp_path, table=table, stream=stream)
    assert document(*paths)["benchmarks"] == {str(paths[0]): "nccl-tests", str(paths[1]): "iperf3"}
    monkeypatch.chdir(tmp_path)
    golden.check("explain_figures.txt", run(*(path.name for path in paths)))
    # A failure comes before figures.
    assert document(stdin=table + UNREACHED)["first_failure"]["error_id"] == "nccl-timed-out"


def test_what_cannot_be_read_is_refused(tmp_path: Path, golden: Golden) -> None:
    paths = (tmp_path / "none.log", tmp_path)
    refused = {name: error_of(run, path) for name, path in zip(("a file", "a directory"), paths, strict=True)}
    golden.check_errors("refused_explain", refused, tmp_path)


def test_where_no_failure_is_found_the_last_lines_are_shown_and_what_to_pass_next(golden: Golden) -> None:
    golden.check("explain_nothing.txt", run("-", stdin="".join(f"line {number}\n" for number in range(9))))


def test_a_log_that_ends_within_a_traceback_that_names_nothing_is_an_error_of_its_own(golden: Golden) -> None:
    app = typer.Typer()
    explain.register(app)
    assert CliRunner().invoke(app, ["-"], input="Traceback (most recent call last):\n").exit_code == 1
    framed = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    main()\n'
    golden.check("explain_traceback.txt", run("-", stdin=framed))


def test_cause_and_fix_are_in_chinese_if_multinode_lang_says_so() -> None:
    app = typer.Typer()
    explain.register(app)
    said = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error.\n"
    shown = CliRunner(env={"MULTINODE_LANG": "zh"}).invoke(app, ["-"], input=said).stdout
    assert "".join(chinese_meanings()["bus-error"].cause.split()) in "".join(shown.split())


def test_a_long_message_is_cut_to_its_first_sentence_and_whole_under_details(golden: Golden) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB"
    said += " of which 1.20 GiB is free. If reserved but unallocated memory is large try setting expandable_segments:True.\n"
    golden.check("explain_long.txt", run("-", stdin=said))
    golden.check("explain_long_details.txt", run("--details", "-", stdin=said))


def test_a_command_for_a_short_log_is_not_shown_and_only_a_programs_words_are_called_its_own(
    tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short,) = write(tmp_path, short="ValueError: labels must be integers\n")
    assert document(short)["next"] == []
    monkeypatch.chdir(tmp_path)
    golden.check("explain_program.txt", run(short.name))
    golden.check("explain_srun.txt", run("-", stdin="srun: error: gpu-a: task 0: Exited with exit code 3\n"))


def test_the_file_of_one_worker_names_its_rank(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0" / "2"
    folder.mkdir(parents=True)
    (path,) = write(folder, stderr="KeyError: 'labels'\n")
    assert document(path)["first_failure"]["rank"] == 2
