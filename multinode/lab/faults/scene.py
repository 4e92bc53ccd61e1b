"""Scene: what an effect is given to work on; and the ways into a node that effects share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.errors import MultinodeError, NodeFailed
from multinode.lab.cluster import ns_command
from multinode.lab.faults.kinds import Fault
from multinode.lab.faults.records import Record
from multinode.lab.processes import is_alive
from multinode.lab.programs import run_program
from multinode.lab.spec import Lab, LabNode

__all__ = ["Scene", "run_in_node"]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and where it happens.

    Attributes:
        node: the one that the fault is taken from.
        others: what else is in force on this node since it was started, oldest first.
    """

    lab: Lab
    node: LabNode
    record: Record
    others: tuple[Fault, ...]

    @property
    def is_same_boot(self) -> bool:
        """Whether the node still runs that had the fault: what is on its disk is lost when it is started anew."""
        return is_alive(self.node.init) and self.node.boot_id == self.record.boot_id


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
