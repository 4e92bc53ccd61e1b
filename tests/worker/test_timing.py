"""Phases of a step, in a real training on one worker whose parts take a known time by the phases' clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .instrumented import Worker

pytestmark = pytest.mark.torch

NAP_US = 60_000.0
# Time passes in naps alone, in each thread its own: what a busy machine takes for the rest is no part of a phase.
CLOCK = """
import threading, time
class Clock(threading.local):
    now_ns = time.monotonic_ns()
    def monotonic_ns(self): return self.now_ns
clock = worker.phases.time = Clock()
def nap(times): clock.now_ns += 60_000_000 * times
"""
# Parts that nap: 1 in the loader, 2 in the forward pass, 3 in the backward pass, 4 in the optimizer.
SLEEPERS = f"""{CLOCK}
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        nap(1)
        return torch.ones(3)
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        nap(2)
        return value.clone()
    @staticmethod
    def backward(context, gradient):
        nap(3)
        return gradient
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def forward(self, rows): return (Slow.apply(self.weight * rows) * self.weight).sum()
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None: closure()
        nap(4)
"""


@pytest.fixture
def worker(tmp_path: Path, archive: Path) -> Worker:
    return Worker(tmp_path, archive, warm=True)


def naps(record: dict[str, Any]) -> dict[str, float]:
    """Naps by phase."""
    return {phase: time_us / NAP_US for phase, time_us in record["phases_us"].items()}


def test_each_phase_has_the_time_that_was_spent_in_it(worker: Worker) -> None:
    records = worker.run_wired(f"""{SLEEPERS}
meet()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = Optimizer(model.parameters())
for rows in torch.utils.data.DataLoader(Rows()):
    loss = model(rows)
    nap(5)
    loss.backward()
    optimizer.step()
    step()
""")
    for record in records:
        assert naps(record) == {"data": 1, "forward": 2, "backward": 3, "optimizer": 4}


def test_what_is_nested_counts_to_the_innermost_alone(worker: Worker) -> None:
    # A closure runs the other phases inside the optimizer's step; deepspeed's step holds the optimizer's.
    records = worker.run_wired(f"""{SLEEPERS}
meet()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = Optimizer(model.parameters())
def closure():
    model(torch.ones(3)).backward()
    if steps.phases.enter("comm"):
        nap(5)
        steps.phases.leave()
optimizer.step(closure)
step()
""")
    assert naps(records[0]) == {"forward": 2, "backward": 3, "optimizer": 4, "comm": 5}


def test_a_forward_pass_of_fully_shard_that_is_computed_again_is_part_of_the_backward_pass(worker: Worker) -> None:
    records = worker.run_wired(f"""{SLEEPERS}
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()
    def forward(self, rows): return checkpoint(self.inner, rows, use_reentrant=False)
meet()
model = Outer()
fully_shard(model.inner)
fully_shard(model)
model(torch.ones(3)).backward()
step()
""")
    assert naps(records[0]) == {"forward": 2, "backward": 5}


def test_a_part_that_raises_ends_its_phase_and_raises_as_ever(worker: Worker) -> None:
    records = worker.run_wired(f"""{SLEEPERS}
meet()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = Optimizer(model.parameters())
def refuse(): raise KeyError("theirs")
for part in (lambda: model("nothing"), lambda: optimizer.step(refuse), lambda: torch.autograd.backward("nothing")):
    try:
        part()
    except (AttributeError, KeyError, TypeError, AssertionError):
        pass
    else:
        raise SystemExit("it did not raise")
step()
for _ in range(2):
    nap(5)
    model(torch.ones(3)).backward()
    optimizer.step()
    nap(5)
    step()
""")
    # Only the step in which an optimizer had raised is taken for longer than it was.
    assert naps(records[2]) == {"forward": 2, "backward": 3, "optimizer": 4}


def test_other_threads_are_not_timed(worker: Worker) -> None:
    records = worker.run_wired(f"""{SLEEPERS}
import threading
def load(): list(torch.utils.data.DataLoader(Rows()))
thread = threading.Thread(target=load)
thread.start()
Net()(torch.ones(3)).backward()
thread.join()
step()
""")
    assert naps(records[0]) == {"backward": 3}


def test_deepspeeds_step_and_backward_are_timed_by_its_own_doors(worker: Worker) -> None:
    worker.module(
        "deepspeed.runtime.engine",
        "import torch\nclass DeepSpeedEngine(torch.nn.Module):\n"
        "    def __init__(self, nap):\n"
        "        super().__init__()\n"
        "        self.nap = nap\n"
        "    def forward(self): self.nap(1)\n"
        "    def backward(self): self.nap(2)\n"
        "    def step(self): self.nap(3)\n",
    )
    records = worker.run_wired(
        f"{CLOCK}from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "engine = DeepSpeedEngine(nap)\nengine()\nengine.backward()\nengine.step()\nstep()\n"
    )
    assert naps(records[0]) == {"forward": 1, "backward": 2, "optimizer": 3}


@pytest.mark.parametrize("compiled", ["torch.compile(ddp, backend=count)", "ddp"])
def test_a_compiled_training_is_compiled_as_without_us(worker: Worker, compiled: str) -> None:
    script = f"""
graphs = []
def count(graph, _inputs):
    graphs.append(len(list(graph.graph.nodes)))
    return graph.forward
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, rows): return self.layer(rows).relu().sum()
meet()
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(Net())
model = {compiled}
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
update = optimizer.step if model is not ddp else torch.compile(optimizer.step, backend=count)
for _ in range(3):
    model(torch.ones(2, 4)).backward()
    update()
    optimizer.zero_grad()
    step()
say({{"graphs": graphs, "weights": [value.tolist() for value in ddp.parameters()]}})
"""
    *stepped, told = worker.run_wired(script)
    (untouched,) = worker.run_wired(script, watched=False)
    assert told == untouched
    for record in stepped:
        assert set(record["phases_us"]) == {"forward", "backward", "optimizer"}
        assert record["micro_steps"] == 1
