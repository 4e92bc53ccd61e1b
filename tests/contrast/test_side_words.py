from __future__ import annotations

from multinode.contrast.figures import capitalised, name_nodes, name_side
from tests.contrast.made_up_sides import side_of


def test_sides_are_called_by_their_part_or_their_nodes() -> None:
    sides = [
        side_of("baseline", 1.0),
        side_of("candidate", 1.0, 4),
        side_of("point", 1.0, 2),
        side_of("each-node", 1.0, node_names=("n2",)),
    ]
    assert [name_nodes(side) for side in sides] == ["1 node", "4 nodes", "2 nodes", "n2"]
    assert [name_side(side, "scale-out") for side in sides] == ["1 node", "4 nodes", "2 nodes", "n2 alone"]
    assert [name_side(side, "compare") for side in sides[:2]] == ["run run-baseline", "run run-candidate"]


def test_only_the_first_letter_is_capitalised() -> None:
    assert (capitalised("one node, n2 of ZeRO"), capitalised("")) == ("One node, n2 of ZeRO", "")
