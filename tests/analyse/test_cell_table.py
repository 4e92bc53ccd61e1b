from __future__ import annotations

import msgspec
import pytest

from multinode.analyse.grid.cell_table import combine, make_table, relative_to
from multinode.analyse.grid.cells import CellRow, CellTable
from multinode.analyse.job.cell_batch import BATCH_WORDS, global_batch
from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.spread import Ranged
from multinode.errors import UsageError
from tests.report.cells import PUBLISHED, SWEEP, measured_cell, swept


def row(label: str, rate: float | None = 10.0, settings: Settings | None = None, source: str = "measured") -> CellRow:
    speed = None if rate is None else Ranged(value=rate, low=rate * 0.9, high=rate * 1.1)
    return CellRow(label=label, samples_per_s=speed, settings=settings or Settings(), source=source)


def table(*rows: CellRow, run_id: str = "s1", notes: tuple[str, ...] = ()) -> CellTable:
    return make_table(CellTable(run_id=run_id, job=f"job of {run_id}", cells=rows, notes=notes))


def test_a_sweep_s_table_has_a_row_a_cell_in_the_grid_s_order_whatever_became_of_it() -> None:
    assert [one.label for one in SWEEP.cells][:3] == ["1x2-lora-batch1", "1x2-lora-batch2", "1x2-lora-batch4"]
    assert len(SWEEP.cells) == 16
    states = [one.state for one in SWEEP.cells]
    assert (states.count("measured"), states.count("out_of_memory"), states.count("skipped")) == (12, 2, 2)
    out = SWEEP.cells[6]
    assert (out.settings.method, out.settings.per_device_batch, out.world_size, out.global_batch) == ("full", 4, 2, 8)
    assert out.settings.lora_rank is None
    assert SWEEP.rule == "the first 5 of 35 steps are warm-up and do not count"
    assert SWEEP.notes[0].startswith("The whole job is 3 epochs of the data set (1,100 samples)")
    assert msgspec.json.decode(msgspec.json.encode(SWEEP), type=CellTable) == SWEEP


def test_of_runs_with_other_numbers_of_steps_one_rule_tells_them_all() -> None:
    cells = []
    for batch, steps, steady_steps in ((1, 66, 61), (2, 28, 22)):
        cell = measured_cell(1, "lora", batch)
        (first, second) = cell.runs
        rule = f"the first {steps - steady_steps} of {steps} steps are warm-up and do not count"
        summary = msgspec.structs.replace(first.summary, steps=steps, steady_steps=steady_steps, rule=rule)
        run = msgspec.structs.replace(first, summary=summary)
        cells.append(msgspec.structs.replace(cell, runs=(run, second)))
    assert swept(*cells).rule == "the first steps of each run are warm-up and do not count: 5 to 6 of 28 to 66"


def test_a_sweep_that_has_measured_nothing_is_a_table_all_the_same() -> None:
    found = swept(measured_cell(1, "lora", 1, state="waiting"))
    assert (found.baseline, found.rule, found.cells[0].relative) == (None, "", None)
    assert swept().cells == ()


def test_the_first_row_with_a_speed_is_the_baseline_and_others_are_relative_to_it() -> None:
    found = table(row("oom", None), row("a", 10.0), row("b", 25.0))
    assert found.baseline == "a"
    assert [one.relative for one in found.cells[:2]] == [None, Ranged(value=1.0, low=1.0, high=1.0)]
    relative = found.cells[2].relative
    assert relative is not None
    assert relative.value == 2.5
    assert relative.low == pytest.approx(25 * 0.9 / 11)


def test_any_row_with_a_speed_can_be_the_baseline() -> None:
    found = relative_to(table(row("a", 10.0), row("b", 25.0)), "b")
    assert found.baseline == "b"
    assert [one.relative.value for one in found.cells if one.relative] == [0.4, 1.0]


def test_a_baseline_that_is_not_there_or_has_no_speed_is_an_error_that_names_those_that_do() -> None:
    found = table(row("oom", None), row("a"), row("b"))
    with pytest.raises(UsageError, match="no row 'c'") as caught:
        relative_to(found, "c")
    assert caught.value.hint == "its rows are: oom, a, b"
    with pytest.raises(UsageError, match="'oom' has no samples/s") as caught:
        relative_to(found, "oom")
    assert caught.value.hint == "these have: a, b"


def test_a_row_whose_speed_is_nothing_is_compared_with_nothing() -> None:
    found = table(row("zero", 0.0), row("a"))
    assert (found.baseline, found.cells[0].relative) == ("a", None)


def test_tables_stand_below_each_other_and_only_labels_that_collide_get_the_run_s_id() -> None:
    found = combine([table(row("a", 10.0), row("b")), table(row("a", 20.0), row("c"), run_id="s2")])
    assert [one.label for one in found.cells] == ["a (s1)", "b", "a (s2)", "c"]
    assert (found.run_id, found.job, found.baseline) == ("s1,s2", "job of s1, job of s2", "a (s1)")
    assert found.cells[2].relative is not None
    assert found.cells[2].relative.value == 2.0


def test_a_note_of_one_table_alone_is_said_to_be_its_own() -> None:
    batch = Settings(per_device_batch=1)
    both = "said of both"
    found = combine(
        [
            table(row("a", settings=batch), notes=("its own", both)),
            table(row("b", source="imported"), run_id="s2", notes=(both,)),
        ]
    )
    assert found.notes[:2] == ("s1: its own", both)
    assert found.notes.count(BATCH_WORDS) == 1
    assert sum("measured elsewhere" in note for note in found.notes) == 1
    assert table(row("a")) == combine([table(row("a"))])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Settings(model="m", sequence_length=8), "sequence length: a sample is not the same work in each, so compare"),
        (Settings(model="n", sequence_length=4), "Rows differ in model: "),
        (Settings(model="n", sequence_length=8), "Rows differ in model and sequence length: "),
        (Settings(model="m"), "Rows do not all tell their sequence length: a sample may not be the same work"),
        (Settings(model="m", sequence_length=4), None),
    ],
)
def test_rows_whose_samples_are_other_work_are_marked(other: Settings, said: str | None) -> None:
    notes = table(row("a", settings=Settings(model="m", sequence_length=4)), row("b", settings=other)).notes
    assert any(note.startswith("Rows ") for note in notes) == (said is not None)
    assert said is None or any(said in note for note in notes)


def test_published_figures_are_relative_by_arithmetic_and_priced_by_what_the_gpus_cost() -> None:
    rows = {one.label: one for one in PUBLISHED.cells}
    two = rows["RTX 4090 x 2, LoRA, batch 2"]
    assert two.relative is not None
    assert two.relative.value == pytest.approx(2.609 / 0.085)
    assert two.samples_per_s_per_purchase == pytest.approx(2.609 / 30000)
    assert rows["RTX 4090 x 1, LoRA, batch 4"].relative is None


@pytest.mark.parametrize(
    ("settings", "workers", "batch"),
    [
        (Settings(per_device_batch=8, accumulation=4), 2, 64),
        (Settings(per_device_batch=8, accumulation=4), None, None),
        (Settings(per_device_batch=8), 2, None),
        (Settings(per_device_batch=-8, accumulation=4), 2, None),
    ],
)
def test_the_global_batch_is_the_product_of_its_three_parts(
    settings: Settings, workers: int | None, batch: int | None
) -> None:
    assert global_batch(settings, workers) == batch
