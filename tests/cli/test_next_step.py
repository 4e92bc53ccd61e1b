"""The commands that a verb proposes are made of the one that was typed, and the real command line takes them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from multinode.cli.contrast import next_command, tune_command
from multinode.cli.main import build_app
from multinode.cli.nccl_test import contrast_command
from multinode.cli.options import propose, read_invocation
from multinode.cli.running import tell_result
from multinode.cli.verbs import VERBS, load_verb
from multinode.decoding import decode_json
from multinode.launch.context import Launched
from multinode.model.workload import Workload
from multinode.records.invocation import Invocation
from multinode.records.plan import LaunchPlan
from multinode.records.run import NodeRun
from multinode.records.run_directory import RunDirectory
from tests import make
from tests.contrast.test_words import CASES
from tests.predict.stored import training_record

SECRET = "hf_s3cretS3CRETs3cret1"
TESTS = Path(__file__).parents[1]


def invocation(text: str) -> Invocation:
    """The command line of a verb, as it is kept."""
    verb, *words = shlex.split(text)
    return read_invocation(load_verb(verb).make_context(verb, words))


def require_parsed(line: str) -> None:
    """The real command line takes a proposed command."""
    program, verb, *words = shlex.split(line)
    assert program == "multinode"
    load_verb(verb).make_context(verb, words)


@pytest.mark.parametrize(
    ("typed", "verb", "line"),
    [
        ("launch --hosts 'my hosts' sft.yaml", "contrast", "--hosts 'my hosts' sft.yaml"),
        ("launch --detach --restarts 2 sft.yaml lr=1", "contrast", "sft.yaml lr=1"),
        (
            "launch --env A=b --setup 'a b' -- torchrun t.py --nodes 7",
            "contrast",
            "--env A=b --setup 'a b' -- torchrun t.py --nodes 7",
        ),
        ("launch --average local:4 --synthetic sft.yaml", "contrast", "--synthetic --average local:4 sft.yaml"),
        ("launch --copy-code . --engine deepspeed -- t.py", "contrast", "--engine deepspeed --copy-code . -- t.py"),
        ("check --hosts h --strict --bandwidth --details sft.yaml", "launch", "--hosts h sft.yaml"),
        ("contrast --hosts h --steps 9 --repeats 3 --json -- t.py", "launch", "--hosts h -- t.py"),
        # A change of the training that the other verb cannot make.
        ("launch --with tuned.yaml sft.yaml", "contrast", None),
        ("launch --balance a=1,b=2 sft.yaml", "contrast", None),
    ],
)
def test_a_proposed_command_is_the_one_that_was_typed(typed: str, verb: str, line: str | None) -> None:
    proposed = propose(invocation(typed), verb)
    assert proposed == (f"multinode {verb} {line}" if line is not None else "")
    if proposed:
        require_parsed(proposed)


def test_no_secret_is_kept_and_the_shells_variable_stands_for_one() -> None:
    kept = invocation(f"launch --env HF_TOKEN={SECRET} --env A=1 -- HF_TOKEN={SECRET} t.py --token {SECRET}")
    assert SECRET not in msgspec.json.encode(kept).decode()
    assert ("--env", "HF_TOKEN") in kept.options
    assert propose(kept, "contrast").startswith("multinode contrast --env HF_TOKEN --env A=1 -- ")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("contrast --hosts h --steps 20 --set max_steps=9 sft.yaml", "--hosts h"),
        ("contrast --hosts h --steps 20 -- t.py --lr 1", "--hosts h -- t.py --lr 1"),
        ("launch --hosts h --workers-per-node 2 --env A=b -- torchrun t.py", "--hosts h --env A=b -- torchrun t.py"),
        ("launch --engine deepspeed --set a=1 sft.yaml", "--engine deepspeed"),
    ],
)
def test_changes_are_tried_with_the_job_that_was_measured(typed: str, line: str) -> None:
    proposed = tune_command(invocation(typed), ["last"])
    assert proposed == f"multinode tune --judge speed --from last --candidates 2 {line}"
    require_parsed(proposed)


def test_nothing_is_proposed_where_nobody_typed_a_command() -> None:
    assert tune_command(None, ["last"]) == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile and a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULTINODE_RUNS", raising=False)
    (tmp_path / "my hosts").write_text("a slots=2 addr=10.0.0.1\nb slots=2 addr=10.0.0.2\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\n")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_plan_keeps_the_command() -> None:
    words = ["launch", "--hosts", "my hosts", "--dry-run", "--json", "sft.yaml", "max_steps=5"]
    planned = CliRunner().invoke(build_app(), words)
    plan = decode_json(planned.stdout.encode(), LaunchPlan)
    assert plan.command is not None
    assert propose(plan.command, "contrast") == "multinode contrast --hosts 'my hosts' sft.yaml max_steps=5"


def test_one_node_is_next_until_it_was_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = store(folder, 2)
    following = "Next        multinode contrast --nodes 1,2 --set max_steps=5 sft.yaml"
    assert following in said_by_show()
    with pytest.raises(typer.Exit):
        tell_result(measured, as_json=False)
    assert following in capsys.readouterr().out.splitlines()
    store(folder, 1)
    assert not [line for line in said_by_show() if "contrast" in line]


def test_a_measured_network_is_tried_with_the_training_that_last_succeeded_there(folder: Path) -> None:
    assert contrast_command("my hosts", None, None) == (
        "multinode contrast --hosts 'my hosts' JOB.yaml (or your command after --)"
    )
    store(folder, 2)
    stopped = msgspec.structs.replace(store(folder, 1).run, status="stopped", command=invocation("launch -- hung.py"))
    RunDirectory(folder / "runs" / stopped.run_id).write("run.json", stopped)
    proposed = contrast_command("my hosts", 2, None)
    assert proposed == "multinode contrast --hosts 'my hosts' --nodes 1,2 --set max_steps=5 sft.yaml"
    require_parsed(proposed)
    assert contrast_command(None, None, Path("other.yaml")) == "multinode contrast other.yaml"
    changed = contrast_command(None, None, Path("other.yaml"), ["max_steps=8", "output_dir=/tmp/my run"])
    assert changed == "multinode contrast --set max_steps=8 --set 'output_dir=/tmp/my run' other.yaml"


def said_by_show() -> list[str]:
    return CliRunner().invoke(build_app(), ["show", "launched-on-2"]).stdout.splitlines()


def store(folder: Path, nodes: int) -> Launched:
    """A launch of one training, with its figures."""
    record = training_record(f"launched-on-{nodes}", nodes)
    assert record.summary is not None
    plan = msgspec.structs.replace(record.plan, config_path="sft.yaml")
    run = make.run(
        *(NodeRun(name=node.place.node, node_rank=node.place.node_rank) for node in plan.nodes),
        run_id=record.run_id,
        job=plan.job,
        engine=plan.engine,
        started_s=0.0,
        ended_s=1.0,
        world_size=nodes,
        command=invocation(f"launch --nodes {nodes} --detach --set max_steps=5 sft.yaml"),
    )
    directory = RunDirectory.create(folder / "runs", record.run_id)
    workload = Workload(settings=record.settings)
    for name, noun in (("plan", plan), ("summary", record.summary), ("run", run), ("workload", workload)):
        directory.write(f"{name}.json", noun)
    return Launched(run=run, summary=record.summary, plan=plan, directory=directory)


_LABELS = "Next|Launch it|Details|fix|hint"
_PROPOSED = re.compile(rf"^ *(?:{_LABELS})\W+(?:.*?: )?(multinode (?:{'|'.join(VERBS)})\b.*)$")
_REMARK = re.compile(r" \([^()]*\)$")


def test_every_command_that_a_golden_screen_proposes_is_one() -> None:
    seen = 0
    for path in sorted(TESTS.glob("*/golden/**/*.txt")):
        for line in path.read_text().splitlines():
            found = _PROPOSED.match(line)
            if found is not None and not found[1].endswith("..."):
                require_parsed(_REMARK.sub("", found[1]).rstrip("."))
                seen += 1
    assert seen > 20


def test_after_an_inconclusive_contrast_comes_the_same_with_more_repeats() -> None:
    def following(typed: str) -> str:
        return next_command(CASES["same workers, noise"], "20260102-a", invocation(typed))

    assert following("contrast --hosts h --repeats 2 -- t.py") == "multinode contrast --repeats 4 --hosts h -- t.py"
    require_parsed(following("contrast --fresh sft.yaml"))
