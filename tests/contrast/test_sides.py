from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from multinode.cluster.cluster import Node
from multinode.contrast.measure import ContrastRequest, Sides, plan_sides
from multinode.series.grid import in_turns
from tests import make
from tests.golden import Golden, error_of

TWO = make.cluster(Node(name="a", slots=2), Node(name="b", slots=2))
FOUR = make.cluster(*"abcd")


def layouts(sides: Sides) -> list[tuple[str, str, int | tuple[int, ...]]]:
    """Of each side its label, its nodes and the workers on each; of unequal ones those of each."""
    return [
        (
            side.label,
            "".join(node.name for node in side.cluster.nodes),
            side.workers[0] if len(set(side.workers)) == 1 else side.workers,
        )
        for side in sides.sides
    ]


def plan(slots: Sequence[int], **wish: object) -> Sides:
    cluster = TWO if len(slots) == len(TWO.nodes) else FOUR
    return plan_sides(cluster, slots, ContrastRequest(**wish))  # type: ignore[arg-type]  # names and values are the tests' own


def test_node_0_holds_the_workers_of_all_nodes() -> None:
    sides = plan([2, 2])
    assert sides.mode == "same-workers"
    assert layouts(sides) == [("baseline", "a", 2), ("candidate", "ab", 1)]
    assert [side.role for side in sides.sides] == ["baseline", "candidate"]


def test_three_slots_and_two_nodes_give_one_worker_each() -> None:
    assert layouts(plan([3, 3])) == [("baseline", "a", 2), ("candidate", "ab", 1)]


def test_unequal_nodes_share_the_workers_of_node_0_as_evenly_as_their_slots_allow() -> None:
    sides = plan([8, 1])
    assert (sides.mode, layouts(sides)) == ("same-workers", [("baseline", "a", 8), ("candidate", "ab", (7, 1))])
    assert sides.candidate.description == "7 and 1 workers on 2 nodes"
    assert layouts(plan([2, 1])) == [("baseline", "a", 2), ("candidate", "ab", 1)]
    assert layouts(plan([5, 2, 2, 2], counts=(1, 2, 4)))[1:] == [
        ("candidate", "abcd", (2, 1, 1, 1)),
        ("2-nodes", "ab", (3, 2)),
    ]


def test_scale_out_fills_every_node() -> None:
    assert layouts(plan([8, 2], mode="scale-out")) == [("baseline", "a", 8), ("candidate", "ab", (8, 2))]
    assert layouts(plan([1, 4])) == [("baseline", "a", 1), ("candidate", "ab", (1, 4))]
    batch = plan([2, 1], mode="fixed-global-batch", accumulation=2)
    assert [side.accumulation for side in batch.sides] == [3, 2]


def test_a_node_alone_has_no_more_workers_than_its_slots() -> None:
    sides = plan([8, 2], mode="scale-out", each_node=True)
    assert layouts(sides)[2:] == [("alone-1", "b", 2)]


def test_one_slot_is_too_few_and_it_scales_out() -> None:
    sides = plan([1, 1])
    assert (sides.mode, layouts(sides)) == ("scale-out", [("baseline", "a", 1), ("candidate", "ab", 1)])


def test_scale_out_can_be_asked_for() -> None:
    sides = plan([2, 2], mode="scale-out")
    assert (sides.mode, layouts(sides)) == ("scale-out", [("baseline", "a", 2), ("candidate", "ab", 2)])


def test_the_published_case_names_node_0s_gpus() -> None:
    sides = plan([2, 2], baseline_gpus=(1, 2, 3, 5))
    assert (sides.mode, layouts(sides)) == ("same-workers", [("baseline", "a", 4), ("candidate", "ab", 2)])
    assert sides.baseline.cluster.nodes[0].gpus == (1, 2, 3, 5)
    assert sides.candidate.cluster == TWO


def test_a_scaling_curve_has_a_point_for_each_number_of_nodes() -> None:
    sides = plan([1, 1, 1, 1], counts=(4, 1, 2))
    assert layouts(sides) == [("baseline", "a", 1), ("candidate", "abcd", 1), ("2-nodes", "ab", 1)]
    assert [side.role for side in sides.sides] == ["baseline", "candidate", "point"]


def test_a_curve_with_the_same_workers_spreads_them_evenly_over_each_number_of_nodes() -> None:
    assert layouts(plan([4, 4, 4, 4], counts=(1, 2, 4))) == [
        ("baseline", "a", 4),
        ("candidate", "abcd", 1),
        ("2-nodes", "ab", 2),
    ]


def test_a_number_alone_is_held_against_one_node() -> None:
    assert layouts(plan([1, 1, 1, 1], counts=(2,))) == [("baseline", "a", 1), ("candidate", "ab", 1)]


def test_the_fewest_nodes_may_be_more_than_one() -> None:
    assert layouts(plan([1, 1, 1, 1], counts=(2, 4))) == [("baseline", "ab", 1), ("candidate", "abcd", 1)]


def test_with_a_fixed_global_batch_one_node_makes_the_micro_batches_of_all() -> None:
    sides = plan([2, 2], mode="fixed-global-batch", accumulation=3)
    assert layouts(sides) == [("baseline", "a", 2), ("candidate", "ab", 2)]
    assert [side.accumulation for side in sides.sides] == [6, 3]


def test_each_node_is_measured_alone_as_the_baseline_is() -> None:
    sides = plan([2, 2, 2, 2], mode="scale-out", each_node=True)
    assert layouts(sides)[2:] == [("alone-1", "b", 2), ("alone-2", "c", 2), ("alone-3", "d", 2)]
    assert {side.role for side in sides.sides[2:]} == {"each-node"}


def test_nodes_beyond_the_candidates_are_not_measured_alone() -> None:
    sides = plan([2, 2, 1, 1], mode="scale-out", counts=(1, 2), each_node=True)
    assert [nodes for _, nodes, _ in layouts(sides)] == ["a", "ab", "b"]


def test_where_no_side_is_one_node_every_node_is_measured_alone() -> None:
    sides = plan([1, 1, 1, 1], counts=(2, 4), each_node=True)
    assert [nodes for _, nodes, _ in layouts(sides)[2:]] == ["a", "b", "c", "d"]


def test_repeats_are_measured_forwards_and_backwards() -> None:
    assert [(turn.number, turn.cell) for turn in in_turns(range(2), 3)] == [
        (1, 0),
        (1, 1),
        (2, 1),
        (2, 0),
        (3, 0),
        (3, 1),
    ]


def test_the_mode_says_why_it_is_used(golden: Golden) -> None:
    cases = {
        "enough slots": plan([2, 2]),
        "too few": plan([1, 1]),
        "asked for": plan([2, 2], mode="scale-out"),
        "unequal": plan([8, 1]),
        "with --baseline-gpus": plan([2, 2], baseline_gpus=(1, 2, 3, 5)),
    }
    golden.check(
        "why.txt",
        "".join(
            f"# {case}\n{sides.mode}: {sides.why.message}\n"
            + "".join(f"  {side.label}: {side.description}\n" for side in sides.sides)
            for case, sides in cases.items()
        ),
    )


def test_what_cannot_be_contrasted_is_refused(golden: Golden) -> None:
    cases: dict[str, tuple[list[int], dict[str, object]]] = {
        "same workers on too few slots": ([1, 1], {"mode": "same-workers"}),
        "fewer GPUs than workers": ([2, 2], {"baseline_gpus": (0, 1, 2)}),
        "fewer GPUs than unequal workers": ([2, 3], {"baseline_gpus": (0, 1, 2)}),
        "a GPU twice": ([2, 2], {"baseline_gpus": (1, 1, 2, 2)}),
        "GPUs of a scale-out": ([2, 2], {"mode": "scale-out", "baseline_gpus": (0, 1, 2, 3)}),
        "more nodes than there are": ([2, 2], {"counts": (1, 3)}),
        "no node": ([2, 2], {"counts": (0, 2)}),
        "one side": ([2, 2], {"counts": (1,)}),
        "workers that do not divide": ([4, 4, 4, 4], {"mode": "same-workers", "counts": (1, 2, 3)}),
        "the batch of a script": ([2, 2], {"mode": "fixed-global-batch"}),
        "a batch that does not divide": ([3, 2], {"mode": "fixed-global-batch", "accumulation": 1}),
    }
    golden.check_errors(
        "refused_sides",
        {case: error_of(plan, slots, **wish) for case, (slots, wish) in cases.items()}
        | {"one node": error_of(plan_sides, TWO.first(1), [2], ContrastRequest())},
    )


@given(
    slots=st.lists(st.integers(1, 8), min_size=4, max_size=4),
    counts=st.sets(st.integers(1, 4), min_size=2).map(tuple),
    mode=st.sampled_from([None, "scale-out"]),
)
def test_no_side_has_more_workers_than_slots_and_the_same_workers_are_the_same(
    slots: list[int], counts: tuple[int, ...], mode: str | None
) -> None:
    sides = plan(slots, counts=counts, mode=mode)
    totals = {sum(side.workers) for side in sides.sides}
    assert all(1 <= count <= has for side in sides.sides for count, has in zip(side.workers, slots, strict=False))
    assert sides.mode == "scale-out" or len(totals) == 1
