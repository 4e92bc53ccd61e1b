from __future__ import annotations

import pytest

from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, hideable_share, passing_bytes, strategy_calls


@pytest.mark.parametrize(
    ("strategy", "lora", "recompute", "share"),
    [
        (Strategy.DDP, False, False, 2 / 3),
        (Strategy.DDP, False, True, 3 / 4),
        (Strategy.DDP, True, False, 1 / 2),
        (Strategy.DDP, True, True, 2 / 3),
        (Strategy.ZERO2, False, True, 3 / 4),
        (Strategy.ZERO3, False, False, 1),
        (Strategy.SHARD_GRAD_OP, True, True, 1),
    ],
)
def test_reductions_hide_beside_the_backward_pass_and_gathers_beside_both(
    strategy: Strategy, *, lora: bool, recompute: bool, share: float
) -> None:
    assert hideable_share(strategy, lora=lora, recompute=recompute) == pytest.approx(share)


def test_a_worker_sends_to_those_whom_a_call_joins() -> None:
    """Hybrid shard of 1 MB on two nodes of four: three quarters inside, and a quarter of the gradients across."""
    load = TrafficInputs(parameters=500_000, trainable=500_000, parameter_bytes=4, gradient_bytes=4)
    layout = Layout(nodes=2, workers_per_node=4)
    calls = strategy_calls(Strategy.HYBRID_SHARD, load, layout)
    assert passing_bytes(calls, 1, layout) == pytest.approx((2 + 1) * 2e6 * 3 / 4 + 2 * 0.5 * 2e6 / 4)
    # On one node nothing reaches across.
    alone = Layout(nodes=1, workers_per_node=4)
    assert passing_bytes(calls, 1, alone) == pytest.approx((2 + 1) * 2e6 * 3 / 4)
