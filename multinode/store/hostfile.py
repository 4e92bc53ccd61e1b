"""What the user says of the nodes: the hostfile, found and read, and the file of prices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from multinode.core.cluster.cluster import Cluster
from multinode.core.cluster.hostfile import parse_hostfile
from multinode.core.cluster.prices import Prices, parse_prices
from multinode.errors import UsageError
from multinode.store.settings import Settings
from multinode.store.text_file import read_text

__all__ = ["find_hosts", "load_hostfile", "load_prices"]

# A file of this name is still found, as ./lab.
_LAB = "lab"


def load_hostfile(path: Path) -> tuple[Cluster, str]:
    """The cluster and the hostfile's text, verbatim.

    Raises:
        UsageError: it cannot be read.
        HostfileError: a line of it is wrong.
    """
    text = read_text(path, "the hostfile", "one node a line, the first is node rank 0: see hostfiles/")
    return parse_hostfile(text, str(path)), text


def find_hosts(
    option: str | None, environ: Mapping[str, str], settings: Settings, lab_hostfile: Path | None
) -> tuple[Path, str]:
    """The hostfile: `--hosts`, else $MULTINODE_HOSTS, else multinode.toml, else the running lab's; `lab` names the lab.

    Returns:
        Its path, and which of these named it.

    Raises:
        UsageError: none of them says one, or the lab is named and none runs.
    """
    ways = {
        "--hosts": option,
        "$MULTINODE_HOSTS": environ.get("MULTINODE_HOSTS"),
        "multinode.toml": settings.defaults.hosts,
    }
    by, named = next(((by, named) for by, named in ways.items() if named), ("the running lab", None))
    if named == _LAB:
        if lab_hostfile is None:
            raise UsageError("no lab is running", hint="multinode lab up --nodes 2 --rate 1gbit")
        return lab_hostfile, by
    if named:
        return Path(named).expanduser(), by
    if lab_hostfile is not None:
        return lab_hostfile, by
    raise UsageError(
        "no hostfile was given, and no lab is running",
        hint="--hosts FILE, or $MULTINODE_HOSTS, or hosts= under [defaults] in multinode.toml, or: multinode lab up",
    )


def load_prices(path: Path) -> tuple[Prices, str]:
    """The prices and the file's text, verbatim.

    Raises:
        UsageError: it cannot be read, or a line of it is wrong; the message has its place.
    """
    text = read_text(path, "the prices file", "a file to start from: configs/figures/gpu_prices.yaml")
    return parse_prices(text, str(path)), text
