"""Calls and bytes by formula against runs that were recorded: how FSDP and ZeRO-3 share a model out.

Two virtual nodes, gloo, torch 2.13.0, DeepSpeed 0.19.8; `lf-` are configs/tiny_sft.yaml under LLaMA-Factory 0.9.5,
transformers 5.6.0 and accelerate 1.11.0 (tests/lab/shard_on_cpu.py), the others tests/lab/train_mlp.py. `calls` are
those of rank 0 in a step, `nics` the payload that each node's interface sent and received in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.job.job import TrainingJob
from multinode.model.engine_calls import step_messages
from multinode.model.training import read_training
from multinode.predict.evidence import work_of_calls
from multinode.profile.calls import read_calls
from multinode.profile.step_bytes import SeenTraffic
from multinode.profile.strategy import Recognised, recognise_strategy
from multinode.profile.summary import Comm
from multinode.records.samples import CallCount
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, nic_bytes, passing_bytes, strategy_calls
from tests import make
from tests.model.trainings import FULL, TINY, training_job
from tests.profile.seen_theory import worker_bytes
from tests.profile.seen_trainings import Passed, Training, call, see


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the file.

    Attributes:
        config: of LLaMA-Factory, beyond FULL; None of a script, of which `strategy` and `load` tell.
    """

    name: str
    workers: int
    micro_steps: int
    model: dict[str, Any]
    calls: Sequence[tuple[str, str, float, int]]
    nics: Sequence[tuple[float, float]]
    config: dict[str, Any] | None = None
    deepspeed: dict[str, Any] = {}
    strategy: Strategy = Strategy.FSDP
    load: dict[str, Any] = {}

    @property
    def layout(self) -> Layout:
        return Layout(nodes=2, workers_per_node=self.workers)

    @property
    def job(self) -> TrainingJob:
        return training_job(FULL | (self.config or {}), **self.deepspeed)

    @property
    def training(self) -> tuple[Strategy, TrafficInputs]:
        if self.config is not None:
            training = read_training(self.job, TINY)
            return training.strategy, training.load
        parameters = self.model["parameters"]
        load = TrafficInputs(
            parameters=parameters, trainable=parameters, parameter_bytes=4, gradient_bytes=4, **self.load
        )
        return self.strategy, load

    @property
    def recorded(self) -> Training:
        def groups(rank: int) -> dict[str, tuple[int, ...]]:
            first = rank - rank % self.workers
            return {
                "world": tuple(range(2 * self.workers)),
                "inside": tuple(range(first, first + self.workers)),
                "across": tuple(range(rank % self.workers, 2 * self.workers, self.workers)),
            }

        def calls(_rank: int) -> list[CallCount]:
            return [call(op, size, count, group=group) for op, group, size, count in self.calls]

        def nics(node: int, _step: int) -> Passed:
            return {"ens1f0": self.nics[node]}

        return Training(
            workers=self.workers,
            calls=calls,
            groups=groups,
            nics=nics,
            model=self.model,
            micro_steps=self.micro_steps,
        )

    @property
    def recognised(self) -> Recognised:
        observed = self.recorded.observed()
        return recognise_strategy(observed, read_calls(observed))

    @property
    def traffic(self) -> SeenTraffic:
        return see(self.recorded.observed())


RUNS = msgspec.json.decode(Path(__file__).with_name("sharded_runs.json").read_bytes(), type=list[Run])
LLAMA_FACTORY = [run for run in RUNS if run.config is not None]
RELATIVE = 0.03


def named(runs: Sequence[Run]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", runs, ids=[run.name for run in runs])


@named(RUNS)
def test_the_strategy_is_recognised(run: Run) -> None:
    assert run.recognised.strategy is run.training[0]


@named(RUNS)
def test_bytes_by_formula_by_calls_and_by_nics_are_equal(run: Run) -> None:
    seen = run.traffic.bytes_per_step
    calls = strategy_calls(*run.training, run.layout)
    assert worker_bytes(calls, run.layout, run.micro_steps) == pytest.approx(seen.calls, rel=RELATIVE)
    assert seen.expected == pytest.approx(seen.nic, rel=RELATIVE)
    assert nic_bytes(calls, run.layout, run.micro_steps, gloo=True) == pytest.approx(seen.nic, rel=RELATIVE)


@named(LLAMA_FACTORY)
def test_the_calls_of_a_job_are_those_recorded(run: Run) -> None:
    told, counted = Counter[str](), Counter[str]()
    for message in step_messages(run.job, TINY, run.layout).messages:
        told[message.collective] += round(message.size_bytes * message.times)
    for op, group, size, count in run.calls:
        # What stays inside a node is left out of a job's messages.
        if group != "inside":
            counted[op] += int(size * count)
    assert told.keys() == counted.keys()
    assert all(told[op] == pytest.approx(counted[op], rel=RELATIVE) for op in told)


@pytest.mark.parametrize(
    ("changes", "transformers", "times"),
    [
        ({}, "4.51.3", 3),
        ({}, "4.52.0", 2),
        ({}, None, 2),
        ({"use_reentrant_gc": False}, "4.51.3", 2),
        ({"disable_gradient_checkpointing": True}, "4.51.3", 2),
        ({"fsdp_config": {"version": 2}}, "4.51.3", 2),
    ],
)
def test_reentrant_checkpointing_around_the_units_gathers_layers_three_times(
    changes: dict[str, Any], transformers: str | None, times: int
) -> None:
    """As `fsdp-full_shard-k1-reentrant` was recorded; what is outside of the layers as `lf-fsdp1-full_shard-k1-gc`."""
    job, layout = training_job(FULL | {"fsdp": "full_shard auto_wrap"} | changes), Layout(nodes=2)
    training = read_training(job, TINY, transformers)
    messages = step_messages(job, TINY, layout, transformers).messages
    layers = len(training.tensors.layers)
    assert max(one.times for one in messages if one.collective == "all_gather") == times * layers
    told = sum(one.size_bytes * one.times for one in messages if one.collective == "all_gather")
    (formula,) = (
        one for one in strategy_calls(training.strategy, training.load, layout) if one.collective == "all_gather"
    )
    assert formula.size_bytes * formula.times_in(training.accumulation) == pytest.approx(told, rel=RELATIVE)


@named([run for run in RUNS if run.micro_steps > 1])
def test_what_grows_with_accumulation_is_known_from_a_run_that_accumulates(run: Run) -> None:
    """Bytes with two micro-batches per step, of a run with four: by the formula, and by what the run called."""
    strategy, load = run.training
    summary = make.summary(
        strategy=run.recognised.name,
        recognised=run.recognised.strategy,
        fsdp_version=run.recognised.fsdp_version,
        micro_steps=run.micro_steps,
        parameters=run.model["parameters"],
        trainable=run.model["trainable"],
        comm=Comm(calls=run.traffic.calls),
    )
    work = work_of_calls(summary, run.layout)
    assert work is not None
    assert work.strategy is strategy
    formula = strategy_calls(strategy, load, run.layout)
    sent = passing_bytes(work.calls[strategy], 2, run.layout)
    assert sent == pytest.approx(worker_bytes(formula, run.layout, 2), rel=RELATIVE)
