"""Parts of a screen on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.render.blocks import blocks_html
from multinode.render.csv_text import blocks_csv
from multinode.render.sheet import Column, Sheet, blocks_markdown, sheet_markdown
from multinode.render.table import BAD, paragraph, print_parts, screen_text, sheet_table
from multinode.render.terminal import block_parts


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


def test_a_figure_for_csv_files_alone_is_in_no_other_table() -> None:
    speed, seed = Figure[float]("speed", "speed", form="figure"), Figure[int]("seed", form="digits", only_csv=True)
    sheet = Frame(title="runs", rows=(Row(None, {"speed": 19.0, "seed": 1234}),), figures=(speed, seed)).sheet()
    shown = (screen_text(block_parts([sheet])), blocks_markdown([sheet]), blocks_html([sheet]))
    assert [("19.0" in text, "1234" in text, "seed" in text) for text in shown] == [(True, False, False)] * 3
    assert (
        blocks_csv([("r", [sheet])]) == "run,table,row,figure,unit,value\nr,runs,1,speed,,19.0\nr,runs,1,seed,,1234\n"
    )
