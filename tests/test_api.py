"""The Python API: what it offers, and that the command goes through it. On nodes: tests/lab/test_api.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from multinode import api
from multinode.cluster.cluster import Node
from multinode.errors import NodeGone
from multinode.launch.context import RunContext
from multinode.transport.fake import FakeTransport

ROOT = Path(__file__).parents[1]


def test_every_name_is_there_and_is_what_it_is_called() -> None:
    found = {name: getattr(api, name) for name in api.__all__}
    assert {name for name, value in found.items() if getattr(value, "__name__", name) != name} == set()
    assert dir(api) == api.__all__
    with pytest.raises(AttributeError, match="has no attribute 'lunch'"):
        _ = api.lunch  # type: ignore[attr-defined]  # a name that there is not


def test_it_is_imported_without_what_a_verb_does_not_need() -> None:
    code = "import multinode.api, sys; print(*[name for name in sys.modules if name.startswith('multinode.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == ["multinode.api"]


@pytest.mark.parametrize("name", ["check", "connect", "contrast", "launch", "nccl_test", "predict"])
def test_a_verb_of_the_command_goes_through_it(name: str) -> None:
    texts = [path.read_text() for path in (ROOT / "multinode/cli").glob("*.py")]
    assert any(f"api.{name}(" in text for text in texts)


def test_nodes_are_those_of_a_text_or_of_this_machine() -> None:
    nodes = api.parse_nodes("a addr=192.0.2.1 slots=2\nb addr=192.0.2.2\n")
    assert [(node.name, node.addr, node.slots) for node in nodes.cluster.nodes] == [
        ("a", "192.0.2.1", 2),
        ("b", "192.0.2.2", None),
    ]
    assert nodes.hostfile.startswith("a addr=")
    assert [node.slots for node in api.local_nodes(3).cluster.nodes] == [3]


def test_a_job_is_read_with_keys_replaced(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: m\nstage: sft\nmax_steps: 9\ndeepspeed: ds.json\n")
    job = api.load_job(str(path), ["max_steps=50"], ["zero_optimization.stage=3"])
    assert job.config["max_steps"] == 50
    assert json.loads(job.deepspeed_text or "") == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("verb", ["nccl_test", "contrast"])
def test_a_run_is_listed_under_the_verb_that_made_it(verb: str, tmp_path: Path) -> None:
    nodes = api.parse_nodes("a addr=192.0.2.1 slots=1\nb addr=192.0.2.2 slots=1\n")
    test = api.CollectiveTest(messages=(api.Message(size_bytes=1024),), backend="gloo")
    job = test if verb == "nccl_test" else api.ScriptJob(argv=("true",))
    what = api.Launch(cluster=nodes.cluster, hostfile=nodes.hostfile, job=job, check=False)

    def answer(node: Node, command: str, _: bytes) -> list[bytes]:
        if "supervise" in command:
            raise NodeGone("its allocation has ended", node=node.name)
        return [b'{"kind": "facts"}\n']

    with pytest.raises(api.MultinodeError):
        getattr(api, verb)(what, RunContext(FakeTransport(answer), tmp_path))
    kinds = [json.loads(path.read_text())["kind"] for path in tmp_path.glob("*/run.json")]
    assert set(kinds) == {verb.replace("_", "-")}


YAML = "model_name_or_path: m\nstage: sft\noutput_dir: out\n"


@pytest.mark.parametrize(
    ("yaml", "restarts", "said"),
    [
        (f"{YAML}save_only_model: true\n", {}, "--restarts: save_only_model: true does not save the optimizer state"),
        (f"{YAML}save_strategy: 'no'\n", {}, "--restarts: save_strategy: no saves no checkpoint"),
        ("model_name_or_path: m\nstage: sft\n", {}, "--restarts: the job sets no output_dir"),
        (YAML.replace("sft", "rm"), {}, "--restarts: LLaMA-Factory does not resume stage rm"),
        (YAML, {"min_nodes": 3}, "--min-nodes 3: there are only 2 nodes"),
        (f"{YAML}gradient_accumulation_steps: 1\n", {"min_nodes": 1}, ""),
    ],
)
def test_a_plan_refuses_what_a_launch_refuses_before_it_asks_a_node(
    tmp_path: Path, yaml: str, restarts: dict[str, int], said: str
) -> None:
    (tmp_path / "sft.yaml").write_text(yaml)
    nodes = api.parse_nodes("a addr=192.0.2.1 slots=2\nb addr=192.0.2.2 slots=2\n")
    launch = api.Launch(cluster=nodes.cluster, hostfile="", job=api.load_job(tmp_path / "sft.yaml"))
    options = api.RestartOptions(restarts=3, **restarts)  # type: ignore[arg-type]  # names and values are the tests' own
    if not said:
        assert api.plan(launch, options).world_size == 4
        return
    # Of a launch without restarts.
    assert api.plan(launch).world_size == 4
    asked = list[str]()

    def answer(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        asked.append(node.name)
        return []

    context = RunContext(FakeTransport(answer), tmp_path / "runs")
    for refused in (lambda: api.plan(launch, options), lambda: api.launch(launch, context, options)):
        with pytest.raises(api.UsageError) as caught:
            refused()
        assert str(caught.value) == said
    assert asked == []


@pytest.mark.parametrize(
    ("hostfile", "name", "value", "said"),
    [
        ("a slurm_job=7\nb\n", "ANY", "", "the text: slurm_job= must be on the lines of all nodes or of none"),
        ("a\nb\n", "MULTINODE_SSH", "putty", "$MULTINODE_SSH is 'putty': expected openssh or fabric"),
        ("a\nb\n", "MULTINODE_FAN_OUT", "0", "$MULTINODE_FAN_OUT is '0': expected a number of nodes, 1 to 1024"),
    ],
)
def test_a_plan_refuses_what_no_connection_could_be_made_with(
    monkeypatch: pytest.MonkeyPatch, hostfile: str, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    nodes = api.parse_nodes(hostfile)
    launch = api.Launch(cluster=nodes.cluster, hostfile=hostfile, job=api.ScriptJob(argv=("train.py",)))
    with pytest.raises(api.UsageError) as planned:
        api.plan(launch)
    with pytest.raises(api.UsageError) as connected, api.connect(nodes.cluster):
        pass
    assert str(planned.value) == str(connected.value) == said


def test_a_benchmark_is_not_restarted() -> None:
    nodes = api.parse_nodes("a slots=2\nb slots=2\n")
    test = api.CollectiveTest(messages=(api.Message(size_bytes=1024),), backend="gloo")
    launch = api.Launch(cluster=nodes.cluster, hostfile="", job=test)
    with pytest.raises(api.UsageError, match="--restarts does not apply to a benchmark"):
        api.plan(launch, api.RestartOptions(restarts=1))


def test_a_document_is_what_the_command_prints_and_has_no_secrets() -> None:
    class Found(msgspec.Struct):
        token: str = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
        nodes: tuple[int, ...] = (1, 2)

    found = api.document(Found())
    assert found["nodes"] == [1, 2]
    assert "abcdefgh" not in found["token"]
    forecast = api.predict_from_benchmarks(ROOT / "configs/figures/two_boxes_lora.yaml")
    assert api.document(forecast)["schema"] == "multinode.predict/3"


def test_a_stored_run_is_read_back_from_any_directory(tmp_path: Path) -> None:
    with pytest.raises(api.UsageError, match="there are no runs"):
        api.load_run(runs=tmp_path)
