"""Faults of a node's disk: full, a file gone or changed, another version of a package. node_files works in the node."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import login_environment
from multinode.lab.faults.kinds import DiskFull, FileMissing, FileText, Package
from multinode.lab.faults.scene import Scene, run_in_node
from multinode.lab.processes import poll
from multinode.lab.spec import Lab, LabNode

__all__ = [
    "check_package",
    "fill_disk",
    "free_disk",
    "hide",
    "restore",
    "restore_version",
    "set_version",
    "write",
]

_PROGRAM = Path(__file__).with_name("node_files.py")
_DEADLINE_S = 10.0
# On the node's disk, and not below its overlays.
_DISK = "/run"
_FIND_METADATA = """\
import importlib.metadata, sys
files = importlib.metadata.files(sys.argv[1]) or []
print(next(file.locate() for file in files if file.name == "METADATA"))
"""


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the node is told to do with a file (node_files reads it)."""

    verb: str
    path: str
    number: int
    text: str = ""
    append: bool = False


def fill_disk(scene: Scene, fault: DiskFull) -> None:
    """Make the disk no larger than what is on it: full to the last byte, and no memory is spent on filling it."""
    del fault
    error: NodeFailed | None = None
    for _ in poll(_DEADLINE_S):
        blocks, free, size_bytes = map(int, run_in_node(scene.node, ["stat", "-f", "-c", "%b %f %S", _DISK]).split())
        try:
            _resize(scene.node, (blocks - free) * size_bytes)
        except NodeFailed as grown:
            # It was written to since we looked.
            error = grown
        else:
            return
    raise error or NodeFailed("its disk cannot be filled", node=scene.node.name)


def free_disk(scene: Scene, fault: DiskFull) -> None:
    """Make the disk as large as the lab has it."""
    del fault
    if scene.is_same_boot:
        _resize(scene.node, scene.lab.spec.disk_bytes)


def hide(scene: Scene, fault: FileMissing) -> None:
    """Move a file or directory out of sight."""
    _order(scene, verb="hide", path=fault.path)


def write(scene: Scene, fault: FileText) -> None:
    """Put a file in place of what is there, if anything."""
    _work(
        scene, _Order(verb="write", path=fault.path, number=scene.record.number, text=fault.text, append=fault.append)
    )


def restore(scene: Scene, fault: FileMissing | FileText) -> None:
    """Put back what was there."""
    if scene.is_same_boot:
        _order(scene, verb="restore", path=fault.path)


def check_package(lab: Lab, fault: Package) -> None:
    """See that the package is installed on the node."""
    _find_metadata(lab, lab.node(fault.node), fault)


def set_version(scene: Scene, fault: Package) -> None:
    """Change what the package's metadata says."""
    path = _find_metadata(scene.lab, scene.node, fault)
    _work(scene, _Order(verb="set_version", path=path, number=scene.record.number, text=fault.version))


def restore_version(scene: Scene, fault: Package) -> None:
    """Let the metadata say what it said."""
    if scene.is_same_boot:
        _order(scene, verb="restore", path=_find_metadata(scene.lab, scene.node, fault))


def _resize(node: LabNode, size_bytes: int) -> None:
    # Zero would be without a limit.
    run_in_node(node, ["mount", "-t", "tmpfs", "-o", f"remount,size={max(size_bytes, 1)}", "none", _DISK])


def _order(scene: Scene, *, verb: str, path: str) -> None:
    _work(scene, _Order(verb=verb, path=path, number=scene.record.number))


def _work(scene: Scene, order: _Order) -> None:
    # The program goes along: a checkout of ours need not be on the node's disk.
    argv = [scene.lab.spec.python, "-I", "-S", "-c", _PROGRAM.read_text()]
    run_in_node(scene.node, argv, stdin=msgspec.json.encode(order).decode())


def _find_metadata(lab: Lab, node: LabNode, fault: Package) -> str:
    environment = [f"{name}={value}" for name, value in login_environment({}).items()]
    ask = [
        "env",
        "--ignore-environment",
        "--chdir=/root",
        *environment,
        lab.spec.python,
        "-c",
        _FIND_METADATA,
        fault.name,
    ]
    try:
        return run_in_node(node, ask).strip()
    except MultinodeError as error:
        raise UsageError(
            f"{fault.name} is not installed for {lab.spec.python}",
            node=node.name,
            hint="name an installed package as pip does",
        ) from error
