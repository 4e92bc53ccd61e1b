from __future__ import annotations

import pytest

from multinode.contrast.figures import capitalised, figure, milliseconds, name_nodes, name_side
from tests.contrast.made_up_sides import side_of


@pytest.mark.parametrize(
    ("value", "written"),
    [(1342.4, "1342"), (123456789.0, "123456789"), (24.12, "24.1"), (0.5123, "0.512"), (-42.0, "-42")],
)
def test_three_digits_count(value: float, written: str) -> None:
    assert figure(value) == written
    assert milliseconds(value) == f"{written} ms"


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
