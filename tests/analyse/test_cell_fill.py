from __future__ import annotations

from typing import Any

import msgspec

from multinode.analyse.grid.cell_rows import fill_rows
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.workload import Settings

LORA = Settings(model="m", method="lora", lora_rank=8, strategy="DDP", per_device_batch=2, accumulation=4)
FULL = msgspec.structs.replace(LORA, method="full", lora_rank=None)


def measured(settings: Settings, nodes: int = 1, **varied: Any) -> CellRow:
    return CellRow(
        label=f"{nodes}-{varied}", nodes=nodes, workers_per_node=2, settings=settings, varied=varied, device="A100"
    )


def filled(*measured_rows: CellRow, nodes: int = 1, workers: int | None = None, **varied: Any) -> CellRow:
    """A cell that ran out of memory beside those that were measured."""
    out = CellRow(label="out", state="out_of_memory", nodes=nodes, workers_per_node=workers, varied=varied)
    *same, found = fill_rows([*measured_rows, out])
    assert same == list(measured_rows)
    return found


def test_what_all_measured_cells_agree_on_holds_for_the_others() -> None:
    row = filled(measured(LORA, per_device_train_batch_size=2), per_device_train_batch_size=8)
    assert row.settings == msgspec.structs.replace(LORA, per_device_batch=8)
    assert (row.device, row.workers_per_node, row.world_size, row.global_batch) == ("A100", 2, 2, 8 * 4 * 2)


def test_a_setting_is_taken_of_the_cells_that_the_sweep_set_alike() -> None:
    rows = [measured(LORA, finetuning_type="lora"), measured(FULL, finetuning_type="full")]
    assert filled(*rows, finetuning_type="full").settings == FULL
    assert filled(*rows, finetuning_type="lora").settings.lora_rank == 8


def test_what_no_measured_cell_shows_is_taken_of_the_sweep_or_unknown() -> None:
    row = filled(measured(LORA, finetuning_type="lora"), finetuning_type="full")
    assert (row.settings.method, row.settings.lora_rank, row.settings.model) == ("full", None, "m")
    row = filled(measured(LORA, deepspeed=None), deepspeed="z3.json")
    assert row.settings.strategy is None
    row = filled(measured(LORA, cutoff_len=512), cutoff_len="long")
    assert row.settings.sequence_length is None


def test_without_a_measured_cell_only_what_the_sweep_set_is_known() -> None:
    row = filled(per_device_train_batch_size=4, finetuning_type="full", nodes=2, workers=1)
    assert row.settings == Settings(method="full", per_device_batch=4)
    assert (row.world_size, row.global_batch, row.device) == (2, None, None)


def test_workers_that_the_hostfile_decides_are_those_of_cells_on_as_many_nodes() -> None:
    two = msgspec.structs.replace(measured(LORA, nodes=2), workers_per_node=4, device="H100")
    row = filled(measured(LORA), two, nodes=2)
    assert (row.workers_per_node, row.world_size, row.device) == (4, 8, "H100")
    assert filled(measured(LORA), nodes=3).workers_per_node is None
