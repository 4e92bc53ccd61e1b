from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from multinode.profile.calls import read_calls
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.strategy import recognise_strategy
from multinode.records.samples import CallCount, GroupSample, ModelSample, WorkerSample
from tests.profile.seen_trainings import S, Training, call, ddp, fsdp, model, zero2

DDP = Training(calls=ddp, model=model("ddp"))
Calls = Callable[[int], Sequence[CallCount]]


def recognise(observed: Observed, nic_bytes: float | None = None) -> str:
    return recognise_strategy(observed, read_calls(observed), nic_bytes).name


def named(training: Training, **changes: object) -> str:
    return recognise(msgspec.structs.replace(training, **changes).observed())


def zero3(_rank: int) -> list[CallCount]:
    return [call("all_gather", S / 4, 8), call("reduce_scatter", S / 4, 4), call("all_reduce", 8)]


def grad_op(_rank: int) -> list[CallCount]:
    """FSDP whose parameters stay whole until the backward pass: each unit is gathered once."""
    return [call("all_gather", S / 5, 5), call("reduce_scatter", S / 5, 5)]


def compressed(_rank: int) -> list[CallCount]:
    """DDP's buckets, their gradient dtype on the wire fp16."""
    return [call("all_reduce", S / 4, 2, source="ddp"), call("all_reduce", 4)]


@pytest.mark.parametrize(
    ("told", "calls", "name"),
    [
        (model("ddp"), ddp, "DDP"),
        (model("ddp", comm_hooks="multinode_fp16"), compressed, "DDP"),
        (None, compressed, "DDP"),
        (model("deepspeed", stage=0), ddp, "DDP (DeepSpeed's ZeRO-0)"),
        (model("deepspeed", stage=1), zero2(1), "ZeRO-1"),
        (model("deepspeed", stage=2), zero2(4), "ZeRO-2"),
        (model("deepspeed", stage=3), zero3, "ZeRO-3"),
        (model("fsdp2", reshard_after_forward=True), fsdp, "FSDP2 (full shard)"),
        (model("fsdp2"), fsdp, "FSDP2 (full shard)"),
        (model("fsdp2", reshard_after_forward=False), grad_op, "FSDP2 (SHARD_GRAD_OP)"),
        (model("fsdp2", reshard_after_forward=8), fsdp, "FSDP2 (reshards to 8 workers)"),
        (model("fsdp", sharding_strategy="FULL_SHARD", reshard_after_forward=True), fsdp, "FSDP (full shard)"),
        (model("fsdp", sharding_strategy="NO_SHARD"), ddp, "FSDP (NO_SHARD, as DDP)"),
        (model("none"), lambda _rank: [call("all_reduce", S)], "custom collectives (all_reduce)"),
        (None, ddp, "DDP"),
        (None, zero3, "custom collectives (all_gather and reduce_scatter)"),
    ],
)
def test_a_strategy_is_named_by_its_model_and_its_calls(
    told: Mapping[str, Any] | None, calls: Calls, name: str
) -> None:
    assert named(DDP, model=told, calls=calls) == name
    assert named(DDP, model=told, calls=calls, workers=2) == name


@pytest.mark.parametrize(
    ("told", "name"),
    [(model("ddp"), "DDP"), (model("deepspeed", stage=3), "ZeRO-3"), (model("none"), "unknown"), (None, "unknown")],
)
def test_without_recorded_calls_the_models_word_is_all_there_is(told: Mapping[str, Any] | None, name: str) -> None:
    assert named(DDP, model=told, calls=None) == name


@pytest.mark.parametrize(
    ("told", "calls", "name"),
    [
        (model("deepspeed", stage=3), ddp, "custom collectives (all_reduce), but ZeRO-3 according to the model"),
        (model("deepspeed", stage=1), ddp, "custom collectives (all_reduce), but ZeRO-1 according to the model"),
        (model("fsdp2"), ddp, "custom collectives (all_reduce), but FSDP2 according to the model"),
        (model("ddp"), zero3, "custom collectives (all_gather and reduce_scatter), but DDP according to the model"),
        (
            model("fsdp2", reshard_after_forward=True),
            grad_op,
            "FSDP2 (SHARD_GRAD_OP) according to its calls, but not to the model",
        ),
        (
            model("fsdp2", reshard_after_forward=False),
            fsdp,
            "FSDP2 (full shard) according to its calls, but not to the model",
        ),
    ],
)
def test_calls_win_over_what_the_model_says(told: Mapping[str, Any], calls: Calls, name: str) -> None:
    assert named(DDP, model=told, calls=calls) == name


def test_accumulation_leaves_the_number_of_gathers_undecided() -> None:
    # With K = 4 and gradients reduced once, units are gathered four times as often as they are reduced.
    def calls(_rank: int) -> list[CallCount]:
        return [call("all_gather", S / 5, 20), call("reduce_scatter", S / 5, 5)]

    told = model("fsdp2", accumulation=4, reshard_after_forward=False)
    assert named(DDP, model=told, calls=calls) == "FSDP2 (SHARD_GRAD_OP)"


def test_an_evaluation_or_a_metric_does_not_make_ddp_something_else() -> None:
    assert named(DDP, calls=lambda rank: [*ddp(rank), call("all_gather", S / 2), call("broadcast", S / 3)]) == "DDP"


def hybrid_groups(rank: int) -> dict[str, tuple[int, ...]]:
    first = rank // 2 * 2
    return {"inside": (first, first + 1), "across": (rank % 2, rank % 2 + 2)}


def hybrid_calls(_rank: int) -> list[CallCount]:
    return [
        call("all_gather", S / 5, 9, group="inside"),
        call("reduce_scatter", S / 5, 5, group="inside"),
        call("all_reduce", S / 10, 5, group="across"),
    ]


def test_groups_in_two_dimensions_are_hybrid_sharding() -> None:
    hybrid = Training(workers=2, groups=hybrid_groups, calls=hybrid_calls, model=model("fsdp2", mesh="2x2"))
    assert named(hybrid) == "FSDP2 (hybrid shard)"


def test_a_worker_alone_is_one_worker() -> None:
    assert named(DDP, nodes=1, calls=None) == "one worker"


def test_workers_that_never_call_each_other_train_alone() -> None:
    alone = "no communication: no worker communicates with another: each trains alone"
    assert named(DDP, model=model("none"), calls=lambda _rank: []) == alone
    assert named(DDP, model=None, calls=lambda _rank: [call("all_reduce", 4, 3), call("barrier", 0)]) == alone


def test_a_nic_that_carries_a_lot_says_that_there_are_calls_which_nobody_saw() -> None:
    silent = Training(model=model("none"), calls=lambda _rank: []).observed()
    assert recognise(silent, 100e6).startswith("unknown: ")
    assert "100.0 MB per step" in recognise(silent, 100e6)
    assert recognise(silent, 9000.0).startswith("no communication: ")


def test_a_wrapped_model_talks_even_where_nothing_saw_it() -> None:
    assert named(DDP, model=model("fsdp2"), calls=lambda _rank: []) == "FSDP2 (full shard), calls not recorded"


def test_nodes_that_never_call_each_other_train_alone() -> None:
    alone = named(DDP, workers=2, groups=lambda rank: {"0": (rank // 2 * 2, rank // 2 * 2 + 1)})
    assert alone == "no communication: no call crosses nodes: each node trains alone"


def test_nodes_of_which_each_counts_itself_the_whole_world_train_alone() -> None:
    # LLaMA-Factory without FORCE_TORCHRUN: both workers are rank 0 of 1, which the second node has no rank of.
    def node(index: int) -> ObservedNode:
        samples = (
            WorkerSample(rank=0, local_rank=0, world_size=1, time_s=0.0, source="trainer"),
            ModelSample(rank=0, **model("none")),
        )
        return ObservedNode(name=f"node-{index}", node_rank=index, ranks=(index,), samples=samples)

    observed = observe("r1", [node(0), node(1)])
    assert recognise(observed) == "no communication: each of several training jobs has 1 of the 2 workers"


def test_silence_of_a_worker_that_recorded_nothing_proves_nothing() -> None:
    observed = msgspec.structs.replace(DDP, model=None, calls=lambda _rank: []).observed()
    first, second = observed.nodes
    half = observe("r1", [first, msgspec.structs.replace(second, samples=())])
    assert recognise(half) == "unknown"


def test_a_model_told_by_a_worker_of_another_node_is_not_believed() -> None:
    observed = DDP.observed()
    liar = ModelSample(rank=0, **model("deepspeed", stage=3))
    first, second = observed.nodes
    spoilt = msgspec.structs.replace(second, samples=(*second.samples, liar))
    assert recognise(observe("r1", [first, spoilt])) == "DDP"


def test_what_cannot_be_is_no_reason_to_fail() -> None:
    impossible = GroupSample(rank=0, group="0", ranks=(5, 5), backend="")
    observed: Observed = DDP.observed()
    first, second = observed.nodes
    spoilt = msgspec.structs.replace(first, samples=(*first.samples, impossible))
    assert recognise(observe("r1", [spoilt, second])) == "DDP"
