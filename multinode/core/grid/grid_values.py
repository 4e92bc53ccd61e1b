"""The values of a grid's axes, as the command line has them: `--set key=a,b`, `--nodes 1,2`. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec

from multinode.core.grid.grid import BATCH
from multinode.core.text.secret_values import is_secret
from multinode.core.text.strict_yaml import YamlError, dump_flow_yaml, dump_yaml, parse_yaml
from multinode.errors import JobError, UsageError

__all__ = ["override_text", "parse_axes", "parse_counts"]

# Of a number of nodes, or of workers.
_MOST_DIGITS = 9
_EXAMPLE = "--set per_device_train_batch_size=1,2,4"
_KEY = re.compile(r"\w+", re.ASCII)
_COUNTS = frozenset({BATCH, "gradient_accumulation_steps", "cutoff_len", "lora_rank"})
# A sweep cuts every run itself.
_OURS = {"max_steps": "--steps", "num_train_epochs": "--steps"}


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Values by key, in the order given; a key with one value has no axis, and is set in every cell.

    Commas part the values, and each is read as YAML, so that a list or a text with a comma in it is written as YAML
    writes it: `key=[a,b]` is one value, `key=[a],[a,b]` are two, `key='"a,b"'` is one text.

    Raises:
        JobError: one is not `KEY=VALUE[,VALUE...]`, has an empty value, or a value or key that stands twice.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = _parse_axis(text)
        if key in axes:
            raise JobError(f"--set {key} is given twice", hint=f"all values of a key stand in one: {_EXAMPLE}")
        axes[key] = values
    return axes


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


def override_text(key: str, value: Any) -> str:
    """The setting as one `--set` of `launch` takes it, in one line."""
    if isinstance(value, list | dict):
        return f"{key}={dump_flow_yaml(value)}"
    return f"{key}={dump_yaml({key: value}).partition(':')[2].strip(' ')}".rstrip("\n")


def _parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    key, equals, written = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise JobError(f"--set {text!r} is not KEY=VALUE[,VALUE...]", hint=f"for example {_EXAMPLE}")
    values = _parse_values(key, written)
    _require_sense(key, values)
    twice = _first_twice([_identity(value) for value in values])
    if twice is not None:
        raise JobError(f"--set {text}: {values[twice]!r} stands twice", hint="--repeats measures every cell again")
    if key in _OURS and len(values) > 1:
        raise JobError(
            f"--set {text}: how long a cell trains is no axis", hint=f"{_OURS[key]} or --minutes says it for all cells"
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
            raise JobError(f"--set {key}: {wrong!r} is not a number from 1 on", hint=f"for example --set {key}=1,2,4")
    if key == "finetuning_type" and "qlora" in values:
        raise JobError(
            "--set finetuning_type: qlora is LoRA on quantized weights, and no type of LLaMA-Factory's",
            hint="--set finetuning_type=lora --set quantization_bit=4",
        )
    if len(values) > 1 and is_secret(key):
        raise JobError(f"--set {key}: a secret is no axis: it would stand in every table", hint="give it one value")


def _parse_values(key: str, written: str) -> tuple[Any, ...]:
    """What a flow sequence of YAML would hold.

    Raises:
        JobError: it is not YAML, or a value is empty.
    """
    quoted = f"a text with a comma or a bracket in it is quoted: --set {key}='\"...\"'"
    try:
        values = parse_yaml(f"[{written}]")
    except YamlError as wrong:
        empty = re.search(r"(?:^|,)\s*,", written)
        said = "has an empty value" if empty else f"is no list of YAML values: {wrong}"
        raise JobError(f"--set {key}={written} {said}", hint=_EXAMPLE if empty else quoted) from None
    # YAML takes a last comma for none at all.
    if not isinstance(values, list) or not values or written.rstrip().endswith(","):
        hint = _EXAMPLE if "," in written else f"to unset a key: --set {key}=null"
        raise JobError(f"--set {key}={written} has an empty value", hint=hint)
    return tuple(values)


def _identity(value: Any) -> Hashable:
    """What tells values apart that Python takes for equal: 1, 1.0 and true."""
    return type(value).__name__, repr(msgspec.to_builtins(value))


def _first_twice(values: Sequence[Hashable]) -> int | None:
    """Where a value stands that stood before."""
    return next((place for place, value in enumerate(values) if value in values[:place]), None)
