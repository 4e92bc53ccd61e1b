"""What every kind of fault has: whom it is taken from, its words, and how it is made and undone on a scene."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import psutil

from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab, LabNode, is_alive, run_program

_STILL = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


class AnyFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Something that can be taken from a node. Each kind judges its own values when it is made.

    Besides `check`, each has `describe()`, a few words; `make(scene)`, which takes it away; and `undo(scene)`, which
    gives it back, and returns the node where that renewed its processes. Undoing what was never made, or is undone,
    does nothing.
    """

    node: str  # whom it is taken from

    def check(self, lab: Lab) -> None:
        """See that it can be here; called before anything is on record.

        Raises:
            UsageError: it cannot.
        """


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Where one fault happens."""

    lab: Lab
    node: LabNode  # the one that the fault is taken from
    number: int  # names what the fault leaves in the node
    boot_id: str  # the node's when the fault was made
    others: tuple[AnyFault, ...]  # what else is in force on this node since it was started, oldest first

    @property
    def is_same_boot(self) -> bool:
        """Whether the node still runs that had the fault: what is on its disk is lost when it is started anew."""
        return is_alive(self.node.init) and self.node.boot_id == self.boot_id


def run_in_node(node: LabNode, argv: Sequence[str], stdin: str = "") -> str:
    """Run a program in all namespaces of a node and return its standard output.

    Raises:
        NodeFailed: it failed.
    """
    try:
        return run_program([*ns_command(node), *argv], stdin=stdin)
    except MultinodeError as error:
        *before, said = error.detail.strip().splitlines() or [error.message]
        raise NodeFailed(said, node=node.name, detail="\n".join(before)) from error


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or gone."""
    try:
        return psutil.Process(pid).status() in _STILL
    except psutil.NoSuchProcess:
        return True


def require(good: object, message: str, hint: str) -> None:
    """See that a value will do.

    Raises:
        UsageError: it will not.
    """
    if not good:
        raise UsageError(message, hint=hint)
