"""From the options of a verb to what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from multinode.cli.options import SCRIPT, read_invocation

if TYPE_CHECKING:
    from multinode.launch.inputs import TrainingInput

Input = TypeVar("Input", bound="TrainingInput")


def fill(kind: type[Input], ctx: Any, words: Sequence[str] | None, *groups: object, **options: object) -> Input:
    """What was asked for, from the options of a verb: groups of them, and others by name.

    Args:
        kind: its type.
        ctx: of the verb.
        words: its arguments: the YAML, and `KEY=VALUE` of it.
        groups: of options.
        options: the others; None was not given.
    """
    for group in groups:
        options |= vars(group)
    return kind(
        words=tuple(words or ()), typed=ctx.meta[SCRIPT], invocation=read_invocation(ctx), **given_values(options)
    )


def given_values(options: dict[str, object]) -> dict[str, Any]:
    """The options that were given, as a struct has them."""
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    return str(value) if isinstance(value, Path) else value
