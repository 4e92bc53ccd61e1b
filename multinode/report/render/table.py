"""make_table: how all our tables look: narrow enough for a terminal of 80 columns, plain enough for a log."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["make_table"]


def make_table(title: str | None = None, *, caption: str | None = None, header: bool = True) -> Table:
    """An empty table; title and caption are plain text."""
    return Table(
        title=Text(title, no_wrap=True) if title else None,
        caption=Text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        show_header=header,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
