"""Phases of a step, in a real training on one worker whose parts sleep for a known time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .instrumented import Worker

pytestmark = pytest.mark.torch

# Long beside what the parts themselves take, and beside what a busy machine keeps them waiting for.
NAP_US = 60_000.0
# Parts that sleep: 1 nap in the loader, 2 in the forward pass, 3 in the backward pass, 4 in the optimizer.
SLEEPERS = """
import time
def nap(times): time.sleep(0.06 * times)
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


def naps(record: dict[str, Any]) -> dict[str, int]:
    """Whole naps by phase; what is shorter than one is the phase's own work."""
    return {phase: int(time_us / NAP_US) for phase, time_us in record["phases_us"].items()}


@pytest.mark.timing
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


@pytest.mark.timing
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


@pytest.mark.timing
def test_a_forward_pass_that_is_computed_again_is_part_of_the_backward_pass(worker: Worker) -> None:
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


@pytest.mark.timing
def test_a_part_that_raises_ends_its_phase_and_raises_as_ever(worker: Worker) -> None:
    records = worker.run_wired(f"""{SLEEPERS}
meet()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = Optimizer(model.parameters())
def refuse(): raise KeyError("theirs")
for part in (lambda: model("nothing"), lambda: optimizer.step(refuse), lambda: torch.autograd.backward("nothing")):
    try:
        part()
    except (KeyError, TypeError, AssertionError):
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


@pytest.mark.timing
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


@pytest.mark.timing
def test_deepspeeds_step_and_backward_are_timed_by_its_own_doors(worker: Worker) -> None:
    worker.module(
        "deepspeed.runtime.engine",
        "import time, torch\nclass DeepSpeedEngine(torch.nn.Module):\n"
        "    def forward(self): time.sleep(0.06)\n"
        "    def backward(self): time.sleep(0.12)\n"
        "    def step(self): time.sleep(0.18)\n",
    )
    records = worker.run_wired(
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "engine = DeepSpeedEngine()\nengine()\nengine.backward()\nengine.step()\nstep()\n"
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
