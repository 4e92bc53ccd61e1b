"""Values of a cell by name, as a sort, a filter and a CSV file name them: those of its row, and what the sweep set.

A value also goes by the titles that tables have for it, and by the names that columns of a foreign table have. How it
is shown is the report's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from multinode.analyse.grid.cells import CellRow
from multinode.analyse.job.cell_batch import BATCH_NAMES
from multinode.analyse.job.workload import Settings
from multinode.analyse.stats.ranged import Ranged
from multinode.core.grid.imported_columns import COLUMNS, column_name
from multinode.errors import UsageError

__all__ = ["RANGED", "VALUES", "has_figures", "has_speed", "our_name", "require_name", "value_names", "value_of"]

# Fields that hold more than a value; what the run's settings hold has names of its own.
_NO_VALUES = frozenset(
    {
        "settings",
        "varied",
        "step_spread",
        "disturbances",
        "contradictions",
        "missing",
        "run_ids",
        "node_names",
        "filed_prices",
        "node_devices",
    }
)
_SPREAD = {"step_time_p95_ms": "p95", "step_time_cv": "cv"}
_SETTINGS, _FIELDS = Settings.__struct_fields__, CellRow.__struct_fields__
_PLACE = _FIELDS.index("settings")
# Ours by the names that a job has for them; what the sweep set under such a name goes first.
_OF_JOBS = BATCH_NAMES | {"model_name_or_path": "model", "finetuning_type": "method", "cutoff_len": "sequence_length"}
# Ours by the titles that a table shows, as column_name has them, where those are not ours themselves. `samples` and
# `price` are titles of two columns each.
_TITLES = {
    "cell": "label",
    "data_set": "dataset",
    "sequence": "sequence_length",
    "recomputed": "recompute",
    "gradients_sent": "grad_compress",
    "tflop_per_s": "model_tflops",
    "hardware": "hardware_tflops",
    "step": "step_time_ms",
    "step_p95": "step_time_p95_ms",
    "network": "network_share",
    "memory": "peak_memory_gib",
    "whole_job": "whole_s",
    "energy": "energy_j_per_sample",
    "job_costs": "whole_cost",
    "1m_tokens_cost": "cost_per_million_tokens",
}
# Ours by what an imported table's figures are called where they differ.
_OF_IMPORTS = {
    "name": "label",
    "devices": "world_size",
    "samples": "dataset_samples",
    "memory_gib": "peak_memory_gib",
    "runtime": "whole_s",
}
_MOST_SUGGESTED = 3
# Beside samples/s.
_MEASURED = (
    "tokens_per_s",
    "tgs",
    "step_time_ms",
    "whole_s",
    "model_tflops",
    "hardware_tflops",
    "mfu",
    "hfu",
    "peak_memory_gib",
    "energy_j_per_sample",
)

RANGED = ("samples_per_s", "tokens_per_s", "tgs", "step_time_ms", "whole_s", "relative")
"""Values that have a spread over repeats."""

VALUES = tuple(name for name in (*_FIELDS[:_PLACE], *_SETTINGS, *_FIELDS[_PLACE:], *_SPREAD) if name not in _NO_VALUES)
"""What every row has under a name."""


def _imported_names() -> dict[str, str]:
    """Ours by every name that a column of a foreign table may have, as long as its unit is ours."""
    named = {name: _OF_IMPORTS.get(found.figure, found.figure) for name, found in COLUMNS.items() if found.scale == 1}
    return {name: ours for name, ours in named.items() if ours in VALUES and name not in VALUES and name != "samples"}


_NAMES = _imported_names() | _TITLES | _OF_JOBS


def value_of(row: CellRow, name: str) -> Any:
    """The value of one of `VALUES`, or of a key that the sweep set; None where the row has none."""
    name = name if name in row.varied else our_name(name)
    if name in _SETTINGS:
        return getattr(row.settings, name)
    if name in _SPREAD:
        return None if row.step_spread is None else getattr(row.step_spread, _SPREAD[name])
    if name not in VALUES:
        return row.varied.get(name)
    value = getattr(row, name)
    return value.value if isinstance(value, Ranged) else value


def our_name(name: str) -> str:
    """What a value is called here that a job, a framework, a foreign table or the title of a column calls so."""
    title = column_name(name) if name[:1].isalnum() else name
    return _NAMES.get(name) or _NAMES.get(title) or (title if title in VALUES else name)


def value_names(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """All names that a value of these rows goes by."""
    return tuple(dict.fromkeys((*VALUES, *_NAMES, *(key for row in rows for key in row.varied))))


def require_name(rows: Sequence[CellRow], name: str) -> None:
    """Refuse a name that no value goes by.

    Raises:
        UsageError: it is none.
    """
    names = value_names(rows)
    if name in names or our_name(name) in VALUES:
        return
    near = " or ".join(_nearest(name, names))
    columns = dict.fromkeys((*VALUES, *(key for row in rows for key in row.varied)))
    raise UsageError(
        f"the table has no column {name!r}" + (f": did you mean {near}?" if near else ""),
        hint=f"its columns are: {', '.join(columns)}",
    )


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Values that it is likely to mean, the likeliest first."""
    title = column_name(name)
    begun = [known for known in VALUES if title and known.startswith(title)]
    near = (our_name(known) for known in difflib.get_close_matches(title, names, n=2 * _MOST_SUGGESTED))
    return list(dict.fromkeys((*begun, *near)))[:_MOST_SUGGESTED]


def has_figures(row: CellRow) -> bool:
    """Whether something was measured: a published table may tell tokens/s, or memory, and no samples/s."""
    return has_speed(row) or (row.state == "measured" and any(getattr(row, name) is not None for name in _MEASURED))


def has_speed(row: CellRow) -> bool:
    """Whether there is something to compare."""
    return row.samples_per_s is not None and row.samples_per_s.low > 0
