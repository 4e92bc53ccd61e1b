"""fill_rows: the settings of cells that were not measured, from the sweep's own and from the cells that were. Pure.

A cell that ran out of memory, or was skipped, has no run that tells them; a table has to show what it was all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from multinode.analyse.grid.cell_row import MEASURED
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.cell_batch import global_batch
from multinode.analyse.job.workload import Settings

__all__ = ["KEYS", "fill_rows"]

T = TypeVar("T")

# Which keys of a job decide a field of Settings; where the first has the field's value itself, a cell that sets it
# needs no other to tell.
KEYS: dict[str, tuple[str, ...]] = {
    "model": ("model_name_or_path",),
    "method": ("finetuning_type", "quantization_bit"),
    "lora_rank": ("lora_rank", "finetuning_type", "quantization_bit"),
    "stage": ("stage",),
    "dataset": ("dataset",),
    "strategy": ("deepspeed", "fsdp"),
    "per_device_batch": ("per_device_train_batch_size",),
    "accumulation": ("gradient_accumulation_steps",),
    "sequence_length": ("cutoff_len",),
    "packing": ("packing", "neat_packing", "stage"),
    "precision": ("bf16", "fp16", "pure_bf16"),
    "recompute": ("disable_gradient_checkpointing",),
    "overlap": ("deepspeed", "fsdp"),
    "grad_compress": (),
    "command": (),
}
# Of these fields the key's value is no value of the field.
_OTHERWISE = frozenset({"strategy", "packing", "precision", "recompute", "overlap", "grad_compress", "command"})


def fill_rows(rows: Sequence[CellRow]) -> tuple[CellRow, ...]:
    """The rows of one sweep, those without figures with all that is certain of them."""
    measured = [row for row in rows if row.state == MEASURED]
    return tuple(row if row.state == MEASURED else _filled(row, measured) for row in rows)


def _filled(row: CellRow, measured: Sequence[CellRow]) -> CellRow:
    settings = Settings(**{name: _setting(row, name, measured) for name in Settings.__struct_fields__})
    alike = [one for one in measured if one.nodes == row.nodes]
    workers = row.workers_per_node or _agreed(one.workers_per_node for one in alike)
    world_size = row.nodes * workers if row.nodes is not None and workers is not None else None
    return msgspec.structs.replace(
        row,
        settings=settings,
        device=row.device or _agreed(one.device for one in alike or measured),
        workers_per_node=workers,
        world_size=world_size,
        global_batch=global_batch(settings, world_size),
    )


def _setting(row: CellRow, name: str, measured: Sequence[CellRow]) -> Any:
    """What the measured cells agree on that the sweep set alike as far as it decides this; else what it set itself."""
    keys = [key for key in KEYS[name] if key in row.varied]
    alike = [one for one in measured if all(one.varied.get(key) == row.varied[key] for key in keys)]
    if alike:
        return _agreed(getattr(one.settings, name) for one in alike)
    if keys != list(KEYS[name][:1]) or name in _OTHERWISE:
        return None
    value = row.varied[keys[0]]
    wanted: Callable[[Any], bool] = _is_count if name in _COUNTS else _is_text
    return value if wanted(value) else None


_COUNTS = frozenset({"lora_rank", "per_device_batch", "accumulation", "sequence_length"})


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _agreed(values: Iterable[T]) -> T | None:
    """What all of them are; None where they differ, or there is none."""
    found = list(values)
    return found[0] if found and all(value == found[0] for value in found) else None
