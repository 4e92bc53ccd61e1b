"""`multinode contrast`, `compare`, `predict` and `advise` on the lab: LLaMA-Factory once, and quick scripts."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import ns_command, set_rate
from multinode.lab.state import Lab
from tests.equipment.faults import Cpu, Fault
from tests.lab.launching import DEADLINE_S, Command, assert_no_agents, kill, wait_for
from tests.lab.supervised import REAL_TORCH, STAND_IN, TRAIN

pytestmark = [pytest.mark.lab]

JOB = "configs/tiny_sft.yaml"
SCRIPT = str(Path(__file__).with_name("train_mlp.py"))
SLOW_GBIT_PER_S = 0.1
CONTRAST = ("contrast", "--no-check", "--json")
# Where the sides' figures do not matter, workers need no torch.
QUICK = ("--env", f"PYTHONPATH={STAND_IN}")


@pytest.fixture
def one_slot(lab: Lab, tmp_path: Path) -> str:
    """The lab's hostfile with room for one worker a node."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace("slots=2", "slots=1"))
    return str(hostfile)


class Contrasted:
    """A contrast of LLaMA-Factory over links of 100 Mbit/s, and where a training had been before."""

    def __init__(self, directory: Path, lab: Lab) -> None:
        self.command = Command(directory / "runs")
        self.hosts = lab.hostfile
        saved = directory / "saves"
        (saved / "checkpoint-30").mkdir(parents=True)
        (saved / "adapter.bin").write_text("mine")
        job = ("--engine", "torchrun", *REAL_TORCH, JOB, "--steps", "6", "--set", f"output_dir={saved}")
        done = self.command.run(*CONTRAST, *job, "--hosts", lab.hostfile, "--min-efficiency", "0.9")
        self.document = json.loads(done.stdout)
        self.code, self.told = done.returncode, done.stderr
        assert_no_agents()
        self.baseline, self.candidate = self.document["baseline"], self.document["candidate"]
        self.speedup = self.candidate["samples_per_s"]["value"] / self.baseline["samples_per_s"]["value"]
        self.run_id: str = self.command.document("show", "last", "--json")["run_id"]
        # The node's own view: what it writes, the controller does not see.
        self.saved = in_node(lab, f"find {saved} -mindepth 1 -printf '%f\\n'").split()
        self.left = in_node(lab, "ls ~/.multinode/runs")


@pytest.fixture(scope="module")
def contrasted(module_lab: Lab, tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contrasted]:
    del tiny
    names = [node.name for node in module_lab.nodes]
    set_rate(names, SLOW_GBIT_PER_S)
    try:
        yield Contrasted(tmp_path_factory.mktemp("contrasted"), module_lab)
    finally:
        set_rate(names, 1.0)


def measure(command: Command, *arguments: str) -> dict[str, Any]:
    """The document of a command that went well."""
    code, document = command.code_and_document(*arguments)
    assert code == 0, document
    return document


def in_node(lab: Lab, shell: str) -> str:
    """What a command prints in node 0."""
    command = [*ns_command(lab.nodes[0]), "sh", "-c", shell]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


@pytest.mark.torch
@pytest.mark.timing
class TestLlamaFactoryOverASlowLink:
    def test_it_is_the_same_workers_on_one_node_and_on_two(self, contrasted: Contrasted) -> None:
        document, baseline, candidate = contrasted.document, contrasted.baseline, contrasted.candidate
        assert (document["schema"], document["mode"]) == ("multinode.contrast/5", "same-workers")
        assert (baseline["nodes"], baseline["workers_per_node"]) == (1, 2)
        assert (candidate["nodes"], candidate["workers_per_node"]) == (2, 1)
        for side in (baseline, candidate):
            assert (side["settings"]["per_device_batch"], side["settings"]["accumulation"]) == (2, 1)
            assert (side["settings"]["sequence_length"], side["global_batch"]) == (128, 4)
            assert side["versions"]["torch"]
            # 30 steps of 4 samples are what the file asks for, whatever --steps has made of it.
            whole_s = 30 * 4 / side["samples_per_s"]["value"]
            assert side["whole_s"]["value"] == pytest.approx(whole_s, rel=0.1)
            # The Trainer counts from its own begin to its own end; over the same steps we must see the same speed.
            (run_id,) = side["run_ids"]
            found = contrasted.command.document("show", run_id, "--json")["summary"]
            assert found["all_steps_samples_per_s"] == pytest.approx(found["trainer_samples_per_s"], rel=0.02)
        runs = contrasted.command.runs
        assert {path.name for path in runs.iterdir()} >= {*baseline["run_ids"], *candidate["run_ids"]}
        listed = contrasted.command.document("runs", "--json")["runs"]
        assert [run["kind"] for run in listed] == ["contrast"] * 3

    def test_the_slow_link_is_the_network(self, contrasted: Contrasted) -> None:
        document, candidate = contrasted.document, contrasted.candidate
        assert document["candidate"]["speedup"]["value"] == pytest.approx(contrasted.speedup)
        assert (document["scaling"], document["candidate"]["efficiency"]) == (
            "same workers",
            pytest.approx(contrasted.speedup),
        )
        # 14.7 MB of gradients per step take 1.2 s at 100 Mbit/s, and the step on one node some 0.2 s.
        assert candidate["step_time_ms"]["value"] > 1080
        assert contrasted.speedup < 0.5
        assert document["loss"]["cause"] == "network"
        assert candidate["exposed_share"] > 0.6
        assert document["verdict"]["code"] == "slower"
        end = " than 1 node with the same 2 workers: the network is the bottleneck."
        assert document["verdict"]["message"].endswith(end)
        assert len(document["reasons"]) == 3

    def test_a_script_is_told_that_the_efficiency_is_too_low_and_what_to_do_next(self, contrasted: Contrasted) -> None:
        assert contrasted.code == 1
        assert (
            f"the efficiency is {contrasted.document['candidate']['efficiency']:.3f}, below --min-efficiency 0.9"
            in contrasted.told
        )
        assert "Next        multinode launch --nodes 1 --workers-per-node 2 " in contrasted.told
        assert f" --hosts {contrasted.hosts} " in contrasted.told

    def test_what_would_fix_it_is_predicted_and_advised(self, contrasted: Contrasted) -> None:
        options = ("--link", f"{SLOW_GBIT_PER_S},10", "--nodes", "2", "--json")
        predicted = measure(contrasted.command, "predict", contrasted.run_id, *options)
        as_it_was, faster = predicted["scenarios"]
        rate, measured = as_it_was["samples_per_s"], contrasted.candidate["samples_per_s"]["value"]
        assert rate["low"] <= measured <= rate["high"]
        assert faster["samples_per_s"]["value"] > 3 * rate["value"]
        # With both workers on each of the nodes, twice as many as one node has.
        assert SLOW_GBIT_PER_S < predicted["break_even"]["full_beats_one"]["value"] < 10
        advice = measure(contrasted.command, "advise", contrasted.run_id, "--json")["advice"]
        # One node stands before all that does not certainly beat it, however large its gain.
        alone = [one["command"].startswith("--nodes 1 ") for one in advice].index(True)
        gains = [one["gain"]["value"] for one in advice[alone + 1 :]]
        assert gains == sorted(gains, reverse=True)
        assert advice[alone]["gain"]["value"] > 2
        assert any("--grad-compress fp16" in one["command"] for one in advice)

    def test_it_is_reported_and_compared_again(self, contrasted: Contrasted, tmp_path: Path) -> None:
        page = tmp_path / "contrast.html"
        assert contrasted.command.run("report", contrasted.run_id, "-o", str(page)).returncode == 0
        assert contrasted.document["verdict"]["message"] in page.read_text()
        (first,), (second,) = contrasted.baseline["run_ids"], contrasted.candidate["run_ids"]
        again = measure(contrasted.command, "compare", first, second, "--json")
        assert (again["mode"], again["candidate"]["speedup"]["value"]) == ("compare", pytest.approx(contrasted.speedup))

    def test_what_was_trained_before_is_neither_resumed_nor_written_over(self, contrasted: Contrasted) -> None:
        assert sorted(contrasted.saved) == ["adapter.bin", "checkpoint-30"]
        run_ids = (*contrasted.baseline["run_ids"], *contrasted.candidate["run_ids"])
        assert not [run_id for run_id in run_ids if run_id in contrasted.left]


def test_with_one_slot_a_node_it_is_scale_out_and_says_so(one_slot: str, command: Command) -> None:
    document = measure(command, *CONTRAST, *QUICK, "--hosts", one_slot, "--", TRAIN, "--steps", "12")
    assert document["mode"] == "scale-out"
    assert document["why"]["code"] == "too-few-slots"
    assert document["candidate"]["efficiency"] == pytest.approx(document["candidate"]["speedup"]["value"] / 2)
    assert (document["baseline"]["world_size"], document["candidate"]["world_size"]) == (1, 2)


@pytest.mark.usefixtures("tiny")
def test_with_a_fixed_global_batch_both_sides_make_the_same_steps(one_slot: str, command: Command) -> None:
    options = ("--steps", "6", "--mode", "fixed-global-batch", "--hosts", one_slot)
    document = measure(command, *CONTRAST, *QUICK, JOB, *options)
    baseline, candidate = document["baseline"], document["candidate"]
    assert (baseline["settings"]["accumulation"], candidate["settings"]["accumulation"]) == (2, 1)
    assert baseline["global_batch"] == candidate["global_batch"] == 4
    assert document["scaling"] == "strong"


@pytest.mark.torch
@pytest.mark.timing
def test_a_slow_node_is_told_from_a_slow_network_and_its_limit_is_named(
    one_slot: str, command: Command, fault: Callable[[Fault], None]
) -> None:
    fault(Cpu(node="node1", share=0.25))
    arguments = ("--each-node", *REAL_TORCH, "--hosts", one_slot, "--", SCRIPT, "--steps", "12", "--batch", "512")
    document = measure(command, *CONTRAST, *arguments)
    sides = (document["baseline"], *document["others"])
    alone = {side["node_names"][0]: side for side in sides if side["relative"] is not None}
    assert (alone["node0"]["relative"], set(alone)) == (1, {"node0", "node1"})
    assert alone["node1"]["relative"] < 0.6
    assert document["loss"]["cause"] == "node"
    assert "node1" in document["verdict"]["message"]
    assert "not the network" in document["verdict"]["message"]
    (run_id,) = document["candidate"]["run_ids"]
    found = command.document("show", run_id, "--json")["summary"]
    (straggler,) = found["stragglers"]
    assert (straggler["node"], straggler["causes"][0]["cause"]) == ("node1", "cpu")
    assert "0.25" in " ".join(cause["message"] for cause in straggler["causes"])
    assert found["bottleneck"]["kind"] == "straggler"
    assert found["comm"]["exposed_ms"]["value"] < straggler["late_ms"]


def test_what_ctrl_c_leaves_is_compared_where_each_side_was_measured(one_slot: str, command: Command) -> None:
    without_json = CONTRAST[:-1]
    arguments = (*without_json, *QUICK, "--repeats", "3", "--hosts", one_slot, "--", TRAIN, "--steps", "40")
    with command.running(*arguments) as process:
        # The second turn of the last side is under way.
        wait_for(lambda: any(path.stat().st_size for path in command.runs.glob("*-candidate-2/samples/*/rank-*")))
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 130
    assert "the measurements made so far are compared in" in said
    (contrast,) = command.runs.glob("*/contrast.json")
    assert '"verdict"' in contrast.read_text()
    assert_no_agents()


@pytest.mark.usefixtures("tiny")
def test_killed_in_its_second_run_it_resumes_and_repeats_nothing(one_slot: str, command: Command) -> None:
    # The first run of the candidate makes one step; a second one would have another name before the dot.
    surroundings = ("--env", f"PYTHONPATH={STAND_IN}", "--env", "HOLD=candidate.")
    arguments = ("contrast", "--no-check", *surroundings, JOB, "--steps", "6", "--hosts", one_slot)
    with command.running(*arguments) as process:
        wait_for(lambda: any(path.stat().st_size for path in command.runs.glob("*-candidate/samples/node-0/*.jsonl")))
        kill(process.pid)
        process.wait(timeout=DEADLINE_S)
    (before,) = command.runs.glob("*-baseline/run.json")
    written = before.stat().st_mtime_ns
    done = command.run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert "resuming contrast" in done.stderr
    document = json.loads(done.stdout)
    assert document["baseline"]["run_ids"] == [before.parent.name]
    assert document["candidate"]["run_ids"] == [before.parent.name.replace("-baseline", "-candidate-try2")]
    assert before.stat().st_mtime_ns == written
    assert len(list(command.runs.glob("*-baseline*"))) == 1
    assert_no_agents()
