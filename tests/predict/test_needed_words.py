from __future__ import annotations

import pytest

from multinode.predict.break_even import Needed
from multinode.predict.screen import accumulation_words, link_words


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (Needed(value=1.0, low=0.7684, high=1.203, message=""), "1 Gbit/s (760 Mbit/s to 1.3 Gbit/s)"),
        (Needed(value=1.0, low=0.98, high=1.01, message=""), "1 Gbit/s"),
        (
            Needed(value=1.79, low=0.91, message=""),
            "1.8 Gbit/s (910 Mbit/s to above 100 Gbit/s)",
        ),
        (
            Needed(low=25.7, code="slow_nodes", message=""),
            "at least 25 Gbit/s, but perhaps no link is enough",
        ),
        (Needed(value=120.0, low=2.0, high=700.0, message=""), "120 Gbit/s (2 to 700 Gbit/s)"),
        (Needed(value=150.0, low=90.0, message=""), "150 Gbit/s (90 to above 150 Gbit/s)"),
        (Needed(code="overlap_off", message="never: overlap is off"), "never: overlap is off"),
        (Needed(value=0.2, low=1e-4, high=0.31, message=""), "at most 310 Mbit/s"),
        (Needed(value=0.2, low=1e-4, message=""), "inconclusive: any link may be enough, or none"),
        (Needed(value=1e-4, low=1e-4, high=1e-4, message="at any bandwidth", always=True), "at any bandwidth"),
        (Needed(value=1e-4, low=1e-4, high=2.0, code="any", message="", always=True), "at most 2 Gbit/s"),
    ],
)
def test_a_link_is_told_no_sharper_than_it_is_known(needed: Needed, said: str) -> None:
    assert link_words(needed) == said


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (
            Needed(value=8, low=6, high=11, message="the global batch becomes 4 times as large"),
            "8 (6 to 11); at 8 the global batch becomes 4 times as large",
        ),
        (
            Needed(value=8, low=8, high=8, message="the global batch could be 0.5 times as large"),
            "8; at 8 the global batch could be 0.5 times as large",
        ),
        (
            Needed(value=8, low=8, message="as it is now"),
            "8 (8 to an unknown maximum); at 8 as it is now",
        ),
        (Needed(message="no number of accumulation steps is enough"), "no number of accumulation steps is enough"),
        # As releases before ranges stored it.
        (
            Needed(value=4, message="the global batch becomes 4 times as large"),
            "4; the global batch becomes 4 times as large",
        ),
    ],
)
def test_an_accumulation_says_what_becomes_of_the_global_batch(needed: Needed, said: str) -> None:
    assert accumulation_words(needed) == said
