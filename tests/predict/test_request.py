from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.cluster.facts import UNASKED, NodeFacts
from multinode.errors import MultinodeError
from multinode.job.job import parse_training
from multinode.launch.one_node import lacks_one_node
from multinode.model.workload import Workload
from multinode.predict.forecast import ForecastRequest
from multinode.predict.request import command_of, evidence_of, forecast_benchmarks, forecast_runs
from multinode.predict.run_selection import Record
from multinode.records.run import VERDICT_FILE, Run, RunSteps
from multinode.records.run_directory import RunDirectory
from multinode.stats.unknown import Entries
from tests import make
from tests.golden import Golden, error_of
from tests.predict.stored import comm_ms, sweep_record, training_record


def store(root: Path, record: Record) -> RunDirectory:
    """As `launch` and `nccl-test` leave it."""
    directory = make.store(root, record.run_id, plan=record.plan)
    model = Entries(record.model) if record.model is not None else UNASKED
    directory.write("facts.json", [NodeFacts(node="node0", model=model)])
    for name, noun in (("summary", record.summary), ("workload", record.workload), ("nccl-test", record.sweep)):
        if noun is not None:
            directory.write(f"{name}.json", noun)
    directory.write("run.json", run(record.run_id))
    return directory


def launched_record(*arguments: Any, **changes: Any) -> Record:
    """A training, with its settings, as `launch` keeps them."""
    record = training_record(*arguments, **changes)
    return record.having(workload=Workload(settings=record.settings))


def run(run_id: str) -> Run:
    return make.run("node0", run_id=run_id, job="sft.yaml", engine="llamafactory", world_size=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An nccl-test, and a contrast: one node, two nodes."""
    store(tmp_path, sweep_record("a-sweep"))
    store(tmp_path, training_record("b-baseline", 1))
    store(tmp_path, training_record("b-candidate", 2, exposed_ms=comm_ms(1.0)))
    make.store(
        tmp_path,
        "b-contrast",
        contrast={"baseline": {"run_ids": ["b-baseline"]}, "candidate": {"run_ids": ["b-candidate"]}},
        run=run("b-contrast"),
    )
    return tmp_path


def test_a_contrast_stands_for_its_runs_and_finds_the_sweep_of_its_nodes(root: Path) -> None:
    found = forecast_runs(root, ["last"], ForecastRequest(links=(0.1, 1.0)))
    assert found.sources == (
        "one node: run b-baseline",
        "2 nodes: run b-candidate",
        "network: nccl-test a-sweep at 1 Gbit/s",
    )
    assert [one.measured for one in found.scenarios] == [False, True]


def test_the_launch_of_a_job_that_nobody_typed_names_the_nodes_as_the_newest_run_was_given_them(root: Path) -> None:
    job = parse_training("{model_name_or_path: m, stage: sft, do_train: true}", source="my job.yaml")

    def launch(*names: str) -> str:
        command = command_of(root, names, job)
        assert command is not None
        return command.launch("--nodes 1")

    for name, cluster in (("b-baseline", {"hosts": "old.txt"}), ("b-candidate", {"hosts": "lab"})):
        RunDirectory(root / name).write("cluster.json", cluster)
    told = "multinode launch --hosts lab --nodes 1 'my job.yaml'"
    assert launch("b-candidate", "b-baseline", "a-sweep") == told
    RunDirectory(root / "b-candidate").write("cluster.json", {"nodes": [], "source": "as an earlier release kept it"})
    assert launch("b-contrast") == "multinode launch --nodes 1 'my job.yaml'"
    assert command_of(root, ["b-contrast"], None) is None


def test_a_training_on_several_nodes_lacks_one_node_until_it_is_stored_there_or_would_not_fit(tmp_path: Path) -> None:
    several = store(tmp_path, launched_record("several", 2))
    assert lacks_one_node(several)
    store(tmp_path, launched_record("other", 1, job={"dataset": "another"}))
    store(tmp_path, sweep_record("a-sweep"))
    assert lacks_one_node(several)
    steps = RunSteps(run_id="several", node="node0", nodes=2, workers_per_node=1, step=15, recorded=15, measured=10)
    for memory, lacks in (("too_small", False), ("unknown", True)):
        several.write(VERDICT_FILE, msgspec.structs.asdict(steps) | {"memory": memory})
        assert lacks_one_node(several) is lacks
    one = store(tmp_path, launched_record("one", 1))
    assert not lacks_one_node(several)
    assert not lacks_one_node(one)
    assert not lacks_one_node(RunDirectory.create(tmp_path, "never-planned"))


def test_runs_can_be_named_one_by_one_in_any_order(root: Path) -> None:
    whole = evidence_of(root, ["b-contrast"])
    assert evidence_of(root, ["b-candidate", "a-sweep", "b-base"]) == whole


def test_stored_runs_of_the_same_training_test_the_model(root: Path) -> None:
    store(root, training_record("c-slow", 2, 0.1, exposed_ms=comm_ms(0.1)))
    tested = forecast_runs(root, ["b-contrast"]).back_test.tested
    assert [trial.name for trial in tested] == ["c-slow, 2 nodes at 100 Mbit/s", "b-candidate, 2 nodes at 1 Gbit/s"]


def test_a_run_that_cannot_be_read_matters_only_where_it_is_named(root: Path) -> None:
    directory = store(root, training_record("c-old", 2))
    (directory.path / "summary.json").write_text('{"schema": "multinode.summary/1"}')
    assert forecast_runs(root, ["b-contrast"]).scenarios


def test_what_cannot_be_read_is_refused(root: Path, golden: Golden) -> None:
    def contrast(run_ids: object) -> MultinodeError:
        RunDirectory(root / "b-contrast").write("contrast.json", {"baseline": {"run_ids": run_ids}})
        return error_of(evidence_of, root, ["b-contrast"])

    old = store(root, training_record("c-old", 2))
    (old.path / "summary.json").write_text('{"schema": "multinode.summary/1"}')
    make.store(root, "e-empty", run=run("e-empty"))
    figures = root / "figures.yaml"
    figures.write_text(
        "model: {trainable: 10}\nstrategy: ddp\nper_device_batch: 1\nnetwork: {}\n"
        "single_node: {workers_per_node: 1, step_time_ms: 100}\n"
    )
    golden.check_errors(
        "refused_runs",
        {
            "a contrast whose runs are gone": contrast(["gone"]),
            "a contrast whose runs are paths": contrast(["../b-baseline"]),
            "a contrast that is broken": contrast(7),
            "a run of another release": error_of(forecast_runs, root, ["c-old"]),
            "no such run": error_of(forecast_runs, root, ["none"]),
            "a run that was never planned": error_of(forecast_runs, root, ["e-empty"]),
            "wrong figures": error_of(forecast_benchmarks, figures),
        },
        root,
    )
