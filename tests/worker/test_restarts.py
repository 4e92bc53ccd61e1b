"""The hooks of a run with restarts, on classes that stand in for the Trainer and DeepSpeed's engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multinode.worker.restarts import hooks

from .gloo_pair import run_pair

ATTEMPT = {"MULTINODE_ATTEMPT": "2"}


class Trainer:
    def __init__(self, output_dir: str) -> None:
        self.args = SimpleNamespace(output_dir=output_dir, save_on_each_node=False)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        return resume_from_checkpoint, trial


class DeepSpeedEngine:
    def __init__(self, **settings: Any) -> None:
        self._config = SimpleNamespace(_param_dict=settings)

    def use_node_local_storage(self) -> bool:
        settings = self._config._param_dict  # noqa: SLF001 - as DeepSpeed has it
        return bool(settings.get("checkpoint", {}).get("use_node_local_storage"))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs the hooks of these variables; returns the modules."""

    def install(**variables: str) -> SimpleNamespace:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        modules = {
            "transformers.trainer": SimpleNamespace(Trainer=type("Trainer", (Trainer,), {})),
            "deepspeed.runtime.engine": SimpleNamespace(
                DeepSpeedEngine=type("DeepSpeedEngine", (DeepSpeedEngine,), {})
            ),
        }
        for name, action in hooks():
            if name in modules:
                action(modules[name])
        return SimpleNamespace(**{name.partition(".")[0]: module for name, module in modules.items()})

    return install


@pytest.mark.parametrize(
    ("variables", "output", "resumed"),
    [
        ({}, "out", "mine"),
        ({"MULTINODE_CHECKPOINT": "out/checkpoint-20"}, "out", "out/checkpoint-20"),
        ({"MULTINODE_CHECKPOINT": "out/checkpoint-20"}, "./out/", "out/checkpoint-20"),
        ({"MULTINODE_CHECKPOINT": f"{Path.cwd()}/out/checkpoint-20"}, "out", f"{Path.cwd()}/out/checkpoint-20"),
        # Another model of the same script.
        ({"MULTINODE_CHECKPOINT": "out/checkpoint-20"}, "reward", "mine"),
    ],
)
def test_a_script_resumes_from_the_chosen_checkpoint(
    hooked: Any, variables: dict[str, str], output: str, resumed: str
) -> None:
    trainer = hooked(**ATTEMPT, **variables).transformers.Trainer(output)
    assert trainer.train("mine", trial=1) == (resumed, 1)
    assert trainer.train(resume_from_checkpoint="mine") == (resumed, None)
    assert trainer.args.save_on_each_node is False


@pytest.mark.parametrize(
    ("settings", "local"),
    [
        ({}, {True}),
        ({"checkpoint": {"tag_validation": "Warn"}}, {True}),
        ({"checkpoint": {"use_node_local_storage": False}}, {False}),
    ],
)
def test_every_node_saves_where_the_disk_is_local(hooked: Any, settings: dict[str, Any], local: set[bool]) -> None:
    modules = hooked(**ATTEMPT, MULTINODE_SAVE_ON_EACH_NODE="1")
    assert modules.deepspeed.DeepSpeedEngine(**settings).use_node_local_storage() in local
    trainer = modules.transformers.Trainer("out")
    assert trainer.train() == (None, None)
    assert trainer.args.save_on_each_node is True


def test_without_restarts_nothing_is_changed(hooked: Any) -> None:
    modules = hooked(MULTINODE_SAVE_ON_EACH_NODE="1", MULTINODE_CHECKPOINT="out/checkpoint-20")
    assert hooks() == []
    assert modules.transformers.Trainer.train is Trainer.train


# accelerate's own functions, which save with two ranks, and load into an optimizer that has made no step.
FSDP = """
hooks = [one for one in worker.restarts.hooks() if "accelerate" in one[0]] if os.environ["HOOKED"] == "1" else []
watch(hooks)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
torch = begin()
from types import SimpleNamespace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from accelerate import PartialState
from accelerate.utils import load_fsdp_optimizer, save_fsdp_optimizer

PartialState(cpu=True)
plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT, state_dict_config=None)
accelerator = SimpleNamespace(wait_for_everyone=torch.distributed.barrier, process_index=RANK)

def make():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def moments(optimizer):
    states = optimizer.state.values()
    return [state[name].to_local().tolist() for state in states for name in ("exp_avg", "exp_avg_sq")]

model, optimizer = make()
for step in range(3):
    model(torch.full((4, 6), 0.1 * (RANK + step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
save_fsdp_optimizer(plugin, accelerator, optimizer, model, FOLDER)
later, fresh = make()
begun = [each.to_local().tolist() for each in later.parameters()]
load_fsdp_optimizer(plugin, accelerator, fresh, later, FOLDER)
kept = begun == [each.to_local().tolist() for each in later.parameters()]
steps = [int(state["step"]) for state in fresh.state.values()]
rate = fresh.param_groups[0]["lr"]
tell({"saved": moments(optimizer), "loaded": moments(fresh), "steps": steps, "kept": kept, "rate": rate})
"""


@pytest.mark.torch
def test_fsdp_gets_back_the_state_of_its_optimizer(tmp_path: Path) -> None:
    for told in run_pair(tmp_path / "hooked", FSDP, MULTINODE_ATTEMPT="2", HOOKED="1"):
        assert told.said["loaded"] == told.said["saved"]
        assert (told.said["steps"], told.said["kept"], told.said["rate"]) == ([3] * 4, True, 0.1)
    # What it is for: accelerate itself loads nothing, and says nothing.
    for told in run_pair(tmp_path / "plain", FSDP, HOOKED="0"):
        assert (len(told.said["saved"]), told.said["loaded"]) == (8, [])
