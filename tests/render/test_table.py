"""Parts of a screen on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from multinode.render.sheet import Column, Sheet, sheet_markdown
from multinode.render.table import BAD, paragraph, print_parts, screen_text, sheet_table


@pytest.mark.parametrize(("variables", "color"), [({}, "\x1b[1;31m"), ({"NO_COLOR": "1"}, "\x1b[1m")])
def test_a_verdict_is_coloured_unless_nobody_wants_it(variables: dict[str, str], color: str) -> None:
    terminal = {"TERM": "xterm-256color"}
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ=terminal | variables)
    with console.capture() as captured:
        print_parts(console, [paragraph("2 nodes are slower", BAD)])
    assert captured.get().startswith(f"{color}2 nodes are slower")


def test_what_signs_mean_is_told_with_the_details_alone() -> None:
    sheet = Sheet(
        title="", columns=(Column("speed"),), rows=(("19 \N{PLUS-MINUS SIGN} 1",),), notes=("n",), legend=("l",)
    )
    assert screen_text([sheet_table(sheet)]).endswith("n\nl\n")
    assert screen_text([sheet_table(sheet, legend=False)]).endswith("n\n")
    assert "\nl.\n" in sheet_markdown(sheet)
