from __future__ import annotations

import msgspec
import pytest

from multinode.render.blocks import blocks_html
from multinode.render.sheet import (
    Block,
    Chart,
    Charts,
    Column,
    Fitting,
    Labels,
    NextCommand,
    Prose,
    Sheet,
    Tiles,
    blocks_markdown,
)
from multinode.render.table import screen_text
from multinode.render.terminal import block_parts

SHEET = Sheet(title="", columns=(Column("node", words=True), Column("speed")), rows=(("[bold]a", "0.5!"),))


def never() -> list[Chart]:
    raise AssertionError("a chart is drawn only on a page")


ANSWER: tuple[Block, ...] = (
    Prose("The verdict.", "lead", tone="bad"),
    Tiles((("speed", "0.5"),)),
    SHEET,
    msgspec.structs.replace(SHEET, title="every node", legend=("! is slow",), detail="full"),
    Labels((("Cause", "heat"),)),
    Labels((("Failed", "one"),), detail="brief"),
    Labels((("Odd", "two"), ("", "three")), detail="full"),
    Labels(()),
    Charts(never),
    NextCommand("Details", "multinode show r --details", detail="brief"),
)


def test_a_terminal_has_what_is_brief_and_no_details() -> None:
    assert screen_text(block_parts(ANSWER)) == (
        "The verdict.\n\nnode     speed\n" + 14 * "\u2500" + "\n[bold]a   0.5!\n\nCause       heat\nFailed      one\n"
        "Details     multinode show r --details\n"
    )


def test_with_details_a_terminal_has_every_table_and_its_legend() -> None:
    text = screen_text(block_parts(ANSWER, details=True))
    assert "every node\nnode     speed\n" in text
    assert "! is slow\n" in text
    assert text.endswith("\nCause       heat\nOdd         two\n            three\n")


def test_a_title_that_is_wider_than_its_table_is_whole() -> None:
    title = "each setting: 3 repeats, interleaved with the default"
    assert screen_text(block_parts([msgspec.structs.replace(SHEET, title=title)])).splitlines()[0] == title


@pytest.mark.parametrize("draw", [blocks_html, blocks_markdown])
def test_a_page_has_the_details_in_one_list_and_no_command(draw: type[str]) -> None:
    text = draw(ANSWER)
    at = [text.index(word) for word in ("The verdict.", "every node", "Cause", "heat", "Odd", "two", "three")]
    assert at == sorted(at)
    assert "Failed" not in text
    assert "multinode show" not in text


def test_the_first_choice_that_fits_is_shown_and_a_page_has_the_first() -> None:
    long, short = Prose("word " * 40), Prose("short")
    answer = [Fitting(((long,), (short,)), most_lines=2)]
    assert screen_text(block_parts(answer, width=40), 40) == "short\n"
    assert screen_text(block_parts(answer, width=200), 200).startswith("word word")
    assert blocks_markdown(answer).startswith("word word")
