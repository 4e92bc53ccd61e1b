from __future__ import annotations

import csv
import io

import msgspec
import pytest

from multinode.analyse.grid.cells import CellTable
from multinode.report.grid.cell_export import cell_csv
from tests.report.cells import PUBLISHED, SWEEP, renamed, swept


def rows(table: CellTable) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(cell_csv(table))))


def test_every_figure_of_every_row_is_there_with_its_unit_and_its_spread() -> None:
    found = rows(SWEEP)
    assert len(found) == 16
    for one, row in zip(found, SWEEP.cells, strict=True):
        assert one["label"] == row.label
        speed = row.samples_per_s
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
