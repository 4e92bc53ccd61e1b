"""Keywords of a call as the options of its command: named alike, with Python's values, refused with what was meant."""

from __future__ import annotations

import csv
import difflib
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.job.job import override_text
from multinode.job.launchers import find_meaning
from multinode.job.typed_command import starts_program
from multinode.strict_yaml import dump_flow_yaml

Names = str | Path | Sequence[str] | None
"""Nodes: a hostfile, `@name`, `lab`, `auto`, or their names."""
JobWords = str | Path | Sequence[object] | None
"""A job: the path of a YAML, or the words of a command."""

_Input = TypeVar("_Input", bound=msgspec.Struct)
_Call = TypeVar("_Call", bound=Callable[..., Any])
# What is no keyword, as the call takes it otherwise.
_POSITIONAL = frozenset({"hosts", "words", "typed", "invocation", "collectives"})
_NOT_CONVERTED = re.compile(r"(?P<what>.*) - at `\$\.(?P<name>\w+).*`", re.DOTALL)


def takes(kind: type[msgspec.Struct], verb: str) -> Callable[[_Call], _Call]:
    """The keywords of a call, in its signature: those of the options of a verb."""

    def sign(call: _Call) -> _Call:
        signature = inspect.signature(call)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        fields = [
            inspect.Parameter(field.encode_name, inspect.Parameter.KEYWORD_ONLY, default=_default(field))
            for field in keyword_fields(kind).values()
        ]
        call.__signature__ = signature.replace(parameters=[*own, *fields])  # type: ignore[attr-defined]
        call.verb = verb  # type: ignore[attr-defined]
        return call

    return sign


def keyword_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of an input that are keywords, by keyword."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind) if field.name not in _POSITIONAL}


def _default(field: Any) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def read_keywords(kind: type[_Input], call: str, options: Mapping[str, object], **given: object) -> _Input:
    """What was asked for.

    Args:
        kind: its type.
        call: the name of the call, for hints.
        options: by keyword.
        given: other fields.

    Raises:
        UsageError: there is no such keyword, or its value is of another kind.
    """
    fields = keyword_fields(kind)
    values: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name not in fields:
            raise UsageError(f"{call} has no keyword {name!r}", hint=_hint(name, call, fields, options))
        if value is not None:
            values[name] = _plain(fields[name].type, value)
    try:
        return convert(values, kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{call}: {_what_is_wrong(str(error), fields)}", hint=f"help(api.{call}) lists the keywords"
        ) from None


def _hint(name: str, call: str, fields: Collection[str], options: Mapping[str, object]) -> str:
    """The nearest keyword, or what does here what an option of another launcher, or of before, does."""
    from multinode.levers.former import respell_average

    if "average" in fields and respell_average({name: ""}) is not None:
        return f"average={respell_average(options)!r}"
    meaning = find_meaning(name.replace("_", "-"))
    meant = meaning.option.replace("-", "_") if meaning is not None else ""
    near = [meant] if meant in fields else difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"help(api.{call}) lists the keywords"


def _what_is_wrong(message: str, fields: Mapping[str, Any]) -> str:
    """The keyword and what is expected of it, from what msgspec says."""
    match = _NOT_CONVERTED.fullmatch(message.replace("null", "None").replace("`str`", "text"))
    if match is None:
        return message
    name, what = match["name"], match["what"]
    kinds = [fields[name].type, *get_args(fields[name].type)]
    choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f"{name}: expected {' or '.join(choices)}" if choices else f"{name}: {what[:1].lower()}{what[1:]}"


def _plain(annotation: Any, value: object) -> object:
    """A value as its field has it: text as typed behind the option, or a plain value."""
    extra = next((meta.extra for meta in get_args(annotation)[1:] if getattr(meta, "extra", None)), None) or {}
    kind = get_args(annotation)[0] if extra else annotation
    if get_origin(kind) is tuple:
        if get_args(kind)[0] is str:
            return _words(value, extra.get("values"))
        return tuple(value) if isinstance(value, Iterable) else (value,)
    return _text(value) if kind is str or str in get_args(kind) else value


def _words(value: object, values: str | None) -> object:
    if isinstance(value, Mapping):
        return tuple(_assignment(str(name), each, values) for name, each in value.items())
    if isinstance(value, str | os.PathLike):
        return (os.fspath(value),)
    return tuple(map(_text, value)) if isinstance(value, Iterable) else value


def _assignment(name: str, value: object, values: str | None) -> str:
    if values == "yaml":
        return override_text(name, value)
    if values == "axis":
        several = value if isinstance(value, list | tuple) else [value]
        return f"{name}={dump_flow_yaml(list(several))[1:-1]}"
    return name if value is None else f"{name}={_text(value)}"


def _text(value: object) -> object:
    if isinstance(value, list | tuple):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(value)
        return line.getvalue()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def read_hosts(hosts: Names) -> str | None:
    """What `--hosts` would be."""
    if hosts is None or isinstance(hosts, str | os.PathLike):
        return None if hosts is None else os.fspath(hosts)
    # A comma at the end makes a list of one name.
    return f"{hosts[0]}," if len(hosts) == 1 else ",".join(hosts)


def read_job(job: JobWords) -> dict[str, tuple[str, ...]]:
    """What would stand in front of `--` or behind it, by field.

    Raises:
        UsageError: a command is given as text.
    """
    if job is None:
        return {}
    if not isinstance(job, str | os.PathLike):
        return {"typed": tuple(map(str, job))}
    path = os.fspath(job)
    first, *_ = path.split() or [""]
    if starts_program(first):
        raise UsageError(f"{path!r} is a command in one string", hint=f"pass a list of words: {shlex.split(path)!r}")
    return {"words": (path,)}
