from __future__ import annotations

import time
from pathlib import PurePath

import msgspec
import pytest

from multinode.launch.ending import run_labels
from multinode.launch.outcome import next_step, run_verdict, show, step_sheet
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.figures import LikelyCause, Straggler
from multinode.profile.step_split import KnownSteps, StepSplit
from multinode.profile.summary import StepTimes, Summary
from multinode.records.run import Attempt, Failure, Run
from multinode.render.sheet import NextCommand
from multinode.stats.estimate import Estimate, exactly
from tests import make
from tests.golden import Golden, screen_of
from tests.profile.observing import RUN as TRAINING
from tests.profile.observing import SUMMARY as TRAINING_SUMMARY

RUN = make.run(
    "a",
    "b",
    run_id="20260102-030405-abcd",
    job="sft.yaml",
    engine="llamafactory",
    started_s=100.0,
    ended_s=165.0,
    world_size=4,
)
SUMMARY = make.summary(
    26.66,
    run_id=RUN.run_id,
    step_time_ms=StepTimes(median=exactly(300.4), p95=320.0, cv=0.05),
    first_loss=2.5,
    last_loss=1.25,
)
NOTHING = make.no_steps(run_id=RUN.run_id)


SLOW_NODE = Straggler(
    node="b\x1b[2J",
    ranks=(1,),
    late_ms=80.0,
    share=0.27,
    message="the others wait 80.0 ms per step for b\x1b[2J (27.0% of the step)",
    causes=(LikelyCause(cause="cpu", message="b had used up its cgroup's CPU limit"),),
    hint="raise the CPU limit of its cgroup",
)
HELD_UP = msgspec.structs.replace(
    SUMMARY,
    bottleneck=Bottleneck(kind="straggler", share=0.27, message="80 of 300 ms per step (27%) are waiting for b"),
    stragglers=(SLOW_NODE,),
)
NO_SYNCHRONISATION = msgspec.structs.replace(
    SUMMARY, bottleneck=Bottleneck(kind="no_communication", message="no gradient synchronization")
)
STOPPED = msgspec.structs.replace(RUN, status="stopped", stop_reason="slower_than_one_node")
FAILED = msgspec.structs.replace(
    RUN,
    status="failed",
    first_failure=Failure(
        node="b",
        node_rank=1,
        message="rank 2 raised ValueError: x",
        time_s=141.0,
        consequences=("a: Connection reset",),
    ),
)


RESTARTED = msgspec.structs.replace(
    RUN,
    world_size=2,
    nodes=RUN.nodes[:1],
    attempts=(
        Attempt(
            run_id=f"{RUN.run_id}-1",
            status="failed",
            started_s=100.0,
            ended_s=120.0,
            world_size=4,
            global_batch=16,
            last_step=57,
            first_failure=Failure(node="b", node_rank=1, message="rank 2 was killed by SIGKILL", kind="killed"),
            lost_steps=17,
            lost_s=21.5,
        ),
        Attempt(
            run_id=f"{RUN.run_id}-2",
            status="lost",
            started_s=130.0,
            ended_s=150.0,
            checkpoint="checkpoint-40",
            world_size=4,
            global_batch=16,
            first_step=40,
            last_step=83,
            first_failure=Failure(node="b", node_rank=1, message="contact was lost", kind="node_lost"),
            lost_steps=23,
            lost_s=661.0,
        ),
        Attempt(
            run_id=f"{RUN.run_id}-3",
            status="succeeded",
            started_s=800.0,
            ended_s=900.0,
            checkpoint="checkpoint-60",
            skipped={"checkpoint-80": "a: optimizer.pt: it is truncated"},
            world_size=2,
            left_out={"b": "no route to host"},
            global_batch=16,
            first_step=60,
            last_step=200,
        ),
    ),
)


PLACE = PurePath("runs", RUN.run_id)
CONTRAST = "multinode contrast --hosts lab sft.yaml"
MEASURED = msgspec.structs.replace(
    TRAINING_SUMMARY,
    samples_per_s=Estimate(value=39.87, low=38.9, high=40.9),
    step_time_ms=StepTimes(median=Estimate(value=401.25, low=391.0, high=412.0), p95=433.5, cv=0.031),
    comm=msgspec.structs.replace(TRAINING_SUMMARY.comm, exposed_ms=Estimate(value=120.5, low=110.0, high=131.0)),
)


@pytest.mark.parametrize(
    ("name", "run", "summary"),
    [
        ("run_network_bound", TRAINING, MEASURED),
        ("run_straggler", RUN, HELD_UP),
        ("run_plain", RUN, SUMMARY),
        ("run_failed", FAILED, NOTHING),
        ("run_restarted", RESTARTED, SUMMARY),
        ("run_without_figures", msgspec.structs.replace(RUN, status="lost"), None),
    ],
)
def test_the_screen(golden: Golden, name: str, run: Run, summary: Summary | None) -> None:
    step = next_step(run, summary, hosts="lab", contrast=CONTRAST if len(run.nodes) > 1 else "")
    following = [step] if step is not None else []
    golden.check_answer(name, (*show(run, summary, PLACE), *following))


def test_the_verdict_has_how_it_ended_its_speed_and_what_limits_it() -> None:
    assert run_verdict(RUN, SUMMARY) == "succeeded after 1 min 05 s: 26.7 samples/s, 4 workers on 2 nodes"
    assert run_verdict(FAILED, NOTHING) == "failed after 1 min 05 s, 4 workers on 2 nodes"
    network = Bottleneck(kind="network", share=0.4, message="119 of 300 ms per step are exposed communication")
    assert run_verdict(RUN, msgspec.structs.replace(SUMMARY, bottleneck=network)).endswith(
        "; network-bound: 40% of a step is exposed communication"
    )
    early = StepSplit(mean=make.split(300.0), steps=KnownSteps(known=4, measured=25))
    few = msgspec.structs.replace(SUMMARY, bottleneck=network, split=early)
    assert run_verdict(RUN, few).endswith(" is exposed communication (from 4 of 25 measured steps)")
    assert "exposed communication: from 4 of 25 measured steps" in step_sheet(few).notes
    unknown = msgspec.structs.replace(SUMMARY, bottleneck=Bottleneck(kind="unknown", message="x"))
    assert run_verdict(RUN, unknown) == run_verdict(RUN, SUMMARY)


def test_a_loss_of_zero_is_a_loss() -> None:
    text = screen_of(show(RUN, msgspec.structs.replace(SUMMARY, first_loss=0.0, last_loss=0.0), PLACE))
    assert "0, 0" in text


@pytest.mark.parametrize(
    ("run", "summary", "expected"),
    [
        (FAILED, NOTHING, ("multinode logs 20260102-030405-abcd --node b",) * 2),
        (TRAINING, TRAINING_SUMMARY, (f"multinode advise {TRAINING.run_id}", CONTRAST)),
        (RUN, HELD_UP, ("multinode bench --hosts 'my nodes'",) * 2),
        (RUN, SUMMARY, (None, CONTRAST)),
        (RUN, NO_SYNCHRONISATION, (None, None)),
        (msgspec.structs.replace(RUN, status="running"), TRAINING_SUMMARY, (None, None)),
        (STOPPED, TRAINING_SUMMARY, ("multinode launch --nodes 1 sft.yaml",) * 2),
    ],
)
def test_the_next_command_follows_from_how_it_went_and_whether_one_node_was_measured(
    run: Run, summary: Summary, expected: tuple[str | None, str | None]
) -> None:
    one_node = "multinode launch --nodes 1 sft.yaml"
    found = tuple(
        next_step(run, summary, hosts="my nodes", contrast=contrast, one_node=one_node) for contrast in ("", CONTRAST)
    )
    assert found == tuple(None if one is None else NextCommand("Next", one) for one in expected)


def test_why_a_run_was_stopped_stands_in_its_verdict() -> None:
    assert run_verdict(STOPPED, NOTHING).startswith("stopped after 1 min 05 s because one node is faster, ")


def shown(run: Run) -> str:
    return screen_of([run_labels(run)], 80, details=True)


def test_it_says_how_the_run_ended_on_each_node() -> None:
    lines = [" ".join(line.split()) for line in shown(TRAINING).splitlines()]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(TRAINING.started_s))
    assert lines == [
        "Run 20260102-aa",
        "Job sft.yaml (LLaMA-Factory sft)",
        "State succeeded",
        f"Began {began}, took 50.0 s",
        "Node 0 box1: exit code 0",
        "Node 1 box2: exit code 0",
    ]


NO_MORE = Failure(node="box2", node_rank=1, message="it broke")


def shown_lines(failure: Failure) -> list[str]:
    return shown(msgspec.structs.replace(TRAINING, status="failed", first_failure=failure)).strip().splitlines()


def test_when_a_node_vanished_and_what_came_of_it_is_told() -> None:
    failure = Failure(
        node="box2",
        node_rank=1,
        message="gone",
        time_s=TRAINING.started_s + 41,
        consequences=("box1: Connection reset",),
    )
    lines = shown(msgspec.structs.replace(TRAINING, status="lost", first_failure=failure)).splitlines()
    (at,) = (line for line in lines if line.strip().startswith("Failed at"))
    assert at.strip().endswith(", 41.0 s after the start")
    assert ["Consequence", "box1: Connection reset"] in [line.split(maxsplit=1) for line in map(str.strip, lines)]


def test_the_cause_of_a_known_error_and_its_fix_are_shown_and_no_file_that_an_installation_lacks() -> None:
    failure = Failure(node="box2", node_rank=1, message="it broke", error_id="bus-error", cause="no room", hint="more")
    lines = [line.strip().split(maxsplit=1) for line in shown_lines(failure)]
    assert ["Cause", "no room"] in lines
    assert ["Fix", "more"] in lines
    assert "docs/" not in " ".join(shown_lines(failure))
    assert not {"Cause", "Fix"} & {line[0] for line in map(str.split, shown_lines(NO_MORE))}


def test_a_failure_is_shown_as_text_and_moves_no_cursor() -> None:
    failure = Failure(node="box[1]", node_rank=0, message="\x1b[2J[red]it broke[/]")
    text = shown(msgspec.structs.replace(TRAINING, status="failed", first_failure=failure))
    assert "box[1]: ?[2J[red]it broke[/]" in text
