from __future__ import annotations

import pytest

from multinode.core.run.log import next_stage

BAR = "Running tokenizer on dataset:  10%|#  | 10/100\rRunning tokenizer on dataset:  45%|## | 45/100"


@pytest.mark.parametrize(
    ("before", "log", "after"),
    [
        ("", "", ""),
        ("", "\n  \n", ""),
        ("", "importing\n\x1b[31mwarnings.warn(\x1b[0m\n", "log: warnings.warn("),
        ("log: a", "b\n", "log: b"),
        ("log: a", "\n", "log: a"),
        ("", "x" * 100, "log: " + "x" * 45 + "..."),
        ("log: a", BAR, "tokenisation 45%"),
        ("tokenisation 45%", "something else\n", "tokenisation 45%"),
        ("tokenisation 45%", "Loading checkpoint shards:  50%|##\n", "model load 50%"),
        ("model load", f"{BAR}\n***** Running training *****\n  Num examples = 400\n", "first step"),
    ],
)
def test_the_stage_is_the_last_that_the_log_names_or_else_its_last_line(before: str, log: str, after: str) -> None:
    assert next_stage(before, log) == after
