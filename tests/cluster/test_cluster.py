from __future__ import annotations

import pytest

from multinode.cluster.cluster import Node


@pytest.mark.parametrize(
    ("node", "workers", "hourly", "purchase"),
    [
        (Node(name="a", slots=8), 8, None, None),
        (Node(name="a", slots=8, price=2.8, price_purchase=90000), 2, 2.8, 90000),
        (Node(name="a", slots=8, price_gpu=0.35, price_purchase_gpu=15000), 2, 0.7, 30000),
        (Node(name="a", price_gpu=0.35, price_purchase=90000), 4, 1.4, 90000),
        (Node(name="a", price=0.0), 4, 0.0, None),
    ],
)
def test_a_node_is_paid_whole_and_a_gpu_where_it_is_used(
    node: Node, workers: int, hourly: float | None, purchase: float | None
) -> None:
    assert node.hourly(workers) == pytest.approx(hourly)
    assert node.purchase(workers) == purchase
