from __future__ import annotations

import pytest

from multinode.render.sheet import sanitize


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is [bold]", "as it is [bold]"),
        ("\u00e4 \u4e2d", "\u00e4 \u4e2d"),
        ("two\nlines\there", "two lines here"),
        ("\x1b[2Jgone\x07\r", "?[2Jgone??"),
        ("turned \u202e round \x9b1m \ud800", "turned ? round ?1m ?"),
    ],
)
def test_what_does_something_instead_of_showing_something_is_a_question_mark(text: str, shown: str) -> None:
    assert sanitize(text) == shown
