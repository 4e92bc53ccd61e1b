"""What a run that failed, or hung and was stopped, shows: what happened first, in a dozen lines."""

from __future__ import annotations

import io
from pathlib import PurePath

import msgspec
import pytest
from rich.console import Console

from multinode.launch.ending import MOST_LINES, hang_words
from multinode.launch.outcome import next_step, show
from multinode.launch.progress_table import ProgressTable
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.summary import StepTimes
from multinode.records.run import Attempt, Failure, Run, Stall
from multinode.stats.estimate import exactly
from tests import make
from tests.golden import Golden, screen_of
from tests.launch.test_progress_table import PROFILED, progress

DIRECTORY = PurePath("runs", "20260102-030405-abcd")
RUN = make.run("node0", "node1", run_id=DIRECTORY.name, status="failed", started_s=100.0, ended_s=133.7, world_size=4)
# Figures of six steps, which say nothing about why a run failed.
SUMMARY = make.summary(
    26.66,
    run_id=RUN.run_id,
    steps=6,
    steady_steps=2,
    rule="the first 4 of 6 steps are excluded as warm-up",
    step_time_ms=StepTimes(median=exactly(300.4), p95=320.0, cv=0.05),
    bottleneck=Bottleneck(kind="network", share=0.54, message="x"),
)
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/lab/train.py", line 41, in <module>
    main()
  File "/home/me/lab/train.py", line 22, in main
    decay = config["weight_decay"]
            ~~~~~~^^^^^^^^^^^^^^^^
KeyError: 'weight_decay'
"""
KEY_ERROR = Failure(
    node="node0",
    node_rank=0,
    rank=1,
    message="rank 1 raised KeyError: 'weight_decay'",
    log_tail=TRACEBACK,
    time_s=110.9,
)
ARGPARSE = Failure(
    node="node1",
    node_rank=1,
    rank=2,
    exit_code=1,
    message="rank 2 exited with code 2",
    log_tail="usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --larning-rate 3\n",
)
UNKNOWN = Failure(
    node="node1", node_rank=1, message="the job exited with code 7", log_tail="one\ntwo\nthe last words\n"
)
LONG = msgspec.structs.replace(
    KEY_ERROR,
    message="rank 1 raised DistBackendError: " + "NCCL error in: ProcessGroupNCCL.cpp, unhandled system error; " * 4,
    cause="The worker could not open a connection to its peer. " * 5,
    hint="name the interface that both nodes share in the hostfile, and see what multinode check says about it; " * 3,
    consequences=("node1: rank 2 raised RuntimeError: Connection closed by peer " + "x" * 200,) * 3,
)
SHM = msgspec.structs.replace(
    KEY_ERROR,
    message="rank 1 raised RuntimeError: unable to allocate shared memory(shm) for file </torch_25_3_0>: No space left",
    cause="Data loader workers pass their batches through /dev/shm, which is full or too small: docker gives a "
    "container 64 MiB.",
    hint="see its size: ssh node0 df -h /dev/shm; then docker run --ipc=host or --shm-size=16g; or use fewer workers",
)
LONG_NAMES = msgspec.structs.replace(RUN, job=f"/var/tmp/{'project/' * 8}train.py", ended_s=5000.0)
STALL = Stall(
    code="elsewhere",
    time_s=133.2,
    silent_s=15.5,
    node="node1",
    node_rank=1,
    rank=3,
    message="rank 3 on node1 is in <module> (train.py:24), idle; the other 3 ranks wait in backward",
    hint="its full stack is in stall.json; if it is only slow, set a longer --hang-timeout",
    stack="/usr/lib/python3.11/selectors.py:468 in select\n/home/me/lab/train.py:24 in <module>",
)
HUNG = msgspec.structs.replace(RUN, status="stopped", stop_reason="SIGINT", stalls=(STALL,))
RESTARTED = msgspec.structs.replace(
    RUN,
    attempts=(
        Attempt(run_id=f"{RUN.run_id}-1", status="failed", started_s=0.0, lost_steps=17, lost_s=21.5),
        Attempt(run_id=f"{RUN.run_id}-2", status="failed", started_s=0.0, not_restarted="1 restart was allowed"),
    ),
)


def _text(table: ProgressTable, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(table)
    return "\n".join(map(str.rstrip, output.getvalue().splitlines()))


def failed(failure: Failure, run: Run = RUN) -> Run:
    return msgspec.structs.replace(run, first_failure=failure)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("ending_key_error", failed(KEY_ERROR)),
        ("ending_arguments", failed(ARGPARSE)),
        ("ending_unknown", failed(UNKNOWN)),
        ("ending_long", failed(LONG)),
        ("ending_long_names", failed(SHM, LONG_NAMES)),
        ("ending_restarted", failed(KEY_ERROR, RESTARTED)),
        ("ending_hang", HUNG),
    ],
)
def test_the_screen_has_what_happened_in_a_dozen_lines(golden: Golden, name: str, run: Run) -> None:
    step = next_step(run, SUMMARY)
    # Of a hang the details have the stacks, and the logs only what its stop made torchrun print.
    assert (step is None) == (run.hang is not None)
    golden.check_answer(
        name,
        [*show(run, SUMMARY, DIRECTORY), *filter(None, [step])],
        most_lines=MOST_LINES,
        widths=(80, 120),
    )


def test_the_live_table(golden: Golden) -> None:
    both = (PROFILED, msgspec.structs.replace(PROFILED, name="box2", node_rank=1, ranks=(2, 3)))
    shown = (f"=== {width} columns\n{_text(ProgressTable(progress(*both)), width)}\n" for width in (80, 120))
    golden.check("live_table.txt", "\n".join(shown))


def test_figures_come_with_details_and_not_before_what_happened() -> None:
    text = screen_of(show(failed(KEY_ERROR), SUMMARY, DIRECTORY), 80, details=True)
    assert text.index("error: node0: rank 1 raised KeyError") < text.index("network-bound: 54%")
    assert "network-bound" not in screen_of(show(failed(KEY_ERROR), SUMMARY, DIRECTORY), 80)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (HUNG, "stopped by you; the run had hung for 16.0 s: rank 3 on node1 at train.py:24"),
        (
            msgspec.structs.replace(HUNG, stop_reason="SIGTERM"),
            "stopped by SIGTERM; the run had hung for 16.0 s: rank 3 on node1 at train.py:24",
        ),
        (
            msgspec.structs.replace(
                HUNG, stalls=(msgspec.structs.replace(STALL, rank=None, stack="", message="all wait"),)
            ),
            "stopped by you; the run had hung for 16.0 s: all wait",
        ),
    ],
)
def test_a_hang_that_was_stopped_says_who_stopped_it_how_long_and_where_it_hung(run: Run, words: str) -> None:
    assert run.hang is not None
    assert hang_words(run, run.hang) == words


def test_a_run_that_resumed_or_was_not_stopped_did_not_end_in_a_hang() -> None:
    resumed = msgspec.structs.replace(STALL, resumed_s=133.0)
    assert msgspec.structs.replace(HUNG, stalls=(STALL, resumed)).hang is None
    assert msgspec.structs.replace(HUNG, status="succeeded").hang is None
