"""Cause and fix of known errors in Chinese (known_errors.zh.toml), for screens; records and documents stay English."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import TypeVar

import msgspec

from multinode.decoding import convert
from multinode.diagnose.explanation import LogFailure
from multinode.diagnose.known_errors import known_errors
from multinode.records.run import Failure

_VARIABLE = "MULTINODE_LANG"
_AnyFailure = TypeVar("_AnyFailure", Failure, LogFailure)


class Meaning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an entry of the catalogue says in another language, with the commands and options of the English text."""

    cause: str
    fix: str  # `{node}` is the node that failed


@functools.cache
def chinese_meanings() -> Mapping[str, Meaning]:
    """The catalogue in Chinese, by the id of the error."""
    text = files(__package__).joinpath("known_errors.zh.toml").read_text("utf-8")
    return convert(msgspec.toml.decode(text), dict[str, Meaning])


def translate(failure: _AnyFailure, environ: Mapping[str, str] = os.environ) -> _AnyFailure:
    """The failure in the language of $MULTINODE_LANG, `zh` or English; only texts of the catalogue are translated."""
    if failure.error_id is None or not environ.get(_VARIABLE, "").lower().startswith("zh"):
        return failure
    error, chinese = known_errors()[failure.error_id], chinese_meanings()[failure.error_id]
    cause = chinese.cause if failure.cause == error.cause else failure.cause
    pattern = re.escape(error.fix_on("\0")).replace("\0", r"(\S+)")
    found = re.fullmatch(pattern, failure.hint or "")
    if found is None:
        return msgspec.structs.replace(failure, cause=cause)
    node = found[1] if found.re.groups else ""
    return msgspec.structs.replace(failure, cause=cause, hint=chinese.fix.format(node=node))
