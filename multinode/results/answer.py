"""answer: blocks and the document that they show, in any form."""

from __future__ import annotations

from collections.abc import Iterable

from multinode.records.files import document_text
from multinode.render.csv_text import blocks_csv
from multinode.render.sheet import Block, Prose, blocks_markdown
from multinode.render.table import screen_text
from multinode.render.terminal import block_parts
from multinode.results.forms import AnswerForm


def answer_in(form: AnswerForm, title: str, blocks: Iterable[Block], document: object) -> str:
    """An answer that is not stored, as a file has it.

    Args:
        form: of the file.
        title: above a page and Markdown; in CSV the name of the run.
        blocks: the answer.
        document: what JSON has.
    """
    if form == "json":
        return document_text(document)
    if form == "csv":
        return blocks_csv([(title, blocks)])
    if form == "table":
        return screen_text(block_parts(blocks, details=True))
    headed = (Prose(title, "heading"), *blocks)
    if form == "markdown":
        return blocks_markdown(headed)
    # plotly, which draws the charts of a page, comes with the extra `report`.
    from multinode.render.page import page, section

    return page(f"multinode: {title}", [section("answer", headed)])
