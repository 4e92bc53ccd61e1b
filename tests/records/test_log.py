from __future__ import annotations

import tracemalloc

import pytest

from multinode.records.log import LogCleaner, clean_log, last_lines, next_stage


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
        ("", "[W1125 03:14:32 socket.cpp:207] [c10d] The hostname of the client socket\n", ""),
        ("", BAR, "tokenizing the data 45%"),
        ("tokenizing the data 45%", "something else\n", "tokenizing the data 45%"),
        ("tokenizing the data 45%", "Loading checkpoint shards:  50%|##\n", "loading the model 50%"),
        ("loading the model", "ninja: no work to do.\n", "compiling"),
        ("loading the model", f"{BAR}\n***** Running training *****\n  Num examples = 400\n", "first step"),
    ],
)
def test_the_stage_is_the_last_that_the_log_names(before: str, log: str, after: str) -> None:
    assert next_stage(before, log) == after


def read(data: bytes, size: int, rank: int | None = None, *, draws: bool = False) -> str:
    reader = LogCleaner(rank, draws=draws)
    pieces = [piece for at in range(0, len(data), size) for piece in reader.feed(data[at : at + size])]
    return "".join(text + "\n" * ended for text, ended in (*pieces, *reader.end()))


RAW = (
    "plain\n\ntwo\r\n 10%|#  |\r 50%|## |\r100%|###|\n\x1b[1;31merror\x1b[0m: boom\x00\ttab\n"
    "Gr\u00fc\u00dfe\r\n\r\r\nlast \u6771"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_log_that_comes_in_pieces_reads_as_the_whole(size: int) -> None:
    assert read(RAW.encode(), size) == clean_log(RAW) + "\n"
    assert read(b"one\ntwo\n", size) == "one\ntwo\n"


@pytest.mark.parametrize("size", [97, 1000])
def test_the_lines_of_another_rank_are_left_out_of_pieces(size: int) -> None:
    log = b"[rank0]: a\n[rank1]: b\nplain\n[rank10]: c\n\n[rank1]: " + b"d" * 200_000 + b"\nend"
    assert read(log, size, 0) == "[rank0]: a\nplain\n\nend\n"
    assert read(log, size, 1) == "[rank1]: b\nplain\n\n[rank1]: " + "d" * 200_000 + "\nend\n"


def test_what_a_carriage_return_ends_is_seen_while_it_is_drawn() -> None:
    reader = LogCleaner(draws=True)
    seen = [[text for text, _ in reader.feed(data)] for data in (b"\r 10%", b"\r 20%\r 30%\r 40%", b"\r\n", b"next\n")]
    assert seen == [[], [" 30%"], [" 40%"], ["next"]]
    assert read(b"windows\r\nline\r\n", 1, draws=True) == "windows\nline\n"


def test_a_line_without_an_end_is_given_out_in_pieces_and_in_little_memory() -> None:
    reader = LogCleaner()
    data = b"x" * 64_000
    tracemalloc.start()
    try:
        given = sum(len(text) for _ in range(200) for text, _ in reader.feed(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert given > 12_000_000
    assert peak < 4_000_000
    assert "".join(text for text, _ in reader.end()).strip("x") == ""


def test_an_escape_sequence_that_is_cut_where_a_piece_ends_is_none_that_is_shown() -> None:
    for before in range((1 << 16) - 10, (1 << 16) + 2, 3):
        log = b"x" * before + b"\x1b[38;5;196mred\x1b[0m\n"
        assert read(log, 50_000) == "x" * before + "red\n"
