"""Whether an imported row's several nodes were slower than their link allows, predicted from the row of one node. Pure.

`predict/shortfall.py` judges. Here is what it needs of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.predict.published_benchmarks import PublishedBenchmarks, evidence_of_benchmarks, parse_strategy
from multinode.predict.shortfall import judge_holdout
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown, or_none
from multinode.sweep.figures import MEASURED, CellRow
from multinode.tables.columns import COLUMNS
from multinode.traffic.step_calls import Strategy
from multinode.units import format_count, format_list

_SAME_SETTINGS = ("model", "method", "lora_rank", "stage", "strategy", "sequence_length", "precision")
_SAME = ("device", "workers_per_node", "parameters", "trainable_parameters", "tokens_per_sample")
_BATCHES = ("per_device_batch", "accumulation")
# A row takes some 10 ms.
_MOST = 1_000
_SPEEDS = ("samples_per_s", "step_time_ms")


def with_shortfalls(rows: Sequence[CellRow]) -> tuple[CellRow, ...]:
    """The rows of a table, those of several nodes with a link judged by it.

    What cannot be judged says why. Labels are unique.
    """
    one_node: dict[tuple[object, ...], list[CellRow]] = {}
    for row in rows:
        if row.nodes == 1 and row.state == MEASURED:
            one_node.setdefault(_training(row), []).append(row)
    asked = [row for row in rows if _is_asked(row)]
    judged = {row.label: _judged(row, one_node.get(_training(row), ())) for row in asked[:_MOST]}
    judged |= {row.label: _unjudged(row, f"only the first {_MOST:,} rows are evaluated") for row in asked[_MOST:]}
    return tuple(judged.get(row.label, row) for row in rows)


def _is_asked(row: CellRow) -> bool:
    has_link = row.network_gbit_per_s is not None or row.rdma is not None
    return row.state == MEASURED and (or_none(row.nodes) or 1) > 1 and has_link


def _judged(row: CellRow, one_node: Sequence[CellRow]) -> CellRow:
    try:
        (held,) = evidence_of_benchmarks(_benchmarks(row, one_node)).holdouts
        return msgspec.structs.replace(row, shortfall=judge_holdout(held))
    except (UsageError, ValueError) as error:
        return _unjudged(row, str(error))


def _unjudged(row: CellRow, reason: str) -> CellRow:
    return msgspec.structs.replace(row, unjudged=Unknown(reason))


def _benchmarks(row: CellRow, one_node: Sequence[CellRow]) -> PublishedBenchmarks:
    """The row and the one of one node, as a file of published figures.

    Raises:
        ValueError: that row or a column is missing, or a value has no meaning here; the message says which.
    """
    if lacking := list(_lacking(row)):
        raise ValueError(f"needs {'the columns' if len(lacking) > 1 else 'the column'} {format_list(lacking)}")
    alone, speed = _alone(row, one_node)
    settings = row.settings
    parameters, trainable = (
        None if count is None else max(1, round(count)) for count in (row.parameters, row.trainable_parameters)
    )
    file = {
        "model": {"parameters": parameters, "trainable": trainable or parameters},
        "strategy": settings.strategy,
        "precision": settings.precision or "bf16",
        "tokens_per_sample": or_none(row.tokens_per_sample),
        "network": {"gbit_per_s": row.network_gbit_per_s, "nics": row.nics, "rdma": row.rdma is True},
        "single_node": _speed(alone, speed),
        "several_nodes": _speed(row, speed),
    }
    # As a file is: with the limits of its numbers.
    return convert(file, PublishedBenchmarks)


def _lacking(row: CellRow) -> Iterator[str]:
    """Columns without which nothing can be predicted."""
    settings = row.settings
    strategy = parse_strategy(settings.strategy) if settings.strategy is not None else None
    # DDP's gradients are in fp32 unless somebody says otherwise.
    gathers = strategy not in {None, Strategy.DDP}
    trains_all = settings.method is None or "full" in settings.method.lower()
    speed = "samples_per_s" if isinstance(row.tokens_per_s, Unknown) else "tokens_per_sample"
    needed = {
        speed: any(_figure(row, name) is not None for name in _SPEEDS),
        "workers_per_node": not isinstance(row.workers_per_node, Unknown),
        "network_gbit_per_s": row.network_gbit_per_s is not None,
        "strategy": strategy is not None,
        "per_device_batch": settings.per_device_batch is not None or not isinstance(row.global_batch, Unknown),
        "parameters": row.parameters is not None or (row.trainable_parameters is not None and not gathers),
        "trainable_parameters": row.trainable_parameters is not None or trains_all,
        "precision": settings.precision is not None or not gathers,
    }
    yield from (COLUMNS[name].written or name for name, is_known in needed.items() if not is_known)


def _alone(row: CellRow, one_node: Sequence[CellRow]) -> tuple[CellRow, str]:
    """The row of one node with the nearest batches, and the speed that both have.

    Of several it is the slowest, so that no difference that the table does not tell is blamed on the network.
    """
    for speed in _SPEEDS:
        known = [other for other in one_node if _figure(other, speed) is not None]
        if _figure(row, speed) is not None and known:
            return min(known, key=lambda other: (_other_batches(row, other), -_slowness(other, speed))), speed
    workers = format_count(or_none(row.workers_per_node) or 0, "worker")
    raise ValueError(f"needs a row for one node with {workers} and the same training job")


def _training(row: CellRow) -> tuple[object, ...]:
    """What two rows of one training share; their batches may differ."""
    of_settings = (getattr(row.settings, name) for name in _SAME_SETTINGS)
    return (*(getattr(row, name) for name in _SAME), *of_settings)


def _other_batches(row: CellRow, other: CellRow) -> int:
    return sum(getattr(row.settings, name) != getattr(other.settings, name) for name in _BATCHES)


def _figure(row: CellRow, speed: str) -> Estimate | None:
    figure: Estimate | Unknown = getattr(row, speed)
    return or_none(figure)


def _slowness(row: CellRow, speed: str) -> float:
    figure = _figure(row, speed)
    value = figure.value if figure is not None else 0.0
    return value if speed == "step_time_ms" else -value


def _speed(row: CellRow, speed: str) -> dict[str, object]:
    """The row's own figure, with its bounds."""
    figure, settings = _figure(row, speed), row.settings
    return {
        "nodes": or_none(row.nodes),
        "workers_per_node": or_none(row.workers_per_node),
        "per_device_batch": settings.per_device_batch,
        "accumulation": settings.accumulation,
        "global_batch": or_none(row.global_batch) if settings.per_device_batch is None else None,
        speed: f"{figure.value:.9g} ({figure.low:.9g}-{figure.high:.9g})" if figure is not None else None,
    }
