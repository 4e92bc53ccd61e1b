"""Faults of a node's disk: full, a file gone or changed, another version of a package. node_files works in the node."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import login_environment
from multinode.lab.state import Lab, LabNode, poll
from tests.equipment.faults.fault import AnyFault, Scene, run_in_node

_PROGRAM = Path(__file__).with_name("node_files.py")
_DEADLINE_S = 10.0
# On the node's disk, and not below its overlays.
_DISK = "/run"
_FIND_METADATA = """\
import importlib.metadata, sys
files = importlib.metadata.files(sys.argv[1]) or []
print(next(file.locate() for file in files if file.name == "METADATA"))
"""


class DiskFull(AnyFault, frozen=True, kw_only=True, tag="disk"):
    """Nothing more can be written to the node's disk."""

    def describe(self) -> str:
        return "its disk is full"

    def make(self, scene: Scene) -> None:
        """No larger than what is on it: full to the last byte, and no memory is spent on filling it."""
        error: NodeFailed | None = None
        for _ in poll(_DEADLINE_S):
            blocks, free, size_bytes = map(
                int, run_in_node(scene.node, ["stat", "-f", "-c", "%b %f %S", _DISK]).split()
            )
            try:
                _resize(scene.node, (blocks - free) * size_bytes)
            except NodeFailed as grown:
                # It was written to since we looked.
                error = grown
            else:
                return
        raise error or NodeFailed("its disk cannot be filled", node=scene.node.name)

    def undo(self, scene: Scene) -> None:
        if scene.is_same_boot:
            _resize(scene.node, scene.lab.spec.disk_bytes)


class Package(AnyFault, frozen=True, kw_only=True, tag="package"):
    """The job's interpreter finds another version of a package installed; its code is unchanged."""

    name: str
    version: str

    def describe(self) -> str:
        return f"{self.name} reports version {self.version}"

    def check(self, lab: Lab) -> None:
        self._find_metadata(lab, lab.node(self.node))

    def make(self, scene: Scene) -> None:
        _order(scene, "set_version", self._find_metadata(scene.lab, scene.node), text=self.version)

    def undo(self, scene: Scene) -> None:
        if scene.is_same_boot:
            _order(scene, "restore", self._find_metadata(scene.lab, scene.node))

    def _find_metadata(self, lab: Lab, node: LabNode) -> str:
        environment = [f"{name}={value}" for name, value in login_environment({}).items()]
        python = lab.spec.python
        ask = ["env", "--ignore-environment", "--chdir=/root", *environment, python, "-c", _FIND_METADATA, self.name]
        try:
            return run_in_node(node, ask).strip()
        except MultinodeError as error:
            raise UsageError(
                f"{self.name} is not installed for {python}",
                node=node.name,
                hint="name an installed package as pip does",
            ) from error


class _AtPath(AnyFault, frozen=True, kw_only=True):
    """What stands at a path is another, until what was there is put back."""

    path: str

    def undo(self, scene: Scene) -> None:
        if scene.is_same_boot:
            _order(scene, "restore", self.path)


class FileMissing(_AtPath, frozen=True, kw_only=True, tag="file-missing"):
    """A file or directory is gone."""

    def describe(self) -> str:
        return f"{self.path} is missing"

    def make(self, scene: Scene) -> None:
        _order(scene, "hide", self.path)


class FileText(_AtPath, frozen=True, kw_only=True, tag="file-text"):
    """A file has another content, or is there at all."""

    text: str

    def describe(self) -> str:
        return f"{self.path} is {self.text!r}"

    def make(self, scene: Scene) -> None:
        _order(scene, "write", self.path, text=self.text)


def _resize(node: LabNode, size_bytes: int) -> None:
    # Zero would be without a limit.
    run_in_node(node, ["mount", "-t", "tmpfs", "-o", f"remount,size={max(size_bytes, 1)}", "none", _DISK])


def _order(scene: Scene, verb: str, path: str, **details: str) -> None:
    argv = [scene.lab.spec.python, "-I", "-S", "-c", _PROGRAM.read_text()]
    order = {"verb": verb, "path": path, "number": scene.number, **details}
    run_in_node(scene.node, argv, stdin=msgspec.json.encode(order).decode())
