from __future__ import annotations

from multinode.render.sheet import Column, Sheet
from multinode.render.table import screen_text, sheet_table

COLUMNS = (Column("node", words=True), Column("samples", "/s"), Column("throttled by", words=True))
ROW = ("box1", "26.2 (24.9-27.6)", "hw_thermal_slowdown 40% of the time")


def lines(width: int) -> list[str]:
    text = screen_text([sheet_table(Sheet(title="", columns=COLUMNS, rows=(ROW,)))], width)
    return [line.rstrip() for line in text.splitlines()]


def test_text_wraps_between_words_before_figures_do() -> None:
    shown = lines(45)
    assert max(map(len, shown)) <= 45
    assert "26.2 (24.9-27.6)" in shown[-2]
    assert "hw_thermal_slowdown" in shown[-2]


def test_figures_wrap_at_their_blanks_before_a_word_breaks() -> None:
    shown = lines(38)
    assert max(map(len, shown)) <= 38
    assert "hw_thermal_slowdown" in shown[-2]
    assert [line for line in shown if "(24.9-27.6)" in line]


def test_a_table_with_too_many_words_still_fits() -> None:
    assert max(map(len, lines(20))) <= 20
