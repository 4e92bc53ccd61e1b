"""Steps that a later attempt makes again have the losses of the first time: real trainings, also sharded ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.launching import RUN_DEADLINE_S, Command, assert_nothing_left, kill
from tests.lab.restarting import (
    FSDP,
    LAUNCH,
    ON_CPU,
    STEPS,
    TRAINED,
    assert_resumed,
    launched,
    losses,
    on_node,
    training,
)
from tests.lab.supervised import REAL_TORCH, document_in, worker

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("module_lab", "tiny")]


@pytest.mark.thorough
def test_steps_that_are_made_again_have_the_losses_of_the_first_time(command: Command) -> None:
    """Real LLaMA-Factory, real DDP over gloo; equal to the last bit. Its dropout takes random numbers at every step."""
    lora = ("--set", "finetuning_type=lora", "--set", "lora_dropout=0.1")
    assert_made_again(command, *training("/var/tmp/made-again", 24, 8), *lora)


# Each commit sees ZeRO-2 and FSDP 2 go on in test_restart_shards.py, and what a script's worker is told in
# tests/worker/test_restarts.py; benchmarks/restart_losses.py measures all strategies beside an undisturbed training.
@pytest.mark.thorough
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("config", ["tiny_z3_config", "ds_z2_config"])
def test_sharded_steps_that_are_made_again_have_the_losses_of_the_first_time(command: Command, config: str) -> None:
    """ZeRO-2 and ZeRO-3: each node has only the shards of its own ranks."""
    # Without copies of shards, each node keeps only its own.
    zero = ("--shard-copies", "0", "--set", f"deepspeed=configs/deepspeed/{config}.json")
    output = f"/var/tmp/made-again-{config}"
    said = assert_made_again(command, *training(output, 24, 8), *zero)
    assert "copying 1 file (12 B) of checkpoint-8 from node0 to node1" in said
    for rank in (0, 1):
        folder = on_node(f"node{rank}", f"{output}/checkpoint-8")
        assert (folder / "latest").read_text() == "global_step8"
        assert not list(folder.glob(f"global_step8/zero_pp_rank_{1 - rank}_*"))


@pytest.mark.thorough
def test_fsdp_steps_that_are_made_again_have_the_losses_of_the_first_time(command: Command) -> None:
    """FSDP 2. Without Adam's moments, the second step after a resume has another loss."""
    output = "/var/tmp/made-again-fsdp"
    said = assert_made_again(command, "--shard-copies", "0", *training(output, 24, 8), *FSDP, options=ON_CPU)
    # Tensors that are not sharded are in the file of any rank, so that each loads all files.
    assert "of checkpoint-8 from node0 to node1" in said
    assert "of checkpoint-8 from node1 to node0" in said
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        names = [".metadata", "__0_0.distcp", "__1_0.distcp"]
        for node in ("node0", "node1"):
            found = on_node(node, f"{output}/checkpoint-8/{folder}")
            assert sorted(path.name for path in found.iterdir()) == names


@pytest.mark.thorough
@pytest.mark.usefixtures("deepspeed_compiled")
def test_a_script_with_the_trainer_resumes_from_its_shards(command: Command) -> None:
    """ZeRO-2. The script neither saves on each node nor resumes by itself."""
    output = "/var/tmp/made-again-script"
    options = {"output_dir": output, "deepspeed": "configs/deepspeed/ds_z2_config.json", "max_steps": 24}
    options |= {"save_steps": 8, "logging_steps": 1, "report_to": "none", "use_cpu": "true"}
    words = tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
    said = assert_made_again(command, "--shard-copies", "0", "--", "tests/lab/train_saving.py", *words)
    assert "copying 1 file (12 B) of checkpoint-8 from node0 to node1" in said
    assert (on_node("node1", f"{output}/checkpoint-8") / "global_step8/mp_rank_00_model_states.pt").exists()


def assert_made_again(command: Command, *job: str, options: tuple[str, ...] = REAL_TORCH) -> str:
    """A worker is killed, and the attempt after it repeats the losses; returns what was said."""
    options = (*TRAINED, *options)
    # There is one checkpoint when the worker is killed, and steps are left for the time until then.
    every, steps = 8, 24
    with launched(command, "--restarts", "3", *options, *job) as (controller, run):
        run.wait_until(1, every + 5)
        kill(worker(run.name(1), 1))
        said = controller.communicate(timeout=RUN_DEADLINE_S)[0]
    document = document_in(said)
    assert document["status"] == "succeeded", document
    first, second = document["attempts"]
    assert_resumed(second, first, every)
    assert (second["first_step"], second["last_step"]) == (every, steps)
    before, after = (losses(command, run.name(number)) for number in (1, 2))
    again = {key: loss for key, loss in before.items() if key[1] > every}
    # The loss of a step is logged when it has ended.
    assert {(rank, step) for rank in (0, 1) for step in range(every + 1, every + 5)} <= set(again)
    assert again == {key: after[key] for key in again}
    assert_nothing_left(command)
    return " ".join(said.split())


def trained(output: str) -> tuple[list[dict[str, Any]], bytes]:
    """Of the last checkpoint on node 0: loss, gradient norm and learning rate of every step, and the weights."""
    folder = on_node("node0", f"{output}/checkpoint-{STEPS}")
    history: list[dict[str, Any]] = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return history, (folder / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_losses_and_weights_after_a_resume_are_those_of_an_undisturbed_training(command: Command) -> None:
    """Started by torchrun itself."""
    options = ("--engine", "torchrun", "--env", "OMP_NUM_THREADS=1")
    disturbed, undisturbed = "/var/tmp/disturbed", "/var/tmp/undisturbed"
    with launched(command, "--restarts", "3", *options, *training(disturbed)) as (controller, run):
        run.wait_until(1, STEPS - 15)
        kill(worker(run.name(1), 1))
        document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert document["status"] == "succeeded", document
    first, second = document["attempts"]
    assert_resumed(second, first)
    assert second["last_step"] == STEPS
    code, whole = command.code_and_document(*LAUNCH, *options, *training(undisturbed))
    assert (code, whole["summary"]["last_loss"]) == (0, document["summary"]["last_loss"])
    history, weights = trained(disturbed)
    expected, their_weights = trained(undisturbed)
    assert [entry["step"] for entry in expected] == list(range(1, STEPS + 1))
    assert history == expected
    assert weights == their_weights
    assert_nothing_left(command)
