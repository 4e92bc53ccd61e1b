from __future__ import annotations

import pytest

from multinode.render.sheet import format_sig


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0724, "0.0724"),
        (0.00001234, "0.0000123"),
        (0.02, "0.0200"),
        (0.99951, "1.00"),
        (2.984, "2.98"),
        (24.13, "24.1"),
        (999.96, "1,000"),
        (13420.4, "13,420"),
        (1e300, "over 1,000,000,000,000,000"),
        (-0.5, "-0.500"),
    ],
)
def test_a_figure_has_three_or_four_digits(value: float | None, told: str) -> None:
    assert format_sig(value) == told
