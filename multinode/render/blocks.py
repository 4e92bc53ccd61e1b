"""blocks: as HTML, on a page or in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from multinode.render.sheet import (
    Block,
    Chart,
    Charts,
    Column,
    Labels,
    Prose,
    Sheet,
    Tiles,
    Tone,
    html_text,
    is_marked,
    page_blocks,
    sanitize,
)

STYLE = """
h1 { font-size: 1.4rem; margin: 0.5rem 0; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 0.4rem; }
section.run ~ section.run { border-top: 3px solid var(--line); margin-top: 3rem; padding-top: 1rem; }
p.lead { font-size: 1.2rem; font-weight: 600; margin: 0.6rem 0 0.9rem; }
p.note { color: var(--faint); font-size: 0.85rem; margin: 0.3rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.6rem; }
.tile { background: var(--card); border-radius: 6px; padding: 0.5rem 0.7rem; }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: 0.8rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: right; vertical-align: top; white-space: nowrap; }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
th small { display: block; color: var(--faint); font-weight: 400; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: normal; min-width: 6.5rem; }
td.long { min-width: 16rem; }
td.odd, td.bad { color: #c0392b; font-weight: 600; }
td.good { color: #2e8b57; }
td.doubtful { color: #b8860b; font-weight: 600; }
td.marks, th.marks { text-align: center; }
td.one { white-space: nowrap; }
td.name { text-align: left; white-space: normal; overflow-wrap: normal; min-width: 4.5rem; color: var(--faint); }
pre { overflow-x: auto; background: var(--card); padding: 0.7rem; border-radius: 6px; font-size: 0.8rem; }
"""
"""Of blocks, wherever they are."""
# A notebook has its own font, and a light or a dark ground.
_IN_NOTEBOOK = """
--faint: #808890; --card: rgba(128, 128, 128, 0.12); --line: rgba(128, 128, 128, 0.4); max-width: 75rem;
"""
_LONG = 40


def fragment(blocks: Iterable[Block]) -> str:
    """Blocks without charts as a part of another document, whose own elements keep their style."""
    return f'<div class="multinode"><style>.multinode {{{_IN_NOTEBOOK}{STYLE}}}</style>\n{blocks_html(blocks)}</div>\n'


def blocks_html(blocks: Iterable[Block], charts: str = "") -> str:
    """Everything on a page; a table without rows, and a text without a word, is not there.

    Args:
        blocks: the answer.
        charts: before the name of each chart, so that it is unique on the page; without it none is drawn.
    """
    return "".join(_block_html(block, charts) for block in page_blocks(blocks))


def _block_html(block: Block, charts: str) -> str:
    if isinstance(block, Sheet):
        return _sheet_html(block)
    if isinstance(block, Labels):
        return _sheet_html(Sheet(title=block.title, rows=block.rows))
    if isinstance(block, Tiles):
        tiles = (
            f'<div class="tile"><b>{html_text(value)}</b><span>{html_text(name)}</span></div>'
            for name, value in block.figures
        )
        return f'<div class="tiles">{"".join(tiles)}</div>\n'
    if isinstance(block, Charts):
        return "".join(_chart_html(chart, charts) for chart in block.draw()) if charts else ""
    return _words_html(block) if isinstance(block, Prose) else ""


def _chart_html(chart: Chart, prefix: str) -> str:
    # plotly is large, and comes with the extra `report`.
    from multinode.render.charts import chart_html

    note = f'<p class="note">{html_text(chart.note)}</p>\n' if chart.note else ""
    return f"<h2>{html_text(chart.title)}</h2>\n{chart_html(chart, f'{prefix}-{chart.name}')}{note}"


def _words_html(words: Prose) -> str:
    if words.style == "verbatim":
        lines = "\n".join(sanitize(line) for line in words.text.splitlines())
        title = f"<h2>{html_text(words.title)}</h2>\n" if words.title else ""
        return f"{title}<pre>{html.escape(lines)}</pre>\n"
    if words.style == "items":
        items = "".join(f"<li>{html_text(line)}</li>" for line in words.text.splitlines())
        return f"<ul>{items}</ul>\n"
    text = html_text(words.text)
    return {
        "heading": f"<h1>{text}</h1>\n",
        "section": f"<h2>{text}</h2>\n",
        "strong": f"<p><b>{text}</b></p>\n",
        "": f"<p>{text}</p>\n",
    }.get(words.style, f'<p class="{words.style}">{text}</p>\n')


def _sheet_html(sheet: Sheet) -> str:
    head = "".join(map(_head, sheet.columns))
    rows = "".join(_row(row, sheet) for row in sheet.rows)
    notes = "".join(f'<p class="note">{html_text(note)}</p>\n' for note in (*sheet.notes, *sheet.legend))
    table = f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{rows}</table></div>\n'
    title = f"<h2>{html_text(sheet.title)}</h2>\n" if sheet.title else ""
    return f"{title}{table}{notes}"


def _head(column: Column) -> str:
    small = f"<small>{html_text(column.unit)}</small>" if column.unit else ""
    kind = " class=words" if column.words else " class=marks" if column.marks else ""
    return f"<th{kind}>{html_text(column.name)}{small}</th>"


def _row(row: Sequence[str], sheet: Sheet) -> str:
    if not sheet.columns:
        name, *rest = row
        cells = "".join(f"<td class=words>{html_text(text)}</td>" for text in rest)
        return f'<tr><td class="name">{html_text(name)}</td>{cells}</tr>'
    tones = (sheet.tones.get(cell, "") for cell in row)
    return f"<tr>{''.join(map(_cell, row, sheet.columns, tones))}</tr>"


def _cell(cell: str, column: Column, tone: Tone) -> str:
    if column.words:
        # A sentence in a narrow column would make its row as tall as the page; a name is read in one line.
        long = " long" if len(cell) > _LONG else " one" if len(cell.split()) == 1 else ""
        return f'<td class="words{long}">{html_text(cell)}</td>'
    if column.marks:
        return f'<td class="{f"marks {tone}".strip()}">{html_text(cell)}</td>'
    return f"<td{' class=odd' if is_marked(cell) else ''}>{html_text(cell)}</td>"
