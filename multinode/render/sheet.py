"""Sheet: a table as plain text, for a terminal, a page or Markdown; and what stands around it. Computes no figures.

An answer is one list of blocks: `terminal.block_parts`, `blocks.blocks_html` and `blocks_markdown` draw it.

Foreign text (output and names of nodes) is harmless in each: it never becomes markup, a link or a mention.
"""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

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
    widest: int = 0  # characters of text on a terminal before it wraps; 0 is what fits
    marks: bool = False  # whether it contains short signs, which are centered
    only_csv: bool = False  # whether only a CSV file has it


Detail = Literal["always", "brief", "full", "screen", "page"]
"""Where a block is shown: `brief` on a terminal without --details; `full` with --details and on a page; `screen` and
`page` only on one of both, where a page has room for a wider table."""
IN_BRIEF: frozenset[Detail] = frozenset({"always", "brief"})
IN_DETAILS: frozenset[Detail] = frozenset({"always", "full", "screen"})
ON_PAGE: frozenset[Detail] = frozenset({"always", "full", "page"})
Tone = Literal["", "good", "doubtful", "bad"]


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table."""

    title: str
    columns: tuple[Column, ...] = ()  # without them, its rows are a name and a text
    rows: tuple[tuple[str, ...], ...] = ()  # one cell per column; plain text from any source
    notes: tuple[str, ...] = ()  # one sentence each, below the table
    legend: tuple[str, ...] = ()  # what its signs mean; on a terminal only where details are shown
    tones: dict[str, Tone] = {}  # of cells with these texts
    dense: bool = False  # without padding on a terminal: a matrix of many columns
    csv_rows: frozenset[str] = frozenset()  # first cells of the rows that only a CSV file has
    split: int = 0  # most columns of figures beside each other on a terminal; the first stays beside all others
    detail: Detail = "always"

    @property
    def shown(self) -> Sheet:
        """The table without the columns and rows that only a CSV file has."""
        kept = [not column.only_csv for column in self.columns]
        if all(kept) and not self.csv_rows:
            return self
        rows = tuple(tuple(itertools.compress(row, kept)) for row in self.rows if row[0] not in self.csv_rows)
        return msgspec.structs.replace(self, columns=tuple(itertools.compress(self.columns, kept)), rows=rows)


class Prose(msgspec.Struct, frozen=True):
    """Plain text of any source."""

    text: str
    # `heading`; `section`, of what follows; `lead`, for readers who read only one sentence; `strong`; `note`; `items`,
    # one a line; `verbatim` lines; empty is a paragraph
    style: str = ""
    title: str = ""  # above verbatim lines
    tone: Tone = ""  # of a lead or a section: its colour on a terminal
    detail: Detail = "always"


class CommandLine(str):
    """Text of a labelled row on a line of its own, never wrapped, to be copied."""

    __slots__ = ()


class Labels(msgspec.Struct, frozen=True):
    """A label and a text per row; a row without a label continues the one above it.

    Labels that follow each other are one list, so that rows of several details can alternate.
    """

    rows: tuple[tuple[str, str], ...]
    title: str = ""  # only on a page
    detail: Detail = "always"


class NextCommand(msgspec.Struct, frozen=True):
    """A command to copy, such as the next one; only on a terminal."""

    label: str
    command: str
    meaning: str = ""  # what it does, where its name does not say it
    detail: Detail = "always"


class Tiles(msgspec.Struct, frozen=True):
    """The main figures, each a name and a value."""

    figures: tuple[tuple[str, str], ...]
    detail: Detail = "page"


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart."""

    title: str
    name: str  # unique among the charts of a run
    figure: Any  # plotly's; its layout is changed
    rows: int = 1  # number of plots below each other in it
    note: str = ""


class Charts(msgspec.Struct, frozen=True):
    """Charts that are drawn only where a page is: plotly is large, and comes with the extra `report`."""

    draw: Callable[[], Iterable[Chart]]
    detail: Detail = "page"


class Fitting(msgspec.Struct, frozen=True):
    """The first choice that has at most `most_lines` on a terminal, else the last one; a page has the first."""

    choices: tuple[tuple[Block, ...], ...]
    most_lines: int
    detail: Detail = "always"


class Later(msgspec.Struct, frozen=True):
    """Blocks that cost much to make, and are made only where they are shown."""

    make: Callable[[], Iterable[Block]]
    detail: Detail = "always"


Block = Sheet | Prose | Labels | NextCommand | Tiles | Charts | Fitting | Later


def page_blocks(blocks: Iterable[Block], *, csv: bool = False) -> Iterator[Block]:
    """The blocks that a page, Markdown and a CSV file have, each with something in it."""
    for block in joined_labels(block for block in blocks if block.detail in ON_PAGE):
        if isinstance(block, Later):
            yield from page_blocks(block.make(), csv=csv)
        elif isinstance(block, Fitting):
            yield from page_blocks(block.choices[0], csv=csv)
        elif not is_empty(block) and not isinstance(block, NextCommand):
            yield block.shown if isinstance(block, Sheet) and not csv else block


def joined_labels(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks, with labels that follow each other as one list."""
    last: Labels | None = None
    for block in blocks:
        if isinstance(block, Labels) and last is not None and not block.title:
            last = msgspec.structs.replace(last, rows=(*last.rows, *block.rows))
            continue
        if last is not None:
            yield last
        last = block if isinstance(block, Labels) else None
        if last is None:
            yield block
    if last is not None:
        yield last


def in_detail(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks as details."""
    for block in blocks:
        if block.detail == "always":
            yield msgspec.structs.replace(block, detail="full")
        elif block.detail != "brief":
            yield block


def is_empty(block: Block) -> bool:
    """Whether it has nothing to show: a table without rows, a text without a word."""
    if isinstance(block, Prose):
        return not block.text
    return isinstance(block, (Sheet, Labels)) and not block.rows


_MARKED = re.compile(r"[0-9.%]+!$|fail!$")


def is_marked(cell: str) -> bool:
    """Whether a cell ends in the mark of an outlier: `0.09!`."""
    return _MARKED.search(cell.rstrip()) is not None


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
    return "".join(map(_block_markdown, page_blocks(blocks)))


_STYLED = {"heading": "## {}", "section": "### {}", "lead": "**{}**", "strong": "**{}**"}


def _block_markdown(block: Block) -> str:
    if isinstance(block, Sheet):
        return sheet_markdown(block)
    if isinstance(block, Labels):
        return (f"### {text_markdown(block.title)}\n\n" if block.title else "") + f"{_list(block.rows)}\n"
    if not isinstance(block, Prose):
        return ""
    if block.style == "verbatim":
        return (f"### {text_markdown(block.title)}\n\n" if block.title else "") + code_markdown(block.text) + "\n"
    if block.style == "items":
        return "".join(f"- {text_markdown(line)}\n" for line in block.text.splitlines()) + "\n"
    text = text_markdown(block.text)
    return _STYLED.get(block.style, "{}").format(text) + "\n\n"


def sheet_markdown(sheet: Sheet) -> str:
    """A table under a heading, a list if it has no columns; empty without rows."""
    if not sheet.rows:
        return ""
    body = _table(sheet) if sheet.columns else _list(sheet.rows)
    notes = "".join(f"\n{text_markdown(note.rstrip('.'))}.\n" for note in (*sheet.notes, *sheet.legend))
    title = f"### {text_markdown(sheet.title)}\n\n" if sheet.title else ""
    return f"{title}{body}{notes}\n"


def code_markdown(text: str) -> str:
    """Lines of text in a fence that none of them can close."""
    lines = [sanitize(line) for line in text.splitlines()]
    longest = max((len(ticks) for line in lines for ticks in _TICKS.findall(line)), default=0)
    fence = "`" * max(_LEAST_FENCE, longest + 1)
    return "\n".join((fence, *lines, fence)) + "\n"


def _table(sheet: Sheet) -> str:
    heads = [f"{column.name} ({column.unit})" if column.unit else column.name for column in sheet.columns]
    rules = [":-:" if column.marks else ":--" if column.words else "--:" for column in sheet.columns]
    rows = [[text_markdown(cell) for cell in row] for row in sheet.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in ([text_markdown(head) for head in heads], rules, *rows))


def _list(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for name, *texts in rows:
        text = ": ".join(text_markdown(text) for text in texts)
        lines.append(f"- **{text_markdown(name)}**: {text}\n" if name else f"  - {text}\n")
    return "".join(lines)
