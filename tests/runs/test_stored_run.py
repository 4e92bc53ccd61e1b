"""StoredRun: each part of a run is decoded once, and what belongs together is said by the records, not by names."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.api import document
from multinode.cli.main import build_app
from multinode.launch.context import Launched
from multinode.predict.request import read_record
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run, new_run
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun, launched_runs, load_parts, load_runs, whole_runs
from multinode.stats.unknown import Unknown, known
from tests import make
from tests.golden import Golden, error_of
from tests.profile.observing import SUMMARY


def plan_with_links(*rates: float | None) -> LaunchPlan:
    return make.plan(
        *(make.node_plan(f"n{rank}", rank, workers=2, link_gbit_per_s=rate) for rank, rate in enumerate(rates))
    )


def store(
    root: Path, run_id: str, *, part_of: str | None = None, has_parts: bool = False, status: str = "succeeded"
) -> Run:
    plan = msgspec.structs.replace(plan_with_links(10.0, 25.0), run_id=run_id)
    directory = RunDirectory.create(root, run_id)
    run = msgspec.structs.replace(new_run(plan, 1.0, part_of), has_parts=has_parts, status=status)
    if not has_parts:
        directory.write("plan.json", plan)
    directory.write("run.json", run)
    return run


def test_a_part_is_decoded_when_it_is_used_and_kept(tmp_path: Path, golden: Golden) -> None:
    store(tmp_path, "r")
    (tmp_path / "r/summary.json").write_text("no JSON")
    stored = StoredRun.open(tmp_path, "r")
    plan = stored.plan
    assert plan is not None
    golden.check_errors("unreadable_summary", {"no JSON": error_of(lambda: stored.summary)}, tmp_path)
    (tmp_path / "r/plan.json").unlink()
    assert stored.plan is plan
    assert (stored.workload, stored.cluster, stored.facts, stored.model) == (None, None, {}, None)


def test_parts_are_those_that_say_so_whatever_they_are_called(tmp_path: Path, golden: Golden) -> None:
    whole = store(tmp_path, "w", has_parts=True)
    store(tmp_path, "w-1")
    store(tmp_path, "other", part_of="w")
    store(tmp_path, "orphan", part_of="removed")
    assert [part.run_id for part in load_parts(tmp_path, whole)] == ["other"]
    assert [part.run_id for part in launched_runs(tmp_path, StoredRun.open(tmp_path, "w"))] == ["other"]
    assert [part.run_id for part in launched_runs(tmp_path, StoredRun.open(tmp_path, "w-1"))] == ["w-1"]
    assert {stored.run_id for stored in whole_runs(load_runs(tmp_path))} == {"w", "w-1", "orphan"}
    golden.check_errors("plan_of_parts", {"w": error_of(StoredRun.open(tmp_path, "w").require_plan)})


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((10.0, 25.0), 10.0),
        ((10.0, None), None),
        ((10.0,), None),
        # A virtual NIC that reports 4294967295 Mbit/s.
        ((10.0, 4294967.295), None),
    ],
)
def test_contrast_and_predict_take_a_run_for_the_same_link(
    tmp_path: Path, rates: tuple[float | None, ...], expected: float | None
) -> None:
    directory = make.store(tmp_path, plan=plan_with_links(*rates), summary=make.no_steps())
    record = read_record(directory)
    assert record is not None
    assert (StoredRun(directory).link_gbit_per_s, record.link_gbit_per_s) == (expected, expected)


def test_every_command_prints_a_run_as_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = store(tmp_path, "r", part_of="w")
    summary = make.summary(steps=3, steady_steps=2, samples_per_s=Unknown("no steps"))
    RunDirectory(tmp_path / "r").write("summary.json", summary)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    shown = json.loads(CliRunner().invoke(build_app(), ["show", "r", "--json"]).stdout)
    launched = Launched(
        run=run, summary=summary, plan=plan_with_links(10.0, 25.0), directory=RunDirectory(tmp_path / "r")
    )
    assert document(launched) == shown
    assert (shown["run_id"], shown["status"], shown["part_of"]) == ("r", "succeeded", "w")
    assert shown["summary"]["steps"] == 3
    assert shown["summary"]["samples_per_s"] == {"is": "unknown", "reason": "no steps"}
    assert [node["name"] for node in shown["nodes"]] == ["n0", "n1"]


def test_a_run_is_listed_with_its_headline_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = store(tmp_path, "r", part_of="w")
    store(tmp_path, "early", status="failed")
    RunDirectory(tmp_path / "r").write("summary.json", msgspec.structs.replace(SUMMARY, run_id="r"))
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path))
    listed = json.loads(CliRunner().invoke(build_app(), ["runs", "--json"]).stdout)["runs"]
    rows = {row["run_id"]: row for row in listed}
    whole, early = rows["r"], rows["early"]
    speed = known(SUMMARY.samples_per_s), known(SUMMARY.step_time_ms).median
    assert (whole["samples_per_s"], whole["step_time_ms"]) == tuple(figure.value for figure in speed)
    assert (whole["status"], whole["part_of"], whole["nodes"]) == ("succeeded", "w", ["n0", "n1"])
    assert (whole["world_size"], whole["directory"]) == (run.world_size, str(tmp_path / "r"))
    assert (early["status"], early["hung"]) == ("failed", False)
    assert (early["samples_per_s"], early["step_time_ms"]) == (None, None)
    assert set(whole) == set(early)
    assert not {"summary", "first_failure", "command"} & set(whole)
