"""Logs that people published, cut to what matters, each with the right answer: what must be said, and what must not.

`source` is the issue that a log stands in; some are made of usual lines, where no published log has them together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.diagnose.explanation import explain
from multinode.diagnose.log_words import read_log

LOGS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "public_logs.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("log", [log for log in LOGS if "healthy" not in log], ids=lambda log: log["source"])
def test_the_first_cause_is_told_with_rank_and_node_and_nothing_else(log: dict[str, Any]) -> None:
    told = explain([("log", read_log(log["log"]))])
    first = told.first_failure
    assert first is not None
    assert (first.rank, first.node) == (log["rank"], log["node"])
    said = " ".join((first.message, first.cause or "", first.hint or ""))
    assert all(any(each in said for each in words.split("|")) for words in log["says"]), said
    shown = " ".join((first.message, first.cause or "", *told.next))
    assert [words for words in log["never"] if words in shown] == []


@pytest.mark.parametrize("log", [log for log in LOGS if "healthy" in log], ids=lambda log: log["source"])
def test_a_run_that_went_well_has_no_failure(log: dict[str, Any]) -> None:
    told = explain([("log", read_log(log["log"]))])
    assert told.first_failure is None
    assert not told.is_unclear
