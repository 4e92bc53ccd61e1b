from __future__ import annotations

import pytest

from multinode.core.run.log import clean_log, last_lines, next_stage


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("plain\ntwo", "plain\ntwo"),
        ("windows line\r\nnext", "windows line\nnext"),
        (" 10%|#  |\r 50%|## |\r100%|###|\n", "100%|###|\n"),
        ("100%|###|\r\n", "100%|###|\n"),
        ("\x1b[1;31merror\x1b[0m: \x1b[Kboom", "error: boom"),
        ("\x1b]0;window title\x07text", "text"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("bell\x07 and null\x00 and backspace\x08", "bell  and null  and backspace "),
        ("tab\tstays", "tab\tstays"),
        ("Gr\u00fc\u00dfe, \u6771\u4eac", "Gr\u00fc\u00dfe, \u6771\u4eac"),
    ],
)
def test_a_log_reads_as_a_terminal_would_have_left_it(raw: str, seen: str) -> None:
    assert clean_log(raw) == seen


def test_no_escape_survives_however_it_is_cut() -> None:
    sequence = "\x1b[38;5;196mred\x1b]2;title\x1b\\\x9b31m"
    for end in range(len(sequence) + 1):
        assert not {"\x1b", "\x9b"} & set(clean_log(sequence[:end]))


def test_the_last_lines_are_those_that_say_something() -> None:
    assert last_lines("one\ntwo\n\n  \nthree\r\n\n", 2) == "two\nthree"
    assert last_lines("", 3) == ""


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
