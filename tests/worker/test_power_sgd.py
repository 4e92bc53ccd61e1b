"""Gradients that DDP sends by PowerSGD, between two real workers on gloo."""

from __future__ import annotations

import pytest

from multinode.records.samples import NoteSample, StepSample, TrafficSample

from .gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

STEPS, START = 12, 3
WIDTH, LAYERS, RANK = 64, 3, 4
# Two samples of each worker: the mean gradient of a layer has rank 4.
BEGIN = """
import contextlib
kind = os.environ["KIND"]
traffic = worker.traffic.Traffic(steps, guard)
watch([
    *worker.compiler.HOOKS,
    *traffic.hooks(),
    *(worker.levers.compress.hooks(steps, guard, traffic, kind) if kind else []),
    *worker.ddp.hooks(steps, guard, traffic),
])
torch = begin()
from torch.nn.parallel import DistributedDataParallel as DDP

def make(width=64, **settings):
    torch.manual_seed(7)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    return DDP(torch.nn.Sequential(*layers), **{"bucket_cap_mb": 0.02, **settings})

def train(model, micro_steps=1, batch=2, width=64):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, losses = steps.count + 1, []
    for number in range(12):
        for micro in range(micro_steps):
            torch.manual_seed(10 * micro + RANK)
            with contextlib.nullcontext() if micro == micro_steps - 1 else model.no_sync():
                loss = (model(torch.randn(batch, width)) - 0.5).square().mean()
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        steps.step("optimizer")
    return {"first": first, "losses": losses, "weights": [each.tolist() for each in model.parameters()],
            "hook": model._get_ddp_logging_data().get("comm_hook", "")}

tell({
    "plain": train(make()),
    "views": train(make(gradient_as_bucket_view=True)),
    "unused": train(make(find_unused_parameters=True)),
    "one bucket": train(make(bucket_cap_mb=25)),
    "large batch": train(make(), batch=16),
    "accumulated": train(make(), micro_steps=2),
    "small": train(make(8), width=8),
})
"""
EXACT = ["plain", "views", "unused", "one bucket"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Told]]:
    folder = tmp_path_factory.mktemp("low-rank")
    kinds = {"none": "", "low": f"powersgd:{RANK}:{START}"}
    return {name: run_pair(folder / name, BEGIN, KIND=kind) for name, kind in kinds.items()}


def flat(weights: object) -> list[float]:
    """All numbers of nested lists."""
    return [one for part in weights for one in flat(part)] if isinstance(weights, list) else [float(str(weights))]


@pytest.mark.parametrize("job", EXACT)
def test_a_gradient_of_that_rank_travels_whole(pairs: dict[str, list[Told]], job: str) -> None:
    for low, plain in zip(pairs["low"], pairs["none"], strict=True):
        off = zip(flat(low.said[job]["weights"]), flat(plain.said[job]["weights"]), strict=True)
        assert max(abs(one - other) for one, other in off) < 1e-4
        assert low.said[job]["hook"] == "multinode_powersgd"


@pytest.mark.parametrize("job", [*EXACT, "large batch", "accumulated"])
def test_workers_stay_equal_and_what_is_lost_is_not_lost_for_good(pairs: dict[str, list[Told]], job: str) -> None:
    first, second = (told.said[job] for told in pairs["low"])
    assert first["weights"] == second["weights"]
    exact = pairs["none"][0].said[job]["losses"]
    assert first["losses"][-1] == pytest.approx(exact[-1], rel=0.1)
    assert first["losses"][-1] < 0.7 * first["losses"][0]


def test_two_thin_matrices_are_sent_from_the_iteration_that_was_asked_for(pairs: dict[str, list[Told]]) -> None:
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    thin = 4 * LAYERS * (2 * RANK * WIDTH + WIDTH)
    for told in pairs["low"]:
        calls = {sample.traffic: sample.calls for sample in told.samples if isinstance(sample, TrafficSample)}
        numbers = {sample.step: sample.traffic for sample in told.samples if isinstance(sample, StepSample)}
        first = told.said["plain"]["first"]
        sent = [
            sum(call.size_bytes * call.count for call in calls[numbers[first + step] or 0] if call.op == "all_reduce")
            for step in range(STEPS)
        ]
        assert sent == [whole] * START + [thin] * (STEPS - START)


def test_matrices_that_are_small_already_stay_as_they_are_and_that_is_told(pairs: dict[str, list[Told]]) -> None:
    reason = f"no gradient is a matrix that rank {RANK} would reduce to less than half"
    for told, plain in zip(pairs["low"], pairs["none"], strict=True):
        assert told.said["small"]["weights"] == plain.said["small"]["weights"]
        notes = [sample.message for sample in told.samples if isinstance(sample, NoteSample)]
        assert notes == [f"gradients were NOT compressed to powersgd:{RANK}:{START}: {reason}"]
