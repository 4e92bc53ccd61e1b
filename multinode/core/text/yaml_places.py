"""compose_yaml, line_of: where in a YAML document something stands. What it means is for who asks."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

__all__ = ["compose_yaml", "is_missing", "line_of"]

_NULL = "tag:yaml.org,2002:null"


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a document that `parse_yaml` takes, each with its text as it was written; None of an empty one."""
    return yaml.compose(text, Loader=yaml.SafeLoader)


def is_missing(node: yaml.Node) -> bool:
    """Whether it is `null`, `~` or nothing."""
    return bool(node.tag == _NULL)


def line_of(root: yaml.Node | None, path: Sequence[str]) -> int:
    """The line of a key, counted from 1, by the keys that lead to it; of the last that is there."""
    node, line = root, 1
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((key, value) for key, value in node.value if key.value == name), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
