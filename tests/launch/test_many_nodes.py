from __future__ import annotations

import msgspec

from multinode.launch.progress_table import progress_line, sum_up, worst_first
from multinode.records.progress import NodeProgress

from .test_progress_table import BUSY, progress, rendered, row


def busy(rank: int, **changes: object) -> NodeProgress:
    return msgspec.structs.replace(BUSY, name=f"n{rank:02}", node_rank=rank, **changes)


NODES = [busy(rank) for rank in range(32)]


def test_few_nodes_keep_their_order_and_all_have_a_row() -> None:
    assert worst_first(NODES[:12], 12) == (tuple(NODES[:12]), ())
    assert "others" not in rendered(*NODES[:12])


def test_of_many_the_worst_come_first_and_the_rest_is_summed() -> None:
    nodes = list(NODES)
    nodes[30] = busy(30, state="lost", message="contact lost")
    nodes[20] = busy(20, step=3)
    nodes[10] = busy(10, recent_us=(900_000.0,))
    shown, rest = worst_first(nodes, 12)
    assert [node.node_rank for node in shown[:3]] == [30, 20, 10]
    assert (len(shown), len(rest)) == (11, 21)
    text = rendered(*nodes)
    assert len([line for line in text.splitlines() if " n" in f" {line}" and "running" in line]) <= 12
    others = row(text, "others")
    assert others[:2] == ["21", "others"]
    assert {"running", ">=", "12"} <= set(others)
    assert f"{21 * 26.666:.1f}"[:4] in text
    assert f"{21 * 0.5:.3f}" in others


def test_a_group_of_ended_nodes_has_no_network_rate() -> None:
    nodes = [busy(rank, state="ended" if rank >= 20 else "running") for rank in range(64)]
    rows = [line.split() for line in rendered(*nodes).splitlines() if "others" in line and "ended" in line]
    assert [f"{int(cells[0]) * 0.5:.3f}" in cells for cells in rows] == [False]


def test_the_rest_says_least_step_and_median_time() -> None:
    rest = sum_up([busy(0), busy(1, step=5, state="ended"), NodeProgress(name="x", node_rank=2, ranks=(4,))])
    assert (rest.count, rest.states, rest.step) == (3, "1 waiting, 1 ended, 1 running", 5)
    assert rest.step_time_us == 300_000.0


def test_the_line_stays_a_line() -> None:
    line = progress_line(progress(*NODES))
    assert len(line) < 300
    assert "27 others: 27 running, at least step 12" in line


def test_the_others_have_a_row_for_each_state_with_their_names_where_these_are_short() -> None:
    nodes = [busy(rank, state="ended" if rank >= 60 else "waiting" if rank >= 58 else "running") for rank in range(64)]
    text = rendered(*nodes)
    assert len(row(text, "n58")) == len(row(text, "n00"))
    others = [line.replace("\u2502", " ").split() for line in text.splitlines() if "others" in line]
    assert others[0][:6] == ["53", "others:", "n[05-57]", "53", "running", ">="]


def test_of_hundreds_no_more_rows_are_shown_than_fit() -> None:
    states = ("lost", "stopping", "waiting", "starting", "ended", "running")
    nodes = [busy(rank, state=states[rank % 6]) for rank in range(256)]
    text = rendered(*nodes)
    rows = [line for line in text.splitlines() if any(state in line for state in states)]
    assert len(rows) == 12
    assert [line.replace("\u2502", " ").split()[0] for line in rows[:2]] == ["n00", "n06"]
    assert [len([line for line in rows if "others" in line and state in line]) for state in states] == [1] * 6
