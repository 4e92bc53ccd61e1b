"""No error of the catalogue is found where programs and trainings ended well, or of something of their own.

`unrelated.jsonl` has what real programs printed: the last 40 lines, at most 3,000 characters, without the names of the
machine that they ran on. At most three runs of a program.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.explanation import explain
from multinode.diagnose.known_errors import find_error
from multinode.diagnose.log_words import read_log

from .test_failure import ended, find

LOGS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "unrelated.jsonl").read_text().splitlines()
]


def test_there_are_many_of_them_and_few_of_each() -> None:
    programs = Counter(log["program"] for log in LOGS)
    assert len(LOGS) >= 200
    assert len(programs) >= 60
    assert max(programs.values()) <= 3
    assert sum(bool(log["exit_code"]) for log in LOGS) >= 100


@pytest.mark.parametrize("log", LOGS, ids=[f"{number}-{log['program']}" for number, log in enumerate(LOGS)])
def test_no_entry_explains_it(log: dict[str, Any]) -> None:
    tail = log["tail"]
    assert find_error(tail) is None
    first = explain([("log", read_log(tail))]).first_failure
    assert first is None or first.error_id is None
    if log["exit_code"]:
        failed = find(NodeEvidence(run=ended(0, exit_code=log["exit_code"] % 100 or 1, ended_s=9.0), log=tail))
        assert failed.error_id is None


@pytest.mark.parametrize("program", ["train mlp", "train transformer", "torchrun"])
def test_a_training_that_ended_well_has_no_failure_at_all(program: str) -> None:
    whole = next(log for log in LOGS if log["program"] == program and log["exit_code"] == 0)
    assert explain([("log", read_log(whole["tail"]))]).first_failure is None
