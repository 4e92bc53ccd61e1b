"""parse_yaml_table: a YAML of figures measured elsewhere -> ImportedTable. What its cells mean is imported_table's.

Cells are taken as they are written: a number read by YAML would have lost the digits that tell how it was rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import yaml

from multinode.core.grid.imported_table import HINT, Cell, Extras, ImportedTable, Line, TableError, make_table
from multinode.core.text.strict_yaml import YamlError, yaml_nodes
from multinode.errors import UsageError

__all__ = ["parse_yaml_table"]

_NULL = "tag:yaml.org,2002:null"
_KEYS = ("columns", "rows", "defaults", "ignore")


def parse_yaml_table(text: str, source: str, extras: Extras) -> ImportedTable:
    """The rows of a YAML: a list of mappings, or `rows:` beside `columns:`, `defaults:` and `ignore:`.

    Args:
        text: of the file.
        source: its path, for messages.
        extras: what the user says of all rows; it comes before what the file says.

    Raises:
        UsageError: `source:line:` and what is wrong.
    """
    try:
        return _read(yaml_nodes(text), extras)
    except YamlError as wrong:
        raise UsageError(wrong.at(source), hint=HINT) from None
    except TableError as wrong:
        place = source if wrong.line is None else f"{source}:{wrong.line}"
        raise UsageError(f"{place}: {wrong}", hint=wrong.hint) from None


def _read(root: yaml.Node | None, extras: Extras) -> ImportedTable:
    parts = _parts(root)
    titles = [_text(node) for node in _items(parts.get("columns"))]
    defaults = _cells(parts["defaults"]) if "defaults" in parts else []
    ignore = (*extras.ignore, *(_text(node) for node in _items(parts.get("ignore"))))
    lines = [Line(_line(node), _row(node, titles)) for node in _items(parts.get("rows"))]
    return make_table(lines, defaults, msgspec.structs.replace(extras, ignore=ignore))


def _parts(root: yaml.Node | None) -> dict[str, yaml.Node]:
    if isinstance(root, yaml.SequenceNode):
        return {"rows": root}
    if not isinstance(root, yaml.MappingNode):
        raise TableError("expected a list of rows, or rows: beside columns: and defaults:", 1)
    parts = {_text(key): value for key, value in root.value}
    for key, _ in root.value:
        if key.value not in _KEYS:
            raise TableError(f"unknown key {key.value!r}: expected one of {', '.join(_KEYS)}", _line(key))
    return parts


def _row(node: yaml.Node, titles: Sequence[str]) -> list[Cell]:
    if isinstance(node, yaml.MappingNode):
        return _cells(node)
    cells = _items(node)
    if len(cells) != len(titles):
        raise TableError(f"{len(cells)} cells stand in a row of {len(titles)} columns", _line(node))
    return [Cell(_line(cell), title, _text(cell)) for title, cell in zip(titles, cells, strict=True)]


def _cells(node: yaml.Node) -> list[Cell]:
    if not isinstance(node, yaml.MappingNode):
        raise TableError("expected a mapping of columns to cells", _line(node))
    # An alias has the line of what it stands for; the key's is where it is used.
    return [Cell(_line(key), _text(key), _text(value, _line(key))) for key, value in node.value]


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    if node is not None and not isinstance(node, yaml.SequenceNode):
        raise TableError("expected a list", _line(node))
    return list(node.value) if node is not None else []


def _text(node: yaml.Node, line: int | None = None) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise TableError("expected one word or number, not a list or a mapping", line or _line(node))
    return "null" if node.tag == _NULL else str(node.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
