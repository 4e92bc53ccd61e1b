"""What `show` and `attach` say comes after a stored launch: the contrast with one node, as the launch itself said."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from multinode.cli.main import build_app, load_verb
from multinode.cli.running import tell_result
from multinode.decoding import decode_json
from multinode.job.workload import Workload
from multinode.launch.context import Launched
from multinode.launch.one_node import contrast_of_launch
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from tests.predict.stored import training_record

HOSTS = "a slots=2 addr=10.0.0.1 ifname=eth0\nb slots=2 addr=10.0.0.2 ifname=eth0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile, a job that names a DeepSpeed JSON, and a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULTINODE_RUNS", raising=False)
    (tmp_path / "my hosts").write_text(HOSTS)
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\ncutoff_len: 128\nmax_steps: 9\n")
    (tmp_path / "zero.yaml").write_text("model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "train.py").write_text("")
    return tmp_path


def stored_launch(folder: Path, arguments: str) -> RunDirectory:
    """A launch that was planned, and is kept."""
    words = ["launch", "--hosts", "my hosts", "--dry-run", "--json", *shlex.split(arguments)]
    planned = CliRunner().invoke(build_app(), words)
    assert planned.exit_code == 0, planned.exception
    directory = RunDirectory.create(folder / "runs", "20260102-030405-abcd")
    directory.write("plan.json", decode_json(planned.stdout.encode(), LaunchPlan))
    directory.write("cluster.json", {"hosts": "my hosts", "nodes": [{"name": "a", "slots": 2}], "of": "later"})
    return directory


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("sft.yaml", "sft.yaml"),
        ("zero.yaml --detach", "zero.yaml"),
        ("sft.yaml --set max_steps=5 --set 'run_name=a b'", "--set max_steps=5 --set 'run_name=a b' sft.yaml"),
        ("zero.yaml --set deepspeed=null", "--set deepspeed=null zero.yaml"),
        ("sft.yaml --workers-per-node 1 --grad-compress fp16", "--workers-per-node 1 --grad-compress fp16 sft.yaml"),
        ("sft.yaml --sync-every 4 --sync-dtype bf16", "--sync-every 4 --sync-dtype bf16 sft.yaml"),
        ("zero.yaml --engine deepspeed", "--engine deepspeed zero.yaml"),
        ("-- train.py --nodes 'a b'", "-- train.py --nodes 'a b'"),
        ("--copy-code -- train.py", "--copy-code FOLDER -- train.py"),
        ("sft.yaml --copy-code --set output_dir=o", "--copy-code FOLDER --set output_dir=o sft.yaml"),
    ],
)
def test_the_contrast_of_a_stored_launch_is_of_what_was_launched(folder: Path, arguments: str, expected: str) -> None:
    found = contrast_of_launch(stored_launch(folder, arguments))
    assert found == f"multinode contrast --nodes 1,2 --hosts 'my hosts' {expected.replace('FOLDER', str(folder))}"
    load_verb("contrast").make_context("contrast", shlex.split(found)[2:])


@pytest.mark.parametrize("arguments", ["sft.yaml --synthetic", "--setup 'module load cuda' -- train.py"])
def test_there_is_none_where_what_was_launched_is_not_stored(folder: Path, arguments: str) -> None:
    assert contrast_of_launch(stored_launch(folder, arguments)) == ""


def test_one_node_is_next_until_it_was_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = store(folder, 2)
    following = "Next        multinode contrast --nodes 1,2 sft.yaml"
    assert following in said_by_show()
    with pytest.raises(typer.Exit):
        tell_result(measured, as_json=False)
    assert following in capsys.readouterr().out.splitlines()
    store(folder, 1)
    assert not [line for line in said_by_show() if "contrast" in line]


def said_by_show() -> list[str]:
    return CliRunner().invoke(build_app(), ["show", "launched-on-2"]).stdout.splitlines()


def store(folder: Path, nodes: int) -> Launched:
    """A launch of one training, with its figures."""
    record = training_record(f"launched-on-{nodes}", nodes)
    assert record.summary is not None
    plan = msgspec.structs.replace(record.plan, config_path="sft.yaml")
    run = Run(
        run_id=record.run_id,
        job=plan.job,
        engine=plan.engine,
        status="succeeded",
        started_s=0.0,
        ended_s=1.0,
        world_size=nodes,
        nodes=tuple(NodeRun(name=node.node, node_rank=node.node_rank) for node in plan.nodes),
    )
    directory = RunDirectory.create(folder / "runs", record.run_id)
    workload = Workload(settings=record.settings)
    for name, noun in (("plan", plan), ("summary", record.summary), ("run", run), ("workload", workload)):
        directory.write(f"{name}.json", noun)
    return Launched(run=run, summary=record.summary, plan=plan, directory=directory)
