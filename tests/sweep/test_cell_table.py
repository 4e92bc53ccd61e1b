from __future__ import annotations

import math

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.model.workload import JobSettings, global_batch
from multinode.profile.step_split import KnownSteps
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED
from multinode.sweep.figures import CELL_FIGURES, CellRow, CellTable
from multinode.sweep.frame import cell_frame
from multinode.sweep.notes import with_notes
from multinode.sweep.table import Look, combine, look_at, relative_to
from tests.contrast.made_up_sides import run_of
from tests.golden import Golden, error_of
from tests.sweep.cells import PUBLISHED, SWEEP, measured_cell, swept


def row(
    label: str, rate: float | None = 10.0, settings: JobSettings | None = None, source: str = "measured"
) -> CellRow:
    speed = UNMEASURED if rate is None else Estimate(value=rate, low=rate * 0.9, high=rate * 1.1)
    return CellRow(label=label, samples_per_s=speed, settings=settings or JobSettings(), source=source)


def table(*rows: CellRow, run_id: str = "s1", notes: tuple[str, ...] = ()) -> CellTable:
    return relative_to(
        CellTable(
            run_id=run_id, job=f"job of {run_id}", cells=rows, notes=tuple(Finding(message=note) for note in notes)
        )
    )


def test_a_sweep_s_table_has_a_row_a_cell_in_the_grid_s_order_whatever_became_of_it() -> None:
    assert [one.label for one in SWEEP.cells][:3] == ["1x2-lora-batch1", "1x2-lora-batch2", "1x2-lora-batch4"]
    assert len(SWEEP.cells) == 16
    states = [one.state for one in SWEEP.cells]
    assert (states.count("measured"), states.count("out_of_memory"), states.count("skipped")) == (12, 2, 2)
    out = SWEEP.cells[6]
    assert (out.settings.method, out.settings.per_device_batch, out.world_size, out.global_batch) == ("full", 4, 2, 8)
    assert out.settings.lora_rank is None
    assert SWEEP.rule == "the first 5 of 35 steps are excluded as warm-up"
    assert SWEEP.notes[0].message.startswith("The full run has 3 epochs of the dataset (1,100 samples)")
    assert msgspec.json.decode(msgspec.json.encode(SWEEP), type=CellTable) == SWEEP


def test_of_runs_with_other_numbers_of_steps_one_rule_tells_them_all() -> None:
    cells = []
    for batch, steps, steady_steps in ((1, 66, 61), (2, 28, 22)):
        cell = measured_cell(1, "lora", batch)
        (first, second) = cell.runs
        rule = f"the first {steps - steady_steps} of {steps} steps are excluded as warm-up"
        whole = first.require_summary()
        summary = msgspec.structs.replace(whole, steps=steps, steady_steps=steady_steps, rule=rule)
        run = run_of(summary)
        cells.append(cell._replace(runs=(run, second)))
    assert swept(*cells).rule == "the first 5 to 6 of the 28 to 66 steps of each run are excluded as warm-up"


def test_a_sweep_that_has_measured_nothing_is_a_table_all_the_same() -> None:
    found = swept(measured_cell(1, "lora", 1, state="waiting"))
    assert (found.baseline, found.rule, found.cells[0].relative) == (None, "", None)
    assert swept().cells == ()


def test_the_first_row_with_a_speed_is_the_baseline_and_others_are_relative_to_it() -> None:
    found = table(row("oom", None), row("a", 10.0), row("b", 25.0))
    assert found.baseline == "a"
    assert [one.relative for one in found.cells[:2]] == [None, Estimate(value=1.0, low=1.0, high=1.0)]
    relative = found.cells[2].relative
    assert relative is not None
    assert relative.value == 2.5
    assert relative.low == pytest.approx(2.5 / math.exp(math.hypot(math.log(1 / 0.9), math.log(1.1))))


def test_any_row_with_a_speed_can_be_the_baseline() -> None:
    found = relative_to(table(row("a", 10.0), row("b", 25.0)), "b")
    assert found.baseline == "b"
    assert [one.relative.value for one in found.cells if one.relative] == [0.4, 1.0]


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
    batch = JobSettings(per_device_batch=1)
    both = "said of both"
    found = combine(
        [
            table(row("a", settings=batch), notes=("its own", both)),
            table(row("b", source="imported"), run_id="s2", notes=(both,)),
        ]
    )
    assert [note.message for note in found.notes[:2]] == ["s1: its own", both]
    assert sum(note.message.startswith("Batch is per_device_train_batch_size") for note in found.notes) == 1
    assert combine([found]) == found
    assert sum("measured elsewhere" in note.message for note in found.notes) == 1
    assert table(row("a")) == combine([table(row("a"))])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            JobSettings(model="m", sequence_length=8),
            "sequence length: a sample needs a different amount of work in each row, so compare",
        ),
        (JobSettings(model="n", sequence_length=4), "The rows differ in model: "),
        (JobSettings(model="n", sequence_length=8), "The rows differ in model and sequence length: "),
        (
            JobSettings(model="m"),
            "The rows do not all state sequence length: a sample may need a different amount of work",
        ),
        (JobSettings(model="m", sequence_length=4), None),
    ],
)
def test_rows_whose_samples_are_other_work_are_marked(other: JobSettings, said: str | None) -> None:
    rows = row("a", settings=JobSettings(model="m", sequence_length=4)), row("b", settings=other)
    notes = with_notes(table(*rows)).notes
    assert any(note.code == "other-work" for note in notes) == (said is not None)
    assert said is None or any(said in note.message for note in notes)


def test_rows_whose_exposed_communication_is_of_few_steps_are_marked() -> None:
    steps = KnownSteps(known=4, measured=10)
    few = msgspec.structs.replace(row("a"), network_share=0.4, exposed_steps=steps)
    note = (
        "In 1 row, exposed communication is known for only some of the measured steps (a: from 4 of 10 measured steps)."
    )
    assert note in [found.message for found in with_notes(table(few, row("b"))).notes]


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
        (JobSettings(per_device_batch=8, accumulation=4), 2, 64),
        (JobSettings(per_device_batch=8, accumulation=4), None, None),
        (JobSettings(per_device_batch=8), 2, None),
        (JobSettings(per_device_batch=-8, accumulation=4), 2, None),
    ],
)
def test_the_global_batch_is_the_product_of_its_three_parts(
    settings: JobSettings, workers: int | None, batch: int | None
) -> None:
    assert global_batch(settings, workers) == batch


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


def test_what_the_table_does_not_have_is_refused_with_what_there_is(golden: Golden) -> None:
    sorts = ("--samples_per_s", "speed_of_samples", "price")
    conditions = ("colour=red", "nodes=", "method", "", "nodes>=many", "nodes<nan")
    small = table(row("oom", None), row("a"), row("b"))
    golden.check_errors(
        "refused_look",
        {f"--sort {name}": error_of(look_at, SWEEP, Look(sort=name)) for name in sorts}
        | {f"--where {text}": error_of(look_at, SWEEP, Look(where=(text,))) for text in conditions}
        | {
            "--baseline x": error_of(look_at, SWEEP, Look(baseline="x")),
            "--baseline c": error_of(relative_to, small, "c"),
            "--baseline oom": error_of(relative_to, small, "oom"),
        },
    )


def test_a_condition_s_value_may_hold_the_signs_of_conditions() -> None:
    label = PUBLISHED.cells[0].label
    assert [row.label for row in look_at(PUBLISHED, Look(where=(f"label={label}",))).cells] == [label]
    assert look_at(PUBLISHED, Look(where=("label=a>=b",))).cells == ()


def test_every_value_that_is_offered_can_be_had_of_every_row() -> None:
    frame = cell_frame(SWEEP.cells)
    for name in frame.names:
        assert len(frame.sort(name).rows) == len(SWEEP.cells)
    names = {figure.name for figure in CELL_FIGURES}
    assert {"samples_per_s", "per_device_batch", "step_time_p95_ms", "currency"} <= names
    assert not {"settings", "varied", "unjudged"} & names


def test_a_filter_that_no_row_meets_says_so() -> None:
    found = look_at(SWEEP, Look(where=("nodes=4", "method=lora")))
    assert found.cells == ()
    assert [note.message for note in found.notes] == ["None of the 16 rows matches nodes=4 and method=lora."]


def test_notes_are_of_the_rows_that_are_shown() -> None:
    rows = [
        msgspec.structs.replace(row, settings=msgspec.structs.replace(row.settings, model=f"m{number % 2}"))
        for number, row in enumerate(PUBLISHED.cells)
    ]
    table = with_notes(relative_to(msgspec.structs.replace(PUBLISHED, cells=tuple(rows))))
    assert any("The rows differ in model" in note.message for note in table.notes)
    shown = with_notes(look_at(table, Look(where=("model=m0",))))
    assert not any("Rows differ" in note.message for note in shown.notes)
    assert any("measured elsewhere" in note.message for note in shown.notes)


def test_names_of_imports_count_only_where_their_unit_is_ours() -> None:
    known = cell_frame(SWEEP.cells).names
    assert {"memory_gib", "runtime_s", "num_gpus", "dtype"} <= set(known)
    assert not {"memory_mb", "runtime_min", "step_time_s", "tokens", "price"} & set(known)
