"""terminal: an answer's blocks as what is printed, with or without --details."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from multinode.render.sheet import (
    IN_BRIEF,
    IN_DETAILS,
    Block,
    Fitting,
    Labels,
    Later,
    NextCommand,
    Prose,
    Sheet,
    is_empty,
    joined_labels,
)
from multinode.render.table import TONES, WIDE, Part, command_lines, labelled_parts, paragraph, screen_text, sheet_table

_BOLD = frozenset({"heading", "section", "lead", "strong"})


def block_parts(blocks: Iterable[Block], *, details: bool = False, width: int = WIDE) -> Iterator[Part]:
    """What a terminal shows: a blank line between blocks, none between paragraphs and above commands.

    Args:
        blocks: the answer.
        details: with what is only in the details, without what is only above them.
        width: columns of the terminal.
    """
    shown = IN_DETAILS if details else IN_BRIEF
    last: Block | None = None
    for block in joined_labels(block for block in blocks if block.detail in shown):
        if is_empty(block):
            continue
        if last is not None and not isinstance(block, NextCommand) and not _is_one_text(last, block):
            yield ""
        yield from _parts(block, details=details, width=width)
        last = block


def _is_one_text(above: Block, below: Block) -> bool:
    if not isinstance(above, Prose):
        return False
    return above.style == "section" or (isinstance(below, Prose) and not below.title and below.style != "section")


def _parts(block: Block, *, details: bool, width: int) -> Iterator[Part]:
    if isinstance(block, Sheet):
        for number, part in enumerate(_beside(block.shown)):
            if number:
                yield ""
            if part.title:
                # Within a table, rich cuts it at the table's width.
                yield paragraph(part.title, style="bold")
            yield sheet_table(part, legend=details)
    elif isinstance(block, Labels):
        yield from labelled_parts(block.rows)
    elif isinstance(block, NextCommand):
        yield from command_lines(block)
    elif isinstance(block, Later):
        yield from block_parts(block.make(), details=details, width=width)
    elif isinstance(block, Fitting):
        yield from _fitting(block, details=details, width=width)
    elif isinstance(block, Prose):
        yield from _prose(block)


def _beside(sheet: Sheet) -> Iterator[Sheet]:
    """The sheet in parts with at most `split` columns of figures; notes are below the last one."""
    last = len(sheet.columns)
    if not sheet.split or last <= sheet.split + 1:
        yield sheet
        return
    for begin in range(2, last, sheet.split - 1):
        end = min(last, begin + sheet.split - 1)
        yield msgspec.structs.replace(
            sheet,
            title=sheet.title if begin == 2 else "",  # noqa: PLR2004 - after the names and the first figures
            columns=(*sheet.columns[:2], *sheet.columns[begin:end]),
            rows=tuple((*row[:2], *row[begin:end]) for row in sheet.rows),
            notes=sheet.notes if end == last else (),
            legend=sheet.legend if end == last else (),
        )


def _prose(words: Prose) -> Iterator[Part]:
    if words.title:
        yield paragraph(words.title, style="bold")
    if words.style == "verbatim":
        yield from words.text.splitlines()
    elif words.style == "items":
        yield from (paragraph(f"- {line}") for line in words.text.splitlines())
    else:
        yield paragraph(words.text, style=TONES[words.tone] if words.style in _BOLD else "")


def _fitting(block: Fitting, *, details: bool, width: int) -> Iterator[Part]:
    shown: tuple[Part, ...] = ()
    for choice in block.choices:
        shown = tuple(block_parts(choice, details=details, width=width))
        if screen_text(shown, width).count("\n") <= block.most_lines:
            break
    yield from shown
