"""markdown: sheets as Markdown for an issue or a wiki. Foreign text never becomes markup, a link or a mention."""

from __future__ import annotations

import re
from collections.abc import Sequence

from multinode.render.escaping import sanitize
from multinode.render.sheet import Sheet

_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|~&$])")
# Some sites link @name, #12 and http://; a zero-width character between the parts keeps them text.
_LINKS = re.compile(r"(@|#(?=\d)|:(?=//)|(?<=www)\.)")
_APART = "&#8203;"
_TICKS = re.compile(r"`+")
_LEAST_FENCE = 3


def text_markdown(text: str) -> str:
    """Foreign text on one line, for the middle of a line."""
    return _LINKS.sub(rf"\1{_APART}", _MEANS_SOMETHING.sub(r"\\\1", sanitize(text).strip()))


def sheet_markdown(sheet: Sheet) -> str:
    """A table under a heading, a list if it has no columns; empty without rows."""
    if not sheet.rows:
        return ""
    body = _table(sheet) if sheet.columns else _list(sheet.rows)
    notes = "".join(f"\n{text_markdown(note.rstrip('.'))}.\n" for note in sheet.notes)
    return f"### {text_markdown(sheet.title)}\n\n{body}{notes}\n"


def code_markdown(text: str) -> str:
    """Lines of text in a fence that none of them can close."""
    lines = [sanitize(line) for line in text.splitlines()]
    longest = max((len(ticks) for line in lines for ticks in _TICKS.findall(line)), default=0)
    fence = "`" * max(_LEAST_FENCE, longest + 1)
    return "\n".join((fence, *lines, fence)) + "\n"


def _table(sheet: Sheet) -> str:
    heads = [f"{column.name} ({column.unit})" if column.unit else column.name for column in sheet.columns]
    rules = [":--" if column.words else "--:" for column in sheet.columns]
    rows = [[text_markdown(cell) for cell in row] for row in sheet.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in ([text_markdown(head) for head in heads], rules, *rows))


def _list(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for name, *said in rows:
        text = ": ".join(text_markdown(one) for one in said)
        lines.append(f"- **{text_markdown(name)}**: {text}\n" if name else f"  - {text}\n")
    return "".join(lines)
