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
from tests.profile.observing import RUN, SUMMARY


def test_a_contrast_has_verdict_reasons_sides_advice_and_what_if() -> None:
    text = run_markdown([make.stored_run(CONTRAST_RUN, {load_contrast: CONTRAST})])
    order = ["## tiny\\_sft.yaml", f"**{CONTRAST.verdict}**", f"- **Why**: {CONTRAST.reasons[0].message}"]
    order += ["| samples/s | 24.1 | 2.98 |", "### changes", "| fp16 gradients | 1.78x |"]
    order += [
        "| \\*2 | 100 Mbit/s | 2 | 1 | 1,342 | 2.98 | 2.89-3.07 |",
        "- **faster than 1 node with 1 worker**: 710 Mbit/s (610 to 840 Mbit/s)",
    ]
    at = [text.index(one) for one in order]
    assert at == sorted(at)
    assert "\n--grad-compress fp16\n" in text


def test_a_run_has_its_summary_and_its_failure() -> None:
    failure = Failure(
        node="box|2",
        node_rank=1,
        message="out of `memory`",
        cause="a `batch`",
        hint="a smaller one",
        error_id="oom",
    )
    text = run_markdown([make.stored_run(msgspec.structs.replace(RUN, first_failure=failure), summary=SUMMARY)])
    assert "**error: box\\|2: out of \\`memory\\`**\n\n- **Meaning**: a \\`batch\\`\n- **Fix**: a smaller one\n" in text
    assert "- **bottleneck**: exposed communication takes 120 of 401 ms per step (30%)" in text
    assert "| compute | 210.0 | 52.3% |" in text


def test_a_run_that_was_restarted_has_a_row_for_each_attempt() -> None:
    first = Attempt(
        run_id="r-1", status="failed", started_s=0.0, world_size=2, last_step=57, lost_steps=17, lost_s=21.5
    )
    second = Attempt(run_id="r-2", status="succeeded", started_s=0.0, checkpoint="checkpoint-40", first_step=40)
    run = msgspec.structs.replace(RUN, attempts=(first, second))
    text, page = (show([make.stored_run(run, summary=SUMMARY)]) for show in (run_markdown, run_page))
    assert "| r-1 | the beginning | failed | 2 | - | 0 to 57 | 17 | 21.5 s |" in text
    assert "| r-2 | checkpoint-40 | succeeded | - | - | 40 to 0 | - | - |" in text
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
    assert "<img" not in said.replace("\\<", "")
    assert "\\*\\*b\\*\\*" in said
    assert "\\[a\\](http:&#8203;//x.y)" in said
    assert "@&#8203;everyone #&#8203;12 \\`c\\` \\&lt; \\| www.&#8203;x.y??" in said


@given(st.text())
def test_no_text_ends_a_fence_or_a_line(text: str) -> None:
    first, *inside, last = code_markdown(text).splitlines()
    assert first == last
    assert not any(line.strip().startswith(first) for line in inside)
    assert len(text_markdown(text).splitlines()) <= 1
