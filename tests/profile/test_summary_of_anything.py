"""Nodes are not trusted: whatever their records say, a run that ended is summed up, and its summary can be stored."""

from __future__ import annotations

import msgspec
from hypothesis import given

from multinode.profile.observed import ObservedNode, observe
from multinode.profile.summary import Summary, summarise
from multinode.records.samples import Sample
from tests.any_samples import any_samples


@given(first=any_samples(), second=any_samples())
def test_records_of_any_content_make_a_summary(first: list[Sample], second: list[Sample]) -> None:
    nodes = [
        ObservedNode(name="a", node_rank=0, ranks=(0, 1), ifname="ens1f0", samples=tuple(first)),
        ObservedNode(name="b", node_rank=1, ranks=(2, 3), ifname="ens1f0", samples=tuple(second)),
    ]
    summary = summarise(observe("r", nodes))
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary).run_id == "r"
