"""Texts of the two catalogues: what stands for what varies, and which entry counts."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from multinode.text_pattern import find_first, find_values


@pytest.mark.parametrize(
    ("text", "line", "values"),
    [
        ("Permission denied", "ssh: permission DENIED (publickey)", {}),
        ("ission denied", "Permission denied", None),
        ("Permission den", "Permission denied", None),
        ("Permission den...", "Permission denied", {}),
        ("(publickey", "denied(publickey)", {}),
        ("connect ... refused", "connect to a: refused", {}),
        ("connect ... refused", f"connect {'a' * 201} refused", None),
        ("connect ... refused", "connect to a\n refused", None),
        ("name {host}: {reason}", "name a: down: x\r\nnext", {"host": "a", "reason": "down: x"}),
        ("name {host}: {reason}", f"name {'a' * 300}: ", {"host": "a" * 300}),
        ("name {host}: gone", "name a\nname b: gone", {"host": "b"}),
        ("missing ranks: {", "missing ranks: {1}", {}),
        ("ValueError", "ValueError: x", {}),
        ("ValueError", "a ValueError may come", None),
        ("'NCCL_ALGO'", "invalid 'nccl_algo'", None),
        ("'NCCL_ALGO'", "invalid 'NCCL_ALGO'", {}),
    ],
)
def test_a_text_stands_in_a_line_with_its_values(text: str, line: str, values: dict[str, str] | None) -> None:
    assert find_values((text,), line) == values


class Entry(NamedTuple):
    texts: tuple[str, ...]


def test_the_first_entry_counts_wherever_its_text_stands() -> None:
    without, late, early = Entry(()), Entry(("gone", "at {host}:")), Entry(("down",))
    assert find_first((without, late, early), "down\nat box: x") == (late, {"host": "box"})
    assert find_first((without, early, late), "down\nat box: x") == (early, {})
    assert find_first((without, late), "up") is None
