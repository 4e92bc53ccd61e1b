"""Our pages in a real browser: no complaint, no request, nothing that is cut, and every figure as in the JSON."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from multinode.contrast.figures import Contrast
from multinode.contrast.side import load_contrast
from multinode.network.measure import load_scan, scan_messages
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import ScanReport
from multinode.predict.forecast import Forecast
from multinode.records.benchmark import CollectiveTest
from multinode.results.run_page import run_page
from multinode.stats.unknown import Unknown, known
from multinode.sweep.figures import CellTable
from multinode.sweep.measure import load_table
from tests import make
from tests.browser.chromium import Chromium, View, chromium
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN, CURVE
from tests.network.test_nccl_tests_text import row
from tests.profile.observing import RUN, SUMMARY, observed
from tests.sweep.cells import PUBLISHED, SWEEP, SWEEP_RUN, renamed

pytestmark = pytest.mark.browser

_SWEEP = ScanReport(
    run_id=RUN.run_id,
    backend="gloo",
    world_size=2,
    workers=(1, 1),
    nodes=("box1", "box2"),
    test=CollectiveTest(messages=scan_messages(["all_reduce"], (1 << 20,))),
    rows=(row(100.0), row(90.0, "all_gather")),
    verdict=Verdict(message="this is what the link carries"),
    directory="/r",
)
_HOSTILE = "<b>x</b><script>console.error(1)</script><img src=http://127.0.0.1:9/y><a href='http://z'>" + "w" * 90
_PAGES = {
    "contrast": [
        make.stored_run(CONTRAST_RUN, {load_contrast: CONTRAST}),
        make.stored_run(msgspec.structs.replace(CONTRAST_RUN, run_id="20260105-dd"), {load_contrast: CURVE}),
    ],
    "run": [make.stored_run(RUN, summary=SUMMARY, observed=observed())],
    "sweep": [make.stored_run(RUN, {load_scan: _SWEEP})],
    "cells": [make.stored_run(SWEEP_RUN, {load_table: SWEEP})],
    "published": [make.stored_run(SWEEP_RUN, {load_table: PUBLISHED})],
    "hostile": [make.stored_run(SWEEP_RUN, {load_table: renamed(SWEEP, _HOSTILE)})],
}
_CHARTS = {
    "contrast": ["run-1-sides", "run-1-links", "run-2-sides", "run-2-scaling"],
    "run": ["run-1-steps", "run-1-split", "run-1-time", "run-1-loss"],
    "sweep": ["run-1-sweep"],
    "cells": [f"run-1-{name}" for name in ("speed", "relative", "hourly", "purchase", "network", "memory")],
    "published": [f"run-1-{name}" for name in ("speed", "relative", "purchase", "memory")],
    "hostile": [f"run-1-{name}" for name in ("speed", "relative", "hourly", "purchase", "network", "memory")],
}
# Width and colours do not depend on each other.
_VIEWS = [
    View(1280, "light"),
    View(400, "dark"),
    *(pytest.param(one, marks=pytest.mark.thorough) for one in (View(1280, "dark"), View(400, "light"))),
]

# What stands farther right than the window, but for what scrolls in a box of its own.
_CUT = """
Array.from(document.body.querySelectorAll('*')).filter(element =>
    element.getBoundingClientRect().right > innerWidth + 1 && !element.closest('.scroll, pre, #js-plotly-tester')
).map(element => element.outerHTML.slice(0, 100))
"""
_DRAWN = """
Array.from(document.querySelectorAll('.plotly-graph-div')).filter(chart => {
    const box = chart.querySelector('.plot-container .main-svg').getBoundingClientRect();
    return box.width > innerWidth / 2 && box.height > 100 && chart.querySelector('.trace');
}).map(chart => chart.id)
"""
_TABLES = """
Array.from(document.querySelectorAll('section.run')).map(section =>
    Array.from(section.querySelectorAll('tr')).map(row => Array.from(row.cells).map(cell => cell.innerText)))
"""
_TILES = """
Array.from(document.querySelectorAll('#run-1 .tile')).map(
    tile => [tile.querySelector('span').innerText, tile.querySelector('b').innerText])
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages, each under its name."""
    folder = tmp_path_factory.mktemp("pages")
    for name, runs in _PAGES.items():
        (folder / f"{name}.html").write_text(run_page(runs))
    return folder


@pytest.mark.parametrize("view", _VIEWS, ids=str)
@pytest.mark.parametrize("name", _PAGES)
def test_a_page_stands_without_a_complaint_a_request_or_a_cut(
    browser: Chromium, pages: Path, name: str, view: View, tmp_path: Path
) -> None:
    page = pages / f"{name}.html"
    browser.open(page, view)
    assert browser.complaints == []
    assert browser.asked == [page.as_uri()]
    assert browser.evaluate("innerWidth") == view.width
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= view.width
    assert browser.evaluate(_CUT) == []
    assert browser.evaluate(_DRAWN) == _CHARTS[name]
    # Without a mouse they would always stand, and on the legend.
    assert browser.evaluate("document.querySelectorAll('.modebar-btn').length") == 0
    browser.picture(tmp_path / "page.png")
    assert _size(tmp_path / "page.png")[0] == view.width


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_words_and_charts_can_be_read_in_the_colours_that_the_reader_prefers(
    browser: Chromium, pages: Path, colours: str
) -> None:
    browser.open(pages / "contrast.html", View(1280, colours))
    ink, paper, axis = browser.evaluate("""[getComputedStyle(document.body).color,
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.xaxislayer-above text')).fill]""")
    assert axis == ink
    assert (_brightness(ink) > _brightness(paper)) == (colours == "dark")
    assert abs(_brightness(ink) - _brightness(paper)) > 150


def test_the_figures_in_the_browser_are_those_of_the_document(browser: Chromium, pages: Path) -> None:
    document = msgspec.json.decode(msgspec.json.encode(CONTRAST), type=Contrast)
    browser.open(pages / "contrast.html", View(1280))
    tiles = {name: _number(value) for name, value in browser.evaluate(_TILES)}
    assert tiles["speed-up"] == pytest.approx(document.speedup.value, rel=0.005)
    assert tiles["samples/s, 2 nodes"] == pytest.approx(document.candidate.samples_per_s.value, rel=0.005)
    assert tiles["step time, 1 node (ms)"] == pytest.approx(document.baseline.step_time_ms.value, rel=0.005)
    assert browser.evaluate("document.querySelector('#run-1 .lead').innerText") == document.verdict.message

    rows = {cells[0]: cells[1:] for cells in browser.evaluate(_TABLES)[0]}
    sides = (document.baseline, document.candidate)
    for name, told in {
        "samples/s": [side.samples_per_s.value for side in sides],
        "TGS (tokens/s per worker)": [known(side.tgs).value for side in sides if not isinstance(side.tgs, Unknown)],
        "step time (ms)": [side.step_time_ms.value for side in sides],
        "exposed communication (ms)": [
            known(side.exposed_ms).value for side in sides if not isinstance(side.exposed_ms, Unknown)
        ],
        "global batch (samples)": [side.global_batch for side in sides],
        "cost per million tokens": [side.cost_per_million_tokens for side in sides],
    }.items():
        assert [_number(cell) for cell in rows[name]] == pytest.approx(told, rel=0.01), name
    for advice in document.advice:
        assert _number(rows[advice.name][0].removesuffix("x")) == pytest.approx(advice.gain.value, rel=0.01)


def test_runs_on_one_page_are_told_apart(browser: Chromium, pages: Path) -> None:
    browser.open(pages / "contrast.html", View(1280))
    lines = "Array.from(document.querySelectorAll('section.run')).map(one => getComputedStyle(one).borderTopWidth)"
    assert browser.evaluate(lines) == ["0px", "3px"]


def test_a_chart_holds_what_was_predicted_and_what_was_measured(browser: Chromium, pages: Path) -> None:
    browser.open(pages / "contrast.html", View(1280))
    drawn = browser.evaluate(
        "Object.fromEntries(document.getElementById('run-1-links').data.map(one => [one.name, [one.x, one.y]]))"
    )
    assert isinstance(CONTRAST.forecast, Forecast)
    wanted = [one for one in CONTRAST.forecast.scenarios if one.nodes == 2 and one.accumulation == 1]
    assert drawn["2 x 1, predicted"] == [
        [one.link_gbit_per_s for one in wanted],
        [pytest.approx(one.samples_per_s.value) for one in wanted],
    ]
    assert drawn["interval"][1] == [pytest.approx(one.samples_per_s.low) for one in wanted]
    assert drawn["high"][1] == [pytest.approx(one.samples_per_s.high) for one in wanted]
    assert drawn["2 x 1, measured"] == [[0.1], [CONTRAST.candidate.samples_per_s.value]]
    break_even = drawn["faster than 1 x 1: 710 Mbit/s (610 to 840 Mbit/s)"]
    assert break_even[0] == pytest.approx([0.6118] * 2 + [0.8391] * 2)


def test_the_cells_in_the_browser_are_those_of_the_document(browser: Chromium, pages: Path) -> None:
    document = msgspec.json.decode(msgspec.json.encode(SWEEP), type=CellTable)
    browser.open(pages / "cells.html", View(1280))
    tables = browser.evaluate(_TABLES)[0]
    head = next(cells for cells in tables if cells[0] == "cell")
    names = [name.split("\n")[0] for name in head]
    rows = {cells[0]: dict(zip(names, cells, strict=True)) for cells in tables if len(cells) == len(head)}
    for cell in document.cells:
        shown = rows[cell.label]
        if isinstance(cell.samples_per_s, Unknown):
            assert shown["memory"] == "-"
            continue
        assert cell.relative is not None
        assert _number(shown["relative"]) == pytest.approx(cell.relative.value, rel=0.005)
        assert _number(shown["memory"]) == pytest.approx(cell.peak_memory_gib, rel=0.005)
        assert _number(shown["network"]) / 100 == pytest.approx(cell.network_share, abs=0.0006)

    drawn = browser.evaluate("document.getElementById('run-1-speed').data.map(one => [one.name, one.x, one.y])")
    bars = {place: x for name, xs, ys in drawn if name != "without figures" for x, place in zip(xs, ys, strict=True)}
    told = {
        place: known(cell.samples_per_s).value
        for place, cell in enumerate(document.cells)
        if not isinstance(cell.samples_per_s, Unknown)
    }
    assert bars == pytest.approx(told)
    words = next(zip(texts, ys, strict=True) for name, texts, ys in drawn if name == "without figures")
    assert [place for _, place in words] == [6, 7, 14, 15]


def test_words_of_a_stranger_are_words_in_the_browser(browser: Chromium, pages: Path) -> None:
    browser.open(pages / "hostile.html", View(1280))
    made = "document.querySelectorAll('section.run b:not(.tile b), section.run script[src], img, a[href]').length"
    assert browser.evaluate(made) == 0
    names = browser.evaluate("Array.from(document.querySelectorAll('#run-1-speed .ytick')).map(one => one.textContent)")
    assert names[0].startswith("<b>x</b><script>")


def test_a_page_that_complains_asks_or_overflows_is_seen(browser: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><script>console.error('so wrong'); nothing.at.all</script>"
        '<img src="http://127.0.0.1:9/x.png"><div style="width: 3000px">wide</div>'
    )
    browser.open(page, View(400))
    assert any("so wrong" in one for one in browser.complaints)
    assert any("nothing is not defined" in one for one in browser.complaints)
    assert "http://127.0.0.1:9/x.png" in browser.asked
    assert browser.evaluate("document.scrollingElement.scrollWidth") > 400
    assert browser.evaluate(_CUT)


def _number(text: str) -> float:
    found = re.match(r"[-+]?[\d,]*\.?\d+", text)
    assert found, f"{text!r} has no figure"
    return float(found[0].replace(",", ""))


def _brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def _size(path: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height
