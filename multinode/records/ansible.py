"""Inventories of Ansible, as its own program reads them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from multinode.cluster.allocation import parse_inventory
from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import render_hostfile
from multinode.errors import HostfileError, UsageError, printable
from multinode.node.files import describe_stranger
from multinode.transport.local import ask_program

_ANSIBLE_S = 60.0
_NO_ANSIBLE = (
    "pip install ansible-core; or run this on a machine that has it: ansible-inventory -i INVENTORY --list > "
    "listing.json"
)


def ask_ansible(path: Path, copy_hint: str) -> str:
    """What `ansible-inventory --list` prints of an inventory.

    Args:
        path: of a file or a directory.
        copy_hint: what to do if others can write it.

    Raises:
        HostfileError: others can write it.
        UsageError: Ansible is not installed, does not answer, or cannot read it.
    """
    stranger = describe_stranger(path)
    if stranger is not None:
        raise HostfileError(f"{path} {stranger}, and Ansible runs programs named in an inventory", hint=copy_hint)
    argv = ("ansible-inventory", f"--inventory={path}", "--list")
    ran = shlex.join(argv)
    environ = {**os.environ, "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true", "ANSIBLE_NOCOLOR": "true"}
    try:
        done = ask_program(argv, environ, deadline_s=_ANSIBLE_S)
    except OSError as error:
        why = f"{path} is an Ansible inventory, but ansible-inventory could not be run: {error.strerror}"
        raise UsageError(why, hint=_NO_ANSIBLE) from error
    except subprocess.TimeoutExpired:
        raise UsageError(f"ansible-inventory did not answer within {_ANSIBLE_S:.0f} s", ran=ran) from None
    if done.returncode:
        raise UsageError(f"Ansible cannot read the inventory {path}", ran=ran, detail=printable(done.stderr))
    return done.stdout


def load_inventory(listing: str, group: str | None, source: str, note: Callable[[str], None]) -> tuple[Cluster, str]:
    """The cluster of a group, and its hostfile; `note` is told what of the inventory is ignored."""
    cluster, ignored = parse_inventory(listing, group, source)
    if ignored:
        note(f"{source}: ignored: {printable(', '.join(ignored))}")
    head = f"# The group {group} of {source}.\n" if group is not None and group.isprintable() else ""
    return cluster, head + render_hostfile(cluster)
