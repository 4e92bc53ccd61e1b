"""The verbs as one call each: keywords are the options of the command, and results are shown. On nodes: tests/lab."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from multinode import api
from multinode.api.keywords import keyword_fields, read_keywords
from multinode.cli.main import build_app
from multinode.cli.panels import bounds
from multinode.cli.verbs import load_verb
from multinode.contrast.inputs import ContrastInput
from multinode.job.planning import plan_launch
from multinode.launch.inputs import CheckInput, LaunchInput
from multinode.network.inputs import NcclTestInput
from multinode.records.run import Failure
from multinode.sweep.inputs import SweepInput
from multinode.tune.inputs import TuneInput
from tests.cli.test_report import store_contrast
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN
from tests.golden import error_of
from tests.profile.observing import RUN, store_observed
from tests.sweep.stored_sweep import store_sweep

INPUTS: dict[str, type[msgspec.Struct]] = {
    "check": CheckInput,
    "contrast": ContrastInput,
    "launch": LaunchInput,
    "nccl-test": NcclTestInput,
    "sweep": SweepInput,
    "tune": TuneInput,
}
CALLS: dict[str, Callable[..., Any]] = {
    "check": api.run_check,
    "contrast": api.run_contrast,
    "launch": api.run_launch,
    "nccl-test": api.run_nccl_test,
    "sweep": api.sweep,
    "tune": api.tune,
}
# Of the terminal: what is printed there, and in which form; a plan is `api.plan`'s.
OF_TERMINAL = {"help", "help_all", "quiet", "verbose", "ssh", "json", "details", "dry_run", "strict", "format", "write"}
OF_TERMINAL |= {"if_slower_than_one_node", "min_efficiency", "min_busbw"}
# Where the chart of an nccl-test is written, what a launch prints of its job; how the table of a sweep is looked at.
OF_TERMINAL |= {"sort", "where", "baseline", "prices", "deadline"}
HOSTS = "a addr=192.0.2.1 slots=2\nb addr=192.0.2.2 slots=2\n"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "hosts.txt").write_text(HOSTS)
    return tmp_path / "hosts.txt"


def keyword(option: Any) -> str:
    """The keyword of an option: its longest name."""
    name: str = max(option.opts, key=len).removeprefix("--").replace("-", "_")
    return {"with": "with_", "from": "from_"}.get(name, name)


@pytest.mark.parametrize("verb", sorted(INPUTS))
def test_a_call_has_the_options_of_its_command_with_their_defaults_and_limits(verb: str) -> None:
    options = {keyword(option): option for option in load_verb(verb).params if option.param_type_name == "option"}
    fields = keyword_fields(INPUTS[verb])
    left_out = options.keys() - fields.keys() - {"hosts"}
    # What is printed already is read by a call of its own.
    left_out -= {"read", "link", "rdma"} if verb == "nccl-test" else set()
    assert left_out <= OF_TERMINAL | ({"output"} if verb != "tune" else set())
    assert fields.keys() <= options.keys()
    schema = msgspec.json.schema(INPUTS[verb])
    properties = schema["$defs"][INPUTS[verb].__name__]["properties"]
    for name, field in fields.items():
        option, default = options[name], field.default
        assert (option.default or None) == (default or None), name
        kinds = properties[name].get("anyOf", [properties[name]])
        numbers: dict[str, float] = next((kind for kind in kinds if kind.get("type") in {"integer", "number"}), {})
        if kinds[0].get("type") != "array":
            assert (numbers.get("minimum"), numbers.get("maximum")) == bounds(option), name
        choices = next((kind["enum"] for kind in kinds if "enum" in kind), None)
        assert choices == (sorted(option.type.choices) if getattr(option.type, "choices", None) else None), name


@pytest.mark.parametrize(
    ("verb", "options", "said", "hint"),
    [
        ("launch", {"worker_per_node": 2}, "run_launch has no keyword 'worker_per_node'", "workers_per_node"),
        ("launch", {"nproc_per_node": 2}, "run_launch has no keyword 'nproc_per_node'", "workers_per_node"),
        ("check", {"sets": {}}, "run_check has no keyword 'sets'", "did you mean set?"),
        ("contrast", {"step": 20}, "run_contrast has no keyword 'step'", "did you mean steps?"),
        ("nccl-test", {"iterations": 5}, "run_nccl_test has no keyword 'iterations'", "iters"),
        ("sweep", {"grids": {}}, "sweep has no keyword 'grids'", "did you mean grid?"),
        ("tune", {"budgets": 1}, "tune has no keyword 'budgets'", "did you mean budget?"),
        (
            "launch",
            {"sync_every": 8, "sync_dtype": "fp16"},
            "run_launch has no keyword 'sync_",
            "average='local:8:fp16'",
        ),
        ("tune", {"xyz": 1}, "tune has no keyword 'xyz'", "help(api.tune)"),
        ("launch", {"words": ("a.yaml",)}, "run_launch has no keyword 'words'", ""),
        ("launch", {"nodes": "two"}, "run_launch: nodes: expected `int | None`, got text", ""),
        ("launch", {"nodes": 0}, "run_launch: nodes: expected `int` >= 1", ""),
        ("launch", {"on_hang": "no"}, "run_launch: on_hang: expected report or stop", ""),
        ("launch", {"check": "yes"}, "run_launch: check: expected `bool`, got text", ""),
        ("launch", {"log_limit": "1x"}, "--log-limit: '1x' is not a size", ""),
        ("tune", {"judge": "speed", "eval_samples": 8}, "--eval-samples does not work with --judge speed", ""),
    ],
)
def test_a_wrong_keyword_is_refused_with_the_nearest_one(
    hosts: Path, verb: str, options: dict[str, Any], said: str, hint: str
) -> None:
    job = "all_reduce" if verb == "nccl-test" else ["train.py"]
    with pytest.raises(api.UsageError) as caught:
        CALLS[verb](hosts, job, say=None, **options)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_a_secret_of_a_wrong_type_is_not_repeated(hosts: Path) -> None:
    with pytest.raises(api.UsageError) as caught:
        api.run_launch(hosts, ["train.py"], nodes="hf_abcdefghijklmnopqrstuvwxyzabcdefgh")
    assert "hf_" not in f"{caught.value}{caught.value.hint}"


def test_a_command_as_text_is_refused_with_its_words(hosts: Path) -> None:
    with pytest.raises(api.UsageError) as caught:
        api.run_launch(hosts, "train.py --lr 1e-4", say=None)
    assert caught.value.hint == "pass a list of words: ['train.py', '--lr', '1e-4']"


def plan_of_the_command(*arguments: str) -> Any:
    done = CliRunner().invoke(build_app(), ["launch", "--dry-run", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def plan_of_the_call(options: dict[str, Any], **given: Any) -> Any:
    launch, _ = read_keywords(LaunchInput, "run_launch", options, **given).read(lambda _: None)
    plan = plan_launch(launch.cluster, launch.job, {}, "r", launch)
    return api.document(plan)


def without_names(plan: Any) -> Any:
    """Without the run's own name and port, and the command line that made it."""
    text = json.dumps(plan | {"command": None})
    return json.loads(text.replace(plan["run_id"], "r").replace(str(plan["rendezvous"]["port"]), "0"))


YAML = "model_name_or_path: m\nstage: sft\noutput_dir: out\nper_device_train_batch_size: 2\ndeepspeed: ds.json\n"


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ({}, ()),
        ({"workers_per_node": 1, "nodes": 1}, ("--workers-per-node", "1", "--nodes", "1")),
        (
            {"env": {"A": "1", "B": "x y", "HOME": None}, "setup": "true"},
            ("--env", "A=1", "--env", "B=x y", "--env", "HOME", "--setup", "true"),
        ),
        ({"env": ["A=1"], "profile": False, "sample_hz": 2}, ("--env", "A=1", "--no-profile", "--sample-hz", "2")),
        ({"trace": 3, "trace_rank": [0, 3]}, ("--trace", "3", "--trace-rank", "0", "--trace-rank", "3")),
        ({"average": "local:8:bf16"}, ("--average", "local:8:bf16")),
    ],
)
@pytest.mark.parametrize("job", [["train.py", "--lr", "1e-4"], "train.yaml"])
def test_a_call_plans_what_the_command_plans(
    hosts: Path, options: dict[str, Any], typed: tuple[str, ...], job: Any
) -> None:
    Path("train.yaml").write_text(YAML.replace("deepspeed: ds.json\n", ""))
    given, behind = ({"words": (job,)}, (job,)) if isinstance(job, str) else ({"typed": tuple(job)}, ("--", *job))
    of_command = plan_of_the_command("--hosts", str(hosts), *typed, *behind)
    of_call = plan_of_the_call({"master_port": of_command["rendezvous"]["port"], **options}, hosts=str(hosts), **given)
    assert without_names(of_call) == without_names(of_command)


def test_settings_of_a_job_are_mappings_or_words(hosts: Path) -> None:
    Path("train.yaml").write_text(YAML)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    options = {
        "set": {"max_steps": 50, "lora_target": "q_proj,v_proj", "report_to": ["wandb"], "eval_dataset": None},
        "deepspeed_set": {"zero_optimization.stage": 3},
    }
    notes: list[str] = []
    launch, _ = read_keywords(LaunchInput, "run_launch", options, hosts=str(hosts), words=("train.yaml",)).read(
        notes.append
    )
    assert isinstance(launch.job, api.TrainingJob)
    config = launch.job.config
    assert (config["max_steps"], config["lora_target"]) == (50, "q_proj,v_proj")
    assert (config["report_to"], config["eval_dataset"]) == (["wandb"], None)
    assert json.loads(launch.job.deepspeed_text or "")["zero_optimization"]["stage"] == 3
    assert any(line.startswith("+") and "3" in line for line in notes)


def test_a_grid_is_a_mapping_of_lists(hosts: Path) -> None:
    Path("train.yaml").write_text(YAML.replace("deepspeed: ds.json\n", ""))
    options = {"grid": {"per_device_train_batch_size": [1, 2], "lora_target": ["q,v", "all"]}, "nodes": [1, 2]}
    grid = read_keywords(SweepInput, "sweep", options, hosts=str(hosts), words=("train.yaml",)).read(lambda _: None)
    assert grid.grid.settings == {"per_device_train_batch_size": (1, 2), "lora_target": ("q,v", "all")}
    assert grid.grid.nodes == (1, 2)
    script = read_keywords(
        SweepInput, "sweep", {"grid_arg": {"--mix": ["a,b", "c"]}}, hosts=str(hosts), typed=("train.py",)
    ).read(lambda _: None)
    assert script.grid.settings == {"mix": ("a,b", "c")}


@pytest.mark.parametrize("names", [["a"], ["a:2", "b:2"], "a:2,b:2", Path("hosts.txt"), "@mine"])
def test_nodes_are_a_file_a_list_or_a_name(hosts: Path, names: Any, capsys: pytest.CaptureFixture[str]) -> None:
    del hosts
    Path("multinode.toml").write_text('[hosts]\nmine = "hosts.txt"\n')
    # Nodes are known, and what is asked of them is refused before one is contacted.
    refused = error_of(api.run_launch, names, ["train.py"], min_nodes=1)
    assert refused.message == "--min-nodes needs --restarts"
    assert capsys.readouterr().err == ""


def test_a_sentence_of_the_call_goes_to_say_alone(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    conda = ["conda", "run", "-n", "mine", "python", "train.py"]
    refused = error_of(api.run_launch, hosts, conda, say=said.append, min_nodes=1)
    assert refused.message == "--min-nodes needs --restarts"
    assert said == ["conda run is replaced by --setup 'conda activate mine'"]
    assert capsys.readouterr() == ("", "")


def test_a_report_is_shown_in_a_notebook_and_written(hosts: Path) -> None:
    store_observed(hosts.parent / "runs")
    shown = api.report("last")
    html = shown._repr_html_()  # what a notebook calls
    assert html.startswith('<div class="multinode"><style>')
    assert "samples/s" in html
    assert "<script" not in html
    assert "<html" not in html
    assert str(shown).startswith(f"## {api.load_run().run.job}".replace("_", "\\_"))
    assert repr(shown) == f"<Result of Report, '{hosts.parent / 'runs' / RUN.run_id}'>"
    api.report(RUN.run_id, output="page.html")
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    api.report(output="notes.md")
    assert Path("notes.md").read_text().rstrip() == str(shown)
    api.report(output="tables", form="csv")
    assert list(Path("tables").glob("*.csv"))
    assert error_of(api.report, output="page.pdf").message == "--output page.pdf: unknown format .pdf"


def test_a_report_has_the_tables_of_contrasts_and_sweeps(hosts: Path) -> None:
    root = hosts.parent / "runs"
    store_contrast(root, CONTRAST)
    assert CONTRAST.verdict.message in api.report(CONTRAST_RUN.run_id)._repr_html_()
    sweep = store_sweep(root)
    html = api.report(sweep.run_id)._repr_html_()
    assert "out of memory" in html
    both = api.report(sweep.run_id, CONTRAST_RUN.run_id)._repr_html_()
    assert both.count("<h1>") == 2


def test_what_a_node_printed_is_text_in_a_notebook(hosts: Path) -> None:
    run = msgspec.structs.replace(
        RUN, first_failure=Failure(node="<b>n", node_rank=0, message="<script>alert(1)</script>")
    )
    store_observed(hosts.parent / "runs", run)
    html = api.report()._repr_html_()
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html


def test_advice_is_that_of_the_command(hosts: Path) -> None:
    assert error_of(api.advise).message == f"there are no runs in {hosts.parent / 'runs'} yet"
    store_observed(hosts.parent / "runs")
    told = "--link: 'fast' is not a link rate; write it as 100mbit, 1gbit or 2.5gbit"
    assert error_of(api.advise, link="fast").message == told
    found = api.advise(RUN.run_id)
    done = CliRunner().invoke(build_app(), ["advise", "--json"], catch_exceptions=False)
    assert api.document(found) == json.loads(done.stdout)
    assert found.value.advice[0].name in str(found)


def test_a_document_of_a_result_is_that_of_its_value(hosts: Path) -> None:
    store_contrast(hosts.parent / "runs", CONTRAST)
    result = api.Result(value=api.Contrasted(contrast=CONTRAST, directory=hosts.parent), screen=lambda: ["fine"])
    assert api.document(result) == api.document(CONTRAST)
    assert str(result) == "fine"
    assert "<pre>fine</pre>" in result._repr_html_()


def test_what_nccl_tests_printed_is_judged_in_one_call(tmp_path: Path) -> None:
    output = tmp_path / "all_reduce.txt"
    rows = (f"{size:>12} {size // 4:>12} float sum -1 {size / 3e3:.1f} 3.00 5.62 0\n" for size in (1 << 27, 1 << 28))
    output.write_text("# nThread 1 nGpus 8\n" + "".join(rows))
    judged = api.read_nccl_test(output, collective="all_reduce", link="100gbit", nodes=2, workers_per_node=8)
    (scan,) = judged.value.scans
    assert scan.verdict.code == "slow"
    assert scan.verdict.message in str(judged)
    assert "256 MiB" in judged._repr_html_().partition("<table")[2]
    told = "--link: 'fast' is not a link rate; write it as 100mbit, 1gbit or 2.5gbit"
    assert error_of(api.read_nccl_test, output, link="fast").message == told
