"""Parts of a screen on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding
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


def test_nor_is_it_a_row_of_a_table_with_a_column_for_each_side() -> None:
    speed, seed = Figure[float]("speed", "speed", form="figure"), Figure[int]("seed", form="digits", only_csv=True)
    sides = (Row(None, {"speed": 19.0, "seed": 1234}), Row(None, {"speed": 37.0, "seed": 1234}))
    heads = (Column("", words=True), Column("1 node"), Column("2 nodes"))
    sheet = Frame(title="sides", rows=sides, figures=(speed, seed)).sheet(across=True, heads=heads)
    shown = (screen_text(block_parts([sheet])), blocks_markdown([sheet]), blocks_html([sheet]))
    assert [("37.0" in text, "1234" in text, "seed" in text) for text in shown] == [(True, False, False)] * 3
    assert "r,sides,2,,,seed\nr,sides,2,1 node,,1234\nr,sides,2,2 nodes,,1234\n" in blocks_csv([("r", [sheet])])


def test_notes_of_a_table_stand_above_those_of_its_frame() -> None:
    speed, own = Figure[float]("speed", "speed", form="figure"), Finding(message="the nodes were busy")
    frame = Frame(rows=(Row(None, {"speed": 19.0}),), figures=(speed,), notes=(own,))
    assert frame.sheet(notes=("speed: of all workers",)).notes == ("speed: of all workers", "the nodes were busy")
