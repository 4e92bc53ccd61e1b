from __future__ import annotations

import time

import msgspec
import pytest

from multinode.cli.live import live_view, within_share
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import Stall

RUNNING = RunProgress(
    run_id="r",
    job="sft.yaml",
    world_size=2,
    nodes=(NodeProgress(name="box1", node_rank=0, ranks=(0, 1), state="running"),),
)
STALL = Stall(time_s=1.0, silent_s=300.0, message="rank 1 on box1 is stopped", hint="resume it")
STALLED = msgspec.structs.replace(RUNNING, stall=STALL)


def test_a_standstill_is_told_in_a_line_once_and_so_is_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with live_view() as view:
        for progress in (RUNNING, STALLED, STALLED, RUNNING, RUNNING):
            view.show(progress)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("stalled: no step and no log on any node for 5 min 00 s: rank 1 on box1 is stopped") == 1
    assert printed.err.count("  hint: resume it\n") == 1
    assert printed.err.count("the run has resumed\n") == 1


def test_what_is_known_besides_is_told_once_of_each_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    noted = msgspec.structs.replace(RUNNING, note="1 node is faster")
    with live_view() as view:
        for progress in (RUNNING, noted, noted, msgspec.structs.replace(noted, run_id="r-2")):
            view.show(progress)
    assert capsys.readouterr().err.count("1 node is faster\n") == 2


def test_a_quiet_view_says_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with live_view(quiet=True) as view:
        view.show(STALLED)
    assert capsys.readouterr().err == ""


def test_a_view_that_fails_is_told_once_and_does_not_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    impossible = msgspec.structs.replace(RUNNING, elapsed_s="not a number")
    with live_view() as view:
        view.show(impossible)
        view.show(RUNNING)
    assert capsys.readouterr().err.count("the view failed; the run is still running") == 1


def test_a_view_that_takes_long_is_drawn_less_often_and_the_end_and_a_standstill_are_always_shown() -> None:
    shown: list[RunProgress] = []

    def draw(progress: RunProgress) -> None:
        shown.append(progress)
        time.sleep(0.1)

    ended = msgspec.structs.replace(RUNNING, nodes=(msgspec.structs.replace(RUNNING.nodes[0], state="ended"),))
    show = within_share(draw)
    for progress in (RUNNING, RUNNING, STALLED, RUNNING, ended):
        show(progress)
    assert shown == [RUNNING, STALLED, ended]
