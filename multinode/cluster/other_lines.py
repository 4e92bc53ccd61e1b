"""Lines of other programs' files that are wrong in a hostfile: what they are, and the line to write instead."""

from __future__ import annotations

import ipaddress
import itertools
import re
import shlex

from multinode.cluster.hostfile_line import WrongLine, is_address, is_name, join_settings, refuse_port

_WHOLE = re.compile(r"\d{1,9}", re.ASCII)


def refuse_other_forms(words: list[str]) -> None:
    """Refuse a wrong line if it has the form of another file.

    Raises:
        WrongLine: with the line to write instead.
    """
    name, *rest = words
    if "=" in name:
        raise WrongLine(f"it starts with {name!r} instead of a node's name", "for example: node1 slots=2")
    if name.startswith((";", "/*")):
        raise WrongLine(f"it starts with {name!r}, which is not a node", "comments start with #")
    if name.startswith("^"):
        raise WrongLine(
            f"in other programs, {name!r} excludes a node", "remove its line, or choose the others with --nodes"
        )
    if name.startswith("+"):
        raise WrongLine(f"in other programs, {name!r} means a node of an allocation", "write the node's name")
    if name == "rank" and rest and "=" in rest[0]:
        node = rest[0].partition("=")[2]
        raise WrongLine(
            "it is a line of an Open MPI rankfile", (f"write one line per node, in rank order: {node} slots=N")
        )
    if name == "-" and rest:
        raise WrongLine("it is a line of a YAML list", f"write {' '.join(rest)}")
    if name == "ssh" and rest:
        raise WrongLine("it is a command", f"write {_of_ssh(rest)}")
    settings = list(join_settings(rest))
    bare = list(itertools.takewhile(lambda word: "=" not in word, settings))
    if bare:
        _refuse_bare_words(name, bare, settings[len(bare) :])


def _refuse_bare_words(name: str, bare: list[str], settings: list[str]) -> None:
    """Reject words without a key behind a name: a number of workers, other names of one machine, or other machines."""
    *others, last = bare
    number = last if _WHOLE.fullmatch(last) else None
    names = [name, *(bare if number is None else others)]
    addresses = [word for word in names if is_address(word)]
    keys = [shlex.quote(setting) for setting in settings]
    if number is not None and len(names) == 1:
        refuse_port(name, number, f"{name} {number}")
        keys.insert(0, f"slots={number}")
        raise WrongLine(f"{number!r} is not key=value", f"write {' '.join([name, *keys])}")
    if not all(is_name(word) or is_address(word) for word in names):
        return
    if len(addresses) == 1:
        (address,) = addresses
        machine = next(word for word in names if word != address)
        keys = [f"addr={address}", *([] if number is None else [f"slots={number}"]), *keys]
        is_local = ipaddress.ip_address(address).is_loopback
        raise WrongLine(
            "it has both an address and a name of one machine, as in /etc/hosts",
            "remove it: this address always means the local machine"
            if is_local
            else f"write {' '.join([machine, *keys])}",
        )
    if not settings:
        raise WrongLine(f"{len(names)} names are on one line", f"write one node per line: {names[0]}, then {names[1]}")


def _of_ssh(words: list[str]) -> str:
    keys = {"-p": "port", "-l": "user", "-i": "key", "-J": "jump", "-F": "ssh_config"}
    given = [f"{keys[option]}={value}" for option, value in itertools.pairwise(words) if option in keys]
    values = {value for option, value in itertools.pairwise(words) if option.startswith("-")}
    name = next((word for word in words if not word.startswith("-") and word not in values), "node1")
    return " ".join([name, *given])
