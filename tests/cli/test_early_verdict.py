"""What follows from the early verdict while a run is followed: shown, asked, or the run stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.cli.early_verdict import Mode, require_terminal, watch
from multinode.cli.main import build_app
from multinode.decoding import decode_json
from multinode.launch.attach import attach, find_recorded
from multinode.launch.context import ExecuteOptions, RunContext
from multinode.predict.early_verdict import verdict_line
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.run import EarlyVerdict, Run
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests.golden import Golden, error_of
from tests.launch.scripted import HELLO, RUNNING, ScriptedNodes, Talk
from tests.profile.made_up_steps import MadeUp, always
from tests.profile.running import keep_running

DEADLINE_S = 60.0
SLOW = MadeUp(steps=15, transfer_ms=always(1000.0))
# As many as may end a run, and as many as warm up.
ENOUGH = msgspec.structs.replace(SLOW, steps=125)
FAST = MadeUp(steps=125, transfer_ms=always(5.0))


def at(step: int) -> RunProgress:
    """Both nodes at this step."""
    nodes = tuple(
        NodeProgress(name=f"node{rank}", node_rank=rank, ranks=(rank,), state="running", step=step) for rank in (0, 1)
    )
    return RunProgress(run_id="r", job="train.py", world_size=2, nodes=nodes)


class Followed:
    """A context whose progress and stages are kept."""

    def __init__(self, root: Path) -> None:
        self.seen: list[RunProgress] = []
        self.said: list[str] = []
        self.context = RunContext(FakeTransport(lambda *_: ()), root, observe=self.seen.append, say=self.said.append)

    def until(self, *, steps: int = 15, noted: bool = True) -> RunProgress:
        """Observe this step again and again, as a run does, until there is a note, or something is said."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self.context.observe(at(steps))
            if self.seen[-1].note if noted else self.said:
                return self.seen[-1]
            time.sleep(0.01)
        pytest.fail(f"no verdict in time: {self.said}")


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


@pytest.mark.parametrize(
    ("made_up", "mode", "stops"),
    [
        pytest.param(ENOUGH, "report", 0, id="report"),
        pytest.param(ENOUGH, "stop", 1, id="stop"),
        pytest.param(SLOW, "stop", 0, id="too few steps"),
        pytest.param(FAST, "stop", 0, id="two nodes are faster"),
    ],
)
def test_a_run_is_stopped_where_that_was_asked_for_and_one_node_is_surely_faster(
    followed: Followed, tmp_path: Path, made_up: MadeUp, mode: Mode, stops: int
) -> None:
    directory = keep_running(tmp_path, made_up)
    with watch(followed.context, mode):
        followed.context.observe(at(14))
        assert followed.seen[-1].note == ""
        shown = followed.until()
    stop = followed.context.stop
    assert (stop.count, stop.reason) == (stops, "slower_than_one_node" if stops else "")
    assert shown.note == verdict_line(decode_json((directory.path / "early-verdict.json").read_bytes(), EarlyVerdict))


def test_a_verdict_whose_uncertainty_is_longer_than_what_is_left_is_kept_and_not_shown(
    followed: Followed, tmp_path: Path
) -> None:
    unsteady = msgspec.structs.replace(SLOW, compute_ms=lambda _, step: 20.0 if step % 3 else 900.0)
    directory = keep_running(tmp_path, msgspec.structs.replace(unsteady, transfer_ms=always(150.0)))
    kept_at, end = directory.path / "early-verdict.json", time.monotonic() + DEADLINE_S
    with watch(followed.context, "report"):
        while not kept_at.exists() and time.monotonic() < end:
            followed.context.observe(at(15))
            time.sleep(0.01)
        for _ in range(3):
            followed.context.observe(at(15))
    assert decode_json(kept_at.read_bytes(), EarlyVerdict).findings[0].code == "inconclusive"
    assert {progress.note for progress in followed.seen} == {""}
    assert followed.said == []


def test_after_few_steps_it_is_told_that_a_run_is_looked_at_again_and_then_it_is_stopped(
    followed: Followed, tmp_path: Path
) -> None:
    directory = keep_running(tmp_path / "runs" / "whole", ENOUGH)
    lines = {rank: list(directory.sample_lines(rank)) for rank in (0, 1)}
    few = keep_running(tmp_path, SLOW)
    with watch(followed.context, "stop"):
        followed.until()
        assert followed.said == ["after 10 measured steps, one node is faster; checking again after 120"]
        for rank, every in lines.items():
            few.append_samples(rank, "ranks.jsonl", b"".join(every[len(list(few.sample_lines(rank))) :]))
        followed.context.observe(at(124))
        assert not [thread for thread in threading.enumerate() if thread.name == "judge"]
        end = time.monotonic() + DEADLINE_S
        while not followed.context.stop.count and time.monotonic() < end:
            followed.context.observe(at(125))
            time.sleep(0.01)
    assert followed.context.stop.reason == "slower_than_one_node"
    kept = decode_json((few.path / "early-verdict.json").read_bytes(), dict[str, Any])
    assert (kept["recorded"], kept["measured"]) == (125, 120)


def test_what_is_left_is_told_of_the_step_where_the_run_is(followed: Followed, tmp_path: Path, golden: Golden) -> None:
    keep_running(tmp_path, SLOW)
    with watch(followed.context, "report"):
        followed.until()
        followed.context.observe(at(508))
    # 485 of the 1000 steps are done, and half of what was left then.
    golden.check("early_verdict_note.txt", f"{followed.seen[-1].note}\n")


def test_a_run_that_resumed_is_judged_after_15_steps_of_its_own(followed: Followed, tmp_path: Path) -> None:
    directory = keep_running(tmp_path / "runs" / "whole", SLOW)
    lines = {rank: list(directory.sample_lines(rank)) for rank in (0, 1)}
    few = keep_running(tmp_path, msgspec.structs.replace(SLOW, steps=5))
    with watch(followed.context, "report"):
        followed.context.observe(at(905))
        for thread in threading.enumerate():
            if thread.name == "judge":
                thread.join(DEADLINE_S)
        followed.context.observe(at(905))
        for rank, every in lines.items():
            few.append_samples(rank, "ranks.jsonl", b"".join(every[len(list(few.sample_lines(rank))) :]))
        # 5 of 15 steps were recorded when it stood at step 905.
        followed.context.observe(at(914))
        assert not [thread for thread in threading.enumerate() if thread.name == "judge"]
        assert followed.until(steps=915).note


def test_a_verdict_that_fails_is_told_once_and_does_not_reach_the_run(followed: Followed, tmp_path: Path) -> None:
    directory = keep_running(tmp_path, SLOW)
    (directory.path / "plan.json").write_text("{")
    with watch(followed.context, "stop"):
        followed.until(noted=False)
        followed.context.observe(at(16))
    assert len(followed.said) == 1
    assert followed.said[0].startswith("no early verdict: ")
    assert followed.said[0].endswith("; the run is still running")
    assert (followed.seen[-1], followed.context.stop.count) == (at(16), 0)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize(("made_up", "status"), [(ENOUGH, "stopped"), (FAST, "succeeded")])
def test_a_run_that_is_taken_up_is_stopped_as_well_though_ctrl_c_would_leave_it(
    tmp_path: Path, made_up: MadeUp, status: str, *, detached: bool
) -> None:
    directory = keep_running(tmp_path, made_up)
    run = directory.read("run.json", Run)
    assert run is not None
    directory.write("run.json", msgspec.structs.replace(run, detached=detached))
    judged = threading.Event()

    def play(talk: Talk) -> None:
        talk.say(HELLO, RUNNING)
        if status == "stopped":
            assert talk.order("stop")
            talk.end(exit_code=None, signal="SIGTERM", cause="stopped")
        else:
            assert judged.wait(DEADLINE_S)
            talk.end()

    nodes = ScriptedNodes(play)
    context = RunContext(
        AgentTransport(nodes, AgentArchive(b"")),
        tmp_path,
        observe=lambda progress: judged.set() if progress.note else None,
    )
    with watch(context, "stop"):
        launched = attach(find_recorded(tmp_path, "r"), context, ExecuteOptions(leave_on_stop=detached))
    nodes.check()
    assert launched.run.status == status
    assert launched.run.stop_reason == ("slower_than_one_node" if status == "stopped" else "")


def test_a_run_that_another_process_follows_is_that_ones_to_stop(tmp_path: Path, golden: Golden) -> None:
    directory = keep_running(tmp_path, SLOW)
    with directory.lock():
        done = CliRunner(env={"MULTINODE_RUNS": str(tmp_path)}).invoke(
            build_app(), ["attach", "r", "--if-slower-than-one-node", "stop"]
        )
    golden.check_errors("refused_attach", {"a run that another process follows": done.exception}, directory.path)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where a user types: what is written there arrives on stdin."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w"):
        monkeypatch.setattr("sys.stdin", stdin)
        yield write


@pytest.mark.parametrize(("answer", "stops"), [(b"y\n", 1), (b"n\n", 0), (b"\n", 0)])
def test_a_user_is_asked_and_not_waited_for(
    followed: Followed, tmp_path: Path, typed: int, answer: bytes, stops: int
) -> None:
    keep_running(tmp_path, ENOUGH)
    with watch(followed.context, "ask"):
        followed.until()
        followed.context.observe(at(16))
        assert followed.context.stop.count == 0
        os.write(typed, answer)
        followed.context.observe(at(17))
        followed.context.observe(at(18))
    assert followed.said[0] == "One node is faster. Stop the run? Type y to stop it; any other answer continues it."
    assert followed.context.stop.count == stops


def test_without_a_terminal_nobody_can_be_asked_and_a_detached_run_is_not_followed(golden: Golden) -> None:
    require_terminal("stop")
    require_terminal("report", detach=True)
    golden.check_errors(
        "refused_early_verdict",
        {"ask": error_of(require_terminal, "ask"), "stop --detach": error_of(require_terminal, "stop", detach=True)},
    )


@pytest.mark.parametrize(
    ("steps", "told"),
    [(15, "Early verdict (15 steps): 1 node is 5.1x faster than 2"), (9, "no early verdict yet: 6 steps to go")],
)
def test_show_says_the_verdict_on_a_run_that_is_still_running(tmp_path: Path, steps: int, told: str) -> None:
    keep_running(tmp_path, msgspec.structs.replace(SLOW, steps=steps))
    runner = CliRunner(env={"MULTINODE_RUNS": str(tmp_path)})
    assert told in runner.invoke(build_app(), ["show", "last"]).stdout
    document = decode_json(runner.invoke(build_app(), ["show", "last", "--json"]).stdout.encode(), dict[str, Any])
    assert (document["early_verdict"] is not None) == (steps == 15)
