from __future__ import annotations

from multinode.core.check.finding import Rule
from multinode.preflight.grouping import group_findings, listed

RULE = Rule(check="c", severity="note", catches="x", message="{what} on {nodes}", hint="h")


def test_what_is_alike_is_said_once_and_what_is_not_apart() -> None:
    cases = [("a", {"what": "this"}), ("b", {"what": "that"}), ("c", {"what": "this"})]
    assert [(one.node, one.message) for one in group_findings(RULE, cases)] == [
        (None, "this on a and c"),
        ("b", "that on b"),
    ]


def test_names_are_listed_up_to_eight() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f, g and h"
    assert listed(list("abcdefghi")) == "a, b, c, d, e, f, g and 2 more"
