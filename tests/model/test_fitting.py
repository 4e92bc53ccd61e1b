from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.job.job_files import Change
from multinode.model.fitting import first_that_fits, fits
from multinode.model.memory import WorkerMemory
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy

from .test_memory import load, worker


def smaller(budget_gib: float, *, samples: int = 8, **changes: Any) -> Change | None:
    memory = worker(samples=samples, **changes)
    return first_that_fits(memory, budget_gib, accumulation=2, small=load(None, 20_971_520))


@pytest.mark.parametrize(
    ("budget_gib", "overrides"),
    [
        # The largest batch that fits; the global batch stays.
        (32, ("per_device_train_batch_size=4", "gradient_accumulation_steps=4")),
        (24, ("per_device_train_batch_size=2", "gradient_accumulation_steps=8")),
    ],
)
def test_a_smaller_micro_batch_comes_first(budget_gib: float, overrides: tuple[str, ...]) -> None:
    assert smaller(budget_gib) == Change(overrides=overrides)


def test_checkpointing_is_turned_on_before_the_training_is_changed() -> None:
    change = smaller(24, samples=1, tokens=2000, recompute=False)
    assert change == Change(overrides=("disable_gradient_checkpointing=false",))


def test_quantization_comes_before_shorter_samples() -> None:
    assert smaller(16, samples=1) == Change(overrides=("quantization_bit=4",))
    assert smaller(12, samples=1, tokens=8192) == Change(overrides=("quantization_bit=4", "cutoff_len=2048"))


def test_what_fits_alone_is_not_joined_with_others() -> None:
    sharded = whole(Strategy.ZERO2, Layout(nodes=8, workers_per_node=8))
    assert first_that_fits(sharded, 24, accumulation=1) == Change(deepspeed=("zero_optimization.stage=3",))
    assert first_that_fits(sharded, 1, accumulation=1) is None


def whole(strategy: Strategy, layout: Layout) -> WorkerMemory:
    memory = worker(strategy, layout, adapted=None)
    parameters = memory.load.parameters or 0
    return replace(memory, load=load(parameters, parameters))


def test_what_is_proposed_fits() -> None:
    assert not fits(worker(samples=8), 24)
    assert fits(worker(samples=1), 24)
