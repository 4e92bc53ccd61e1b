"""Foreign text (output and names of nodes), made harmless for a terminal, a page or a spreadsheet."""

from __future__ import annotations

import html
import unicodedata

# Control, format (bidirectional text) and lone surrogates; line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def sanitize(text: str) -> str:
    """The text on one line, with a question mark for every character that is not printable."""
    spaced = text.replace("\n", " ").replace("\t", " ")
    if spaced.isascii() and spaced.isprintable():
        return spaced
    return "".join("?" if unicodedata.category(char) in _UNSEEN else char for char in spaced)


def html_text(text: str) -> str:
    """The text for a page or a chart: plotly interprets HTML, too."""
    return html.escape(sanitize(text))
