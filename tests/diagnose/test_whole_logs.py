"""A whole log of a job: what helpers of its script said, several programs one after the other, and normal ends."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import pytest

from multinode.diagnose.log_words import read_log

from .test_standing import HANDLING, first, told

STEPS = [f"step {number} loss 2.{number}" for number in range(30)]
# Lines of a program in whose words nothing tells how far it came.
QUIET = [f"[{number:05d}] {('shard', 'tile', 'reader')[number % 3]} is ready" for number in range(320)]
DISK = "(raylet) [2025-02-25 19:42:{:02d},206 E 2097714 2097744] file_system_monitor.cc:116: /tmp/ray is over 95% full"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'out/last.ckpt'"
LOCAL = "OSError: out/sft is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def trace(program: str, exception: str, mark: str = "") -> list[str]:
    lines = ["Traceback (most recent call last):", f'  File "/w/{program}.py", line 88, in <module>', "    main()"]
    return [f"{mark}{line}" for line in (*lines, exception)]


@pytest.mark.parametrize(
    "complaint",
    [
        "CommandNotFoundError: Your shell has not been properly configured to use 'conda activate'.",
        "/etc/profile.d/lmod.sh: line 3: module: command not found",
        "run.sh: line 9: python: command not found",
    ],
)
def test_what_a_shell_complains_of_is_survived_if_its_script_went_on(complaint: str) -> None:
    failed = "RuntimeError: expected scalar type Half but found Float"
    assert told(complaint, *trace("train", failed)).message == failed
    assert first(complaint, *QUIET[:80]) is None
    assert first(*STEPS, "Finished training", complaint) is None
    assert told("Job 12 on n1", complaint, "srun: error: n1: task 0: Exited with exit code 127").line == 2


@pytest.mark.parametrize("missing", [MISSING, LOCAL])
@pytest.mark.parametrize("mark", ["", "[rank0]: "])
def test_a_program_that_misses_what_an_earlier_one_did_not_write_follows_from_it(missing: str, mark: str) -> None:
    assert told(*trace("train", OOM, mark), *trace("export", missing, mark)).message.endswith(OOM)
    words = "AssertionError: the sequence is no multiple of 128"
    assert told(*trace("train", words, mark), *trace("export", missing, mark)).message.endswith(words)
    # The same program was started again, with another setting.
    assert missing in told(*trace("train", words, mark), *trace("train", missing, mark)).message
    # What another program fails at by itself is the last failure.
    assert told(*trace("train", words, mark), *trace("export", "KeyError: 'x'", mark)).message.endswith("KeyError: 'x'")


def test_a_killed_program_of_a_script_comes_before_what_the_next_one_misses() -> None:
    killed = "run.sh: line 12: 88123 Killed                  python train.py --config a.yaml"
    assert told(killed, *trace("merge", MISSING)).error_id == "killed"


def test_the_exception_of_another_process_is_not_survived_by_whoever_waited_for_it() -> None:
    waited = "AssertionError: failed to get register_center_actor: a_register_center in []"
    child = ["Process SpawnProcess-2:", *trace("engine", "ValueError: the free memory is less than desired")]
    assert told(*child, *trace("server", waited)).message == child[-1]
    # Its end by Ctrl-C tells nothing that the exception of the other does not.
    stopped = ["Process Worker-1:", *trace("env", "KeyboardInterrupt")]
    assert told(*stopped, *trace("train", "KeyError: 7")).message == "KeyError: 7"


def test_an_actor_that_ray_could_not_import_failed_by_the_traceback_that_it_quotes() -> None:
    outer = "RuntimeError: The actor with name WorkerDict failed to import on the worker. The reason is below:"
    inner = "ImportError: /env/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
    wrapped = "RuntimeError: Failed to import transformers.models.mistral because of the error above"
    quoted = [outer, "", *trace("utils", inner), *HANDLING, *trace("workers", wrapped)]
    lines = [
        "(raylet) Traceback (most recent call last):",
        '  File "python/ray/_raylet.pyx", line 2276, in ray.x',
        *quoted,
    ]
    waited = "AssertionError: failed to get register_center_actor: a_register_center in []"
    assert told(*lines, "", *lines, *trace("main_ppo", waited)).message == inner


def test_a_step_of_slurm_that_failed_before_the_training_was_a_helper() -> None:
    helper = [
        "++ srun --ntasks=1 sysinfo.sh",
        "srun: error: n1: task 0: Exited with exit code 1",
        "+ srun python train.py",
    ]
    assert first(*helper, *STEPS) is None
    assert first(*helper, *QUIET) is None
    assert first(*STEPS, *helper[:2], *STEPS[:3]) is not None


def test_a_worker_of_ray_that_the_training_did_not_need_fails_no_run() -> None:
    died = "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 4"
    assert first(*STEPS, died, *STEPS) is None
    assert first(*STEPS, died, *STEPS[:2]) is not None


def test_threads_that_end_together_end_no_process() -> None:
    named = ["Exception in thread Thread-1:", "Exception in thread Thread-3:", "", "End training....", ""]
    mixed = [line for line in trace("writer", "OSError: handle is closed") for _ in range(2)]
    assert first(*STEPS, *named, *mixed) is None
    refused = "ConnectionRefusedError: [Errno 111] Connection refused"
    chain = [*named[:1], *trace("writer", refused), *HANDLING, *trace("writer", "MaxRetryError: too many")]
    assert first(*STEPS, *chain) is None


@pytest.mark.parametrize(
    "lines",
    [
        [
            "ERROR cannot open the shard",
            *(f"Epoch 1: {number}%|##  | {number}/100 [00:01<00:09, 1.1it/s]" for number in range(9)),
        ],
        [line for number in range(9) for line in (DISK.format(number), f"part {number} is written")]
        + [DISK.format(11)],
        ["saved", "wandb: ERROR Dropped streaming file chunk (see wandb/debug-internal.log)"],
        [*trace("probe", "ModuleNotFoundError: No module named 'apex'"), *QUIET],
        [
            "[W 2024-01-01 10:00:00,000] Trial 3 failed because of the following error: RuntimeError('CUDA out of memory')",
            *(f"[I 2024-01-01 10:00:00,000] Trial {number} finished with value: 0.{number}" for number in range(9)),
        ],
        ["RuntimeError: No valid triton configs. Ignoring this choice.", "AUTOTUNE mm(1x2)", "done"],
        [f"Training: {number}%|## | {number}/100" for number in (99, 100)]
        + ["no FID: No module named 'pytorch_fid'", "saved"],
    ],
)
def test_a_run_that_went_on_has_no_failure(lines: list[str]) -> None:
    assert first(*lines) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("run.sh: line 3: 11 Segmentation fault      python train.py", "SIGSEGV"),
        ("Bus error", "SIGBUS"),
        ("Terminated", "Terminated"),
        ("Loss is nan, stopping training", "Loss is nan"),
    ],
)
def test_the_words_of_a_shell_or_program_at_the_end_are_told(line: str, words: str) -> None:
    assert words in told(*STEPS, line).message


def test_a_helper_that_a_script_stops_fails_no_run() -> None:
    assert first(*STEPS, "run.sh: line 9: 3321 Terminated              tensorboard --logdir out") is None
    assert first("run.sh: line 2: 33 Segmentation fault      nvidia-smi dmon > gpu.log", *STEPS) is None


FULL = "[1724685341.232] [box:102593:f]        vfs_fuse.c:281  UCX  ERROR inotify_add_watch(/tmp) failed: No space left on device"
ASYNC = "[rank2]:[E814 01:57:12.008 ProcessGroupNCCL.cpp:542] [Rank 2] Collective WorkNCCL(SeqNum=7) raised the following async exception: NCCL error: unhandled system error, NCCL version 2.21.5"
FRAMES = [f"frame #{number}: <unknown function> + 0x9caa4 (0x7f4bdd961aa4 in libc.so.6)" for number in range(20)]


@pytest.mark.parametrize(
    "end",
    [
        "[after training is done] datetime: 2024-08-26 15:18:23",
        "\u8bad\u7ec3\u7ed3\u675f | 2000 \u6b65 | 386.4 min",
        "Training has been successfully completed.",
    ],
)
def test_a_message_before_the_end_that_a_training_tells_ended_nothing(end: str) -> None:
    for message in (FULL, ASYNC):
        assert first(message, *FRAMES, end) is None
        # What raised or was reported did end a process, whatever the script prints after it.
        assert first(*trace("train", OOM), end) is not None
        assert first(message, "Rank 3 crashed with exit code 1", end) is not None


def test_a_message_that_many_plain_lines_end_ended_nothing() -> None:
    assert first(FULL, *QUIET[:30]) is None
    assert told(FULL, *QUIET[:3]).line == 1
    assert told(FULL, *FRAMES).line == 1
    # A training may hang by what NCCL warns of.
    assert told("box:1:2 [0] NCCL WARN Call to connect returned Connection refused", *QUIET[:30]).line == 1


def test_a_worker_that_its_parent_asked_to_end_fails_no_run() -> None:
    died = "ERROR 12-25 11:03:05 multiproc_worker_utils.py:116] Worker VllmWorkerProcess pid 39 died, exit code: {}"
    assert first("accuracy  win_rate", died.format(-15), "INFO 12-25 Killing local vLLM worker processes") is None
    assert "was killed by SIGKILL" in told("loaded", died.format(-9)).message


def test_what_runs_after_a_report_is_another_attempt() -> None:
    raised = trace("train", "torch.AcceleratorError: CUDA error: invalid device ordinal")
    report = "failed (exitcode: 1) local_rank: 1 (pid: 91721) of binary: /usr/bin/python"
    assert [word.went_on for word in read_log("\n".join((*raised, report, *STEPS))).words] == [False]
    one = "ERROR multiproc_worker_utils.py:116] Worker VllmWorkerProcess pid 39 died, exit code: 1"
    assert [word.went_on for word in read_log("\n".join((*raised, one, *STEPS))).words] == [True]


def test_arguments_that_a_later_program_lacks_end_a_script() -> None:
    lacks = "evaluate: error: the following arguments are required: --output-dir"
    assert lacks.partition(": ")[2] in told(*STEPS, "Training completed.", *QUIET[:150], lacks).message
    assert first(*STEPS, "Training completed.", lacks) is None


def test_what_a_scheduler_and_a_tracing_shell_print_at_the_end_hides_nothing() -> None:
    assert told(*STEPS, "State: TIMEOUT (exit code 0)", *QUIET[:20]).error_id == "slurm-time-limit"
    refused = "inference.py: error: unrecognized arguments: --tensor_parallel_size 8"
    assert "unrecognized arguments" in told(*QUIET[:20], refused, "+ OUTPUT='WARNING no ray'").message
