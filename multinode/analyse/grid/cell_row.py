"""make_row: what became of a cell, and the runs that measured it -> its CellRow. Pure.

The figures are a contrast side's, with what that lacks. What needs the other cells is `cell_fill`'s and `cell_whole`'s:
the settings of a cell without figures, and the whole job. Prices beyond the hostfile's are `cell_prices`'.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from multinode.analyse.comparison.contrast_figures import Side
from multinode.analyse.comparison.contrast_side import SideRun, make_side
from multinode.analyse.grid.cell_device import device_of
from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.flops import Utilisation
from multinode.analyse.job.workload import Settings, Whole
from multinode.core.grid.grid import CellRecord
from multinode.errors import UsageError

__all__ = ["MEASURED", "MeasuredCell", "make_row"]

MEASURED = "measured"
_UTILISATION = ("model_tflops", "hardware_tflops", "mfu", "hfu")
# Figures of a Side, by its names, that a row has under the same ones.
_FROM_SIDE = (
    "run_ids",
    "node_names",
    "nodes",
    "workers_per_node",
    "world_size",
    "global_batch",
    "dataset_samples",
    "samples_per_s",
    "tokens_per_s",
    "tgs",
    "step_time_ms",
    "step_spread",
    "energy_j_per_sample",
    "price_per_hour",
    "cost_per_million_tokens",
    "disturbances",
)
# What no figure here can be above.
_MOST = 1e12


class MeasuredCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and what its runs found.

    Attributes:
        runs: that ended well, in the order in which they were measured; none of a cell that has no figures.
        devices: of each node how many workers compute on which device; empty where one does not tell.
        price_purchase: of its nodes or of their GPUs together, as the hostfile has it; None is unknown.
    """

    record: CellRecord
    runs: tuple[SideRun, ...] = ()
    devices: tuple[dict[str, int], ...] = ()
    price_purchase: float | None = None

    @property
    def whole(self) -> Whole:
        """The user's whole job, as far as one of the runs knows it."""
        told = (run.workload.whole for run in self.runs if run.workload is not None)
        return next((whole for whole in told if whole != Whole()), Whole())


def make_row(measured: MeasuredCell) -> CellRow:
    """The row of one cell; one that was not measured, or has no speed, says why and has no figures."""
    record, runs = measured.record, measured.runs
    row = CellRow(
        label=record.cell.label,
        state=record.state if record.state != "running" else "waiting",
        out_of=record.out_of,
        reason=record.reason,
        run_ids=record.run_ids,
        varied=record.cell.settings,
        device=device_of(measured.devices),
        node_devices=measured.devices,
        nodes=record.cell.nodes,
        workers_per_node=record.cell.workers_per_node,
        price_purchase=measured.price_purchase,
    )
    if record.state != MEASURED:
        return _with_world(row)
    try:
        side = make_side("point", runs) if runs else None
    except UsageError as error:
        return _without_figures(row, error.message)
    if side is None:
        return _without_figures(row, "its runs are no longer stored")
    return _measured(row, side, runs)


def _with_world(row: CellRow) -> CellRow:
    if row.nodes is None or row.workers_per_node is None:
        return row
    return msgspec.structs.replace(row, world_size=row.nodes * row.workers_per_node)


def _without_figures(row: CellRow, reason: str) -> CellRow:
    """A run that ended well and tells no speed, as a script's may, has failed at what it was run for."""
    return _with_world(msgspec.structs.replace(row, state="failed", reason=row.reason or reason))


def _measured(row: CellRow, side: Side, runs: Sequence[SideRun]) -> CellRow:
    known = {name: getattr(side, name) for name in _FROM_SIDE}
    peak_gib = _peak_memory_gib(runs)
    used = _utilisation(runs)
    tokens = [run.summary.tokens_per_sample for run in runs]
    row = msgspec.structs.replace(
        row,
        **known,
        settings=side.settings or Settings(),
        network_share=side.exposed_share,
        peak_memory_gib=peak_gib,
        tokens_per_sample=_median(tokens),
        **used,
    )
    return msgspec.structs.replace(row, missing=_missing(row, side, runs[-1]))


def _peak_memory_gib(runs: Sequence[SideRun]) -> float | None:
    """Of the worker that needed most, in any repeat."""
    peaks = (gib for run in runs for node in run.summary.nodes for gib in node.peak_worker_memory_gib.values())
    return max(peaks, default=None)


def _utilisation(runs: Sequence[SideRun]) -> dict[str, float | None]:
    """The repeats' medians, of each figure that every repeat has."""
    used: list[Utilisation | None] = [run.summary.utilisation for run in runs]
    return {name: _median([getattr(one, name, None) for one in used]) for name in _UTILISATION}


def _median(values: Sequence[float | None]) -> float | None:
    """Of the repeats; None where one lacks it, or has what cannot be."""
    known = [value for value in values if value is not None and 0 <= value <= _MOST]
    return statistics.median(known) if known and len(known) == len(values) else None


def _missing(row: CellRow, side: Side, last: SideRun) -> dict[str, str]:
    """Why what is None is: the side's reasons, and the last repeat's."""
    summary = last.summary
    no_peak = summary.missing.get("utilisation", "") if summary.utilisation is None else summary.utilisation.denominator
    told = side.missing | {
        "network_share": side.missing.get("exposed_share", ""),
        "tokens_per_sample": summary.missing.get("tokens_per_sample", ""),
        "peak_memory_gib": "no worker told its memory",
        "device": "the nodes did not tell what they compute on",
        "price_purchase": "not every node has a price: price_purchase= in the hostfile",
        **dict.fromkeys(_UTILISATION, no_peak),
    }
    unknown = [name for name in row.__struct_fields__ if getattr(row, name) is None]
    return {name: told[name] or "not every repeat told it" for name in unknown if name in told}
