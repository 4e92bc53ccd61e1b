"""YAML as LLaMA-Factory reads it (through OmegaConf), strict about what is surely a mistake; every error has its line.

Knows nothing of what the keys mean; a struct whose values depend on each other refuses them with `WrongValue`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
import yaml

from multinode.decoding import convert
from multinode.errors import UsageError

_Kind = TypeVar("_Kind")

_FLOAT_TAG = "tag:yaml.org,2002:float"
_DATE_TAG = "tag:yaml.org,2002:timestamp"
# YAML 1.1 wants a point and a sign in a float: PyYAML reads 1e-4 and 1.5e3 as text, OmegaConf and people as numbers.
_LOOSE_FLOAT = re.compile(r"[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+\Z", re.ASCII)
_FLOAT_STARTS = list("-+0123456789")
# Characters, with every alias written out. Aliases of aliases make a small text unfold without bound.
_MOST_CHARACTERS = 1 << 20

# PyYAML writes it as it is among quotes, and reads it there as a line break; escaped it comes back.
_NEXT_LINE = "\x85"

# A step of the path in a message of msgspec, which does not tell the keys of a mapping: `$.nodes[...].price`.
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_PATH = re.compile(r" - at `\$.*| in `\$.*")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")


class YamlError(Exception):
    """A text is not the YAML that it should be.

    Args:
        message: what is wrong, one line.
        line: where, counted from 1; None where PyYAML does not tell.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line

    def at(self, source: object) -> str:
        """`source:line: message`, of the file with that path."""
        return f"{source}: {self}" if self.line is None else f"{source}:{self.line}: {self}"


class WrongValue(ValueError):
    """What a struct says of its own values in `__post_init__`, with the keys that lead to the wrong one."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


class _PlainLoader(yaml.SafeLoader):
    """Reads plain data, and numbers as PyYAML does."""


class _Loader(_PlainLoader):
    """Reads numbers as OmegaConf does."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader, or PyYAML's own, would read as something else."""


# A date stays text.
_PlainLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE_TAG]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _reader in (_Loader, _Dumper):
    _reader.add_implicit_resolver(_FLOAT_TAG, _LOOSE_FLOAT, _FLOAT_STARTS)


def parse_yaml(text: str, *, plain: bool = False) -> Any:
    """The data of one YAML document; None where it is empty.

    Args:
        text: the document.
        plain: read numbers as PyYAML does, to which 1e-4 is text.

    Raises:
        YamlError: it is not YAML, a key stands twice in a mapping, a tag names something other than plain data, or
            aliases unfold without bound.
    """
    try:
        loader = (_PlainLoader if plain else _Loader)(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _count_characters(root, {})
        return loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"invalid character U+{error.character:04X} in YAML", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(message, mark.line + 1 if mark is not None else None) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as error:
        # What PyYAML happens to raise for a value that its tag does not fit, such as `!!int ""`.
        raise YamlError(f"a value does not fit its type ({error})") from None


def decode_yaml(text: str, kind: type[_Kind], source: object, hint: str) -> _Kind:
    """A YAML document as `kind`; `source` is its path, for messages.

    Raises:
        UsageError: it is none: `source:line:`, the keys that lead there, and what is wrong.
    """
    try:
        data = parse_yaml(text)
        return convert(data, kind)
    except YamlError as wrong:
        raise UsageError(wrong.at(source), hint=hint) from None
    except msgspec.ValidationError as error:
        path = _wrong_path(data, kind, error)
        keys = "".join(f"{key!r}: " for key in path)
        line = _line_of(yaml_nodes(text), path)
        hint = "; ".join(filter(None, (_keys_words(kind, path, str(error)), hint)))
        raise UsageError(f"{source}:{line}: {keys}{_PATH.sub('', str(error))}", hint=hint) from None


def yaml_nodes(text: str) -> yaml.Node | None:
    """The nodes of one YAML document, each with its text as it was written and its place; None where it is empty."""
    parse_yaml(text)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def dump_yaml(data: dict[str, Any]) -> str:
    """The data as YAML, keys in their order."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if _NEXT_LINE not in text:
        return text
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def dump_flow_yaml(data: list[Any] | dict[str, Any]) -> str:
    """A list or mapping as YAML in one line, as brackets have it."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf).strip()


def _count_characters(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Characters below a node with aliases written out; `counted` has None for the nodes that are being counted."""
    if id(node) in counted:
        count = counted[id(node)]
        if count is None:
            raise _wrong("an alias contains itself", node)
        return count
    counted[id(node)] = None
    total = 1
    if isinstance(node, yaml.ScalarNode):
        total += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        _check_keys(node)
        total += sum(_count_characters(part, counted) for pair in node.value for part in pair)
    else:
        total += sum(_count_characters(part, counted) for part in node.value)
    if total > _MOST_CHARACTERS:
        raise _wrong(f"it expands to more than {_MOST_CHARACTERS} characters", node)
    counted[id(node)] = total
    return total


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = (key.tag, key.value)
            if name in lines:
                raise _wrong(f"duplicate key {key.value!r} (line {lines[name]})", key)
            lines[name] = key.start_mark.line + 1


def _wrong(message: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)


def _keys_words(kind: Any, path: Sequence[Any], message: str) -> str:
    """What could have been meant by an unknown key, and all keys that there are; empty of another mistake."""
    if _UNKNOWN.search(message) is None:
        return ""
    found = [msgspec.inspect.type_info(kind)]
    for name in path[:-1]:
        found = [inside for info in found for inside in _inside(info, name)]
    keys = [field.encode_name for info in found for struct in _structs(info) for field in struct.fields]
    close = difflib.get_close_matches(str(path[-1]), keys, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}Known keys: {', '.join(dict.fromkeys(keys))}" if keys else ""


def _structs(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    for member in info.types if isinstance(info, msgspec.inspect.UnionType) else (info,):
        if isinstance(member, msgspec.inspect.StructType):
            yield member


def _inside(info: msgspec.inspect.Type, name: Any) -> Iterator[msgspec.inspect.Type]:
    """The types below a key or an index."""
    for member in info.types if isinstance(info, msgspec.inspect.UnionType) else (info,):
        match member:
            case msgspec.inspect.StructType():
                yield from (field.type for field in member.fields if field.encode_name == name)
            case msgspec.inspect.DictType():
                yield member.value_type
            case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
                yield member.item_type


def _wrong_path(data: Any, kind: Any, error: msgspec.ValidationError) -> list[Any]:
    """The keys that lead to what does not fit; of mappings on the way `data` loses the other entries."""
    match = _PATH.search(str(error))
    path: list[Any] = []
    node = data
    for name, index in _STEP.findall(match[0] if match is not None else ""):
        path.append(_wrong_key(node, data, kind, str(error)) if index == "..." else name or int(index))
        node = node[path[-1]]
    return [*path, *getattr(error.__cause__, "path", ()), *_UNKNOWN.findall(str(error))]


def _wrong_key(mapping: dict[Any, Any], data: Any, kind: Any, message: str) -> Any:
    """The first key of a mapping within `data` that has msgspec say this where the others are left out."""
    for key, value in list(mapping.items()):
        mapping.clear()
        mapping[key] = value
        try:
            convert(data, kind)
        except msgspec.ValidationError as error:
            if str(error) == message:
                break
    return key


def _line_of(root: yaml.Node | None, path: Sequence[Any]) -> int:
    """The line, counted from 1, of the key that a path leads to, or of the last on the way that is there."""
    node, line = root, 1
    for name in path:
        if isinstance(node, yaml.SequenceNode):
            node = node.value[name]
            line = node.start_mark.line + 1
            continue
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        entry = next(((key, value) for key, value in entries if key.value == str(name)), None)
        if entry is None:
            break
        line, node = entry[0].start_mark.line + 1, entry[1]
    return line
