from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from multinode.records.samples import CallCount
from tests.profile.seen_theory import Theory, theory
from tests.profile.seen_trainings import (
    DDP,
    PARAMETERS,
    S,
    Training,
    call,
    ddp,
    hybrid_calls,
    hybrid_groups,
    model,
    see,
    zero2,
)

Calls = Callable[[int], Sequence[CallCount]]


def of(**changes: object) -> Theory:
    return theory(msgspec.structs.replace(DDP, **changes).observed())


def zero3(accumulation: int) -> Calls:
    return lambda _rank: [
        call("all_gather", S / 4, 8 * accumulation),
        call("reduce_scatter", S / 4, 4 * accumulation),
    ]


def grad_op(_rank: int) -> list[CallCount]:
    return [call("all_gather", S / 5, 5), call("reduce_scatter", S / 5, 5)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("told", "calls", "parts"),
    [
        # Parts of S, to be multiplied by (n-1)/n: the table of strategies.
        (model("ddp", accumulation=1), ddp, 2),
        (model("ddp", accumulation=4), ddp, 2),
        (model("deepspeed", stage=1, accumulation=4), zero2(1), 3),
        (model("deepspeed", stage=2, accumulation=1), zero2(1), 3),
        (model("deepspeed", stage=2, accumulation=4), zero2(4), 9),
        (model("deepspeed", stage=3, accumulation=2), zero3(2), 6),
        (model("fsdp2", accumulation=1, reshard_after_forward=False), grad_op, 2),
    ],
)
def test_what_was_called_is_what_the_theory_says(
    told: Mapping[str, Any], calls: Calls, parts: float, workers: int
) -> None:
    observed = msgspec.structs.replace(DDP, model=told, calls=calls, workers=workers).observed()
    expected = parts * S * (2 * workers - 1) / (2 * workers)
    assert theory(observed).bytes_per_step == pytest.approx(expected)
    assert see(observed).bytes_per_step.calls == pytest.approx(expected, rel=0.03)


def test_gradients_travel_in_the_dtype_that_is_set_for_them() -> None:
    half = model("deepspeed", stage=2, accumulation=1, communication_dtype="bfloat16")
    # Two bytes an element reduced, four an element of the updated parameters.
    assert of(model=half, calls=zero2(1)).bytes_per_step == pytest.approx(S / 2 + S / 2)
    mixed = model("deepspeed", stage=2, accumulation=1, communication_dtype="bfloat16, float32")
    assert "the dtype" in of(model=mixed, calls=zero2(1)).reason


def test_only_what_is_trained_is_reduced_and_all_of_it_is_gathered() -> None:
    lora = model("deepspeed", stage=3, accumulation=1) | {
        "trainable": 1000,
        "trainable_dtypes": {"float32": 1000},
        "dtypes": {"bfloat16": PARAMETERS, "float32": 1000},
    }
    weights, gradients = 2 * PARAMETERS + 4000, 4000
    assert of(model=lora, calls=zero3(1)).bytes_per_step == pytest.approx((2 * weights + gradients) / 2)
    assert of(model=lora | {"wrapper": "ddp"}).bytes_per_step == pytest.approx(gradients)


def test_parameters_that_zero_3_may_leave_whole_are_gathered_once() -> None:
    whole = model("deepspeed", stage=3, accumulation=1, stage3_max_reuse_distance=10**9)
    assert of(model=whole, calls=zero3(1)).bytes_per_step == pytest.approx(2 * S / 2)


@pytest.mark.parametrize(
    ("hook", "part"),
    [
        ("", 1),
        ("ALLREDUCE", 1),
        ("fp16_compress_hook", 0.5),
        ("FP16_COMPRESS", 0.5),
        ("multinode_fp16", 0.5),
        ("multinode_bf16", 0.5),
    ],
)
def test_a_communication_hook_halves_what_ddp_sends(hook: str, part: float) -> None:
    assert of(model=model("ddp", comm_hooks=hook)).bytes_per_step == pytest.approx(part * S)


@pytest.mark.parametrize(
    ("told", "calls", "reason"),
    [
        (model("ddp", comm_hooks="powerSGD_hook"), ddp, "communication hook"),
        (model("deepspeed", stage=2), zero2(1), "how many micro-batches"),
        (model("deepspeed", stage=2, accumulation=10**12), zero2(1), "how many micro-batches"),
        (model("deepspeed", stage=3, accumulation=1, zero_quantized_weights=True), zero3(1), "ZeRO++"),
        (
            model("deepspeed", stage=1, use_multi_rank_bucket_allreduce=False),
            zero2(1),
            "use_multi_rank_bucket_allreduce",
        ),
        (model("ddp") | {"trainable_dtypes": {"float3": 5}}, ddp, "the dtype"),
        (model("ddp") | {"trainable_dtypes": {}}, ddp, "how many parameters"),
        (model("ddp") | {"trainable_dtypes": {"float32": 1 << 62}}, ddp, "how many parameters"),
        (None, ddp, "size of its model"),
        (model("none"), zero3(1), "no theory is known of this strategy: custom collectives"),
    ],
)
def test_where_theory_ends_the_reason_is_given(told: Mapping[str, Any] | None, calls: Calls, reason: str) -> None:
    result = of(model=told, calls=calls)
    assert result.bytes_per_step is None
    assert reason in result.reason


def test_hybrid_sharding_all_reduces_shares_across_nodes_and_the_rest_inside() -> None:
    hybrid = Training(
        workers=2, groups=hybrid_groups, calls=hybrid_calls, model=model("fsdp2", accumulation=1)
    ).observed()
    assert theory(hybrid).bytes_per_step == pytest.approx(3 * S / 2 + S / 2)
    assert see(hybrid).bytes_per_step.calls == pytest.approx(2 * S)


def test_one_worker_sends_nothing() -> None:
    assert of(nodes=1).bytes_per_step == 0
