from __future__ import annotations

from multinode.check.rule import Check, CheckRule, disagreements, listed

from .inspecting import inspection

RULE = CheckRule(code="c", severity="note", about="x", message="{what} on {nodes}", hint="h")


def test_what_is_alike_is_said_once_and_what_is_not_apart() -> None:
    check = Check(lambda _: [RULE.found("a", what="this"), RULE.found("b", what="that"), RULE.found("c", what="this")])
    assert [(one.node, one.message) for one in check(inspection())] == [
        (None, "this on a and c"),
        ("b", "that on b"),
    ]


def test_nodes_disagree_with_the_first_or_with_most() -> None:
    values = {"a": 1, "b": 2, "c": 2}
    assert list(disagreements(values)) == [("b", 2, "a", 1), ("c", 2, "a", 1)]
    assert list(disagreements(values, majority=True)) == [("a", 1, "b", 2)]
    assert list(disagreements({"a": 1, "b": 2}, majority=True)) == [("b", 2, "a", 1)]
    assert list(disagreements({})) == []


def test_names_are_listed_up_to_eight() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f, g and h"
    assert listed(list("abcdefghi")) == "a, b, c, d, e, f, g and 2 more"
