from __future__ import annotations

from typing import get_args

import pytest

from multinode.job.step_messages import NoteKind, StepMessages, StepNote
from multinode.network.screen import step_notes


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (StepNote(kind="cut_at_owners", cap=65536), "reduce_bucket_size (65536 elements)"),
        (StepNote(kind="reduced_to_owners"), "nccl-test has no reduce"),
        (StepNote(kind="inside_left_out"), "has one worker per node"),
    ],
)
def test_a_note_says_what_is_measured_otherwise(note: StepNote, said: str) -> None:
    (sentence,) = step_notes(StepMessages(training="DDP", messages=(), notes=(note,)))
    assert said in sentence


def test_every_note_has_a_sentence_of_its_own() -> None:
    kinds: tuple[NoteKind, ...] = get_args(NoteKind)
    notes = tuple(StepNote(kind=kind, cap=1) for kind in kinds)
    assert len(set(step_notes(StepMessages(training="DDP", messages=(), notes=notes)))) == len(kinds)
