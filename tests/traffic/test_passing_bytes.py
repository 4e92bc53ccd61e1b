from __future__ import annotations

import pytest

from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, passing_bytes, strategy_calls


def test_a_worker_sends_to_those_whom_a_call_joins() -> None:
    """Hybrid shard of 1 MB on two nodes of four: three quarters inside, and a quarter of the gradients across."""
    load = TrafficInputs(parameters=500_000, trainable=500_000, parameter_bytes=4, gradient_bytes=4)
    layout = Layout(nodes=2, workers_per_node=4)
    calls = strategy_calls(Strategy.HYBRID_SHARD, load, layout)
    assert passing_bytes(calls, 1, layout) == pytest.approx((2 + 1) * 2e6 * 3 / 4 + 2 * 0.5 * 2e6 / 4)
    # On one node nothing reaches across.
    alone = Layout(nodes=1, workers_per_node=4)
    assert passing_bytes(calls, 1, alone) == pytest.approx((2 + 1) * 2e6 * 3 / 4)
