from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from multinode.analyse.grid.imported_rows import label_rows
from multinode.core.grid.imported_table import ImportedRow
from multinode.core.text.rounded import exactly


def row(words: dict[str, str], **counts: int) -> ImportedRow:
    return ImportedRow(line=7, words=words, figures={name: exactly(count) for name, count in counts.items()})


def test_a_label_has_the_device_and_what_tells_it_from_others() -> None:
    rows = [
        row({"device": "NVIDIA GeForce RTX 4090", "method": "LoRA", "model": "b"}, world_size=1, per_device_batch=2),
        row({"device": "RTX 4090", "method": "full ZeRO-3 offload", "model": "b"}, world_size=2, per_device_batch=2),
    ]
    assert label_rows(rows) == ["rtx-4090-x1", "rtx-4090-x2"]
    same = [msgspec.structs.replace(one, figures=rows[0].figures) for one in rows]
    assert label_rows(same) == ["rtx-4090-x1-lora", "rtx-4090-x1-full-zero-3-offload"]


def test_models_are_named_where_nothing_else_differs() -> None:
    rows = [row({"device": "A100", "method": "LoRA", "model": f"org/Model-{size}B"}, world_size=1) for size in (7, 70)]
    assert label_rows(rows) == ["a100-x1-org-model-7b", "a100-x1-org-model-70b"]


def test_a_name_is_taken_as_it_is() -> None:
    assert label_rows([row({"label": "My run (2)"}), row({"label": "Other"})]) == ["My run (2)", "Other"]


def test_rows_of_one_name_are_told_apart() -> None:
    rows = [row({"label": "a"}), row({"label": "a", "fp16": "yes"}), row({"label": "a", "precision": "INT 8"})]
    assert label_rows(rows) == ["a", "a-fp16", "a-int-8"]
    assert label_rows([row({"label": "a"}), row({"label": "a-2"}), row({"label": "a"})]) == ["a", "a-2", "a-3"]
    assert label_rows([row({}), row({})]) == ["line-7", "line-7-2"]


_rows = st.builds(
    row,
    st.dictionaries(
        st.sampled_from(["label", "device", "model", "precision", "fp16"]), st.sampled_from(["yes", "a", "a-2"])
    ),
    world_size=st.integers(1, 3),
)


@given(st.lists(_rows, max_size=8))
def test_labels_are_unique_and_never_empty(rows: list[ImportedRow]) -> None:
    labels = label_rows(rows)
    assert len(labels) == len(rows) == len(set(labels))
    assert all(labels)
