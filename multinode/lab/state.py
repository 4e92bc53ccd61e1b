"""Where the lab keeps its files, state.json and the lock. The directory exists as long as anything of a lab may."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.lab.spec import Lab
from multinode.store.run_directory import replace_file

__all__ = ["STATE_DIR", "controller_boot_id", "load_lab", "lock_lab", "node_dir", "save_lab", "write_file"]

STATE_DIR = Path("/run/multinode/lab")

_STATE_FILE = "state.json"


def node_dir(name: str) -> Path:
    """The files of one node that the controller keeps: its log, its keys, and the place where its disk is mounted."""
    return STATE_DIR / "nodes" / name


def controller_boot_id() -> str:
    """This boot of the controller; what a lab left behind before a reboot is known by another one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def load_lab() -> Lab | None:
    """The lab that stands on this machine; None where there is none, none of this boot, or none that was finished."""
    try:
        lab = decode_json((STATE_DIR / _STATE_FILE).read_bytes(), Lab)
    except (FileNotFoundError, PermissionError, msgspec.DecodeError):
        return None
    return lab if lab.controller_boot_id == controller_boot_id() else None


def save_lab(lab: Lab) -> None:
    """Write state.json, all of it or nothing."""
    write_file(STATE_DIR / _STATE_FILE, msgspec.json.format(msgspec.json.encode(lab), indent=2).decode() + "\n")


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file, all of it or nothing, with this mode from the start."""
    replace_file(path, text.encode(), mode)


@contextlib.contextmanager
def lock_lab() -> Iterator[None]:
    """Keep other `multinode lab` commands from changing the lab meanwhile.

    An abstract socket rather than a file: the kernel lets go of it when its owner dies, and nothing is left behind.

    Raises:
        UsageError: one is at work already.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind("\0multinode-lab")
        except OSError as error:
            raise UsageError(
                "another `multinode lab` command is at work", hint="wait for its end, or stop it with Ctrl-C"
            ) from error
        yield
