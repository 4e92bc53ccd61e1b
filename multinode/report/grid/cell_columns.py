"""Columns of a table of cells: what stands in each, what it is called, and which go first where there is little room.

How they are laid out is `cell_sheet`'s. No figure is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from multinode.analyse.grid.cell_fill import KEYS
from multinode.analyse.grid.cell_row import MEASURED
from multinode.analyse.grid.cell_values import value_of
from multinode.analyse.grid.cell_work import currencies
from multinode.analyse.grid.cells import CellRow
from multinode.core.cluster.device_name import short_device_name
from multinode.report.render.foreign_text import sanitize
from multinode.report.render.sheet import UNKNOWN, Column, format_sig, percent
from multinode.units import format_duration

__all__ = [
    "BOUGHT_WITH",
    "LABEL",
    "CellColumn",
    "cell_columns",
    "cell_text",
    "constants",
    "money_text",
    "money_unit",
    "short_model",
    "state_word",
]

_STATES = {"skipped": "skipped", "failed": "failed", "waiting": "waiting", "running": "waiting"}
_SHOWN_KEYS = frozenset(key for keys in KEYS.values() for key in keys[:1])
_LAST = 99
# In a unit, in place of the currency.
_PAID = "{money}"
_UNTOLD = ("unit", "units")

BOUGHT_WITH = 10_000
"""Units of money: of what a GPU costs, one buys too little speed to be read."""


class CellColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One column.

    Attributes:
        name: of its value, as a sort names it.
        tell: a row's value as text.
        rank: the least is kept longest where there is little room.
        is_figure: whether it was measured; else it says which cell it is.
    """

    name: str
    title: str
    unit: str = ""
    tell: Callable[[CellRow], str]
    rank: int = _LAST
    is_figure: bool = False
    is_words: bool = False

    @property
    def column(self) -> Column:
        """As a sheet has it: a key of the job and a currency are a stranger's words."""
        return Column(sanitize(self.title), sanitize(self.unit), words=self.is_words)


def state_word(row: CellRow) -> str:
    """What stands in the place of the figures of a row that has none; whose memory it was is told apart."""
    if row.state == "out_of_memory":
        return "OOM (node)" if row.out_of == "node" else "OOM"
    return _STATES.get(row.state, UNKNOWN)


def short_model(model: str) -> str:
    """A model as people call it: of a path its last part; a hub's `owner/name` stays."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return model.rstrip("/").rpartition("/")[2] or model if is_path else model


def cell_text(value: Any) -> str:
    """A value as a person would write it."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def cell_columns(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    """All columns that say something of these rows, in the order in which they stand.

    What is the same on every row is no column; `constants` has it. What no row has is left out.
    """
    told = [column for column in (*_identities(rows), *_FIGURES) if _says_something(column, rows)]
    fixed = {name for name, _ in constants(rows)}
    kept = (column for column in told if column.name not in fixed)
    return (LABEL, *(msgspec.structs.replace(column, unit=money_unit(column.unit, rows)) for column in kept))


def constants(rows: Sequence[CellRow]) -> tuple[tuple[str, str], ...]:
    """Name and text of what is the same on every row; of a row without figures what is not known differs in nothing."""
    found: dict[str, str] = {}
    for column in _identities(rows):
        texts = {column.tell(row) for row in rows if row.state == MEASURED or column.tell(row) != UNKNOWN}
        # Of a method without adapters the rank is not unknown: there is none.
        is_of_all = column.name != "lora_rank" or "method" in found
        if len(texts) == 1 and texts != {UNKNOWN} and is_of_all:
            found[column.name] = texts.pop()
    return tuple(found.items())


def money_unit(unit: str, rows: Sequence[CellRow]) -> str:
    """A unit with the currency of these rows in the place of `{money}`; with `units` where it is not known and one."""
    found = currencies(rows)
    one, many = (found[0], found[0]) if len(found) == 1 and found[0] is not None else _UNTOLD
    return unit.replace(f"for 1 {_PAID}", f"for 1 {one}").replace(_PAID, many)


def _says_something(column: CellColumn, rows: Sequence[CellRow]) -> bool:
    return any(column.tell(row) != UNKNOWN for row in rows)


def _identities(rows: Sequence[CellRow]) -> tuple[CellColumn, ...]:
    keys = dict.fromkeys(key for row in rows for key in row.varied if key not in _SHOWN_KEYS)
    return (*_IDENTITIES, *(_identity(key, key, rank=18) for key in keys))


def _identity(name: str, title: str, unit: str = "", *, rank: int, words: bool = True) -> CellColumn:
    return CellColumn(
        name=name, title=title, unit=unit, tell=lambda row: cell_text(value_of(row, name)), rank=rank, is_words=words
    )


def _figure(
    name: str, title: str, unit: str = "", *, rank: int, tell: Callable[[float | None], str] = format_sig
) -> CellColumn:
    return CellColumn(
        name=name, title=title, unit=unit, tell=lambda row: tell(value_of(row, name)), rank=rank, is_figure=True
    )


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_duration(seconds)


def _share(share: float | None) -> str:
    return percent(share)


def money_text(value: float | None) -> str:
    """Two digits behind the point where they say enough."""
    return UNKNOWN if value is None else f"{value:,.2f}" if value >= 1 or value == 0 else format_sig(value)


def _of_many(value: float | None) -> str:
    return format_sig(value * BOUGHT_WITH if value is not None else None)


def _places(row: CellRow) -> str:
    if row.nodes is None:
        return UNKNOWN if row.world_size is None else f"{row.world_size} worker{'s' if row.world_size > 1 else ''}"
    return f"{row.nodes} x {'?' if row.workers_per_node is None else row.workers_per_node}"


def _device(row: CellRow) -> str:
    return UNKNOWN if row.device is None else short_device_name(row.device)


def _model(row: CellRow) -> str:
    return UNKNOWN if row.settings.model is None else short_model(row.settings.model)


def _speed(row: CellRow) -> str:
    return format_sig(row.samples_per_s.value) if row.samples_per_s is not None else state_word(row)


def _speed_range(row: CellRow) -> str:
    speed = row.samples_per_s
    if speed is None or speed.repeats < 2:  # noqa: PLR2004 - a spread has two ends
        return UNKNOWN
    return f"{format_sig(speed.low)} to {format_sig(speed.high)}"


LABEL = CellColumn(name="label", title="cell", tell=lambda row: row.label, rank=0, is_words=True)
_IDENTITIES = (
    _identity("source", "source", rank=40),
    CellColumn(name="model", title="model", tell=_model, rank=15, is_words=True),
    _identity("dataset", "data set", rank=60),
    CellColumn(name="device", title="device", tell=_device, rank=14, is_words=True),
    CellColumn(name="nodes", title="nodes", unit="x workers", tell=_places, rank=13),
    _identity("method", "method", rank=11),
    _identity("lora_rank", "LoRA rank", rank=70, words=False),
    _identity("stage", "stage", rank=65),
    _identity("strategy", "strategy", rank=17),
    _identity("precision", "precision", rank=61),
    _identity("sequence_length", "sequence", "tokens", rank=16, words=False),
    _identity("packing", "packing", rank=66),
    _identity("recompute", "recomputed", rank=67),
    _identity("grad_compress", "gradients sent", rank=46),
    _identity("per_device_batch", "batch", rank=12, words=False),
    _identity("accumulation", "accumulation", rank=18, words=False),
    _identity("global_batch", "global batch", rank=20, words=False),
)
_FIGURES = (
    CellColumn(name="samples_per_s", title="samples/s", tell=_speed, rank=1, is_figure=True),
    CellColumn(name="samples_per_s_range", title="from, to", tell=_speed_range, rank=33, is_figure=True),
    _figure("relative", "relative", rank=2),
    _figure("tokens_per_s", "tokens/s", rank=9),
    _figure("tgs", "TGS", "tokens/s", rank=19),
    _figure("model_tflops", "TFLOP/s", "a worker", rank=22),
    _figure("mfu", "MFU", rank=10, tell=_share),
    _figure("hardware_tflops", "hardware", "TFLOP/s", rank=36),
    _figure("hfu", "HFU", rank=23, tell=_share),
    _figure("step_time_ms", "step", "ms", rank=5),
    _figure("step_time_p95_ms", "step, p95", "ms", rank=34),
    _figure("network_share", "network", "of step", rank=4, tell=_share),
    _figure("peak_memory_gib", "memory", "GiB", rank=3),
    _figure("whole_s", "whole job", rank=6, tell=_duration),
    _figure("energy_j_per_sample", "energy", "J a sample", rank=21),
    _figure("price_per_hour", "price", f"{_PAID} an hour", rank=31, tell=money_text),
    _figure("whole_cost", "job costs", _PAID, rank=7, tell=money_text),
    _figure("samples_per_money", "samples", f"for 1 {_PAID}", rank=8),
    _figure("cost_per_million_tokens", "1M tokens cost", _PAID, rank=32, tell=money_text),
    _figure("price_purchase", "price", f"{_PAID} to buy", rank=35, tell=money_text),
    _figure("samples_per_s_per_purchase", "samples/s", f"for {BOUGHT_WITH:,} {_PAID}", rank=9, tell=_of_many),
)
