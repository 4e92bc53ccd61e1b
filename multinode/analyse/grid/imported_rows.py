"""imported_rows: figures measured elsewhere -> rows of a cell table. Pure; prices of devices are cell_prices'.

What a row gives stands as it was given: where figures contradict each other, the row says so, and nothing is mended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from multinode.analyse.grid.cell_row import MEASURED
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.grid.contradictions import find_contradictions
from multinode.analyse.grid.derived_figures import with_derived
from multinode.analyse.grid.imported_labels import label_rows
from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.ranged import Ranged
from multinode.core.grid.imported_table import ImportedRow
from multinode.core.text.plausible import plausible_count
from multinode.core.text.rounded import Rounded

__all__ = ["imported_rows"]

_OUT_OF = {"gpu": "the GPU's memory did not suffice, says the table", "node": "the node's did not, says the table"}
# What tells how a training went; a row without any of them tells of none.
_SPEEDS = (
    *("samples_per_s", "tokens_per_s", "step_time_ms", "runtime", "memory_gib", "model_tflops", "hardware_tflops"),
    *("mfu", "hfu", "network_share", "energy_j_per_sample"),
)
# Figures of a row, by our names, that may be None, but for those that follow from others once there are prices.
_FIGURES = (
    *("device", "nodes", "workers_per_node", "world_size", "global_batch", "dataset_samples", "samples_per_s"),
    *("tokens_per_s", "tgs", "tokens_per_sample", "model_tflops", "hardware_tflops", "mfu", "hfu", "step_time_ms"),
    *("step_spread", "network_share", "peak_memory_gib", "whole_s", "energy_j_per_sample"),
)


def imported_rows(rows: Sequence[ImportedRow]) -> tuple[CellRow, ...]:
    """A row of a cell table each, marked as imported, with what follows from its figures and what contradicts it."""
    return tuple(_row(row, label) for row, label in zip(rows, label_rows(rows), strict=True))


def _row(row: ImportedRow, label: str) -> CellRow:
    figures = with_derived(row.figures)
    state, reason = _state(row, figures)
    found = CellRow(
        label=label,
        source="imported",
        state=state,
        out_of=row.out_of,
        reason=reason,
        device=row.words.get("device"),
        nodes=_count(figures, "nodes"),
        workers_per_node=_count(figures, "workers_per_node"),
        world_size=_count(figures, "devices"),
        settings=_settings(row, figures),
        global_batch=_count(figures, "global_batch"),
        dataset_samples=_count(figures, "samples"),
        samples_per_s=_ranged(figures, "samples_per_s"),
        tokens_per_s=_ranged(figures, "tokens_per_s"),
        tgs=_ranged(figures, "tgs"),
        tokens_per_sample=_value(figures, "tokens_per_sample"),
        model_tflops=_value(figures, "model_tflops"),
        hardware_tflops=_value(figures, "hardware_tflops"),
        mfu=_value(figures, "mfu"),
        hfu=_value(figures, "hfu"),
        step_time_ms=_ranged(figures, "step_time_ms"),
        network_share=_value(figures, "network_share"),
        peak_memory_gib=_value(figures, "memory_gib"),
        whole_s=_ranged(figures, "runtime"),
        energy_j_per_sample=_value(figures, "energy_j_per_sample"),
        price_per_hour=_value(figures, "price_per_hour"),
        price_purchase=_value(figures, "price_purchase"),
        currency=row.words.get("currency") if {"price_per_hour", "price_purchase"} & figures.keys() else None,
        contradictions=_contradictions(row),
    )
    return found if state != MEASURED else _with_reasons(found)


def _state(row: ImportedRow, figures: Mapping[str, Rounded]) -> tuple[str, str]:
    """The state, and why it has no figures."""
    if row.out_of is not None:
        return "out_of_memory", _OUT_OF[row.out_of]
    if any(name in figures for name in _SPEEDS):
        return MEASURED, ""
    return "skipped", "the table has no figures of it"


def _settings(row: ImportedRow, figures: Mapping[str, Rounded]) -> Settings:
    narrow = next((name for name in ("fp16", "bf16") if row.words.get(name) == "yes"), None)
    return Settings(
        model=row.words.get("model"),
        method=row.words.get("method"),
        lora_rank=_count(figures, "lora_rank"),
        stage=row.words.get("stage"),
        dataset=row.words.get("dataset"),
        strategy=row.words.get("strategy"),
        per_device_batch=_count(figures, "per_device_batch"),
        accumulation=_count(figures, "accumulation"),
        sequence_length=_count(figures, "sequence_length"),
        precision=row.words.get("precision") or narrow,
    )


def _contradictions(row: ImportedRow) -> tuple[str, ...]:
    found = find_contradictions(row.figures)
    told = [name for name in ("samples_per_s", "tokens_per_s", "steps_per_s", "runtime") if name in row.figures]
    if row.out_of is not None and told:
        return (f"it ran out of memory, and has {' and '.join(told)} all the same", *found)
    return found


def _with_reasons(row: CellRow) -> CellRow:
    unknown = {name: "the table does not tell it" for name in _FIGURES if getattr(row, name) is None}
    return msgspec.structs.replace(row, missing=unknown)


def _value(figures: Mapping[str, Rounded], name: str) -> float | None:
    return figures[name].value if name in figures else None


def _count(figures: Mapping[str, Rounded], name: str) -> int | None:
    return plausible_count(round(figures[name].value)) if name in figures else None


def _ranged(figures: Mapping[str, Rounded], name: str) -> Ranged | None:
    """A figure with the bounds that the rounding of its digits leaves."""
    if name not in figures:
        return None
    figure = figures[name]
    return Ranged(value=figure.value, low=figure.low, high=figure.high)
