from __future__ import annotations

import pytest

from multinode.core.cluster import Cluster, Node
from multinode.core.sides import plan_sides
from multinode.errors import UsageError

TWO = Cluster(nodes=(Node(name="a", slots=2), Node(name="b", slots=2)), source="hosts")


def test_node_0_holds_the_workers_of_all_nodes() -> None:
    sides = plan_sides(TWO, [2, 2], None, None)
    assert sides.mode == "same-workers"
    assert (sides.baseline.nodes, sides.baseline_workers) == ((TWO.nodes[0],), 2)
    assert (sides.candidate, sides.candidate_workers) == (TWO, 1)


def test_three_slots_and_two_nodes_give_one_worker_each() -> None:
    sides = plan_sides(TWO, [3, 3], None, None)
    assert (sides.baseline_workers, sides.candidate_workers) == (2, 1)


def test_the_smallest_node_bounds_the_workers_of_each() -> None:
    sides = plan_sides(TWO, [8, 1], None, None)
    assert (sides.baseline_workers, sides.candidate_workers) == (2, 1)


def test_one_slot_is_too_few_and_it_scales_out_and_says_why() -> None:
    sides = plan_sides(TWO, [1, 1], None, None)
    assert (sides.mode, sides.baseline_workers, sides.candidate_workers) == ("scale-out", 1, 1)
    assert sides.why == "node 0 has slots=1, too few for one worker of each of the 2 nodes"


def test_scale_out_can_be_asked_for() -> None:
    sides = plan_sides(TWO, [2, 2], "scale-out", None)
    assert (sides.mode, sides.baseline_workers, sides.candidate_workers) == ("scale-out", 2, 2)
    assert sides.why == "asked for with --mode"


def test_the_published_case_names_node_0s_gpus() -> None:
    sides = plan_sides(TWO, [2, 2], None, (1, 2, 3, 5))
    assert (sides.mode, sides.baseline_workers, sides.candidate_workers) == ("same-workers", 4, 2)
    assert sides.baseline.nodes[0].gpus == (1, 2, 3, 5)
    assert sides.candidate == TWO


@pytest.mark.parametrize(
    ("slots", "mode", "gpus", "said"),
    [
        ([1, 1], "same-workers", None, "too few for one worker"),
        ([2, 2], "weak", None, "unknown mode 'weak'"),
        ([2, 2], None, (0, 1, 2), "names 3 GPUs, and all nodes have 4 workers"),
    ],
)
def test_what_cannot_be_contrasted(slots: list[int], mode: str | None, gpus: tuple[int, ...] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_sides(TWO, slots, mode, gpus)


def test_one_node_has_nothing_to_be_contrasted_with() -> None:
    with pytest.raises(UsageError, match="two nodes or more"):
        plan_sides(TWO.first(1), [2], None, None)
