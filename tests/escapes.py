"""Records as a node may send them, made from the structs: escape sequences in each text that a field can hold."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

import multinode
from multinode.transport.agent import Refused

__all__ = ["ESCAPES", "RECORDS", "fill", "lines_of", "unprintable"]

# Clears the screen, titles the window, moves up, and passes for a line of ours; DELETE and C1 need no escape in JSON.
ESCAPES = "a\x1b[2J\x1b]0;t\x07\x9b1A\x7f\r\nmultinode: done"
_NOT_FROM_NODES = {"multinode.node", "multinode.worker", "multinode.__main__"}
# Texts that no pattern of ours refuses.
_PATTERNED = ("10.0.0.1", "name", "checkpoint-1", "0000:00:00.0", "0a")

# Of a union, apart from None: a fact, or why it is unknown.
_MOST_MEMBERS = 2


def tagged(kind: type[Any]) -> Iterator[type[Any]]:
    """The structs below a type that have a `kind`, as all that nodes send."""
    for sub in kind.__subclasses__():
        if sub.__struct_config__.tag_field == "kind" and sub.__module__.startswith("multinode."):
            yield sub
        yield from tagged(sub)


def load_all() -> None:
    for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
        if not any(module.name.startswith(name) for name in _NOT_FROM_NODES):
            importlib.import_module(module.name)


load_all()
RECORDS = sorted({*tagged(msgspec.Struct)} - {Refused}, key=lambda kind: (kind.__module__, kind.__qualname__))


def fill(of: Any, turn: int = 0) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line a kind of type
    """A value of a type as JSON has it, with escape sequences in each text; of unions the `turn`-th member."""
    match of:
        case inspect.StrType(pattern=None, max_length=most):
            return ESCAPES[:most]
        case inspect.StrType(pattern=str()):
            return next(text for text in _PATTERNED if re.search(str(of.pattern), text))
        case inspect.UnionType():
            kinds = [one for one in of.types if not isinstance(one, inspect.NoneType)]
            return fill(kinds[turn % len(kinds)], turn)
        case inspect.LiteralType():
            return of.values[0]
        case inspect.IntType():
            return max(1, int(of.ge or 0))
        case inspect.FloatType():
            return max(0.5, of.ge or 0.0)
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return ""
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            return [fill(of.item_type, turn)]
        case inspect.TupleType():
            return [fill(item, turn) for item in of.item_types]
        case inspect.DictType(key_type=inspect.IntType()):
            return {"1": fill(of.value_type, turn)}
        case inspect.DictType():
            return {fill(of.key_type, turn): fill(of.value_type, turn)}
        case inspect.StructType():
            tag = {of.tag_field: of.tag} if of.tag_field is not None else {}
            return {**tag, **{field.encode_name: fill(field.type, turn) for field in of.fields}}
        case inspect.AnyType():
            return ESCAPES
    raise AssertionError(f"no value for {of}")


def texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each text in plain data, with the name of the field that it is in."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield name, str(key)
            yield from texts(item, key)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item, name)


def lines_of(kind: type[Any]) -> list[bytes]:
    """The records as the agent writes them, and as one that escapes all it may."""
    values = [fill(inspect.type_info(kind), turn) for turn in range(_MOST_MEMBERS)]
    return [json.dumps(value, ensure_ascii=is_ascii).encode() for value in values for is_ascii in (False, True)]


def unprintable(value: Any) -> list[tuple[str, str]]:
    """Field and text of each text in structs or plain data that has a control character, apart from line breaks."""
    seen = texts(msgspec.to_builtins(value))
    return [(name, text) for name, text in seen if not text.replace("\n", "").isprintable()]
