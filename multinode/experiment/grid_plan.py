"""From `--grid key=a,b`, `--grid-arg --name=a,b` and `--nodes 1,2` to a grid's named cells and their order. Pure."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.errors import JobError, UsageError
from multinode.experiment.grid import BATCH, Cell, Grid, is_batch
from multinode.job.job import override_text
from multinode.secret_values import is_secret
from multinode.strict_yaml import YamlError, parse_yaml
from multinode.units import format_count

# A day of measuring has not as many; more are a slip of the hand.
_MOST_CELLS = 1000
# With the sweep's own name, a turn and a node's rank it is yet the name of a run.
_LONGEST_LABEL = 64
_UNFIT = re.compile(r"[^A-Za-z0-9_.]+")
# What a value is called beside its key, or alone where it says enough.
_SHORT = {
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
    keys = sorted(grid.settings, key=is_batch)
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
    value = next((value for key, value in cell.settings.items() if is_batch(key)), None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def batch_group(cell: Cell) -> tuple[int, int | None, str]:
    """Equal for cells that differ in their batch alone."""
    others = {key: value for key, value in cell.settings.items() if not is_batch(key)}
    # As text: 1 and true are equal, and a list has no hash.
    return cell.nodes, cell.workers_per_node, repr(others)


def cell_overrides(cell: Cell) -> tuple[str, ...]:
    """What the grid sets in the job, each as one `--set` of `launch` takes it."""
    return tuple(override_text(key, value) for key, value in cell.settings.items())


def cell_arguments(grid: Grid, cell: Cell) -> tuple[str, ...]:
    """What the grid adds to a script's arguments, a word each."""
    return tuple(f"{grid.arguments[key]}={value}" for key, value in cell.settings.items() if key in grid.arguments)


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
    short = "batch" if is_batch(key) else _SHORT.get(key)
    return f"{short}{text}" if short is not None else f"{key}-{text}"


def _with_unique_labels(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells, with a number behind a label that an earlier one has."""
    taken: set[str] = set()
    for cell in cells:
        labels = itertools.chain([cell.label], (f"{cell.label}-{number}" for number in itertools.count(2)))
        label = next(label for label in labels if label not in taken)
        taken.add(label)
        yield msgspec.structs.replace(cell, label=label)


# Of a number of nodes, or of workers.
_MOST_DIGITS = 9
_EXAMPLE = "--grid per_device_train_batch_size=1,2,4"
_KEY = re.compile(r"\w+", re.ASCII)
# With a dot as Hydra has them: `model.depth=2`.
_ARGUMENT = re.compile(r"\w[\w.]*", re.ASCII)
_COUNTS = frozenset({BATCH, "gradient_accumulation_steps", "cutoff_len", "lora_rank"})
# A sweep cuts every run itself.
_OURS = {"max_steps": "--steps", "num_train_epochs": "--steps"}


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Values by key, in the order given; a key with one value has no axis, and is set in every cell as by `--set`.

    Commas part the values, and each is read as YAML, so that a list or a text with a comma in it is written as YAML
    writes it: `key=[a,b]` is one value, `key=[a],[a,b]` are two, `key='"a,b"'` is one text.

    Raises:
        JobError: one is not `KEY=VALUE[,VALUE...]`, has an empty value, or a value or key that stands twice.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = _parse_axis(text)
        if key in axes:
            raise JobError(f"--grid {key} is given twice", hint=f"give all values of a key in one: {_EXAMPLE}")
        axes[key] = values
    return axes


def parse_arguments(texts: Iterable[str]) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
    """Values by name of a script's arguments, in the order given, and the arguments as they are written.

    Commas part the values, which reach the script as they are written; one with a comma is quoted: `--to='"1,2",3'`.
    The name is what stands before `=`, without the dashes: `batch_size` of `--batch-size=1,2`.

    Raises:
        JobError: one is not `NAME=VALUE[,VALUE...]`, has an empty value, or a value or name that stands twice.
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
            raise JobError(f"--grid-arg {argument} is given twice", hint="all values of an argument stand in one")
        twice = _first_twice(values)
        if twice is not None:
            raise JobError(
                f"--grid-arg {text}: {values[twice]!r} stands twice", hint="--repeats measures every cell again"
            )
        if len(values) > 1 and is_secret(name):
            raise JobError(f"--grid-arg {argument}: a secret is no axis: it would stand in every table")
        axes[name], written[name] = tuple(map(_plain_number, values)), argument
    return axes, written


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, in their order.

    Raises:
        UsageError: it is something else, a number is zero, or stands twice.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part) for part in parts):
        raise UsageError(f"{option} {text!r} is not a list of numbers from 1 on", hint=f"for example {option} 1,2")
    numbers = [int(part) for part in parts]
    twice = _first_twice(numbers)
    if twice is not None:
        raise UsageError(f"{option} {text}: {numbers[twice]} stands twice", hint="name each number once")
    return tuple(numbers)


def _parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    key, equals, written = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise JobError(f"--grid {text!r} is not KEY=VALUE[,VALUE...]", hint=f"for example {_EXAMPLE}")
    values = _parse_values(key, written)
    _require_sense(key, values)
    twice = _first_twice([_identity(value) for value in values])
    if twice is not None:
        raise JobError(f"--grid {text}: {values[twice]!r} stands twice", hint="--repeats measures every cell again")
    if key in _OURS and len(values) > 1:
        raise JobError(
            f"--grid {text}: how long a cell trains is no axis", hint=f"{_OURS[key]} or --minutes says it for all cells"
        )
    return key, values


def _require_sense(key: str, values: Sequence[Any]) -> None:
    """Refuse what would cost a start on all nodes before the training refuses it.

    Raises:
        JobError: a value is none that the key can have, or is not to be shown in a table.
    """
    if key in _COUNTS:
        wrong = next((value for value in values if type(value) is not int or value < 1), None)
        if wrong is not None:
            raise JobError(f"--grid {key}: {wrong!r} is not a number from 1 on", hint=f"for example --grid {key}=1,2,4")
    if key == "finetuning_type" and "qlora" in values:
        raise JobError(
            "--grid finetuning_type: qlora is LoRA on quantized weights, and no type of LLaMA-Factory's",
            hint="--set finetuning_type=lora --set quantization_bit=4",
        )
    if len(values) > 1 and is_secret(key):
        raise JobError(f"--grid {key}: a secret is no axis: it would stand in every table", hint="give it one value")


def _parse_values(key: str, written: str) -> tuple[Any, ...]:
    """What a flow sequence of YAML would hold.

    Raises:
        JobError: it is not YAML, or a value is empty.
    """
    quoted = f"a text with a comma or a bracket in it is quoted: --grid {key}='\"...\"'"
    try:
        values = parse_yaml(f"[{written}]")
    except YamlError as wrong:
        empty = re.search(r"(?:^|,)\s*,", written)
        said = "has an empty value" if empty else f"is no list of YAML values: {wrong}"
        raise JobError(f"--grid {key}={written} {said}", hint=_EXAMPLE if empty else quoted) from None
    # YAML takes a last comma for none at all.
    if not isinstance(values, list) or not values or written.rstrip().endswith(","):
        hint = _EXAMPLE if "," in written else f"to unset a key: --set {key}=null"
        raise JobError(f"--grid {key}={written} has an empty value", hint=hint)
    return tuple(values)


def _plain_number(text: str) -> int | str:
    """A whole number where its text can be made of it again, so that a table sorts it as one."""
    return int(text) if re.fullmatch(r"0|[1-9]\d{0,17}", text, re.ASCII) else text


def _identity(value: Any) -> Hashable:
    """What tells values apart that Python takes for equal: 1, 1.0 and true."""
    return type(value).__name__, repr(msgspec.to_builtins(value))


def _first_twice(values: Sequence[Hashable]) -> int | None:
    """Where a value stands that stood before."""
    return next((place for place, value in enumerate(values) if value in values[:place]), None)
