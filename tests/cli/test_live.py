from __future__ import annotations

import time
from typing import Literal

import msgspec
import pytest

from multinode.cli.live import live_view, within_share
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import NodeRun, Stall
from tests.terminal import left_on_screen

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
    assert (
        printed.err.count("stalled: no new step or log line on any node for 5 min 00 s; rank 1 on box1 is stopped") == 1
    )
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
    assert capsys.readouterr().err.count("the live view failed, but the run is still running") == 1


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


NODES = (NodeRun(name="box1", node_rank=0), NodeRun(name="box2", node_rank=1))


def printed_log(capsys: pytest.CaptureFixture[str], output: Literal["none", "rank0", "all"]) -> str:
    with live_view(output=output) as view:
        view.show_log(NODES[0], b"step 1, loss")
        view.show_log(NODES[1], b"elsewhere\n")
        view.show_log(
            NODES[0], b" 2.5\n[rank1]: mine\n\x1b[2Jerror: all is lost\x1b]0;x\x07\n 50%|##\r100%|####\nno end"
        )
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("none", []),
        ("rank0", ["step 1, loss 2.5", "error: all is lost", "100%|####", "no end"]),
        ("all", ["elsewhere", "step 1, loss 2.5", "[rank1]: mine", "error: all is lost", "100%|####", "no end"]),
    ],
)
def test_what_the_job_prints_is_shown_in_whole_lines_behind_its_node_and_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], output: Literal["none", "rank0", "all"], expected: list[str]
) -> None:
    lines = printed_log(capsys, output).splitlines()
    assert lines == [f"{'box2' if text == 'elsewhere' else 'box1'} | {text}" for text in expected]


def test_output_that_comes_faster_than_it_is_shown_is_left_out_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with live_view(output="all") as view:
        view.show_log(NODES[0], b"first\n")
        view.show_log(NODES[0], b"x" * (2 << 20) + b"\n")
        view.show_log(NODES[0], b"last\n")
    first, said, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("box1 | first", "box1 | last")
    assert said == "2 MiB of output is not shown here; see multinode logs"


def test_a_table_is_followed_by_what_a_signal_says_and_by_output_and_leaves_no_line_of_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with live_view(output="rank0") as view:
        view.say("run r: starting")
        view.show(RUNNING)
        time.sleep(0.3)
        view.say_at_once("stopping on all nodes")
        time.sleep(0.3)
        view.show_log(NODES[0], b"[red]:bug: loss 2.5\n")
        time.sleep(0.3)
        view.show(msgspec.structs.replace(RUNNING, nodes=(msgspec.structs.replace(RUNNING.nodes[0], state="ended"),)))
    lines = left_on_screen(capsys.readouterr().err)
    assert lines[:3] == ["run r: starting", "stopping on all nodes", "box1 | [red]:bug: loss 2.5"]
    assert [line.startswith("sft.yaml  run r") for line in lines].count(True) == 1


def test_long_lines_leave_the_table_whole_and_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    noted = msgspec.structs.replace(RUNNING, note="a note that is longer than the table is wide; " * 3)
    with live_view(output="rank0") as view:
        for number in range(3):
            view.show(noted)
            time.sleep(0.2)
            view.show_log(NODES[0], f"{number} ".encode() + b"x" * 200 + b"\n")
            time.sleep(0.2)
    lines = left_on_screen(capsys.readouterr().err, width=80)
    begins = [number for number, line in enumerate(lines) if line.startswith("box1 | ")]
    assert [lines[number][:8] for number in begins] == ["box1 | 0", "box1 | 1", "box1 | 2"]
    assert all("".join(lines[number : number + 3]).count("x") == 201 for number in begins)
    assert [line.startswith("sft.yaml  run r") for line in lines].count(True) == 1
