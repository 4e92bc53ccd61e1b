"""Files that name machines for other programs: an SSH configuration, or YAML and JSON that are no Ansible inventory.

Each is refused with the lines that a hostfile has for the same machines. Single lines of other files are refused by
parse_hostfile, inventories are read by parse_inventory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from multinode.cluster.hostfile_line import KEYS
from multinode.cluster.inventory import has_keys
from multinode.decoding import decode_json
from multinode.errors import HostfileError, printable_line

_HOST = re.compile(r"[ \t]*Host[ \t]+(?P<names>\S.*)", re.IGNORECASE)
# What OpenSSH says of a host, below its Host line.
_OF_HOST = re.compile(r"[ \t]*(?:HostName|User|Port|IdentityFile|ProxyJump|ProxyCommand)[ \t]+\S", re.IGNORECASE)
# Of a group in an Ansible inventory.
_GROUP = frozenset({"hosts", "children", "vars"})
# PyYAML reads some hundred kB a second; larger documents are Ansible's to judge.
_MOST_CHARACTERS = 1 << 19
_SHOWN = 2


def refuse_other_documents(text: str, source: str) -> None:
    """Refuse a whole file that is neither a hostfile nor an Ansible inventory.

    Args:
        text: of the file.
        source: its path, for messages.

    Raises:
        HostfileError: with the lines to write instead.
    """
    _refuse_ssh_configuration(text, source)
    if text.lstrip().startswith(("{", "[")):
        _refuse_json(text, source)
    elif has_keys(text) and len(text) <= _MOST_CHARACTERS:
        _refuse_yaml(text, source)


def _refuse_ssh_configuration(text: str, source: str) -> None:
    lines = text.split("\n")
    hosts = {number: match["names"] for number, line in enumerate(lines, start=1) if (match := _HOST.fullmatch(line))}
    if not hosts or not any(map(_OF_HOST.match, lines)):
        return
    aliases = [name for names in hosts.values() for name in names.split() if not set("*?!#") & set(name)]
    settings = {"ssh_config": source}
    raise HostfileError(
        f"{source}:{min(hosts)}: it is an SSH configuration",
        hint=f"{_write(aliases, settings)}; without ssh_config=, multinode reads ~/.ssh/config",
    )


def _refuse_json(text: str, source: str) -> None:
    try:
        document = decode_json(text, object)
    except msgspec.DecodeError:
        # A name in brackets; or an error that parse_inventory reports.
        return
    # A list of numbers is a range of names, such as [1,3].
    is_range = isinstance(document, list) and all(isinstance(item, int) for item in document)
    is_listing = isinstance(document, dict) and ("_meta" in document or any(map(_is_group, document.values())))
    if not (is_range or is_listing):
        raise HostfileError(
            f"{source}: it is JSON, but not output of ansible-inventory --list: it has no groups with hosts",
            hint=_hint(document),
        )


def _refuse_yaml(text: str, source: str) -> None:
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        # Ansible has tags of its own, and says what is wrong.
        return
    # With this key it configures a plugin that finds the hosts.
    if isinstance(document, dict) and "plugin" in document:
        return
    groups = list(document.values()) if isinstance(document, dict) else [document]
    if all(group is None or isinstance(group, dict) for group in groups) and any(map(_is_group, groups)):
        return
    raise HostfileError(
        f"{source}: it is YAML, but not an Ansible inventory: it has no groups with hosts", hint=_hint(document)
    )


def _is_group(value: object) -> bool:
    return isinstance(value, dict) and bool(_GROUP & value.keys())


def _hint(document: object) -> str:
    """The lines for the machines in the first list of a document, with what it says of all of them."""
    lists = document.values() if isinstance(document, dict) else [document]
    names = next((listed for value in lists if (listed := _names(value))), [])
    settings = dict(_settings(document)) if isinstance(document, dict) else {}
    return _write(names, settings)


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _settings(document: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if key in KEYS and isinstance(value, str | int) and not isinstance(value, bool):
            yield key, str(value)


def _write(names: Sequence[str], settings: Mapping[str, str]) -> str:
    if not names:
        return "write one node per line, for example: node1 slots=2"
    keys = "".join(f" {key}={shlex.quote(value)}" for key, value in settings.items())
    lines = [f"{name}{keys}" for name in names[:_SHOWN]]
    more = ", and so on" if len(names) > _SHOWN else ""
    return printable_line(f"write one node per line: {', then '.join(lines)}{more}")
