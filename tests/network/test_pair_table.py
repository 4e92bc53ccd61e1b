from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from rich.console import Console

from multinode.network.screen import pair_sheet
from multinode.render.table import sheet_table
from multinode.traffic.pair_speeds import NetworkFinding, PairSpeed, find_odd


def measured(names: Sequence[str], speed: Callable[[str, str], float | None]) -> tuple[PairSpeed, ...]:
    return tuple(PairSpeed(source=a, target=b, gbit_per_s=speed(a, b)) for a, b in permutations(names, 2))


def rendered(
    pairs: Sequence[PairSpeed], odd: Sequence[NetworkFinding] = (), *, nodes: Sequence[str] = (), width: int = 80
) -> str:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(sheet_table(pair_sheet(pairs, odd, nodes=nodes)))
    return output.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.split()


def test_senders_are_rows_and_receivers_are_columns() -> None:
    text = rendered(measured(("one", "two"), lambda a, _: 0.25 if a == "one" else 0.93), nodes=("one", "two"))
    assert text.splitlines()[0].split() == ["from", "\\", "to", "one", "two"]
    assert row(text, "one") == ["one", "0.25"]
    assert row(text, "two") == ["two", "0.93"]
    # Of node one the cell under its own name is empty.
    line = next(line for line in text.splitlines() if line.startswith("one"))
    assert line.index("0.25") > text.splitlines()[0].index("one")
    assert "Gbit/s" in text
    assert "!" not in text


def test_odd_cells_have_a_mark_that_needs_no_colour() -> None:
    pairs = measured("abc", lambda a, _: 0.09 if a == "b" else 0.93)
    text = rendered(pairs, find_odd(pairs))
    assert row(text, "b") == ["b", "0.09!", "0.09!"]
    assert row(text, "a") == ["a", "0.93", "0.93"]
    assert "! is an outlier" in text


def test_a_stream_that_failed_and_one_that_was_not_tried_are_told_apart() -> None:
    pairs = (
        PairSpeed(source="a", target="b", error="refused"),
        PairSpeed(source="b", target="a", gbit_per_s=0.9),
        PairSpeed(source="b", target="c", gbit_per_s=0.9),
    )
    text = rendered(pairs, find_odd(pairs))
    assert row(text, "a") == ["a", "fail!", "-"]
    assert row(text, "c") == ["c", "-", "-"]


@pytest.mark.parametrize(
    ("gbit_per_s", "figure"),
    [
        (0.0, "0.00"),
        (0.004, "<.01"),
        (0.0941, "0.09"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (392.1, "392"),
    ],
)
def test_a_figure_is_never_wider_than_its_column(gbit_per_s: float, figure: str) -> None:
    assert row(rendered(measured("ab", lambda _a, _b: gbit_per_s)), "a") == ["a", figure]


def test_sixteen_nodes_with_long_names_fit_into_120_columns() -> None:
    names = [f"gpu-box-{number:02d}.example" for number in range(16)]
    pairs = measured(names, lambda a, _: 0.09 if a == names[9] else 93.4)
    text = rendered(pairs, find_odd(pairs), nodes=names, width=120)
    lines = text.splitlines()
    assert lines[0].split() == ["from", "\\", "to", *(str(rank) for rank in range(16))]
    assert row(text, "9 ") == ["9", names[9], *["0.09!"] * 15]
    # A row a node, below the head and its rule, above the caption: nothing was wrapped or cut.
    assert len(lines) == 2 + 16 + 1
    assert "\u2026" not in text


def test_names_that_fit_stand_above_their_columns() -> None:
    text = rendered(measured([f"node{rank}" for rank in range(6)], lambda _a, _b: 0.9))
    assert text.splitlines()[0].split()[3:] == [f"node{rank}" for rank in range(6)]


def test_the_order_is_that_of_the_nodes() -> None:
    text = rendered(measured("ab", lambda _a, _b: 0.9), nodes=("b", "a", "z"))
    assert [line[0] for line in text.splitlines()[2:5]] == ["b", "a", "z"]


def test_no_pairs_are_an_empty_table() -> None:
    assert "Gbit/s" in rendered(())
