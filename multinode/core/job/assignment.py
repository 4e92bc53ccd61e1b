"""`KEY=VALUE` as an option of the command line takes it: what is set, and to which value."""

from __future__ import annotations

import re
from typing import Any

from multinode.core.text.strict_yaml import YamlError, parse_yaml
from multinode.errors import JobError

__all__ = ["parse_assignment"]

_KEY = re.compile(r"\w+", re.ASCII)
_NULLS = frozenset({"null", "Null", "NULL", "~"})


def parse_assignment(option: str, text: str, example: str, key: re.Pattern[str] = _KEY) -> tuple[str, Any]:
    """The key and the value, which is read as YAML: `3` is a number, `true` a truth, and JSON is YAML too.

    Args:
        option: its name, for messages.
        text: what it was given.
        example: a right one, for the hint.
        key: what a key has to look like.

    Raises:
        JobError: it is not `KEY=VALUE`, its value is not YAML, or is nothing.
    """
    name, equals, written = text.partition("=")
    if not equals or not key.fullmatch(name):
        raise JobError(f"{option} {text!r} is not KEY=VALUE", hint=f"for example {option} {example}")
    try:
        value = parse_yaml(written)
    except YamlError as wrong:
        raise JobError(
            f"{option} {name}: {written!r} is not a YAML value: {wrong}",
            hint=f"text is quoted: {option} {name}='\"...\"'",
        ) from None
    if value is None and written.strip() not in _NULLS:
        raise JobError(f"{option} {text!r} sets {name} to nothing", hint=f"if that is meant: {option} {name}=null")
    return name, value
