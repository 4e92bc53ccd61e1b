from __future__ import annotations

import io

import msgspec
from rich.console import Console

from multinode.core.run.run import Failure, Run
from multinode.report.run.outcome import run_table
from tests.report.observing import RUN


def shown(run: Run) -> str:
    output = io.StringIO()
    Console(file=output, width=80, color_system=None).print(run_table(run))
    return output.getvalue()


def test_it_says_how_the_run_ended_on_each_node() -> None:
    lines = [" ".join(line.split()) for line in shown(RUN).splitlines()]
    assert lines == [
        "run 20260102-aa",
        "job sft.yaml (LLaMA-Factory sft)",
        "state succeeded",
        "node 0 box1: exit code 0",
        "node 1 box2: exit code 0",
    ]


def test_when_a_node_vanished_and_what_came_of_it_is_told() -> None:
    failure = Failure(
        node="box2", node_rank=1, message="gone", time_s=RUN.started_s + 41, consequences=("box1: Connection reset",)
    )
    lines = shown(msgspec.structs.replace(RUN, status="lost", first_failure=failure)).splitlines()
    (at,) = (line for line in lines if line.strip().startswith("failed at"))
    assert at.strip().endswith(", 41.0 s after the start")
    assert ["consequence", "box1: Connection reset"] in [line.split(maxsplit=1) for line in map(str.strip, lines)]


def test_a_failure_is_shown_as_text_and_moves_no_cursor() -> None:
    failure = Failure(node="box[1]", node_rank=0, message="\x1b[2J[red]it broke[/]")
    text = shown(msgspec.structs.replace(RUN, status="failed", first_failure=failure))
    assert "box[1]: ?[2J[red]it broke[/]" in text
