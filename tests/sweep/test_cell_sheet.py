from __future__ import annotations

import csv
import io
import re

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.render.sheet import blocks_markdown
from multinode.stats.estimate import Estimate, value_of
from multinode.stats.unknown import UNMEASURED, Unknown, known, or_none
from multinode.sweep.contradictions import Contradiction
from multinode.sweep.figures import CellRow, CellTable, Cheapest
from multinode.sweep.frame import cell_frame, shown_frame
from multinode.sweep.notes import with_notes
from multinode.sweep.screen import cell_csv, cells_sheet, constants_line, lead, missing_sheet, show, unmeasured_sheet
from multinode.sweep.table import Look, look_at
from tests.golden import screen_of
from tests.sweep.cells import PUBLISHED, SWEEP, measured_cell, renamed, swept


def shown(table: CellTable, width: int) -> list[str]:
    return screen_of(show(table, width), width, details=True).splitlines()


def line_of(lines: list[str], label: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(f"{label} "))


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
@pytest.mark.parametrize("table", [SWEEP, PUBLISHED], ids=["sweep", "published"])
def test_it_fits_any_terminal_and_no_figure_is_cut(table: CellTable, width: int) -> None:
    lines = shown(table, width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert "samples/s" in text
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_the_wider_the_terminal_the_more_columns_and_what_is_left_out_is_named() -> None:
    heads = {width: next(line for line in shown(SWEEP, width) if line.startswith("cell ")) for width in (80, 120, 200)}
    assert "memory" in heads[80]
    assert "MFU" not in heads[80]
    assert "MFU" in heads[120]
    assert "batch" in heads[200]
    assert len(heads[80].split()) < len(heads[120].split()) < len(heads[200].split())
    assert "MFU" in " ".join(shown(SWEEP, 80)).partition("columns hidden (terminal too narrow):")[2]
    assert "columns hidden" not in " ".join(shown(SWEEP, 400))


def test_a_cell_without_figures_says_what_became_of_it_in_their_place() -> None:
    lines = shown(SWEEP, 100)
    assert line_of(lines, "1x2-full-batch4")[1] == "OOM"
    assert line_of(lines, "2x2-full-batch4")[1:3] == ["OOM", "(node)"]
    assert line_of(lines, "1x2-full-batch8")[1] == "skipped"
    assert line_of(lines, "1x2-lora-batch1")[1:3] == ["22.7", "1.00"]
    below = " ".join(lines[lines.index("not measured") :])
    assert "skipped     1x2-full-batch8, 2x2-full-batch8  batch 4 ran out of memory" in below


def test_of_more_rows_than_anybody_reads_the_first_are_shown_and_the_rest_is_told() -> None:
    many = tuple(msgspec.structs.replace(PUBLISHED.cells[0], label=f"row{number:04}") for number in range(501))
    lines = shown(msgspec.structs.replace(PUBLISHED, cells=many), 120)
    assert sum(line.startswith("row") for line in lines) == 500
    assert any(line.startswith("The first 500 of 501 rows") for line in lines)


def test_what_a_table_is_sorted_by_is_seen_however_narrow_it_is() -> None:
    for details in (False, True):
        text = screen_of(show(SWEEP, 80, "energy_j_per_sample"), 80, details=details)
        assert "energy" in next(line for line in text.splitlines() if line.startswith("cell "))
    assert "energy" not in next(line for line in shown(SWEEP, 80) if line.startswith("cell "))


def test_what_is_the_same_on_every_row_is_said_once_and_is_no_column() -> None:
    assert constants_line(SWEEP) == (
        "The same in every row: model Qwen/Qwen2.5-1.5B, data set identity, device RTX 4090, stage sft, strategy "
        "ZeRO-2, precision bf16, sequence length 1,024, recomputed, accumulation 1."
    )
    names = [column.name for column in cells_sheet(SWEEP).columns]
    assert names[:6] == ["cell", "nodes", "method", "LoRA rank", "batch", "global batch"]
    assert constants_line(PUBLISHED).startswith("The same in every row: imported, model baichuan2-7b")
    assert "device" in [column.name for column in cells_sheet(PUBLISHED).columns]


def test_a_lora_rank_is_not_said_of_a_cell_that_has_no_adapter() -> None:
    out = measured_cell(1, "full", 1, state="out_of_memory", out_of="gpu")
    assert "LoRA rank" not in constants_line(swept(measured_cell(1, "lora", 1), out))
    assert "LoRA rank 8" in constants_line(swept(measured_cell(1, "lora", 1), measured_cell(1, "lora", 2)))


def test_a_setting_without_a_name_of_ours_that_varies_is_a_column() -> None:
    cells = [measured_cell(1, "lora", 1), measured_cell(1, "lora", 2)]
    table = swept(*cells)
    rows = tuple(
        msgspec.structs.replace(row, varied={"neat_packing": value, "learning_rate": 1e-4})
        for row, value in zip(table.cells, (True, False), strict=True)
    )
    sheet = cells_sheet(msgspec.structs.replace(table, cells=rows))
    place = [column.name for column in sheet.columns].index("neat_packing")
    assert [row[place] for row in sheet.rows] == ["yes", "no"]
    assert "learning_rate 0.0001" in sheet.notes[0]


def test_one_sentence_says_the_most() -> None:
    assert lead(SWEEP) == (
        "The fastest is 2x2-lora-batch8 at 108.3 samples/s, 4.76 times as fast as 1x2-lora-batch1; "
        "12 of 16 cells measured, 2 out of memory, 2 skipped."
    )
    alone = look_at(SWEEP, Look(where=("label=2x2-lora-batch8",)))
    assert lead(alone) == "The fastest is 2x2-lora-batch8 at 108.3 samples/s; 1 of 1 cells measured."
    assert lead(swept(measured_cell(1, "lora", 1, state="waiting"))) == "0 of 1 cells measured, 1 waiting."


def test_the_cheapest_cell_is_told_where_a_deadline_was_asked_for() -> None:
    table = msgspec.structs.replace(SWEEP, cheapest=Cheapest(deadline_s=60.0, message="the cheapest is X"))
    assert "the cheapest is X" in shown(table, 80)
    assert "**the cheapest is X**\n" in blocks_markdown(show(table))


def test_prices_are_in_their_currency_and_what_gpus_cost_buys_speed() -> None:
    sheet = cells_sheet(PUBLISHED)
    bought = next(place for place, column in enumerate(sheet.columns) if column.unit == "for 10,000 CNY")
    assert (sheet.columns[bought].name, sheet.rows[6][bought]) == ("samples/s", f"{1.138 / 1.5:.3f}")
    assert "for 1 unit" in [column.unit for column in cells_sheet(SWEEP).columns]


def test_what_disturbed_a_row_or_contradicts_itself_is_marked() -> None:
    marked = msgspec.structs.replace(
        SWEEP.cells[0],
        disturbances=(Finding(message="box1: hot"),),
        contradictions=(Contradiction(message="4 x 2 is not 9", sides=()),),
        why=Finding(message="repeat 2 failed"),
    )
    lines = shown(msgspec.structs.replace(SWEEP, cells=(marked, *SWEEP.cells[1:])), 100)
    below = lines[lines.index("remarks") :]
    for mark in ("box1: hot", "4 x 2 is not 9", "repeat 2 failed"):
        assert any(line.startswith("1x2-lora-batch1") and mark in line for line in below)


def test_missing_figures_are_told_by_their_reason() -> None:
    rows = missing_sheet(PUBLISHED).rows
    assert any(whose == "H800 x 2, full ZeRO-3 offload, batch 4" and "H800" in why for _, whose, why in rows)
    many = next(row for row in rows if "more" in row[1])
    assert many[1].count(";") == 6


@pytest.mark.parametrize(
    "attack", ["[red]x[/]", "\x1b[2J\x07", "a\nb\tc\u202e", "| `x` <img src=x> [y](http://z) @all"]
)
def test_foreign_words_are_shown_as_text(attack: str) -> None:
    table = renamed(SWEEP, attack)
    text = "\n".join(shown(table, 600))
    markdown = blocks_markdown(show(table))
    for found in (text, markdown):
        assert "\x1b" not in found
        assert "\x07" not in found
        assert "\u202e" not in found
    if attack.startswith("[red]"):
        head = next(line for line in text.splitlines() if line.startswith("cell "))
        assert attack in head
    assert not re.search(r"(?<!\\)[<`]", markdown)
    assert not re.search(r"(?<!\\)\]\(", markdown)


def test_markdown_has_every_column_and_a_line_a_cell() -> None:
    text = blocks_markdown(show(SWEEP))
    rows = [line for line in text.splitlines() if line.startswith(("| 1x2-", "| 2x2-"))]
    assert len(rows) == 16
    assert "| OOM |" in rows[6]
    head = next(line for line in text.splitlines() if line.startswith("| cell |"))
    assert {"MFU", "HFU", "memory (GiB)", "energy (J per sample)"} <= {one.strip() for one in head.split("|")}
    assert text.startswith("**The fastest is 2x2-lora-batch8")


def test_the_fastest_is_not_said_to_be_so_many_times_a_row_of_another_job() -> None:
    small = msgspec.structs.replace(
        SWEEP.cells[9], settings=msgspec.structs.replace(SWEEP.cells[9].settings, model="1b")
    )
    table = msgspec.structs.replace(SWEEP, cells=(SWEEP.cells[0], small))
    assert lead(table) == (
        f"The fastest is {small.label} at 55.0 samples/s, though cells differ in model; 2 of 2 cells measured."
    )
    beside = msgspec.structs.replace(SWEEP, cells=(*SWEEP.cells, small))
    assert "4.76 times as fast as 1x2-lora-batch1, though cells differ in model" in lead(beside)


@pytest.mark.parametrize(
    ("lowest", "said"),
    [
        (0.9, ""),
        (0.7, ", though 2x2-lora-batch4 may be as fast"),
        (0.5, ", though 1x2-lora-batch8, 2x2-lora-batch2 and 2x2-lora-batch4 may be as fast"),
        (0.4, ", though 1x2-lora-batch4, 1x2-lora-batch8 and 2 more may be as fast"),
    ],
)
def test_who_cannot_be_told_from_the_fastest_is_named_beside_it(lowest: float, said: str) -> None:
    best = next(row for row in SWEEP.cells if row.label == "2x2-lora-batch8")
    wide = msgspec.structs.replace(known(best.samples_per_s), low=known(best.samples_per_s).value * lowest, values=())
    cells = tuple(msgspec.structs.replace(row, samples_per_s=wide) if row is best else row for row in SWEEP.cells)
    start, _, _ = lead(msgspec.structs.replace(SWEEP, cells=cells)).partition(";")
    assert start == f"The fastest is 2x2-lora-batch8 at 108.3 samples/s, 4.76 times as fast as 1x2-lora-batch1{said}"


def test_cells_of_other_lengths_are_told_apart_by_their_tokens() -> None:
    short = SWEEP.cells[0]
    twice = msgspec.structs.replace(
        short,
        label="long",
        samples_per_s=Estimate(value=1.0, low=1.0, high=1.0),
        tokens_per_s=Estimate(value=1e6, low=1e6, high=1e6),
        settings=msgspec.structs.replace(short.settings, sequence_length=4096),
    )
    table = msgspec.structs.replace(SWEEP, cells=(short, twice))
    assert lead(table) == (
        "The fastest is long at 1,000,000 tokens/s, among cells with different sequence lengths; 2 of 2 cells measured."
    )
    untold = msgspec.structs.replace(table, cells=(short, msgspec.structs.replace(twice, tokens_per_s=UNMEASURED)))
    assert lead(untold).startswith(f"The fastest is {short.label} at ")


def test_a_table_without_rows_is_its_notes() -> None:
    found = look_at(SWEEP, Look(where=("nodes=4",)))
    assert [line for line in shown(found, 80) if line] == ["No rows.", "None of the 16 rows matches nodes=4."]


def test_a_cell_that_ran_out_of_memory_in_one_repeat_has_its_figures_and_says_so() -> None:
    whole = measured_cell(1, "lora", 1)
    reason = "a repeat ran out of memory: CUDA out of memory on box1"
    record = msgspec.structs.replace(whole.record, out_of="gpu", why=Finding(message=reason))
    table = swept(whole._replace(record=record), measured_cell(1, "lora", 2))
    lines = shown(table, 120)
    assert "22.7" in line_of(lines, "1x2-lora-batch1")
    assert "2 of 2 cells" in " ".join(lines[:2])
    assert any("1x2-lora-batch1" in line and reason in line for line in lines[lines.index("remarks") :])
    assert reason in blocks_markdown(show(table))


@pytest.mark.parametrize("table", [SWEEP, PUBLISHED], ids=["sweep", "published"])
def test_a_value_goes_by_the_title_that_is_shown(table: CellTable) -> None:
    ambiguous = {"samples", "price"}
    for figure in shown_frame(table).figures:
        if figure.title not in ambiguous and "purchase" not in figure.name and figure.name != "samples_per_s_range":
            assert cell_frame(table.cells).figure(figure.title).name == figure.name


def test_workers_whose_nodes_are_not_told_are_no_nodes() -> None:
    rows = tuple(msgspec.structs.replace(row, nodes=UNMEASURED, workers_per_node=UNMEASURED) for row in PUBLISHED.cells)
    table = msgspec.structs.replace(PUBLISHED, cells=rows)
    place = [column.name for column in cells_sheet(table).columns].index("nodes")
    assert {row[place] for row in cells_sheet(table).rows} == {"1 worker", "2 workers"}
    assert ", 1 worker, " in constants_line(msgspec.structs.replace(table, cells=rows[:3]))


def test_a_small_figure_keeps_its_digits() -> None:
    slow = Estimate(value=0.0004, low=0.0004, high=0.0004)
    table = msgspec.structs.replace(SWEEP, cells=(msgspec.structs.replace(SWEEP.cells[0], samples_per_s=slow),))
    assert line_of(shown(table, 100), "1x2-lora-batch1")[1] == "0.000400"


def test_a_table_that_tells_tokens_and_no_samples_is_measured() -> None:
    rows = [
        msgspec.structs.replace(row, samples_per_s=Unknown("it does not tell"), relative=None)
        for row in SWEEP.cells[:3]
    ]
    table = msgspec.structs.replace(SWEEP, cells=tuple(rows), baseline=None)
    most = max(rows, key=lambda row: value_of(row.tokens_per_s) or 0.0)
    assert lead(table).startswith(f"The fastest is {most.label} at ")
    assert lead(table).endswith(" tokens/s; 3 of 3 cells measured.")
    assert unmeasured_sheet(table).rows == ()
    assert "samples_per_s" in missing_sheet(table).rows[0][0]
    bare = tuple(
        CellRow(
            label=row.label, state="measured", peak_memory_gib=row.peak_memory_gib if row is rows[0] else UNMEASURED
        )
        for row in rows
    )
    nothing = msgspec.structs.replace(table, cells=bare)
    assert lead(nothing) == "1 of 3 cells measured."
    assert [row[1] for row in unmeasured_sheet(nothing).rows] == [f"{rows[1].label}, {rows[2].label}"]


def test_a_price_without_a_currency_is_not_taken_for_one_of_anothers() -> None:
    priced = [
        msgspec.structs.replace(row, price_per_hour=2.0, currency=currency)
        for row, currency in zip(SWEEP.cells, ("EUR", None), strict=False)
    ]
    table = with_notes(msgspec.structs.replace(SWEEP, cells=tuple(priced), notes=()))
    assert any("EUR and an unknown currency" in note.message for note in table.notes)
    units = {column.unit for column in cells_sheet(table).columns}
    assert not any("EUR" in unit for unit in units)


def rows(table: CellTable) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(cell_csv(table))))


def test_every_figure_of_every_row_is_there_with_its_unit_and_its_spread() -> None:
    found = rows(SWEEP)
    assert len(found) == 16
    for one, row in zip(found, SWEEP.cells, strict=True):
        assert one["label"] == row.label
        speed = or_none(row.samples_per_s)
        told = [one[f"samples_per_s{end}"] for end in ("", "_low", "_high")]
        assert told == (["", "", ""] if speed is None else [str(speed.value), str(speed.low), str(speed.high)])
        assert one["set.per_device_train_batch_size"] == str(row.settings.per_device_batch)
    first = found[0]
    assert (first["device"], first["sequence_length_tokens"], first["repeats"]) == (
        "NVIDIA GeForce RTX 4090",
        "1024",
        "2",
    )
    assert first["run_ids"] == "20260301-ab-1x2-lora-batch1-1; 20260301-ab-1x2-lora-batch1-2"
    assert (first["node_names"], found[6]["out_of"], found[14]["out_of"]) == ("box1", "gpu", "node")


def test_all_values_have_a_column_whether_or_not_a_row_has_them() -> None:
    assert set(rows(PUBLISHED)[0]) <= set(rows(SWEEP)[0])
    assert cell_csv(swept()).startswith("label,source,state,")
    assert rows(swept()) == []


@pytest.mark.parametrize("formula", ["=cmd|' /C calc'!A0", "+1", "-1+2", "@SUM(A1)", "\t=1", "\n=1", "\x07=1"])
def test_a_name_that_a_spreadsheet_would_calculate_is_told_to_be_text(formula: str) -> None:
    for one in csv.reader(io.StringIO(cell_csv(renamed(SWEEP, formula)))):
        assert not any(cell.lstrip().startswith(("=", "+", "@")) for cell in one)
        assert not any(cell.startswith("-") for cell in one)
        assert all(cell.isprintable() for cell in one)


def test_a_setting_that_is_a_list_is_one_cell() -> None:
    row = msgspec.structs.replace(SWEEP.cells[0], varied={"lora_target": ["q_proj", "v_proj"], "report_to": None})
    found = rows(msgspec.structs.replace(SWEEP, cells=(row,)))[0]
    assert (found["set.lora_target"], found["set.report_to"]) == ('["q_proj","v_proj"]', "")
