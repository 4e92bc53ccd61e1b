"""What nodes send, of every record and in every text of it: escape sequences reach no one who shows it."""

from __future__ import annotations

from typing import Any

import pytest

from multinode.cluster.cluster import Node
from multinode.records.samples import parse_samples
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests.escapes import RECORDS, lines_of, unprintable


def test_the_records_of_nodes_are_found() -> None:
    tags = {kind.__struct_config__.tag for kind in RECORDS}
    assert {
        "facts",
        "runs",
        "stopped",
        "diagnosis",
        "hello",
        "status",
        "end",
        "gone",
        "step",
        "trouble",
    } <= tags


@pytest.mark.parametrize("kind", RECORDS, ids=[f"{kind.__module__}.{kind.__name__}" for kind in RECORDS])
def test_no_text_of_a_record_keeps_an_escape_sequence(kind: type[Any]) -> None:
    for line in lines_of(kind):
        if kind.__module__ == "multinode.records.samples":
            records: list[Any] = [*parse_samples([line])]
        else:
            fake = FakeTransport(lambda *_, line=line: [line + b"\n"])
            stream = AgentTransport(fake, AgentArchive(b"")).open(Node(name="a"), "follow", {}, kind, deadline_s=5)
            records = [stream.first]
        assert len(records) == 1
        assert unprintable(records) == []
