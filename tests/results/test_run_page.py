from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from multinode.bench.measure import load_bench
from multinode.network.measure import load_scan, scan_messages
from multinode.network.scan_evidence import CollectiveRow
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import ScanReport
from multinode.profile.figures import FigureNote
from multinode.profile.observed import observe
from multinode.records.benchmark import CollectiveTest
from multinode.results.run_page import run_page
from multinode.stats.estimate import exactly
from multinode.stats.unknown import UNMEASURED
from tests import make
from tests.bench.made_up_bench import gpu, on_gpu, part, report, speeds
from tests.network.test_nccl_tests_text import row
from tests.profile.observing import RUN, SUMMARY, observed

WHOLE = make.stored_run(RUN, summary=SUMMARY, observed=observed())
_ASKING = {"src", "href", "srcset", "poster", "data", "action", "background", "manifest"}
_BEFORE_BODY = re.compile(r"^.*<body>", re.DOTALL)


class _Read(HTMLParser):
    """What a browser would ask for, show, and open without closing."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.charts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.left_open = self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value or "" for name, value in attrs if name in _ASKING]
        given = dict(attrs)
        if "plotly-graph-div" in (given.get("class") or ""):
            self.charts.append(given.get("id") or "")
        if tag == "tr":
            self.rows.append([])
        if tag not in {"meta", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in {"script", "style"}:
            self.words.append(data)
            if self._open[-1] in {"td", "th"}:
                self.rows[-1].append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def page() -> str:
    return run_page([WHOLE])


def test_the_page_asks_nobody_for_anything_and_forbids_it_to_itself(page: str) -> None:
    read = _Read(page)
    assert read.asked == []
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(read.tags)
    assert read.left_open == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "@import" not in page[: page.index("<script>")]
    assert "url(" not in page[: page.index("<script>")]


def test_its_numbers_are_those_of_the_summary(page: str) -> None:
    read = _Read(page)
    for tile in ("401.2", "39.9", "5,103", "30.0%", "25.3%", "31.0%"):
        assert tile in read.words
    assert ["125.80", "126.30", "127.10"] in read.rows
    assert ["box2", "ens1f0", "2.410", "2.530", "9.100", "10", "25.3%", "0/17", "0.02%"] in read.rows
    assert "exposed communication takes 120 of 401 ms per step (30%)" in read.text
    assert "check the fans of box2" in read.text
    assert "the first 5 of 40 steps are excluded as warm-up" in read.text
    assert "according to each node's clock" in read.text


def test_it_has_a_chart_of_each_kind_and_the_library_once(page: str) -> None:
    assert _Read(page).charts == ["run-1-steps", "run-1-split", "run-1-time", "run-1-loss"]
    assert page.count("plotly.js v") == 1
    assert "width=device-width" in page
    assert "prefers-color-scheme: dark" in page


def test_the_same_run_gives_the_same_page(page: str) -> None:
    assert run_page([WHOLE]) == page


def test_a_run_without_samples_has_a_page_that_says_so() -> None:
    bare = make.no_steps()
    seen = observed()
    silent = observe(RUN.run_id, [msgspec.structs.replace(node, samples=()) for node in seen.nodes])
    for run in (make.stored_run(RUN), make.stored_run(RUN, summary=bare, observed=silent)):
        read = _Read(run_page([run]))
        assert "This run has no recorded samples" in read.text
        assert read.charts == []
    assert "no worker recorded a step" in read.text


def test_several_runs_have_a_section_each_and_one_table_beside_each_other() -> None:
    other = msgspec.structs.replace(RUN, run_id="20260103-bb", job="other.yaml")
    figures = msgspec.structs.replace(SUMMARY, samples_per_s=exactly(77.7), utilisation=UNMEASURED)
    read = _Read(run_page([WHOLE, make.stored_run(other, summary=figures, observed=observed())]))
    assert read.tags.count("section") == 2
    assert len(set(read.charts)) == 8
    head = next(cells for cells in read.rows if cells[:2] == ["run", "state"])
    first, second = (next(cells for cells in read.rows if cells[0] == name) for name in (RUN.run_id, "20260103-bb"))
    at = head.index("samples/s")
    assert (first[at], second[at]) == ("39.9", "77.7")
    assert second[head.index("MFU")] == "-"


def test_an_nccl_test_has_its_sweep_and_its_verdict() -> None:
    rows: tuple[CollectiveRow, ...] = (row(100.0), row(90.0, "all_gather"))
    sweep = ScanReport(
        run_id=RUN.run_id,
        backend="gloo",
        world_size=2,
        workers=(1, 1),
        nodes=("box1", "box2"),
        test=CollectiveTest(messages=scan_messages(["all_reduce"], (1 << 20,))),
        rows=rows,
        verdict=Verdict(message="this is what the link carries"),
        directory="/r",
    )
    untrained = make.no_steps(run_id=RUN.run_id)
    read = _Read(
        run_page(
            [make.stored_run(msgspec.structs.replace(RUN, kind="nccl-test"), {load_scan: sweep}, summary=untrained)]
        )
    )
    assert read.charts == ["run-1-sweep"]
    assert "this is what the link carries" in read.text
    # Its run trained nothing, and nothing of a training is missing.
    assert "bottleneck" not in read.text
    assert "no steps" not in read.text


def test_a_bench_has_its_verdict_and_its_tables() -> None:
    found = report(part(0, on_gpu(speeds(), gpu())), part(1, on_gpu(speeds(0.5), gpu()), node="<b>1"))
    read = _Read(run_page([make.stored_run(RUN, {load_bench: found})]))
    assert "<b>1 is slow: 50% of the speed of node0 in matrix products" in read.text
    assert ["node0", "0", "alone", "250.0 80%", "1400/-"] in read.rows
    assert ["<b>1", "0", "alone", "125.0 40%!", "1400/-"] in read.rows
    assert "median of the timings over 1 s per test" in read.text
    assert "no recorded samples" not in read.text


def test_nothing_that_a_node_or_a_job_says_is_run_by_the_page() -> None:
    attack = "</script><script>alert(1)</script><img src=http://x/y onerror=alert(2)>\u202e"
    seen = observed()
    nodes = tuple(msgspec.structs.replace(node, name=f"{node.name}{attack}") for node in seen.nodes)
    run = msgspec.structs.replace(
        RUN, job=attack, nodes=tuple(msgspec.structs.replace(node, name=attack) for node in RUN.nodes)
    )
    summary = msgspec.structs.replace(SUMMARY, rule=attack, notes=(FigureNote(concerns=attack, message=attack),))
    page = run_page([make.stored_run(run, summary=summary, observed=msgspec.structs.replace(seen, nodes=nodes))])
    read = _Read(page)
    assert read.asked == []
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "img" not in read.tags
