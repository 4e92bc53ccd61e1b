"""Reading a grid from the command line, and the job of every cell from the user's files, before any is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multinode.core.grid.grid import Cell, Grid
from multinode.core.job.job import Job, ScriptJob

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster

__all__ = ["GridJobs", "GridWish", "read_grid"]


class GridWish(NamedTuple):
    """What the command line asks of the grid; each is as its option has it."""

    settings: Sequence[str]
    deepspeed_edits: Sequence[str]
    nodes: str | None
    workers_per_node: str | None
    repeats: int
    interleave: bool


class GridJobs(NamedTuple):
    """The grid and what it is of: the job without what the grid varies, its cells, and their jobs by their labels."""

    plain: Job
    grid: Grid
    cells: tuple[Cell, ...]
    jobs: dict[str, Job]


def read_grid(path: Path | None, script: tuple[str, ...] | None, wish: GridWish, cluster: Cluster) -> GridJobs:
    """The grid of a YAML or a script over a cluster.

    Raises:
        UsageError: as `read_job`; a script has no keys; numbers of nodes or workers are none; a file that a setting
            names cannot be read, or a setting is wrong.
    """
    from multinode.cli.inputs import read_job
    from multinode.core.grid.grid_plan import plan_grid
    from multinode.core.grid.grid_values import parse_axes

    axes = parse_axes(wish.settings)
    plain = read_job(path, script, list(axes) if script is not None else _fixed(axes), list(wish.deepspeed_edits))
    grid = _grid(axes, wish, len(cluster.nodes))
    cells = plan_grid(grid, cluster)
    return GridJobs(plain, grid, cells, _cell_jobs(plain, cells, axes, wish.deepspeed_edits))


def _grid(axes: Mapping[str, tuple[Any, ...]], wish: GridWish, there: int) -> Grid:
    """The grid of the axes that have more than one value; without `--nodes` on all nodes that are there."""
    from multinode.core.grid.grid_values import parse_counts

    workers = wish.workers_per_node
    return Grid(
        settings={key: values for key, values in axes.items() if len(values) > 1},
        nodes=parse_counts("--nodes", wish.nodes) if wish.nodes is not None else (there,),
        workers_per_node=parse_counts("--workers-per-node", workers) if workers is not None else (None,),
        repeats=wish.repeats,
        interleave=wish.interleave,
    )


def _cell_jobs(
    plain: Job, cells: Sequence[Cell], axes: Mapping[str, Sequence[Any]], deepspeed_edits: Sequence[str]
) -> dict[str, Job]:
    """The job of each cell by its label, exactly as `launch` would make it of the same `--set`.

    A setting may name another file, a model or a DeepSpeed JSON; so each is read as a job of its own.
    """
    from multinode.core.grid.grid_plan import cell_overrides
    from multinode.core.job.deepspeed_edit import parse_deepspeed_edits
    from multinode.store.job import load_job

    if isinstance(plain, ScriptJob):
        return {cell.label: plain for cell in cells}
    path, edits = Path(plain.config_path), parse_deepspeed_edits(deepspeed_edits)
    made: dict[tuple[str, ...], Job] = {}
    for cell in cells:
        settings = cell_overrides(cell)
        if settings not in made:
            made[settings] = load_job(path, (*_fixed(axes), *settings), edits)
    return {cell.label: made[cell_overrides(cell)] for cell in cells}


def _fixed(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What has one value, as `launch` takes it."""
    from multinode.core.grid.grid_values import override_text

    return [override_text(key, values[0]) for key, values in axes.items() if len(values) == 1]
