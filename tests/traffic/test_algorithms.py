from __future__ import annotations

import pytest

from multinode.records.benchmark import BACKENDS, COLLECTIVES
from multinode.traffic.algorithms import (
    Layout,
    bus_factor,
    link_share,
    message_steps,
    nic_factor,
    node_flows,
    rank_flows,
    worker_factor,
)
from tests.golden import raised

FOUR = Layout(nodes=4)

# Parts of S that each node sent and received, by its NIC's counters: gloo of torch 2.13, 16 MiB, virtual nodes.
MEASURED = [
    (Layout(nodes=2), "all_reduce", [(1.000, 1.000)] * 2),
    (Layout(nodes=3), "all_reduce", [(1.3335, 1.3335)] * 3),
    (Layout(nodes=4), "all_reduce", [(1.5002, 1.5002)] * 4),
    (Layout(nodes=5), "all_reduce", [(1.6003, 1.6003)] * 5),
    (Layout(nodes=6), "all_reduce", [(1.6669, 1.6669)] * 6),
    (Layout(nodes=2, workers_per_node=2), "all_reduce", [(1.5002, 1.5002)] * 2),
    (Layout(nodes=3), "all_gather", [(0.6667, 0.6667)] * 3),
    (Layout(nodes=5), "all_gather", [(0.8001, 0.8001)] * 5),
    (Layout(nodes=2, workers_per_node=2), "all_gather", [(0.7501, 0.7501)] * 2),
    (Layout(nodes=4), "reduce_scatter", [(1.5002, 1.5002)] * 4),
    (Layout(nodes=2, workers_per_node=2), "reduce_scatter", [(1.5002, 1.5002)] * 2),
    (Layout(nodes=2), "broadcast", [(1, 0), (0, 1)]),
    (Layout(nodes=3), "broadcast", [(2, 0), (0, 1), (0, 1)]),
    (Layout(nodes=4), "broadcast", [(2, 0), (1, 1), (0, 1), (0, 1)]),
    (Layout(nodes=5), "broadcast", [(3, 0), (1, 1), (0, 1), (0, 1), (0, 1)]),
    (Layout(nodes=6), "broadcast", [(3, 0), (2, 1), (0, 1), (0, 1), (0, 1), (0, 1)]),
    (Layout(nodes=2, workers_per_node=2), "broadcast", [(2, 0), (0, 2)]),
    (Layout(nodes=5), "all_to_all", [(0.8, 0.8001)] * 5),
    (Layout(nodes=2, workers_per_node=2), "all_to_all", [(1.0, 1.0)] * 2),
    (Layout(nodes=3), "sendrecv", [(1.0, 1.0)] * 3),
    (Layout(nodes=2, workers_per_node=2), "sendrecv", [(1.0, 1.0)] * 2),
]


@pytest.mark.parametrize(("layout", "collective", "measured"), MEASURED)
def test_gloo_sends_what_was_measured_on_the_nics(
    layout: Layout, collective: str, measured: list[tuple[float, float]]
) -> None:
    nodes = node_flows(rank_flows("gloo", collective, layout), layout)
    assert [node.sent for node in nodes] == pytest.approx([sent for sent, _ in measured], rel=0.001)
    assert [node.received for node in nodes] == pytest.approx([received for _, received in measured], rel=0.001)


@pytest.mark.parametrize(
    ("collective", "measured"),
    [
        ("all_reduce", [1.4998, 1.4998]),
        ("all_gather", [0.7499, 0.7498]),
        ("reduce_scatter", [1.4998, 1.4998]),
        ("broadcast", [0.9998, 0.0]),
        ("all_to_all", [0.4999, 0.4999]),
        ("sendrecv", [0.9997, 0.9998]),
    ],
)
def test_what_stays_in_a_node_is_what_was_measured_on_its_loopback(collective: str, measured: list[float]) -> None:
    layout = Layout(nodes=2, workers_per_node=2)
    nodes = node_flows(rank_flows("gloo", collective, layout), layout)
    assert [node.inside for node in nodes] == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_of_every_backend_is_known_and_sends_nothing_when_alone(backend: str, collective: str) -> None:
    assert rank_flows(backend, collective, Layout(nodes=1)) == {}
    assert worker_factor(backend, collective, 1) == 0
    assert nic_factor(backend, collective, Layout(nodes=1, workers_per_node=4)) == 0
    flows = rank_flows(backend, collective, FOUR)
    received = [sum(part for (_, to), part in flows.items() if to == rank) for rank in range(4)]
    # Whatever the way, each rank receives the part of the result that it has not: all but broadcast's root.
    least = {"broadcast": 1, "sendrecv": 1, "all_reduce": 1}.get(collective, 0.75)
    assert min(received[1:]) >= least


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_nccl_with_a_worker_a_node_moves_what_busbw_counts(collective: str, nodes: int) -> None:
    assert nic_factor("nccl", collective, Layout(nodes=nodes)) == pytest.approx(bus_factor(collective, nodes))


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (3, 1), (4, 8), (5, 2), (13, 4), (14, 1), (32, 8)])
def test_nccl_s_tree_crosses_each_of_its_edges_up_and_down(nodes: int, workers: int) -> None:
    layout = Layout(nodes=nodes, workers_per_node=workers)
    moved = node_flows(rank_flows("nccl", "all_reduce", layout, algorithm="tree"), layout)
    # Hierarchical: 2(k-1)/k of S a node on average, whatever the workers; up and down are alike.
    assert sum(node.sent for node in moved) / nodes == pytest.approx(2 * (nodes - 1) / nodes)
    assert [node.sent for node in moved] == [node.received for node in moved]
    # The point of two trees: a leaf of the one is inside the other, and no node carries more than twice S.
    assert max(node.sent for node in moved) <= 2
    assert min(node.sent for node in moved) >= 1
    assert [node.inside for node in moved] == [2 * (workers - 1)] * nodes


def test_nccl_s_trees_of_twelve_and_thirteen_nodes_are_those_drawn_in_its_source() -> None:
    first = {(8, 0), (4, 8), (10, 8), (2, 4), (6, 4), (1, 2), (3, 2), (5, 6), (7, 6), (9, 10), (11, 10)}
    mirrored = {(11 - child, 11 - parent) for child, parent in first}
    assert _edges(12) == {frozenset(edge) for edge in first | mirrored}
    thirteen = (first - {(10, 8)}) | {(12, 8), (10, 12)}
    shifted = {((child + 1) % 13, (parent + 1) % 13) for child, parent in thirteen}
    assert _edges(13) == {frozenset(edge) for edge in thirteen | shifted}


def _edges(nodes: int) -> set[frozenset[int]]:
    return {frozenset(edge) for edge in rank_flows("nccl", "all_reduce", Layout(nodes=nodes), algorithm="tree")}


UNEQUAL = Layout.of((8, 2))


def test_a_ring_leaves_unequal_nodes_once_and_pairs_by_their_workers() -> None:
    for backend in ("gloo", "nccl"):
        assert nic_factor(backend, "all_reduce", UNEQUAL) == pytest.approx(2 * 9 / 10)
        assert nic_factor(backend, "all_gather", UNEQUAL) == pytest.approx(9 / 10)
        # Eight workers send two parts each.
        assert nic_factor(backend, "all_to_all", UNEQUAL) == pytest.approx(8 * 2 / 10)
    moved = node_flows(rank_flows("gloo", "all_reduce", UNEQUAL), UNEQUAL)
    assert [node.inside for node in moved] == pytest.approx([7 * 1.8, 1.8])
    tree = node_flows(rank_flows("nccl", "all_reduce", UNEQUAL, algorithm="tree"), UNEQUAL)
    assert [(node.sent, node.inside) for node in tree] == [(1, 14), (1, 2)]


def test_the_first_nodes_keep_their_workers_and_more_have_those_of_the_fullest() -> None:
    assert (UNEQUAL.counts, UNEQUAL.workers, UNEQUAL.ranks) == ((8, 2), 10, (range(8), range(8, 10)))
    assert UNEQUAL.on(1) == Layout(nodes=1, workers_per_node=8)
    assert UNEQUAL.on(2) == UNEQUAL
    assert UNEQUAL.on(3).counts == (8, 2, 8)
    assert Layout(nodes=2, workers_per_node=4).on(3) == Layout(nodes=3, workers_per_node=4)


def test_a_ring_leaves_a_node_once_and_pairs_do_so_for_each_worker() -> None:
    layout = Layout(nodes=2, workers_per_node=8)
    assert nic_factor("nccl", "all_reduce", layout) == pytest.approx(2 * 15 / 16)
    assert nic_factor("nccl", "all_to_all", layout) == pytest.approx(8 * 8 / 16)


def test_what_is_not_known_is_an_error_and_busbw_s_factor_stands_in_for_the_nic() -> None:
    assert str(raised(ValueError, rank_flows, "mpi", "all_reduce", FOUR)) == "unknown: all_reduce of mpi"
    tree = raised(ValueError, rank_flows, "nccl", "all_gather", FOUR, algorithm="tree")
    assert str(tree) == "unknown: all_gather of nccl as tree"
    assert nic_factor("mpi", "all_reduce", FOUR) == pytest.approx(1.5)
    assert str(raised(ValueError, nic_factor, "gloo", "gossip", FOUR)) == "unknown collective 'gossip'"


@pytest.mark.parametrize(
    ("collective", "nodes", "share"),
    [
        ("all_to_all", 2, 0.5),
        ("all_to_all", 4, 0.5),
        ("sendrecv", 2, 0.5),
        ("sendrecv", 3, 1.0),
        ("all_reduce", 2, 1.0),
    ],
)
def test_gloo_takes_turns_where_two_workers_have_a_message_for_each_other(
    collective: str, nodes: int, share: float
) -> None:
    assert link_share("gloo", collective, Layout(nodes=nodes)) == share
    assert link_share("nccl", collective, Layout(nodes=nodes)) == 1.0
    assert link_share("unknown", collective, Layout(nodes=nodes)) == 1.0


@pytest.mark.parametrize(
    ("backend", "collective", "nodes", "workers_per_node", "steps"),
    [
        ("gloo", "all_reduce", 4, 1, (6, 0)),
        ("gloo", "all_gather", 4, 1, (3, 0)),
        # A ring reduces to each in one pass of n - 1; Gloo all-reduces instead.
        ("gloo", "reduce_scatter", 4, 1, (6, 0)),
        ("nccl", "reduce_scatter", 4, 1, (3, 0)),
        ("nccl", "all_gather", 4, 2, (4, 3)),
        ("gloo", "broadcast", 4, 1, (2, 0)),
        # NCCL has a ring alone for it.
        ("nccl", "broadcast", 4, 1, (3, 0)),
        ("gloo", "all_to_all", 4, 1, (1, 0)),
        ("nccl", "sendrecv", 4, 1, (1, 0)),
        # Two nodes' tree is a ring; from four on its height is less, through the chain of each node as well.
        ("nccl", "all_reduce", 2, 1, (2, 0)),
        ("nccl", "all_reduce", 3, 1, (4, 0)),
        ("nccl", "all_reduce", 4, 1, (4, 0)),
        ("nccl", "all_reduce", 5, 1, (6, 0)),
        ("nccl", "all_reduce", 8, 1, (6, 0)),
        ("nccl", "all_reduce", 8, 4, (6, 6)),
        ("nccl", "all_reduce", 1, 8, (0, 14)),
        ("unknown", "reduce", 4, 1, (3, 0)),
        ("gloo", "all_reduce", 1, 1, (1, 0)),
    ],
)
def test_messages_wait_for_each_other_as_the_algorithm_has_it(
    backend: str, collective: str, nodes: int, workers_per_node: int, steps: tuple[int, int]
) -> None:
    layout = Layout(nodes=nodes, workers_per_node=workers_per_node)
    assert message_steps(backend, collective, layout) == steps
