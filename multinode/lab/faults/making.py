"""Make faults, list them, clear them: the order of things and the record. What each kind does is in effects."""

from __future__ import annotations

import contextlib

from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import require_lab
from multinode.lab.faults.effects import effect_of
from multinode.lab.faults.kinds import Fault
from multinode.lab.faults.records import Record, add_record, load_records, remove_record
from multinode.lab.faults.scene import Scene
from multinode.lab.processes import is_alive
from multinode.lab.spec import Lab
from multinode.lab.state import load_lab, lock_lab, save_lab

__all__ = ["clear_faults", "list_faults", "make_fault"]

_CLEAR_HINT = "multinode lab fault clear"


def make_fault(lab: Lab, fault: Fault) -> None:
    """Take something away from a node, until it is cleared. What cannot be done is taken back.

    Args:
        lab: the one that stands, as the caller knows it; sshd may have been started anew since.
        fault: what to take from whom.

    Raises:
        UsageError: there is no such node or peer, the fault is in force already, or it cannot be here.
        NodeFailed, MultinodeError: it could not be done.
    """
    with lock_lab():
        current = _current(lab)
        node = current.node(fault.node)
        if fault in (one.fault for one in load_records()):
            raise UsageError(f"{node.name}: this fault is in force: {fault.describe()}", hint=_CLEAR_HINT)
        if not is_alive(node.init):
            raise NodeFailed("it is down", node=node.name, hint=_CLEAR_HINT)
        effect = effect_of(fault)
        effect.check(current, fault)
        record = add_record(fault, node.boot_id)
        try:
            effect.make(_scene(current, record), fault)
        except BaseException:
            # What cannot be undone now stays on record, for `clear`.
            with contextlib.suppress(MultinodeError):
                _undo(record)
            raise


def clear_faults(lab: Lab, node: str | None = None) -> tuple[Fault, ...]:
    """Give back what was taken from a node, or from all of them; returns what it was, newest first.

    Raises:
        UsageError: there is no such node.
        NodeFailed, MultinodeError: some could not be given back, and stay on record; the first of them.
    """
    with lock_lab():
        current = _current(lab)
        names = {one.name for one in current.nodes} if node is None else {current.node(node).name}
        cleared: list[Fault] = []
        failures: list[MultinodeError] = []
        for record in reversed(load_records()):
            if record.fault.node in names:
                try:
                    _undo(record)
                except MultinodeError as error:
                    failures.append(error)
                else:
                    cleared.append(record.fault)
        if failures:
            raise failures[0]
        return tuple(cleared)


def list_faults() -> tuple[Fault, ...]:
    """What is in force, oldest first; nothing where no lab stands."""
    return tuple(record.fault for record in load_records()) if load_lab() is not None else ()


def _current(lab: Lab) -> Lab:
    current = require_lab()
    if [one.management_addr for one in current.nodes] != [one.management_addr for one in lab.nodes]:
        raise UsageError("another lab stands than the one that was meant", hint="load it anew")
    return current


def _undo(record: Record) -> None:
    lab = require_lab()
    renewed = effect_of(record.fault).undo(_scene(lab, record), record.fault)
    if renewed is not None:
        save_lab(lab.with_node(renewed))
    remove_record(record)


def _scene(lab: Lab, record: Record) -> Scene:
    others = tuple(
        one.fault
        for one in load_records()
        if one.fault.node == record.fault.node and one.number != record.number and one.boot_id == record.boot_id
    )
    return Scene(lab=lab, node=lab.node(record.fault.node), record=record, others=others)
