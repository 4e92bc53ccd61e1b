from __future__ import annotations

from pathlib import Path

import pytest

from multinode.cluster.cluster import Node
from multinode.runs.stored_run import StoredRun
from tests import make
from tests.predict.stored import on_four, training_record
from tests.predict.test_request import store


@pytest.mark.parametrize(
    ("node", "price"),
    [
        (Node(name="node0", slots=8, price=2.8), 2.8),
        (Node(name="node0", slots=8, price_gpu=0.35), 1.4),
        (Node(name="node0", slots=8), None),
        (Node(name="another", price=2.8), None),
    ],
)
def test_a_side_pays_for_its_nodes_or_for_the_gpus_that_it_uses(
    tmp_path: Path, node: Node, price: float | None
) -> None:
    record = training_record("one", 1)
    of_four = on_four(record.plan)
    directory = store(tmp_path, record.having(plan=of_four))
    directory.write("cluster.json", make.cluster(node))
    assert StoredRun(directory).price_per_hour == price


@pytest.mark.parametrize(("prices", "price"), [((1.5, 2.5), 4.0), ((1.5, None), None)])
def test_a_side_has_a_price_where_all_its_nodes_have_one(
    tmp_path: Path, prices: tuple[float | None, ...], price: float | None
) -> None:
    record = training_record("one", 2)
    nodes = zip(record.plan.nodes, prices, strict=True)
    directory = store(tmp_path, record)
    directory.write("cluster.json", make.cluster(*(Node(name=n.place.node, price=each) for n, each in nodes)))
    assert StoredRun(directory).price_per_hour == price
