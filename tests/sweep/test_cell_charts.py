from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.stats.unknown import Unknown, known
from multinode.sweep.charts import MOST_BARS, CellChart, bar_chart, memory_chart, tokens_chart
from multinode.sweep.figures import BY_NAME, CellRow, CellTable
from tests.sweep.cells import PUBLISHED, SWEEP, measured_cell, swept


def traces(chart: CellChart | None) -> dict[str, Any]:
    assert chart is not None
    return {trace.name: trace for trace in chart.figure.data}


def speed(table: CellTable) -> CellChart | None:
    return bar_chart(table, BY_NAME["samples_per_s"], "samples/s")


def test_every_cell_has_a_bar_in_the_table_s_order_coloured_by_nodes_and_workers() -> None:
    drawn = traces(speed(SWEEP))
    assert list(drawn["1 x 2"].y) == [0, 1, 2, 3, 4, 5]
    assert list(drawn["2 x 2"].y) == [8, 9, 10, 11, 12, 13]
    values = [known(row.samples_per_s).value for row in SWEEP.cells if not isinstance(row.samples_per_s, Unknown)]
    assert [*drawn["1 x 2"].x, *drawn["2 x 2"].x] == values
    first = known(SWEEP.cells[0].samples_per_s)
    assert drawn["1 x 2"].error_x.array[0] == pytest.approx(first.high - first.value)


def test_a_cell_without_figures_has_a_word_in_place_of_a_bar() -> None:
    words = traces(speed(SWEEP))["without figures"]
    assert list(words.y) == [6, 7, 14, 15]
    assert [text.strip() for text in words.text] == ["OOM", "skipped", "OOM (node)", "skipped"]
    assert "CUDA out of memory" in words.customdata[0][1]


def test_a_level_to_hold_the_bars_against_is_a_line() -> None:
    chart = bar_chart(SWEEP, BY_NAME["relative"], "relative", level=1.0)
    assert chart is not None
    assert [shape.x0 for shape in chart.figure.layout.shapes] == [1.0]


def test_what_no_cell_has_is_not_drawn() -> None:
    assert bar_chart(PUBLISHED, BY_NAME["network_share"], "network") is None
    assert memory_chart(swept(measured_cell(1, "lora", 1))) is None
    assert memory_chart(swept(measured_cell(1, "lora", 1, state="skipped"))) is None
    assert tokens_chart(SWEEP) is None


def test_names_of_many_cells_make_a_taller_chart_of_no_more_than_can_be_read() -> None:
    few, many = speed(SWEEP), speed(swept(*(measured_cell(1, "lora", batch) for batch in range(1, 101))))
    assert few is not None
    assert many is not None
    assert few.rows < many.rows
    assert len(many.figure.data[0].y) == MOST_BARS


def test_memory_is_drawn_over_the_batch_a_line_a_method_and_place_and_an_oom_is_marked() -> None:
    drawn = traces(memory_chart(SWEEP))
    assert list(drawn["1 x 2, lora"].x) == [1, 2, 4, 8]
    assert list(drawn["1 x 2, full"].x) == [1, 2]
    assert list(drawn["1 x 2, full"].y) == pytest.approx([16.35, 17.45])
    out = drawn["out of memory"]
    assert list(out.x) == [4, 4]
    assert out.y[0] > 18.3
    assert list(out.marker.color) == [drawn[name].line.color for name in ("1 x 2, full", "2 x 2, full")]


@pytest.mark.parametrize("name", ["sequence_length", "lora_rank"])
def test_memory_of_another_length_or_rank_is_another_line(name: str) -> None:
    two = SWEEP.cells[:2]
    rows = [
        msgspec.structs.replace(row, settings=msgspec.structs.replace(row.settings, **{name: value}))
        for row in two
        for value in (8, 64)
    ]
    drawn = traces(memory_chart(msgspec.structs.replace(SWEEP, cells=tuple(rows))))
    assert [list(line.x) for line in drawn.values()] == [[1, 2], [1, 2]]
    assert sorted(key.split()[-1] for key in drawn) == ["64", "8"]


def test_tokens_are_drawn_over_the_sequence_length_where_it_varies() -> None:
    rows = [at_length(row, 512 << number) for number, row in enumerate(SWEEP.cells[:4])]
    rows = [msgspec.structs.replace(row, settings=_batch_of_one(row)) for row in rows]
    drawn = traces(tokens_chart(msgspec.structs.replace(SWEEP, cells=tuple(reversed(rows)))))
    assert list(drawn["all"].x) == [512, 1024, 2048, 4096]
    assert list(drawn["all"].y) == [
        known(row.tokens_per_s).value for row in rows if not isinstance(row.tokens_per_s, Unknown)
    ]


def at_length(row: CellRow, tokens: int) -> CellRow:
    return msgspec.structs.replace(row, settings=msgspec.structs.replace(row.settings, sequence_length=tokens))


def _batch_of_one(row: CellRow) -> Any:
    return msgspec.structs.replace(row.settings, per_device_batch=1)


def test_many_lines_are_no_more_than_can_be_told_apart_and_take_more_room() -> None:
    rows = [
        msgspec.structs.replace(row, settings=msgspec.structs.replace(row.settings, model=f"m{number}"))
        for number in range(40)
        for row in SWEEP.cells[:2]
    ]
    chart = memory_chart(msgspec.structs.replace(SWEEP, cells=tuple(rows)))
    assert chart is not None
    assert len(chart.figure.data) == 24
    assert chart.rows > 2


def test_names_are_text_to_a_chart() -> None:
    attack = "<a href='http://x'>y</a>"
    rows = tuple(msgspec.structs.replace(row, label=f"{attack}{place}") for place, row in enumerate(SWEEP.cells))
    chart = speed(msgspec.structs.replace(SWEEP, cells=rows))
    assert chart is not None
    told = [*chart.figure.layout.yaxis.ticktext, *(data[0] for trace in chart.figure.data for data in trace.customdata)]
    assert not any("<a" in text for text in told)
