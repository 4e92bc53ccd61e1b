"""Writes docs/reference/api.md from multinode.api itself; with --check, says whether it is current."""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from reference_pages import field_comments, write_or_check

from multinode import api
from multinode.cli.verbs import load_verb

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "api.md"

_HEADER = """\
# The Python API

<!-- Written by scripts/make_api_reference.py. -->

The functions and structs of `multinode.api`. For examples, see [use from Python](../how-to/use-from-python.md).

Within a major version, multinode may add names and fields, but does not rename or remove any. The name of a field
includes its unit, as in `lease_s`. Results have the same fields as the [JSON documents](json.md).
"""
# What a caller makes; the others are made by the functions.
_REQUESTS = (
    "Launch",
    "LaunchOptions",
    "Observation",
    "TraceWindow",
    "ExecuteOptions",
    "JobEnvironment",
    "RestartOptions",
    "ScriptJob",
    "CheckOptions",
    "CollectiveTest",
    "Message",
    "Extent",
    "ContrastRequest",
    "ForecastRequest",
)
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n", re.MULTILINE)
_ENTRY = re.compile(r"^    (?P<names>[\w., ]+): (?P<text>.*(?:\n {8}.*)*)", re.MULTILINE)
_MODULE = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")


def main() -> int:
    """Write it where it is not current, or say so."""
    return write_or_check({REFERENCE: render()}, __doc__)


def render() -> str:
    """The whole page."""
    found = {name: getattr(api, name) for name in api.__all__}
    functions = {name: one for name, one in found.items() if inspect.isfunction(one)}
    others = {name: one for name, one in found.items() if name not in functions and name not in _REQUESTS}
    parts = [_HEADER, "\n## Functions\n", *(_function(name, one) for name, one in functions.items())]
    parts += ["\n## Structs for arguments\n", *(_request(name, found[name]) for name in _REQUESTS)]
    parts += ["\n## Other names\n\n| name | meaning |\n|---|---|\n", *(_row(name, one) for name, one in others.items())]
    return "".join(parts)


def _function(name: str, function: Any) -> str:
    summary, sections = _docstring(function)
    signature = inspect.signature(function)
    verb = getattr(function, "verb", None)
    keywords = _keywords(verb, signature) if verb is not None else {}
    given = [one for one in signature.parameters.values() if one.name not in keywords]
    by_name = [one for one in given if one.kind is one.KEYWORD_ONLY]
    several = any(one.kind is one.VAR_POSITIONAL for one in given)
    parameters = [_parameter(one) for one in given if one not in by_name]
    parameters += [*([] if several else ["*"]), *map(_parameter, by_name)] if by_name else []
    parameters += ["**options"] if keywords else []
    returned = _type(signature.return_annotation)
    # What contextlib makes of a generator.
    returned = returned.replace("Iterator", "ContextManager") if hasattr(function, "__wrapped__") else returned
    lines = ["", f"### `{name}`", "", f"    {name}({', '.join(parameters)}) -> {returned}", "", summary]
    for title, said in (("Args", "argument"), ("Raises", "raises")):
        if title in sections:
            lines += ["", f"| {said} | meaning |", "|---|---|"]
            lines += [f"| `{names}` | {text} |" for names, text in _entries(sections[title])]
    if keywords:
        lines += ["", "| option | default | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | `{default!r}` | {_cell(text)} |" for name, (default, text) in keywords.items()]
    return "\n".join(lines) + "\n"


def _keywords(verb: str, signature: inspect.Signature) -> dict[str, tuple[Any, str]]:
    """Default and meaning of each option of a call, as the help of its command has it."""
    options = [param for param in load_verb(verb).params if param.param_type_name == "option"]
    helps = {_keyword(option): option.help or "" for option in options}
    return {name: (one.default, helps[name]) for name, one in signature.parameters.items() if name in helps}


def _keyword(option: Any) -> str:
    name: str = max(option.opts, key=len).removeprefix("--").replace("-", "_")
    # An argument in front of the keywords; words that Python reserves.
    return {"hosts": "", "with": "with_", "from": "from_"}.get(name, name)


def _parameter(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if default is inspect.Parameter.empty:
        return parameter.name
    plain = default is None or isinstance(default, bool | int | float | str | tuple)
    # Another one, such as this interpreter's path or a function that does nothing, is this machine's or of no interest.
    return f"{parameter.name}={default!r}" if plain and default != sys.executable else f"{parameter.name}=..."


def _request(name: str, struct: Any) -> str:
    summary = _docstring(struct)[0]
    # Its own fields, then those of the structs that it extends.
    structs = [one for one in struct.__mro__ if issubclass(one, msgspec.Struct) and one is not msgspec.Struct]
    meanings = {field: text for one in structs for field, text in _fields(one).items()}
    annotations = {field: kind for one in structs for field, kind in one.__annotations__.items()}
    defaults = dict(zip(reversed(struct.__struct_fields__), reversed(struct.__struct_defaults__), strict=False))
    lines = ["", f"### `{name}`", "", summary, "", "| field | type | default | meaning |", "|---|---|---|---|"]
    for field in sorted(struct.__struct_fields__, key=list(annotations).index):
        kind = _cell(_type(annotations[field]))
        default = _default(defaults.get(field, msgspec.NODEFAULT))
        lines.append(f"| `{field}` | `{kind}` | {default} | {meanings.get(field, '')} |")
    return "\n".join(lines) + "\n"


def _fields(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The meaning of each field that a struct itself declares."""
    comments = field_comments(inspect.getsource(struct))
    comments = {name: f"{_capital(text).rstrip('.')}." for name, text in comments.items()}
    return comments | dict(_meanings(_docstring(struct)[1].get("Attributes", "")))


def _meanings(section: str) -> Iterator[tuple[str, str]]:
    """What each attribute means, also where several share an entry."""
    for names, text in _entries(section):
        for one in names.split(", "):
            yield one, text


def _default(default: Any) -> str:
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, msgspec.Struct):
        return f"`{type(default).__name__}()`"
    # msgspec keeps what makes an empty one of a mutable type.
    return f"`{_cell(repr(getattr(default, 'factory', lambda: default)()))}`"


def _row(name: str, one: Any) -> str:
    if not inspect.isclass(one):
        return f"| `{name}` | `{_cell(_type(one))}` |\n"
    told = _docstring(one)[0]
    if issubclass(one, enum.Enum):
        told += f" One of {', '.join(f'`{member.name}`' for member in one)}."
    elif issubclass(one, msgspec.Struct):
        told += f" Fields: {', '.join(f'`{field}`' for field in one.__struct_fields__)}."
    return f"| `{name}` | {_cell(told)} |\n"


def _docstring(one: Any) -> tuple[str, dict[str, str]]:
    """What stands before the sections, and the sections by their titles."""
    summary, *rest = _SECTION.split(inspect.getdoc(one) or "")
    return summary.strip(), dict(zip(rest[::2], rest[1::2], strict=True))


def _entries(section: str) -> Iterator[tuple[str, str]]:
    for match in _ENTRY.finditer(section):
        yield match["names"], _capital(_cell(match["text"]))


def _type(annotation: Any) -> str:
    """As it would be written, without modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _MODULE.sub("", text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
