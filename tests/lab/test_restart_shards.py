"""Shards of a checkpoint that are on another node: a later attempt gets them, and `--fetch` brings all of them home."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equipment.faults import NodeState
from tests.lab.faulting import faults
from tests.lab.launching import RUN_DEADLINE_S, Command, assert_nothing_left, wait_for
from tests.lab.restarting import FSDP, LAUNCH, ON_CPU, TRAINED, Attempts, launched, losses, on_node, training
from tests.lab.supervised import REAL_TORCH, document_in, wait_said

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("module_lab", "tiny")]


@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize(
    "config", ["ds_z2_config", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tiny_z3_config", "fsdp"))]
)
def test_a_node_that_returns_with_an_empty_disk_gets_its_shards_from_the_other(command: Command, config: str) -> None:
    every, steps, output = 20, 120, f"/var/tmp/empty-disk-{config}"
    is_fsdp = config == "fsdp"
    modules = ON_CPU if is_fsdp else REAL_TORCH
    options = (*TRAINED, *modules, "--node-wait", "5m")
    sharding = FSDP if is_fsdp else ("--set", f"deepspeed=configs/deepspeed/{config}.json")
    job = (*training(output, steps, every), *sharding)
    with launched(command, "--restarts", "3", *options, *job) as (controller, run):
        zero = f"global_step{every}/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        copy = f"{output}/checkpoint-{every}/{'optimizer_0/__1_0.distcp' if is_fsdp else zero}"
        wait_for(lambda: on_node("node0", copy).exists(), deadline_s=RUN_DEADLINE_S)
        wait_said(controller, "would survive the loss of a disk")
        with faults(NodeState(node="node1", how="kill")):
            wait_for(lambda: run.status(1) == "lost", deadline_s=RUN_DEADLINE_S)
            wait_said(controller, "waiting until the run has ended")
        said = controller.communicate(timeout=RUN_DEADLINE_S)[0]
    document = document_in(said)
    assert document["status"] == "succeeded", document
    first, second = document["attempts"]
    assert first["first_failure"]["kind"] == "node_lost"
    assert second["checkpoint"] is not None, said
    assert f"of {second['checkpoint']} from node0 to node1" in " ".join(said.split())
    assert (second["first_step"] % every, second["last_step"], second["left_out"]) == (0, steps, {})
    before, after = (losses(command, run.name(number)) for number in (1, 2))
    again = {key: loss for key, loss in before.items() if key[1] > second["first_step"]}
    assert again == {key: after[key] for key in again}
    assert_nothing_left(command)


def test_without_a_node_fsdp_goes_on_with_the_losses_of_all(command: Command) -> None:
    """The worker that is left loads what two have saved, and makes two micro-batches of each step."""
    every, steps, output = 8, 40, "/var/tmp/left-out-fsdp"
    options = (*TRAINED, *ON_CPU, "--restarts", "1")
    waits = ("--node-wait", "8s", "--min-nodes", "1")
    with command.running(*LAUNCH, *options, *waits, *training(output, steps, every), *FSDP) as controller:
        run = Attempts(command)
        wait_said(controller, "would survive the loss of a disk")
        run.wait_until(1, every + 5, node_rank=0)
        # The first node has the metadata.
        with faults(NodeState(node="node0", how="kill")):
            said = controller.communicate(timeout=2 * RUN_DEADLINE_S)[0]
    document = document_in(said)
    assert document["status"] == "succeeded", said
    first, second = document["attempts"]
    assert (first["world_size"], second["world_size"], list(second["left_out"])) == (2, 1, ["node0"])
    assert second["global_batch"] == first["global_batch"] == 4
    assert (second["first_step"] % every, second["last_step"]) == (0, steps)
    assert second["first_step"] > 0, said
    before, after = (losses(command, run.name(number)) for number in (1, 2))
    again = {key: loss for key, loss in before.items() if key[0] == 0 and key[1] > second["first_step"]}
    assert again, before
    assert {key: after[key] for key in again} == pytest.approx(again, rel=1e-4)
    assert_nothing_left(command)


# How many tensors of a file another one has in the same shape, and in how many of them are the same numbers.
_COMPARE = """
import glob, sys, torch
from safetensors.torch import load_file
ours, theirs = sys.argv[1:]
(path,) = glob.glob(ours + "/*.safetensors") + glob.glob(ours + "/*.bin")
found, wanted = load_file(path) if path.endswith("safetensors") else torch.load(path), load_file(theirs)
shapes = [name for name, each in wanted.items() if each.shape == found[name].shape]
print(len(wanted), len(shapes), sum(torch.equal(found[name].float(), wanted[name].float()) for name in shapes))
"""


# What is fetched, each commit sees in tests/launch/test_shard_fetch.py.
@pytest.mark.thorough
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("library", ["zero2", "fsdp"])
def test_fetched_shards_of_all_nodes_become_one_file(command: Command, tmp_path: Path, library: str) -> None:
    """By the very command that is named. FSDP 2 saves no other weights, which the model had before the training."""
    zero = library == "zero2"
    output = f"/var/tmp/fetched-{library}"
    sharding = ("--set", "deepspeed=configs/deepspeed/ds_z2_config.json") if zero else FSDP
    options = (*TRAINED, *(REAL_TORCH if zero else ON_CPU))
    fetch = ("--fetch", f"{output}/checkpoint-4/")
    done = command.run(*LAUNCH, *options, *fetch, *training(output, 4, 4), *sharding)
    assert done.returncode == 0, done.stderr
    fetched = command.runs / command.run_id() / "fetched/checkpoint-4"
    shards = sorted(str(path.relative_to(fetched)) for path in fetched.glob("*/*") if re.search(r"_[01]_", path.name))
    folder, model = "global_step4/", "pytorch_model_fsdp_0/"
    assert shards == (
        [f"{folder}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
        if zero
        else [f"{name}__{rank}_0.distcp" for name in ("optimizer_0/", model) for rank in (0, 1)]
    )
    (convert,) = re.findall(r"merge the parameters into one file: (.*) OUTPUT_DIR", done.stderr)
    program, *words = convert.split()
    argv = [str(Path(sys.executable).with_name(program)), *words, str(tmp_path / "whole")]
    subprocess.run(argv, check=True, capture_output=True, timeout=RUN_DEADLINE_S)
    theirs = fetched / "model.safetensors" if zero else Path("assets/tiny/model/model.safetensors")
    argv = [sys.executable, "-c", _COMPARE, str(tmp_path / "whole"), str(theirs)]
    told = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=RUN_DEADLINE_S).stdout.split()
    # Beside the model's own, DeepSpeed saves the output layer that is tied to the embedding.
    assert told == (["51", "51", "51"] if zero else ["50", "50", "0"])
    assert_nothing_left(command)
