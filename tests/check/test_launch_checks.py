from __future__ import annotations

import pytest

from multinode.check.check import check_launch, raise_first_error
from multinode.check.rule import CheckFinding
from multinode.errors import NodeFailed

from .inspecting import but, inspection


def test_nodes_that_are_well_may_launch() -> None:
    assert [one for one in check_launch(inspection()) if one.severity == "error"] == []
    assert check_launch(inspection(facts={})) == ()


def test_what_would_break_the_launch_is_found_first() -> None:
    broken = but(inspection(), "b", python=None, missing={"workdir": "/work does not exist"})
    assert [one.code for one in check_launch(broken)] == ["interpreter", "workdir"]


def test_the_first_error_stops_a_launch_and_names_the_others() -> None:
    warning = CheckFinding(severity="warning", node="a", code="x", message="slow")
    first = CheckFinding(
        severity="error", node="a", code="x", message="no torch", hint="on a:\npip install torch\npip check"
    )
    second = CheckFinding(severity="error", node="b", code="x", message="no torch")
    raise_first_error([warning])
    with pytest.raises(NodeFailed) as caught:
        raise_first_error([warning, first, second])
    assert (caught.value.node, caught.value.message, caught.value.hint) == (
        "a",
        "no torch",
        "on a: pip install torch; pip check",
    )
    assert caught.value.detail == "also b: no torch"
