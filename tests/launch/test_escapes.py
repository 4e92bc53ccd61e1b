"""A run on a node that fills what it says with escape sequences: none is shown, or kept in a record of ours."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec import inspect
from rich.console import Console

from multinode.launch.outcome import show as show_outcome
from multinode.launch.progress_lines import ProgressLines
from multinode.launch.progress_table import ProgressTable
from multinode.launch.session import Ended, Gone, Hello, StatusReport
from multinode.profile.summary import summarise_run
from tests import make
from tests.escapes import ESCAPES, RECORDS, fill, lines_of, unprintable
from tests.golden import screen_of

from .scripted import RUNNING, Execution, Talk


@pytest.mark.parametrize("stopped_by", [None, ESCAPES])
def test_what_a_node_says_of_a_run_leaves_terminal_json_and_records_printable(
    tmp_path: Path, stopped_by: str | None
) -> None:
    lone = Execution(tmp_path, "a")
    samples = b"".join(lines_of(kind)[0] + b"\n" for kind in RECORDS if kind.__module__ == "multinode.records.samples")

    def play(talk: Talk) -> None:
        talk.say(fill(inspect.type_info(Hello)), RUNNING)
        talk.say({"kind": "alive", "time_s": 0.0}, {"kind": "note", "message": ESCAPES})
        talk.say({**fill(inspect.type_info(StatusReport)), "state": "running"})
        talk.chunk(ESCAPES, 0, b"x\n")
        talk.chunk("samples/rank-0.jsonl", 0, samples)
        talk.chunk("log", 0, ESCAPES.encode() + b"\n")
        talk.say({**fill(inspect.type_info(Gone)), "offset": len(ESCAPES.encode()) + 1})
        talk.say({**fill(inspect.type_info(Ended)), "exit_code": 1, "stopped_by": stopped_by})

    run = lone.run(play)
    assert run.status == ("failed" if stopped_by is None else "stopped")
    summary = summarise_run(lone.directory, make.plan("a", workers=2))
    shown = io.StringIO()
    console = Console(file=shown, width=160, color_system=None)
    lines: list[str] = []
    show = ProgressLines(lines.append, 0.0).show
    for progress in lone.seen:
        console.print(ProgressTable(progress))
        show(progress)
    shown.write(screen_of(show_outcome(run, summary, lone.directory.path), details=True))
    assert unprintable([shown.getvalue(), lines, run, summary]) == []
    kept = [path for path in lone.directory.path.rglob("*.json") if path.is_file()]
    assert kept
    assert [found for path in kept for found in unprintable(json.loads(path.read_text()))] == []
