from __future__ import annotations

import msgspec
import pytest

from multinode.analyse.grid.cell_table import Look, look_at, make_table
from multinode.analyse.grid.cells import VALUES, value_names, value_of
from multinode.errors import UsageError
from tests.report.cells import PUBLISHED, SWEEP


def labels(*where: str, sort: str | None = None) -> list[str]:
    return [row.label for row in look_at(SWEEP, Look(where=where, sort=sort)).cells]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (("method=lora",), 8),
        (("method=LoRA", "nodes>=2"), 4),
        (("nodes>1", "samples_per_s<20"), 2),
        (("state!=measured",), 4),
        (("state=out_of_memory", "out_of=node"), 1),
        (("per_device_train_batch_size=4",), 4),
        (("train_micro_batch_size_per_gpu<=2", "finetuning_type=full"), 4),
        (("global_batch=8",), 4),
        (("device=RTX 4090",), 16),
        (("device=nvidia geforce rtx 4090",), 16),
        (("recompute=yes", "packing=no"), 16),
        (("gpus=4", "batch=8"), 2),
        (("samples/s>100",), 1),
        (("Global batch=8", "data set=identity"), 4),
        (("TGS>1e6",), 0),
        (("mfu>0.3",), 3),
        (("lora_rank!=8",), 8),
        (("samples_per_s>=1e9",), 0),
    ],
)
def test_rows_that_meet_every_condition_are_shown(where: tuple[str, ...], count: int) -> None:
    assert len(labels(*where)) == count


def test_a_row_without_the_figure_meets_no_bound_of_it() -> None:
    measured = [row.label for row in SWEEP.cells if row.state == "measured"]
    assert labels("peak_memory_gib>0") == measured
    assert labels("peak_memory_gib<=1e9") == measured


def test_rows_are_sorted_either_way_and_those_without_the_figure_stand_last() -> None:
    least, most = labels(sort="samples_per_s"), labels(sort="-samples_per_s")
    assert (least[0], most[0]) == ("2x2-full-batch1", "2x2-lora-batch8")
    assert least[:12] == most[:12][::-1]
    assert least[12:] == most[12:] == [row.label for row in SWEEP.cells if row.state != "measured"]
    assert labels(sort="method")[0] == "1x2-full-batch1"
    assert labels(sort="-per_device_train_batch_size")[:2] == ["1x2-lora-batch8", "1x2-full-batch8"]


def test_the_first_row_that_is_shown_is_the_baseline_unless_the_table_s_own_is_shown() -> None:
    assert look_at(SWEEP, Look(sort="-samples_per_s")).baseline == "1x2-lora-batch1"
    full = look_at(SWEEP, Look(where=("method=full",)))
    assert (full.baseline, full.cells[0].relative.value if full.cells[0].relative else None) == ("1x2-full-batch1", 1.0)
    chosen = look_at(SWEEP, Look(where=("method=full",), baseline="1x2-lora-batch1"))
    relative = chosen.cells[0].relative
    assert chosen.baseline == "1x2-lora-batch1"
    assert relative is not None
    assert relative.value < 1
    assert look_at(SWEEP, Look(where=("nodes>9",))).baseline is None


@pytest.mark.parametrize(
    ("look", "said", "hint"),
    [
        (Look(sort="speed"), "no column 'speed'", "samples_per_s"),
        (Look(sort="--samples_per_s"), "no column '-samples_per_s'", "its columns are"),
        (Look(where=("colour=red",)), "no column 'colour'", "per_device_train_batch_size"),
        (Look(where=("nodes=",)), "'nodes=' says nothing to compare with", "method=lora"),
        (Look(sort="speed_of_samples"), "no column 'speed_of_samples'", "samples_per_s"),
        (Look(sort="sample_per_s"), "'sample_per_s': did you mean samples_per_s", "samples_per_s"),
        (Look(sort="price"), "did you mean price_per_hour or price_purchase", "samples_per_s"),
        (Look(where=("method",)), "'method' is no condition", "method=lora"),
        (Look(where=("",)), "is no condition", "nodes>=2"),
        (Look(where=("nodes>=many",)), "'many' is no number", "nodes>=2"),
        (Look(where=("nodes<nan",)), "'nan' is no number", "nodes>=2"),
        (Look(baseline="x"), "no row 'x'", "1x2-lora-batch1"),
    ],
)
def test_what_the_table_does_not_have_is_an_error_that_says_what_there_is(look: Look, said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        look_at(SWEEP, look)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_a_condition_s_value_may_hold_the_signs_of_conditions() -> None:
    label = PUBLISHED.cells[0].label
    assert [row.label for row in look_at(PUBLISHED, Look(where=(f"label={label}",))).cells] == [label]
    assert look_at(PUBLISHED, Look(where=("label=a>=b",))).cells == ()


def test_every_value_that_is_offered_can_be_had_of_every_row() -> None:
    for name in value_names(SWEEP.cells):
        assert [value_of(row, name) for row in SWEEP.cells]
    assert {"samples_per_s", "per_device_batch", "step_time_p95_ms", "currency"} <= set(VALUES)
    assert not {"settings", "varied", "missing"} & set(VALUES)


def test_a_filter_that_no_row_meets_says_so() -> None:
    found = look_at(SWEEP, Look(where=("nodes=4", "method=lora")))
    assert found.cells == ()
    assert found.notes == ("No row of 16 meets nodes=4 and method=lora.",)


def test_notes_are_of_the_rows_that_are_shown() -> None:
    rows = [
        msgspec.structs.replace(row, settings=msgspec.structs.replace(row.settings, model=f"m{number % 2}"))
        for number, row in enumerate(PUBLISHED.cells)
    ]
    table = make_table(msgspec.structs.replace(PUBLISHED, cells=tuple(rows)))
    assert any("Rows differ in model" in note for note in table.notes)
    shown = look_at(table, Look(where=("model=m0",)))
    assert not any("Rows differ" in note for note in shown.notes)
    assert any("measured elsewhere" in note for note in shown.notes)


def test_names_of_imports_count_only_where_their_unit_is_ours() -> None:
    known = value_names(SWEEP.cells)
    assert {"memory_gib", "runtime_s", "num_gpus", "dtype"} <= set(known)
    assert not {"memory_mb", "runtime_min", "step_time_s", "tokens", "price"} & set(known)
