"""An Ansible inventory: whether a text is one, and not a hostfile."""

from __future__ import annotations

import re

_SECTION = re.compile(r"\[\s*[A-Za-z_][^\[\]:\s]*\s*(?::\s*\w+\s*)?\]\s*(?:[#;].*)?")
_KEYS = re.compile(r"(?:---|\{|[\"']?[A-Za-z_][\w.-]*[\"']?:(?:\s|$))")
_COMMENTS = ("#", ";")


def is_inventory(text: str) -> bool:
    """Whether a text is an Ansible inventory with groups, and not a hostfile."""
    return has_keys(text) or any(_SECTION.fullmatch(entry) for entry in _entries(text))


def has_keys(text: str) -> bool:
    """Whether the first line that says something begins a YAML document whose keys are groups, or JSON."""
    return _KEYS.match(next(iter(_entries(text)), "")) is not None


def _entries(text: str) -> list[str]:
    lines = (line.strip() for line in text.split("\n"))
    return [line for line in lines if line and not line.startswith(_COMMENTS)]
