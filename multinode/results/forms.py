"""forms: in which an answer is written, and the file that has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from multinode.records.files import choose_form

AnswerForm = Literal["table", "html", "markdown", "csv", "json"]
_ENDINGS: dict[str, AnswerForm] = {
    ".txt": "table",
    "": "table",
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
}
_SUFFIXES: dict[AnswerForm, str] = {"table": "txt", "html": "html", "markdown": "md", "csv": "csv", "json": "json"}


def choose_answer_form(form: AnswerForm | None, output: Path | None, usual: AnswerForm) -> AnswerForm:
    """The form that is asked for, else that of the ending of `output`, before anything is read.

    Args:
        form: as given; None is by the ending.
        output: a file, or a directory; None prints.
        usual: without a form, and without an ending.

    Raises:
        UsageError: the ending is unknown.
    """
    if output is None or output.is_dir():
        return form or usual
    # CSV of samples is several files in a directory that is made.
    return cast("AnswerForm", choose_form(form, None if form == "csv" else output, _ENDINGS))


def answer_path(output: Path, run_ids: Sequence[str], form: AnswerForm) -> Path:
    """The file of an answer: `output`, or in that directory a file with the name of the first run."""
    if not output.is_dir():
        return output
    return output / f"{run_ids[0]}{'-and-others' if run_ids[1:] else ''}.{_SUFFIXES[form]}"
