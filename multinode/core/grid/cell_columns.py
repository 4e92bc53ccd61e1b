"""COLUMNS: what the columns of a foreign table may be called, what each holds and in which unit. Knows no rows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

from multinode.core.text.rounded import Rounded, exactly, parse_count, parse_rounded
from multinode.units import parse_clock

__all__ = ["COLUMNS", "NONE", "OUT_OF_MEMORY", "Column", "Value", "column_name", "find_column", "nearest_columns"]

Value = str | Rounded
"""A cell: words, or a figure."""

NONE = frozenset({"-", "null", "none", "n/a", "na"})
"""Cells that say that there is no such figure, in small letters; an empty one leaves it to the table's default."""

OUT_OF_MEMORY = {"oom": "gpu", "oom node": "node"}
"""Cells that stand for a training that ran out of memory, in small letters, and whose memory it was."""

_LONGEST_WORDS = 200
_MIB = 1 << 20
_GIB = 1 << 30
_MOST_SUGGESTED = 4
_FLAGS = {"true": "yes", "yes": "yes", "1": "yes", "false": "no", "no": "no", "0": "no"}
_UNIT = re.compile(r"/\s*(?=[a-z])")
_NO_WORD = re.compile(r"[^a-z0-9]+")


class Column(NamedTuple):
    """A column.

    Attributes:
        figure: what it tells; two columns of a table may not tell the same.
        parse: text to value; raises ValueError.
        expected: what it may hold, for messages.
        measured: whether it tells how a training went, and may so hold OOM.
        scale: what its unit is in the figure's.
    """

    figure: str
    parse: Callable[[str], Value]
    expected: str
    measured: bool = False
    scale: float = 1.0


def column_name(title: str) -> str:
    """A title as COLUMNS has it: small letters and `_`, `/s` as `_per_s`: `Samples/s` is `samples_per_s`."""
    return _NO_WORD.sub("_", _UNIT.sub("_per_", title.strip().lower())).strip("_")


def find_column(title: str) -> Column | None:
    """The column of this title; None of an unknown one."""
    return COLUMNS.get(column_name(title))


def nearest_columns(title: str) -> list[str]:
    """Known columns that a title is likely to mean, the likeliest first, one a figure."""
    name = column_name(title)
    begun = [known for known in COLUMNS if name and known.startswith(name)]
    near = [*begun, *difflib.get_close_matches(name, COLUMNS, n=2 * _MOST_SUGGESTED)]
    figures = {COLUMNS[known].figure: known for known in reversed(near)}
    return list(reversed(figures.values()))[:_MOST_SUGGESTED]


def _words(text: str) -> str:
    if len(text) > _LONGEST_WORDS:
        raise ValueError(text)
    return text


def _flag(text: str) -> str:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _epochs(text: str) -> Rounded:
    value = parse_rounded(text)
    # Whoever writes 3 epochs does not mean anything from 2.5 to 3.5.
    return value if "." in text else exactly(value.value)


def _clock(text: str) -> Rounded:
    if ":" not in text:
        return parse_rounded(text)
    seconds = parse_clock(text)
    if not seconds:
        raise ValueError(text)
    half = 0.5 if "." not in text else 0.0
    return Rounded(value=seconds, low=seconds - half, high=seconds + half)


def _part_of_one(text: str) -> Rounded:
    percent = text.endswith("%")
    value = parse_rounded(text.removesuffix("%").rstrip(), scale=0.01 if percent else 1.0)
    if value.value > 1:
        # 45 without a sign may be a share in percent, and is not taken for one.
        raise ValueError(text)
    return value


def _scaled(scale: float) -> Callable[[str], Rounded]:
    return lambda text: parse_rounded(text, scale=scale)


def _text(figure: str) -> Column:
    return Column(figure, _words, f"words, at most {_LONGEST_WORDS} characters")


def _count(figure: str) -> Column:
    return Column(figure, parse_count, "a whole number, at least 1")


def _measured(figure: str, scale: float = 1.0) -> Column:
    expected = "a number above 0 with a decimal point, and no unit"
    return Column(figure, _scaled(scale), expected, measured=True, scale=scale)


def _share(figure: str) -> Column:
    return Column(figure, _part_of_one, "a share above 0, such as 0.45 or 45 %", measured=True)


def _price(figure: str) -> Column:
    return Column(figure, parse_rounded, "a price above 0, a number alone")


def _named(column: Column, *names: str) -> dict[str, Column]:
    return dict.fromkeys((column.figure, *names), column)


_FLAG = "true or false"

COLUMNS: dict[str, Column] = {
    **_named(_text("name"), "label"),
    **_named(_text("model"), "model_name"),
    **_named(_text("dataset")),
    **_named(_text("stage")),
    **_named(_text("device"), "gpu", "gpu_name", "device_name"),
    **_named(_count("devices"), "gpus", "num_gpus", "n_gpus", "workers", "world_size"),
    **_named(_count("nodes"), "num_nodes", "nnodes"),
    **_named(_count("workers_per_node"), "gpus_per_node", "nproc_per_node"),
    **_named(_text("method"), "finetuning_type"),
    **_named(_text("strategy")),
    **_named(_text("precision"), "dtype"),
    **_named(Column("fp16", _flag, _FLAG)),
    **_named(Column("bf16", _flag, _FLAG)),
    **_named(_count("lora_rank")),
    **_named(_count("sequence_length"), "cutoff_len", "max_seq_length", "seq_len"),
    **_named(
        _count("per_device_batch"),
        *("batch", "batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size"),
    ),
    **_named(_count("accumulation"), "gradient_accumulation_steps", "accumulation_steps"),
    **_named(_count("all_devices_batch"), "train_bs"),
    **_named(_count("global_batch"), "total_train_bs", "total_train_batch_size", "global_batch_size"),
    **_named(_count("samples"), "dataset_samples", "num_samples"),
    **_named(Column("epochs", _epochs, "a number above 0"), "num_train_epochs"),
    **_named(_count("tokens"), "dataset_tokens"),
    **_named(Column("tokens_per_sample", parse_rounded, "a number above 0")),
    **_named(_count("steps"), "global_step", "optimizer_steps"),
    **_named(_measured("samples_per_s"), "train_samples_per_second"),
    **_named(_measured("tokens_per_s"), "train_tokens_per_second"),
    **_named(_measured("steps_per_s"), "train_steps_per_second"),
    **_named(_measured("tgs"), "tokens_per_gpu_per_s"),
    **_named(_measured("step_time_ms")),
    "step_time_s": _measured("step_time_ms", 1e3),
    **_named(
        Column("runtime", _clock, "seconds, 28:04 (minutes) or 3:35:20 (hours)", measured=True),
        *("runtime_s", "train_runtime", "duration", "duration_s"),
    ),
    "runtime_min": _measured("runtime", 60.0),
    "runtime_h": _measured("runtime", 3600.0),
    **_named(_measured("model_tflops")),
    **_named(_measured("hardware_tflops")),
    **_named(_share("mfu")),
    **_named(_share("hfu")),
    **_named(_share("network_share")),
    **_named(_measured("energy_j_per_sample")),
    **{
        f"{name}_{unit}": _measured("memory_gib", scale / _GIB)
        for name in ("memory", "peak_memory", "gpu_memory")
        for unit, scale in (("mb", 1e6), ("mib", _MIB), ("gb", 1e9), ("gib", _GIB))
    },
    **_named(_text("currency")),
    **_named(_price("price_per_hour")),
    **_named(_price("price_gpu_per_hour")),
    **_named(_price("price_purchase")),
    **_named(_price("price_purchase_gpu")),
}
"""By every name that a column may have, its figure's own among them."""
