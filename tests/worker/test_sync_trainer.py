"""Levers under the Trainer: its seams, checkpoints and a resume, of two real workers that are a node each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.records.samples import EvaluationSample, LossSample, NoteSample, SyncSample

from .gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

STEPS, SAVED = 12, 6
BEGIN = """
import shutil
os.environ.update(LOCAL_RANK="0", MULTINODE_SAMPLES=FOLDER, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
worker.hooks.install()
torch = begin()
import transformers
from torch.utils.data import Dataset

# cpu:0, as accelerate has it with several workers, is no place that torch loads an optimizer to.
transformers.TrainingArguments.device = property(lambda args: args._setup_devices and torch.device("cpu"))

class Numbers(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        numbers = torch.arange(8) * 0.1 + index * 0.03
        return {"x": torch.sin(numbers), "labels": torch.cos(numbers[:4])}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.first, self.second = (torch.nn.Linear(8, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.frozen.requires_grad_(False)
    def forward(self, x, labels=None):
        out = self.second(torch.tanh(self.first(self.frozen(x))))
        return {"loss": (out - labels).square().mean(), "out": out}

def checksum(model):
    return [each.double().sum().item() for each in model.parameters()]

class Watch(transformers.TrainerCallback):
    def __init__(self): self.seen, self.losses = [], {}
    def see(self, what, state, model): self.seen.append([what, state.global_step, checksum(model)])
    def on_evaluate(self, args, state, control, model=None, **_): self.see("evaluate", state, model)
    def on_save(self, args, state, control, model=None, **_): self.see("save", state, model)
    def on_train_end(self, args, state, control, model=None, **_): self.see("end", state, model)
    def on_step_end(self, args, state, control, model=None, **_): self.see("step", state, model)
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}): self.losses[state.global_step] = logs["loss"]

def train(name, resume=None, steps_to_do=12, **settings):
    torch.manual_seed(7 + RANK)
    folder = FOLDER + "/" + name
    args = transformers.TrainingArguments(**{
        "output_dir": folder, "max_steps": steps_to_do, "save_steps": 6, "logging_steps": 1, "save_strategy": "steps",
        "per_device_train_batch_size": 2, "learning_rate": 0.02, "report_to": [], "use_cpu": True, "seed": 3,
        "disable_tqdm": True, **settings})
    watch = Watch()
    trainer = transformers.Trainer(model=Model(), args=args, train_dataset=Numbers(), eval_dataset=Numbers(),
                                   callbacks=[watch])
    trainer.train(resume_from_checkpoint=resume)
    files = sorted(
        os.path.relpath(os.path.join(at, one), folder) for at, _, names in os.walk(folder) for one in names
    ) if os.path.isdir(folder) else []
    return {"seen": watch.seen, "losses": watch.losses, "weights": checksum(trainer.model), "files": files}
"""
DILOCO = json.dumps(
    {
        "every": 4,
        "workers": [1, 1],
        "dtype": "fp16",
        "outer_lr": 0.7,
        "momentum": 0.9,
        "option": "--average diloco:4:fp16",
    }
)
POWER_SGD = """
told = {"whole": train("whole")}
told["resumed"] = train("resumed", resume=FOLDER + "/whole/checkpoint-6")
tell(told)
"""
TRAIN = """
told = {"whole": train("whole")}
told["resumed"] = train("resumed", resume=FOLDER + "/whole/checkpoint-6")
told["evaluated"] = train("evaluated", eval_strategy="steps", eval_steps=5, save_steps=5, load_best_model_at_end=True,
                          save_total_limit=1, steps_to_do=11)
if RANK == 0:
    shutil.copytree(FOLDER + "/whole/checkpoint-6", FOLDER + "/plain/checkpoint-6",
                    ignore=shutil.ignore_patterns("multinode_sync_*"))
    shutil.copytree(FOLDER + "/whole/checkpoint-6", FOLDER + "/half/checkpoint-6",
                    ignore=shutil.ignore_patterns("multinode_sync_1*"))
torch.distributed.barrier()
told["plain"] = train("from-plain", resume=FOLDER + "/plain/checkpoint-6", save_strategy="no")
try:
    train("from-half", resume=FOLDER + "/half/checkpoint-6")
except RuntimeError as error:
    told["half"] = str(error)

class InBackward(torch.optim.SGD):
    # As LOMO, which no hook of torch sees.
    _patch_step_function = step = lambda self, *_: None

def in_backward(trainer, *_):
    trainer.optimizer = InBackward(trainer.model.parameters(), lr=0.1)
    return trainer.optimizer
transformers.Trainer.create_optimizer = in_backward
try:
    train("in-backward")
except RuntimeError as error:
    told["in backward"] = str(error)
tell(told)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("sync") / "trainer", BEGIN + TRAIN, warm=False, MULTINODE_SYNC=DILOCO)


def sums(told: Told, run: str, what: str) -> dict[int, Any]:
    """Checksums by step, of one kind of event."""
    return {step: sums for kind, step, sums in told.said[run]["seen"] if kind == what}


@pytest.mark.parametrize(
    ("run", "what", "steps"),
    [
        ("whole", "save", [6, 12]),
        ("whole", "end", [12]),
        ("resumed", "save", [12]),
        ("evaluated", "evaluate", [5, 10, 11]),
        ("evaluated", "save", [5, 10, 11]),
        ("evaluated", "end", [11]),
        ("plain", "end", [12]),
    ],
)
def test_all_workers_are_equal_where_the_trainer_evaluates_saves_and_ends(
    trained: list[Told], run: str, what: str, steps: list[int]
) -> None:
    first, second = (sums(told, run, what) for told in trained)
    assert sorted(first) == steps
    assert first == second


def test_workers_are_not_equal_inside_a_round(trained: list[Told]) -> None:
    first, second = (sums(told, "whole", "step") for told in trained)
    equal = [step for step in first if first[step] == second[step]]
    # The round that the checkpoint at step 6 closed is followed by one from 7 to 10.
    assert equal == [4, 10]


def test_a_resumed_training_has_the_losses_and_the_weights_of_an_undisturbed_one(trained: list[Told]) -> None:
    for told in trained:
        whole, resumed = told.said["whole"], told.said["resumed"]
        after = {step: loss for step, loss in whole["losses"].items() if int(step) > SAVED}
        assert sorted(map(int, after)) == list(range(SAVED + 1, STEPS + 1))
        assert {step: resumed["losses"][step] for step in after} == after
        assert resumed["weights"] == whole["weights"]
        # One of plain DDP goes on too, with an outer state and inner optimizers that are rank 0's.
        assert told.said["plain"]["weights"] != whole["weights"]


def test_each_nodes_state_is_beside_the_checkpoint_and_a_part_of_it_is_refused(trained: list[Told]) -> None:
    files = trained[0].said["whole"]["files"]
    for step in (6, 12):
        assert {f"checkpoint-{step}/multinode_sync_{rank}.pt" for rank in (0, 1)} <= set(files)
    assert not [one for one in files if one.endswith(".partial")]
    for told in trained:
        assert "checkpoint-6 has multinode_sync_*.pt of only some ranks" in told.said["half"]
    said = [one.message for one in trained[0].samples if isinstance(one, NoteSample)]
    assert "the checkpoint was saved without averaging between nodes; the outer state starts over" in said


def test_an_early_round_is_recorded_with_its_reason(trained: list[Told]) -> None:
    for told in trained:
        rounds = [(one.steps, one.reason) for one in told.samples if isinstance(one, SyncSample)]
        assert rounds[:4] == [(4, "round"), (2, "checkpoint"), (4, "round"), (2, "checkpoint")]
        assert {(1, "evaluation"), (2, "end")} <= set(rounds)
    assert any(isinstance(one, LossSample) for one in trained[0].samples)


def test_an_evaluation_has_the_same_loss_on_all_workers(trained: list[Told]) -> None:
    first, second = (
        [(one.step, one.loss) for one in told.samples if isinstance(one, EvaluationSample)] for told in trained
    )
    assert [step for step, _ in first] == [5, 10, 11]
    assert first == second


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_by_the_trainers_own_step(trained: list[Told]) -> None:
    for told in trained:
        assert "InBackward updates parameters in the backward pass" in told.said["in backward"]


def test_power_sgd_resumes_with_what_it_has_lost_so_far(tmp_path: Path) -> None:
    for told in run_pair(tmp_path / "low-rank", BEGIN + POWER_SGD, warm=False, MULTINODE_GRAD_COMPRESS="powersgd:1:2"):
        whole, resumed = told.said["whole"], told.said["resumed"]
        files = {f"checkpoint-{step}/multinode_powersgd_{rank}.pt" for step in (6, 12) for rank in (0, 1)}
        assert files <= set(whole["files"])
        assert resumed["weights"] == whole["weights"]
        assert not [one for one in told.samples if isinstance(one, NoteSample)]
