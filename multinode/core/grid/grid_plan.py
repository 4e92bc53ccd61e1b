"""plan_grid: a grid's cells, each with a name; and the order in which they are measured. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from multinode.core.cluster.cluster import Cluster
from multinode.core.grid.grid import BATCH, Cell, Grid
from multinode.core.grid.grid_values import override_text
from multinode.errors import UsageError
from multinode.units import format_count

__all__ = ["Turn", "batch_group", "batch_of", "cell_overrides", "measuring_order", "plan_grid"]

# A day of measuring has not as many; more are a slip of the hand.
_MOST_CELLS = 1000
# With the sweep's own name, a turn and a node's rank it is yet the name of a run.
_LONGEST_LABEL = 64
_UNFIT = re.compile(r"[^A-Za-z0-9_.]+")
# What a value is called beside its key, or alone where it says enough.
_SHORT = {
    BATCH: "batch",
    "gradient_accumulation_steps": "accumulation",
    "cutoff_len": "length",
    "lora_rank": "rank",
    "quantization_bit": "bits",
}
_ALONE = frozenset({"finetuning_type", "deepspeed", "model_name_or_path", "stage"})


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One run to make.

    Attributes:
        cell: index of the cell in the grid's order.
        number: which of its repeats, from 1.
    """

    cell: int
    number: int


def plan_grid(grid: Grid, cluster: Cluster) -> tuple[Cell, ...]:
    """Every combination, in the order of the values as they were given; the batch varies fastest.

    Raises:
        UsageError: more nodes or workers than the hostfile has, or more cells than anybody measures.
    """
    _require_room(grid, cluster)
    keys = sorted(grid.settings, key=lambda key: key == BATCH)
    combinations = list(itertools.product(grid.nodes, grid.workers_per_node, *(grid.settings[key] for key in keys)))
    if len(combinations) > _MOST_CELLS:
        raise UsageError(f"the grid has {len(combinations)} cells, and a sweep has {_MOST_CELLS} at most")
    cells = [
        Cell(label=_label(nodes, workers, settings), settings=settings, nodes=nodes, workers_per_node=workers)
        for nodes, workers, *values in combinations
        for settings in [dict(zip(keys, values, strict=True))]
    ]
    return tuple(_with_unique_labels(cells))


def measuring_order(grid: Grid, cells: Sequence[Cell]) -> Iterator[Turn]:
    """Every cell as often as it is measured; the smaller of batches that are otherwise equal first.

    So a batch that runs out of memory is seen before a larger one is tried.
    """
    order = _ascending(cells)
    if grid.repeats > 1 and not grid.interleave:
        for index in order:
            yield from (Turn(cell=index, number=number) for number in range(1, grid.repeats + 1))
        return
    for number in range(1, grid.repeats + 1):
        for index in order if number % 2 else reversed(order):
            yield Turn(cell=index, number=number)


def batch_of(cell: Cell) -> float | None:
    """The batch that the grid sets in a cell; None where it sets none, or what is no number."""
    value = cell.settings.get(BATCH)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def batch_group(cell: Cell) -> tuple[int, int | None, str]:
    """Equal for cells that differ in their batch alone."""
    others = {key: value for key, value in cell.settings.items() if key != BATCH}
    # As text: 1 and true are equal, and a list has no hash.
    return cell.nodes, cell.workers_per_node, repr(others)


def cell_overrides(cell: Cell) -> tuple[str, ...]:
    """What the grid sets in the job, each as one `--set` of `launch` takes it."""
    return tuple(override_text(key, value) for key, value in cell.settings.items())


def _require_room(grid: Grid, cluster: Cluster) -> None:
    there = len(cluster.nodes)
    if max(grid.nodes) > there:
        has = format_count(there, "node")
        raise UsageError(
            f"--nodes {','.join(map(str, grid.nodes))}: {cluster.source} has {has}",
            hint=f"numbers from 1 to {there}",
        )
    most = max((workers for workers in grid.workers_per_node if workers is not None), default=0)
    for node in cluster.nodes[: max(grid.nodes)]:
        slots = node.slots if node.slots is not None else len(node.gpus) if node.gpus is not None else None
        if slots is not None and slots < most:
            raise UsageError(
                f"--workers-per-node {most}, and it has {slots} slots",
                node=node.name,
                hint="fewer workers, or more slots= or gpus= in the hostfile",
            )


def _ascending(cells: Sequence[Cell]) -> list[int]:
    """Indices in the order of the grid, but among cells that differ in their batch alone the smaller first."""
    groups: dict[tuple[int, int | None, str], list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(batch_group(cell), []).append(index)
    ordered = (sorted(group, key=lambda index: batch_of(cells[index]) or 0.0) for group in groups.values())
    return list(itertools.chain.from_iterable(ordered))


def _label(nodes: int, workers: int | None, settings: dict[str, Any]) -> str:
    placed = "1-node" if nodes == 1 else f"{nodes}-nodes"
    parts = [placed if workers is None else f"{nodes}x{workers}"]
    parts += [_name_value(key, value) for key, value in settings.items()]
    return "-".join(part for part in parts if part)[:_LONGEST_LABEL].strip("-.")


def _name_value(key: str, value: Any) -> str:
    if isinstance(value, str):
        # Of a path, its last part says what it is.
        value = value.rstrip("/").rpartition("/")[2].removesuffix(".json")
    elif value is None:
        value = "none"
    text = _UNFIT.sub("-", str(value).lower() if isinstance(value, bool) else str(value)).strip("-")
    if key in _ALONE:
        return text if value != "none" else f"no-{_UNFIT.sub('-', key)}"
    return f"{_SHORT[key]}{text}" if key in _SHORT else f"{key}-{text}"


def _with_unique_labels(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells, with a number behind a label that an earlier one has."""
    taken: set[str] = set()
    for cell in cells:
        labels = itertools.chain([cell.label], (f"{cell.label}-{number}" for number in itertools.count(2)))
        label = next(label for label in labels if label not in taken)
        taken.add(label)
        yield msgspec.structs.replace(cell, label=label)
