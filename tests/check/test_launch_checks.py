from __future__ import annotations

import pytest

from multinode.check.check import check_all, check_launch
from multinode.check.rule import Inspection
from multinode.errors import NodeFailed
from multinode.stats.unknown import Entries, Unknown
from multinode.transport.agent import AgentTransport
from multinode.transport.fake import FakeTransport

from .inspecting import but, inspection


def test_nodes_that_are_well_may_launch() -> None:
    assert [one for one in check_all(inspection(), before_launch=True) if one.severity == "error"] == []
    assert list(check_all(inspection(facts={}), before_launch=True)) == []


def refused(broken: Inspection) -> NodeFailed:
    transport = FakeTransport(lambda *_: ())
    with pytest.raises(NodeFailed) as caught:
        check_launch(AgentTransport(transport), broken, lambda _: None)
    # The nodes are not connected with each other.
    assert not transport.ran
    assert not transport.streams
    return caught.value


def test_the_first_error_stops_a_launch_and_names_the_others() -> None:
    error = refused(but(inspection(), "b", python=Unknown("none was found"), cwd=Unknown("/work does not exist")))
    assert (error.node, error.message) == ("b", "no interpreter for the job: none was found")
    assert error.detail == "also b: workdir= is unusable: /work does not exist"


def test_commands_of_a_fix_are_in_one_line() -> None:
    error = refused(but(inspection(), "b", packages=Entries({})))
    fix = "correct python= in the hostfile, or run on the node: /env/bin/python -m pip install torch llamafactory"
    assert (error.node, error.hint) == ("b", fix)
