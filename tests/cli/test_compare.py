"""`multinode compare` of records that are no trainings; trainings are compared as a contrast's sides are."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.network.measure import scan_messages
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import ScanReport
from multinode.records.benchmark import CollectiveTest
from multinode.stats.estimate import Estimate
from tests import make
from tests.golden import Golden, error_of
from tests.network.test_scan_changes import row
from tests.sweep.cells import SWEEP_RUN

FIRST, SECOND = "20260401-aa", "20260402-bb"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    return tmp_path


def keep(root: Path, run_id: str, kind: str, file: str, result: object) -> None:
    directory = make.store(root, run_id, run=msgspec.structs.replace(SWEEP_RUN, run_id=run_id, kind=kind))
    directory.write(file, result)


def compare(*options: str) -> str:
    result = CliRunner().invoke(build_app(), ["compare", *options], catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_two_records_of_another_kind_are_compared_figure_by_figure(root: Path, golden: Golden) -> None:
    for run_id, speed, other in ((FIRST, 2.0, 5.0), (SECOND, 3.0, 5.5)):
        tests = [
            {"label": "matmul bf16", "alone": Estimate(value=speed, low=0.95 * speed, high=1.05 * speed)},
            {"label": "copy", "alone": Estimate(value=other, low=0.9 * other, high=1.1 * other)},
            {"label": "bytes", "alone": {"value": 7}},
        ]
        keep(root, run_id, "bench", "bench.json", {"nodes": [{"node": "a", "workers": [{"rank": 0, "tests": tests}]}]})
    matmul, copy, size = json.loads(compare(FIRST, SECOND, "--json"))["figures"]
    assert matmul["name"] == "nodes a workers 0 tests matmul bf16 alone"
    assert (matmul["first"]["value"], matmul["second"]["value"], matmul["changed"]) == (2.0, 3.0, True)
    assert matmul["ratio"]["value"] == pytest.approx(1.5)
    assert matmul["ratio"]["low"] > 1.3
    # 10% more, and within what scatters.
    assert (copy["second"]["value"], copy["changed"]) == (5.5, False)
    assert (size["ratio"]["value"], size["changed"]) == (1.0, None)
    golden.check("compare_figures.txt", compare(FIRST, SECOND))
    golden.check("compare_figures_details.txt", compare(FIRST, SECOND, "--details"))


def test_workers_with_the_same_device_are_compared_each_with_itself(root: Path) -> None:
    for run_id, speeds in ((FIRST, (2.0, 8.0)), (SECOND, (3.0, 8.5))):
        workers = [
            {"rank": rank, "name": "A100", "tests": [{"label": "copy", "alone": {"value": speed}}]}
            for rank, speed in enumerate(speeds)
        ]
        keep(root, run_id, "bench", "bench.json", {"nodes": [{"node": "a", "workers": workers}]})
    figures = json.loads(compare(FIRST, SECOND, "--json"))["figures"]
    assert {one["name"]: (one["first"]["value"], one["second"]["value"]) for one in figures} == {
        "nodes a workers A100 tests copy alone": (2.0, 3.0),
        "nodes a workers A100 1 tests copy alone": (8.0, 8.5),
    }


def test_two_nccl_tests_are_compared_size_by_size(root: Path, golden: Golden) -> None:
    for run_id, time_us in ((FIRST, 1000.0), (SECOND, 2000.0)):
        scan = ScanReport(
            run_id=run_id,
            backend="gloo",
            world_size=2,
            workers=(1, 1),
            nodes=("a", "b"),
            test=CollectiveTest(messages=scan_messages(["all_reduce"], (1 << 20,))),
            rows=(row(time_us),),
            verdict=Verdict(message="this is what the link carries"),
            directory=f"/r/{run_id}",
        )
        keep(root, run_id, "nccl-test", "nccl-test.json", scan)
    changes = json.loads(compare(FIRST, SECOND, "--json"))["changes"]
    assert changes["before"] == FIRST
    (slower,) = changes["rows"]
    assert (slower["name"], slower["changed"]) == ("all_reduce 1 MiB", True)
    assert slower["ratio"]["value"] == pytest.approx(0.5)
    golden.check("compare_scans.txt", compare(FIRST, SECOND))


def test_records_that_have_nothing_in_common_are_named_with_their_kinds(root: Path, golden: Golden) -> None:
    keep(root, FIRST, "bench", "bench.json", {"nodes": []})
    keep(root, SECOND, "contrast", "contrast.json", {"schema": "multinode.contrast/5"})
    golden.check_errors("refused_compare", {second: error_of(compare, FIRST, second) for second in (SECOND, FIRST)})


def test_a_figure_without_an_interval_is_shown_and_not_judged(root: Path) -> None:
    for run_id, seconds, busy in ((FIRST, 41.0, 100.0), (SECOND, 1.2, 100.001)):
        node = {"node": "a", "seconds": seconds, "cpu_busy_percent": busy}
        keep(root, run_id, "bench", "bench.json", {"nodes": [node]})
    figures = json.loads(compare(FIRST, SECOND, "--json"))["figures"]
    assert [figure["changed"] for figure in figures] == [None, None]
    shown = compare(FIRST, SECOND)
    assert "without an interval, so the change may be noise: 1 figure" in " ".join(shown.split())
    assert "seconds" in shown
    assert "cpu_busy_percent" not in shown
