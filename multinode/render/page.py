"""page: what all pages share: head and style. A page loads nothing from a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from multinode.render.blocks import STYLE, blocks_html
from multinode.render.charts import get_plotlyjs
from multinode.render.sheet import Block, html_text

# The browser refuses network requests; plotly draws with inline scripts and styles.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #667; --paper: #fff; --card: #f4f5f7; --line: #d5d8dd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #9aa3ad; --paper: #14171a; --card: #1f2428; --line: #363c43; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
"""
_OF_CHARTS = """
.infolayer text, .cartesianlayer text, .xaxislayer-above text, .yaxislayer-above text { fill: var(--ink) !important; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """One HTML page of these sections, which are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_text(title)}</title>\n<style>{_STYLE}{STYLE}{_OF_CHARTS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n{''.join(sections)}</body>\n</html>\n"
    )


def section(name: str, blocks: Iterable[Block]) -> str:
    """One of several parts of a page."""
    return f'<section class="run" id="{name}">\n{blocks_html(blocks, name)}</section>\n'
