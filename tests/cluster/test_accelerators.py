from __future__ import annotations

from pathlib import Path

import pytest

from multinode.cluster.accelerators import ACCELERATORS, NVIDIA, accelerator_named
from multinode.cluster.facts import Gpu, select_gpus
from multinode.records.benchmark import BACKENDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "accelerators.md"


def test_the_page_has_the_table_of_the_code() -> None:
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    names = [one.name for one in ACCELERATORS]
    rows = {row[0]: [cell.replace("`", "") for cell in row[1:]] for row in lines[: len(names) + 2] if row[0] in names}
    assert rows == {one.name: [one.visible[0], one.backend, ", ".join(one.sockets), one.query] for one in ACCELERATORS}


def test_a_node_of_an_earlier_agent_is_nvidias() -> None:
    assert accelerator_named(None) is NVIDIA
    assert {one.backend for one in ACCELERATORS} < set(BACKENDS)


@pytest.mark.parametrize(("by_place", "chosen"), [(False, [7]), (True, [])])
def test_a_number_is_that_of_the_tool_or_of_the_place_among_what_is_shown(chosen: list[int], *, by_place: bool) -> None:
    gpus = tuple(Gpu(index=index, name="AMD") for index in (6, 7))
    assert [gpu.index for gpu in select_gpus("7", gpus, by_place=by_place)] == chosen
    assert [gpu.index for gpu in select_gpus("1", gpus, by_place=True)] == [7]
