"""From `--grid key=a,b`, `--grid-arg` and `--nodes 1,2` to cells, how far a grid is, its progress in lines. Pure."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.quoting import quote_path
from multinode.errors import JobError, UsageError
from multinode.job.job import override_text
from multinode.secret_values import is_secret
from multinode.series.grid import (
    BATCH,
    Grid,
    GridCell,
    GridRecord,
    _words,
    due_turns,
    give_up,
    is_batch,
    measuring_order,
)
from multinode.strict_yaml import YamlError, parse_yaml
from multinode.units import format_count

# More than a day of measuring; probably a mistake.
_MOST_CELLS = 1000
# Must fit a run name, with the sweep's name, a repeat and a node rank.
_LONGEST_LABEL = 64
_UNFIT = re.compile(r"[^A-Za-z0-9_.]+")
# How a value is written with its key, or alone if that is clear.
_SHORT = {
    "gradient_accumulation_steps": "accumulation",
    "cutoff_len": "length",
    "lora_rank": "rank",
    "quantization_bit": "bits",
}
_ALONE = frozenset({"finetuning_type", "deepspeed", "model_name_or_path", "stage"})


def plan_grid(grid: Grid, cluster: Cluster) -> tuple[GridCell, ...]:
    """Every combination, in the given order of values; the batch varies fastest.

    Raises:
        UsageError: more nodes or workers than the hostfile has, or too many cells.
    """
    _require_room(grid, cluster)
    keys = sorted(grid.settings, key=is_batch)
    combinations = list(itertools.product(grid.nodes, grid.workers_per_node, *(grid.settings[key] for key in keys)))
    if len(combinations) > _MOST_CELLS:
        raise UsageError(f"the grid has {len(combinations)} cells; a sweep can have at most {_MOST_CELLS}")
    cells = [
        GridCell(label=_label(nodes, workers, settings), settings=settings, nodes=nodes, workers_per_node=workers)
        for nodes, workers, *values in combinations
        for settings in [dict(zip(keys, values, strict=True))]
    ]
    return tuple(_with_unique_labels(cells))


def cell_overrides(cell: GridCell) -> tuple[str, ...]:
    """The grid's settings as values of `launch --set`."""
    return tuple(override_text(key, value) for key, value in cell.settings.items())


def cell_arguments(grid: Grid, cell: GridCell) -> tuple[str, ...]:
    """The grid's additions to a script's arguments, one word each."""
    return tuple(f"{grid.arguments[key]}={value}" for key, value in cell.settings.items() if key in grid.arguments)


def _require_room(grid: Grid, cluster: Cluster) -> None:
    there = len(cluster.nodes)
    if max(grid.nodes) > there:
        has = format_count(there, "node")
        raise UsageError(
            f"--nodes {','.join(map(str, grid.nodes))}: {cluster.source} has {has}",
            hint=f"use numbers from 1 to {there}",
        )
    most = max((workers for workers in grid.workers_per_node if workers is not None), default=0)
    for node in cluster.nodes[: max(grid.nodes)]:
        slots = node.slots if node.slots is not None else len(node.gpus) if node.gpus is not None else None
        if slots is not None and slots < most:
            raise UsageError(
                f"--workers-per-node {most} exceeds its {slots} slots",
                node=node.name,
                hint="use fewer workers, or add slots (slots=) or GPUs (gpus=) in the hostfile",
            )


def _label(nodes: int, workers: int | None, settings: dict[str, Any]) -> str:
    placed = "1-node" if nodes == 1 else f"{nodes}-nodes"
    parts = [placed if workers is None else f"{nodes}x{workers}"]
    parts += [_name_value(key, value) for key, value in settings.items()]
    return "-".join(part for part in parts if part)[:_LONGEST_LABEL].strip("-.")


def _name_value(key: str, value: Any) -> str:
    if isinstance(value, str):
        # The last part of a path is its name.
        value = value.rstrip("/").rpartition("/")[2].removesuffix(".json")
    elif value is None:
        value = "none"
    text = _UNFIT.sub("-", str(value).lower() if isinstance(value, bool) else str(value)).strip("-")
    if key in _ALONE:
        return text if value != "none" else f"no-{_UNFIT.sub('-', key)}"
    short = "batch" if is_batch(key) else _SHORT.get(key)
    return f"{short}{text}" if short is not None else f"{key}-{text}"


def _with_unique_labels(cells: Sequence[GridCell]) -> Iterator[GridCell]:
    taken: set[str] = set()
    for cell in cells:
        labels = itertools.chain([cell.label], (f"{cell.label}-{number}" for number in itertools.count(2)))
        label = next(label for label in labels if label not in taken)
        taken.add(label)
        yield msgspec.structs.replace(cell, label=label)


# Maximum number of nodes or workers.
_MOST_DIGITS = 9
_EXAMPLE = "--grid per_device_train_batch_size=1,2,4"
_KEY = re.compile(r"\w+", re.ASCII)
# Hydra uses dots: `model.depth=2`.
_ARGUMENT = re.compile(r"\w[\w.]*", re.ASCII)
_COUNTS = frozenset({BATCH, "gradient_accumulation_steps", "cutoff_len", "lora_rank"})
# A sweep limits every run itself.
_OURS = {"max_steps": "--steps", "num_train_epochs": "--steps"}


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Values by key, in order; a key with one value is no axis, and is set in every cell.

    Commas separate the values, and each is read as YAML, so a list or a text with a comma follows YAML: `key=[a,b]` is
    one value, `key=[a],[a,b]` are two, `key='"a,b"'` is one text.

    Raises:
        JobError: one is not `KEY=VALUE[,VALUE...]`, has an empty value, or a duplicate value or key.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = _parse_axis(text)
        if key in axes:
            raise JobError(f"--grid {key} is given twice", hint=f"give all values of a key in one option: {_EXAMPLE}")
        axes[key] = values
    return axes


def parse_arguments(texts: Iterable[str]) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
    """Values by name of a script argument, in order, and the arguments as written.

    Commas separate the values, which reach the script unchanged; quote one with a comma: `--to='"1,2",3'`. The name is
    the part before `=` without dashes: `batch_size` for `--batch-size=1,2`.

    Raises:
        JobError: one is not `NAME=VALUE[,VALUE...]`, has an empty value, or a duplicate value or name.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    written: dict[str, str] = {}
    for text in texts:
        argument, _, listed = text.partition("=")
        name = argument.lstrip("-").replace("-", "_")
        values = next(csv.reader([listed], skipinitialspace=True), [])
        if not _ARGUMENT.fullmatch(name) or not all(values) or not values:
            raise JobError(
                f"--grid-arg {text!r} is not NAME=VALUE[,VALUE...]", hint="for example --grid-arg --batch=1,2,4"
            )
        if name in axes:
            raise JobError(f"--grid-arg {argument} is given twice", hint="give all values of an argument in one option")
        twice = _first_twice(values)
        if twice is not None:
            raise JobError(
                f"--grid-arg {text}: {values[twice]!r} is given twice", hint="to measure cells again, use --repeats"
            )
        if len(values) > 1 and is_secret(name):
            raise JobError(f"--grid-arg {argument}: a secret cannot be an axis, because every table would show it")
        axes[name], written[name] = tuple(map(_plain_number, values)), argument
    return axes, written


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, in order.

    Raises:
        UsageError: it is something else, or a number is zero or a duplicate.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part) for part in parts):
        raise UsageError(f"{option} {text!r} is not a list of positive integers", hint=f"for example {option} 1,2")
    numbers = [int(part) for part in parts]
    twice = _first_twice(numbers)
    if twice is not None:
        raise UsageError(f"{option} {text}: {numbers[twice]} is given twice", hint="name each number once")
    return tuple(numbers)


def _parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    key, equals, written = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise JobError(f"--grid {text!r} is not KEY=VALUE[,VALUE...]", hint=f"for example {_EXAMPLE}")
    values = _parse_values(key, written)
    _require_sense(key, values)
    twice = _first_twice([_identity(value) for value in values])
    if twice is not None:
        raise JobError(f"--grid {text}: {values[twice]!r} is given twice", hint="to measure cells again, use --repeats")
    if key in _OURS and len(values) > 1:
        raise JobError(
            f"--grid {text}: the length of a run cannot be an axis",
            hint=(f"use {_OURS[key]} or --minutes for all cells"),
        )
    return key, values


def _require_sense(key: str, values: Sequence[Any]) -> None:
    """Refuse values here that would fail only after a start on all nodes."""
    if key in _COUNTS:
        wrong = next((value for value in values if type(value) is not int or value < 1), None)
        if wrong is not None:
            raise JobError(f"--grid {key}: {wrong!r} is not a positive integer", hint=f"for example --grid {key}=1,2,4")
    if key == "finetuning_type" and "qlora" in values:
        raise JobError(
            "--grid finetuning_type: qlora is not a LLaMA-Factory type; it is LoRA on quantized weights",
            hint="--set finetuning_type=lora --set quantization_bit=4",
        )
    if len(values) > 1 and is_secret(key):
        raise JobError(
            (f"--grid {key}: a secret cannot be an axis, because every table would show it"), hint="give it one value"
        )


def _parse_values(key: str, written: str) -> tuple[Any, ...]:
    """The items of a YAML flow sequence."""
    quoted = f"quote a string with a comma or bracket: --grid {key}='\"...\"'"
    try:
        values = parse_yaml(f"[{written}]")
    except YamlError as wrong:
        empty = re.search(r"(?:^|,)\s*,", written)
        fault = "has an empty value" if empty else f"is not a list of YAML values: {wrong}"
        raise JobError(f"--grid {key}={written} {fault}", hint=_EXAMPLE if empty else quoted) from None
    # YAML ignores a trailing comma.
    if not isinstance(values, list) or not values or written.rstrip().endswith(","):
        hint = _EXAMPLE if "," in written else f"to unset a key: --set {key}=null"
        raise JobError(f"--grid {key}={written} has an empty value", hint=hint)
    return tuple(values)


def _plain_number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"0|[1-9]\d{0,17}", text, re.ASCII) else text


def _identity(value: Any) -> Hashable:
    """Distinguishes values that Python treats as equal: 1, 1.0 and true."""
    return type(value).__name__, repr(msgspec.to_builtins(value))


def _first_twice(values: Sequence[Hashable]) -> int | None:
    return next((place for place, value in enumerate(values) if value in values[:place]), None)


def _describe(grid: Grid, cell: GridCell) -> str:
    """What a cell sets, as the options of `launch`, or a script's arguments, would."""
    workers = [] if cell.workers_per_node is None else [f"--workers-per-node {cell.workers_per_node}"]
    settings = [f"--set {quote_path(text)}" for text in cell_overrides(cell)]
    arguments = ["--", *map(quote_path, cell_arguments(grid, cell))]
    return " ".join([f"--nodes {cell.nodes}", *workers, *(arguments if grid.arguments else settings)])


def plan_lines(record: GridRecord) -> list[str]:
    """The cells in order of measurement, and the number of runs."""
    cells = record.cells
    order = [turn.cell for turn in measuring_order(record.grid, [cell.cell for cell in cells]) if turn.number == 1]
    width = max(len(cell.cell.label) for cell in cells)
    lines = [
        f"{number:>{len(str(len(cells)))}}  {cells[index].cell.label:<{width}}  "
        + _describe(record.grid, cells[index].cell)
        + ("" if cells[index].state == "waiting" else f"  ({_words(cells[index].state)})")
        for number, index in enumerate(order, 1)
    ]
    repeats = record.grid.repeats
    times = "" if repeats == 1 else f", {repeats} times each"
    # A run in progress counts as not made: if it is interrupted, it is repeated.
    running = [index for index, cell in enumerate(cells) if cell.state == "running"]
    left = len(due_turns(functools.reduce(give_up, running, record)))
    return [*lines, f"{format_count(len(cells), 'cell')}{times}: {format_count(left, 'run')} to make"]
