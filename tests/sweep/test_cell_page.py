from __future__ import annotations

import re

import msgspec

from multinode.results.run_page import run_markdown, run_page, table_text
from multinode.sweep.figures import CellTable, Cheapest
from multinode.sweep.measure import load_table
from tests import make
from tests.sweep.cells import PUBLISHED, SWEEP, SWEEP_RUN, measured_cell, renamed, swept


def body(text: str) -> str:
    """What follows the library of charts."""
    return text.split("<body>")[1]


def charts(table: CellTable) -> list[str]:
    names = ("speed", "relative", "hourly", "purchase", "network", "memory", "tokens")
    text = body(table_text(table, "html"))
    return [name for name in names if f'id="run-1-{name}"' in text]


def test_the_page_of_a_sweep_says_the_most_first() -> None:
    text = body(run_page([make.stored_run(SWEEP_RUN, {load_table: SWEEP})]))
    wanted = [
        '<p class="lead">The fastest is',
        'class="tiles"',
        "<h2>samples/s by cell</h2>",
        "<h2>memory by batch</h2>",
    ]
    wanted += ["<th class=words>cell</th>", "<h2>not measured</h2>"]
    order = [text.index(one) for one in wanted]
    assert order == sorted(order)
    assert "Nothing was recorded" not in text
    assert "<h2>relative to 1x2-lora-batch1</h2>" in text


def test_only_charts_that_say_something_are_drawn() -> None:
    assert charts(SWEEP) == ["speed", "relative", "hourly", "purchase", "network", "memory"]
    assert charts(PUBLISHED) == ["speed", "relative", "purchase", "memory"]
    assert charts(swept(measured_cell(1, "lora", 1, state="waiting"))) == []
    alone = tuple(msgspec.structs.replace(row, network_share=0.0) for row in SWEEP.cells)
    assert "network" not in charts(msgspec.structs.replace(SWEEP, cells=alone))


def test_the_best_of_each_figure_is_named_with_its_cell() -> None:
    text = body(table_text(SWEEP, "html"))
    assert "<b>108.3</b><span>most samples/s: 2x2-lora-batch8</span>" in text
    assert "<b>10.6</b><span>lowest memory per worker (GiB): 1x2-lora-batch1</span>" in text
    assert "highest MFU: 1x2-lora-batch8" in text


def test_the_cheapest_cell_stands_on_top_where_a_deadline_was_asked_for() -> None:
    table = msgspec.structs.replace(SWEEP, cheapest=Cheapest(deadline_s=60.0, message="the cheapest is X"))
    assert '<p class="lead">the cheapest is X</p>' in body(table_text(table, "html"))


def test_a_sweep_is_in_the_markdown_of_a_report() -> None:
    text = run_markdown([make.stored_run(SWEEP_RUN, {load_table: SWEEP})])
    assert text.startswith("## sft.yaml")
    assert "| 1x2-full-batch4 |" in text


def test_nothing_that_a_table_says_is_run_by_the_page() -> None:
    attack = "</script><script>alert(1)</script><img src=http://x/y onerror=alert(2)>"
    text = body(table_text(renamed(SWEEP, attack), "html"))
    assert "<script>alert" not in text
    assert "<img" not in text


def test_no_cell_is_the_cheapest_of_two_currencies_or_of_two_jobs() -> None:
    assert {"most samples per unit of money", "cheapest full run"} <= set(tiles(SWEEP))
    first, *others = SWEEP.cells
    foreign = msgspec.structs.replace(SWEEP, cells=(msgspec.structs.replace(first, currency="EUR"), *others))
    assert not {"most samples per unit of money", "cheapest full run"} & set(tiles(foreign))
    settings = msgspec.structs.replace(first.settings, model="another")
    other = msgspec.structs.replace(SWEEP, cells=(msgspec.structs.replace(first, settings=settings), *others))
    assert "cheapest full run" not in tiles(other)
    assert "most samples per unit of money" in tiles(other)


def tiles(table: CellTable) -> list[str]:
    return re.findall(r"</b><span>([^:<]+):", body(table_text(table, "html")))
