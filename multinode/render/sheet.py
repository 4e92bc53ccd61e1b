"""Sheet: a table as plain text, for a terminal, a page or Markdown; and what stands around it. Computes no figures.

A page and Markdown are the same list of blocks: `page.blocks_html` and `blocks_markdown` render one each.

Foreign text (output and names of nodes) is harmless in each: it never becomes markup, a link or a mention.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from multinode.stats.estimate import PLUS_MINUS
from multinode.units import UNKNOWN

RANGES = f"ranges and {PLUS_MINUS} are 95% confidence intervals over the repeats; with one run, over its steps"
"""Note below tables with ranges."""
_BYTES_PER_MB = 1e6


class Column(msgspec.Struct, frozen=True):
    """A column."""

    name: str
    unit: str = ""
    words: bool = False  # whether it contains text (left-aligned, may wrap) or figures


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table."""

    title: str
    columns: tuple[Column, ...] = ()  # without them, its rows are a name and a text
    rows: tuple[tuple[str, ...], ...] = ()  # one cell per column; plain text from any source
    notes: tuple[str, ...] = ()  # one sentence each, below the table
    legend: tuple[str, ...] = ()  # what its signs mean; on a terminal only where details are shown


class Prose(msgspec.Struct, frozen=True):
    """Plain text of any source."""

    text: str
    # `heading`; `lead`, for readers who read only one sentence; `strong`; `note`; `items`, one a line; `verbatim`
    # lines; empty is a paragraph
    style: str = ""
    title: str = ""  # above verbatim lines


class Tiles(msgspec.Struct, frozen=True):
    """The main figures, each a name and a value; only on a page."""

    figures: tuple[tuple[str, str], ...]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart; only on a page."""

    title: str
    name: str  # unique on the page
    figure: Any  # plotly's; its layout is changed
    rows: int = 1  # number of plots below each other in it
    note: str = ""


Block = Sheet | Prose | Tiles | Chart


def figure(value: float | None, form: str = ".1f") -> str:
    """A figure, or a dash."""
    return UNKNOWN if value is None else format(value, form)


def percent(share: float | None, form: str = ".1f") -> str:
    """A share in percent, or a dash."""
    return UNKNOWN if share is None else f"{100 * share:{form}}%"


def megabytes(size_bytes: float | None) -> str:
    """Bytes in MB (1e6), or a dash."""
    return UNKNOWN if size_bytes is None else f"{size_bytes / _BYTES_PER_MB:,.2f}"


# Control, format (bidirectional text) and lone surrogates; line and paragraph separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def sanitize(text: str) -> str:
    """The text on one line, with a question mark for every character that is not printable."""
    spaced = text.replace("\n", " ").replace("\t", " ")
    if spaced.isascii() and spaced.isprintable():
        return spaced
    return "".join("?" if unicodedata.category(char) in _UNSEEN else char for char in spaced)


# Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@")


def harmless(value: object) -> object:
    """A cell, marked as text if a spreadsheet would calculate it."""
    if not isinstance(value, str):
        return value
    text = sanitize(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def html_text(text: str) -> str:
    """The text for a page or a chart: plotly interprets HTML, too."""
    return html.escape(sanitize(text))


_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|~&$])")
# Some sites link @name, #12 and http://; a zero-width character between the parts keeps them text.
_LINKS = re.compile(r"(@|#(?=\d)|:(?=//)|(?<=www)\.)")
_APART = "&#8203;"
_TICKS = re.compile(r"`+")
_LEAST_FENCE = 3


def text_markdown(text: str) -> str:
    """Foreign text on one line, for the middle of a line."""
    return _LINKS.sub(rf"\1{_APART}", _MEANS_SOMETHING.sub(r"\\\1", sanitize(text).strip()))


def blocks_markdown(blocks: Iterable[Block]) -> str:
    """Markdown for an issue or a wiki."""
    return "".join(map(_block_markdown, blocks))


def _block_markdown(block: Block) -> str:
    if isinstance(block, Sheet):
        return sheet_markdown(block)
    if not isinstance(block, Prose) or not block.text:
        return ""
    if block.style == "verbatim":
        return (f"### {text_markdown(block.title)}\n\n" if block.title else "") + code_markdown(block.text) + "\n"
    if block.style == "items":
        return "".join(f"- {text_markdown(line)}\n" for line in block.text.splitlines()) + "\n"
    text = text_markdown(block.text)
    return {"heading": f"## {text}", "lead": f"**{text}**", "strong": f"**{text}**"}.get(block.style, text) + "\n\n"


def sheet_markdown(sheet: Sheet) -> str:
    """A table under a heading, a list if it has no columns; empty without rows."""
    if not sheet.rows:
        return ""
    body = _table(sheet) if sheet.columns else _list(sheet.rows)
    notes = "".join(f"\n{text_markdown(note.rstrip('.'))}.\n" for note in (*sheet.notes, *sheet.legend))
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
    for name, *texts in rows:
        text = ": ".join(text_markdown(text) for text in texts)
        lines.append(f"- **{text_markdown(name)}**: {text}\n" if name else f"  - {text}\n")
    return "".join(lines)
