"""What the user or a scheduler says of the nodes: the hostfile or inventory, found and read."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import count_slots, is_host_list, parse_host_list, parse_hostfile
from multinode.cluster.inventory import is_inventory
from multinode.errors import HostfileError, UsageError
from multinode.node.files import describe_stranger
from multinode.records.files import MAX_BYTES, exists, nearest_path, read_text
from multinode.records.settings import Settings
from multinode.units import format_list

HINT = (
    "write one node per line, such as node1 slots=2; the first is node rank 0; for sample files, run multinode init "
    "--example"
)
_NOT_UTF8 = "save it as UTF-8"
_STDIN = "standard input"

# Variables by which the dynamic loader, Python, a shell or NCCL load or run files.
_RUNS_PROGRAMS = re.compile(
    r"PATH|(?:LD|DYLD|PYTHON)_?[A-Z_]*|(?:BASH_)?ENV|PROMPT_COMMAND|NCCL_\w*PLUGIN|\w*PRELOAD\w*"
)

# Files of these names are still found, as ./lab and ./auto.
_LAB, _AUTO = "lab", "auto"


def load_hostfile(path: Path, note: Callable[[str], None] = lambda _: None) -> tuple[Cluster, str]:
    """The cluster and the text of its hostfile: verbatim, or made from a list or a group of an inventory.

    Args:
        path: a hostfile, `-` for standard input, or one of these with `:GROUP`, a group of an Ansible inventory, which
            `ansible-inventory` reads; of standard input, what it has printed. Without a file of this name, a list such
            as `a,b`, `a:2,b:2` or `node[1-4]`.
        note: is told what of an inventory is ignored, and which names are repeated.
    """
    path, group = _split_group(path)
    source = _STDIN if str(path) == "-" else str(path)
    if group is None and is_host_list(source) and not exists(path):
        cluster, text = parse_host_list(source)
        _note_repeated(text, source, note)
        return cluster, text
    if source == _STDIN:
        text = _read_stdin(note)
    else:
        # Ansible also reads directories, and programs.
        text = "" if group is not None and path.is_dir() else read_text(path, "the hostfile", _hint(path))
    if group is None and not is_inventory(text):
        try:
            cluster = parse_hostfile(text, source)
        except HostfileError:
            _refuse_other(text, source)
            raise
        _check_ownership(path, cluster)
        _note_repeated(text, source, note)
        return cluster, text
    _refuse_other(text, source)
    from multinode.records.ansible import ask_ansible, load_inventory

    listing = text if source == _STDIN or text.lstrip().startswith("{") else ask_ansible(path, _copy(path))
    return load_inventory(listing, group, source, note)


def _refuse_other(text: str, source: str) -> None:
    from multinode.records.other_documents import refuse_other_documents

    refuse_other_documents(text, source)


def _note_repeated(text: str, source: str, note: Callable[[str], None]) -> None:
    if (counts := count_slots(text)) is not None:
        repeated = format_list([f"{name} {count} times" for name, count in counts.items() if count > 1], 4)
        note(f"{source} names {repeated}, once for each of its workers")


def _hint(path: Path) -> str:
    if str(path) == "slurm":
        return "in an allocation: --hosts auto"
    if exists(path):
        return HINT
    name, colon, group = str(path).partition(":")
    near = nearest_path(Path(name))
    meant = f"did you mean {near}{colon}{group}?" if near is not None else ""
    # A file mostly has a suffix or a directory.
    if path.name == str(path) and not path.suffix and not colon:
        meant += f"{' ' if meant else ''}if it is the name of a node: --hosts {shlex.quote(name)}:1"
    return meant or f"{HINT}; or name the nodes in the command: --hosts node1:2,node2:2"


def _check_ownership(path: Path, cluster: Cluster) -> None:
    """Check that a file that runs programs here or on the nodes was written by us or root."""
    named = next((name for node in cluster.nodes for name in _programs(node)), None)
    stranger = describe_stranger(path) if named is not None and cluster.source != _STDIN else None
    if stranger is not None:
        raise HostfileError(
            f"{path} {stranger}, and {named}= in it runs programs as you",
            hint=_copy(path),
        )


def _copy(path: Path) -> str:
    return f"review it; if you trust it, copy it: cp -r {shlex.quote(str(path))} my-hosts"


def _programs(node: Node) -> tuple[str, ...]:
    keys = [key for key in ("ssh_config", "python") if getattr(node, key) is not None]
    return (*keys, *(f"env.{name}" for name in node.env if _RUNS_PROGRAMS.fullmatch(name)))


def _split_group(path: Path) -> tuple[Path, str | None]:
    """`FILE:GROUP` split; a file with a colon in its name takes precedence."""
    name, colon, group = str(path).rpartition(":")
    whole = not colon or exists(path) or not (name == "-" or exists(Path(name)))
    return (path, None) if whole else (Path(name), group)


def _read_stdin(note: Callable[[str], None]) -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("--hosts - reads standard input, which is closed", hint=HINT)
    if sys.stdin.isatty():
        note("reading the hostfile from standard input; Ctrl-D ends it")
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError("the hostfile on standard input is too large", hint=HINT)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError("the hostfile on standard input is not UTF-8 text", hint=_NOT_UTF8) from None


class RunningLab(NamedTuple):
    """Where the lab of this machine is described, and where it was started."""

    hostfile: Path
    directory: Path


def find_hosts(
    option: str | None, environ: Mapping[str, str], settings: Settings, find_lab: Callable[[], RunningLab | None]
) -> tuple[Path | None, str]:
    """The hostfile: `--hosts`, $MULTINODE_HOSTS, the settings' or the lab that was started here, in this order.

    Returns:
        Its path, None where `auto` names what a scheduler gave us; and which of these named it.

    Raises:
        UsageError: none is set, the lab is named and not running, or the settings have no such name.
    """
    ways = {
        "--hosts": option,
        "$MULTINODE_HOSTS": environ.get("MULTINODE_HOSTS"),
        settings.hosts_file: settings.defaults.hosts,
    }
    by, named = next(((by, named) for by, named in ways.items() if named), ("", ""))
    if named.startswith("@"):
        by, named = f"{by}, {named}", _named_hosts(named[1:], settings)
    if named == _AUTO:
        return None, by
    if named and named != _LAB:
        return Path(named).expanduser(), by
    lab = find_lab()
    if named and lab is None:
        raise UsageError("no lab is running", hint="multinode lab up --nodes 2 --rate 1gbit")
    # A lab elsewhere is a colleague's, or of another day: nothing starts there unless it is named.
    if lab is not None and (named or lab.directory == Path.cwd()):
        return lab.hostfile, by or "the lab that was started in this directory"
    raise UsageError(
        "no hosts are given: use --hosts" + (", or --hosts lab for the lab that runs here" if lab is not None else ""),
        hint="pass a hostfile or a:2,b:2, or set $MULTINODE_HOSTS or hosts in multinode.toml; for virtual nodes: "
        "multinode lab up",
    )


def _named_hosts(name: str, settings: Settings) -> str:
    if name not in settings.hosts:
        known = f"known names: {', '.join(settings.hosts)}" if settings.hosts else f'write {name} = "hosts.txt" there'
        raise UsageError(f"no hosts are named {name!r} under [hosts] in multinode.toml", hint=known)
    return settings.hosts[name]
