"""Foreign text: what a node printed or is called, made harmless before a terminal, a page or a spreadsheet shows it."""

from __future__ import annotations

import html
import unicodedata

# Control, format (which turns the direction of what follows) and lone surrogates; separators of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def sanitize(text: str) -> str:
    """The text on one line, a question mark for every character that does something instead of showing something."""
    spaced = text.replace("\n", " ").replace("\t", " ")
    if spaced.isascii() and spaced.isprintable():
        return spaced
    return "".join("?" if unicodedata.category(char) in _UNSEEN else char for char in spaced)


def html_text(text: str) -> str:
    """The text for a page or a chart: plotly, too, takes text for a kind of HTML."""
    return html.escape(sanitize(text))
