from __future__ import annotations

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from multinode.contrast.side import load_contrast
from multinode.records.run import Attempt, Failure
from multinode.render.sheet import Column, Sheet, code_markdown, sheet_markdown, text_markdown
from multinode.results.run_page import run_markdown, run_page
from tests import make
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN
from tests.golden import Golden
from tests.profile.observing import RUN, SUMMARY


def test_a_contrast_has_verdict_reasons_sides_advice_and_what_if(golden: Golden) -> None:
    text = run_markdown([make.stored_run(CONTRAST_RUN, {load_contrast: CONTRAST})])
    golden.check("contrast.md", text)


def test_a_run_has_its_summary_and_its_failure(golden: Golden) -> None:
    failure = Failure(
        node="box|2",
        node_rank=1,
        message="out of `memory`",
        cause="a `batch`",
        hint="a smaller one",
        error_id="oom",
    )
    text = run_markdown([make.stored_run(msgspec.structs.replace(RUN, first_failure=failure), summary=SUMMARY)])
    golden.check("failed_run.md", text)


def test_a_run_that_was_restarted_has_a_row_for_each_attempt(golden: Golden) -> None:
    first = Attempt(
        run_id="r-1", status="failed", started_s=0.0, world_size=2, last_step=57, lost_steps=17, lost_s=21.5
    )
    second = Attempt(run_id="r-2", status="succeeded", started_s=0.0, checkpoint="checkpoint-40", first_step=40)
    run = msgspec.structs.replace(RUN, attempts=(first, second))
    text, page = (show([make.stored_run(run, summary=SUMMARY)]) for show in (run_markdown, run_page))
    golden.check("attempts.md", "\n".join(line for line in text.splitlines() if re.match(r"\| (attempt|r-\d)", line)))
    assert "r-1</td>" in page


def test_every_row_of_a_table_has_as_many_cells_as_its_head_whatever_stands_in_them() -> None:
    sheet = Sheet(
        title="t", columns=(Column("a|b", words=True), Column("n", "ms")), rows=(("x|y\n| z", "1"), ("\\|", "`2`"))
    )
    lines = [line for line in sheet_markdown(sheet).splitlines() if line.startswith("|")]
    assert lines[1] == "| :-- | --: |"
    assert {len(re.findall(r"(?<!\\)\|", line.replace("\\\\", ""))) for line in lines} == {3}


def test_foreign_text_is_neither_markup_nor_link_nor_mention() -> None:
    said = text_markdown("<img src=x> **b** [a](http://x.y) @everyone #12 `c` &lt; | www.x.y\x1b\u202e")
    assert said == (
        "\\<img src=x\\> \\*\\*b\\*\\* \\[a\\](http:&#8203;//x.y) "
        "@&#8203;everyone #&#8203;12 \\`c\\` \\&lt; \\| www.&#8203;x.y??"
    )


@given(st.text())
def test_no_text_ends_a_fence_or_a_line(text: str) -> None:
    first, *inside, last = code_markdown(text).splitlines()
    assert first == last
    assert not any(line.strip().startswith(first) for line in inside)
    assert len(text_markdown(text).splitlines()) <= 1
