"""Take one thing of the lab away at a time, and give it back: link, port, sshd, processor, memory, disk and others.

faults.json has what was taken away, oldest first. It is written before anything is done, so that nothing is forgotten.
"""

from __future__ import annotations

import contextlib

import msgspec

from multinode.decoding import decode_json
from multinode.errors import MultinodeError, NodeFailed, UsageError
from multinode.lab.cluster import require_lab
from multinode.lab.state import STATE_DIR, Lab, is_alive, load_lab, lock_lab, save_lab, write_json
from tests.equipment.faults.fault import Scene
from tests.equipment.faults.files import DiskFull, FileMissing, FileText, Package
from tests.equipment.faults.links import Address, Interface, LinkDown, LinkSlow, Mtu, Ports, Route
from tests.equipment.faults.node import Cpu, Memory, NodeState
from tests.equipment.faults.sshd import Clock, SshdState, Variable

__all__ = [
    "Address",
    "Clock",
    "Cpu",
    "DiskFull",
    "Fault",
    "FileMissing",
    "FileText",
    "Interface",
    "LinkDown",
    "LinkSlow",
    "Memory",
    "Mtu",
    "NodeState",
    "Package",
    "Ports",
    "Route",
    "SshdState",
    "Variable",
    "add_record",
    "clear_faults",
    "list_faults",
    "make_fault",
]

Fault = (
    LinkDown
    | LinkSlow
    | Mtu
    | Ports
    | SshdState
    | NodeState
    | Cpu
    | Memory
    | DiskFull
    | Package
    | FileMissing
    | FileText
    | Variable
    | Clock
    | Interface
    | Address
    | Route
)

_FILE = STATE_DIR / "faults.json"
_CLEAR_HINT = "scripts/lab-fault clear"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that was made, or was going to be."""

    number: int  # counts up
    boot_id: str  # of the node then; one that was started anew has lost the fault together with its disk
    fault: Fault


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
        if fault in (one.fault for one in _load_records()):
            raise UsageError(f"{node.name}: this fault is in force: {fault.describe()}", hint=_CLEAR_HINT)
        if not is_alive(node.init):
            raise NodeFailed("it is down", node=node.name, hint=_CLEAR_HINT)
        fault.check(current)
        record = add_record(fault, node.boot_id)
        try:
            fault.make(_scene(current, record))
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
        for record in reversed(_load_records()):
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
    """What is in force, oldest first; nothing where no lab is up."""
    return tuple(record.fault for record in _load_records()) if load_lab() is not None else ()


def add_record(fault: Fault, boot_id: str) -> _Record:
    """Put a fault of a node with this boot id on record."""
    records = _load_records()
    record = _Record(number=max((one.number for one in records), default=0) + 1, boot_id=boot_id, fault=fault)
    _save_records((*records, record))
    return record


def _current(lab: Lab) -> Lab:
    current = require_lab()
    if [one.management_addr for one in current.nodes] != [one.management_addr for one in lab.nodes]:
        raise UsageError("the running lab is another one", hint="reload it")
    return current


def _undo(record: _Record) -> None:
    lab = require_lab()
    renewed = record.fault.undo(_scene(lab, record))
    if renewed is not None:
        nodes = tuple(renewed if node.name == renewed.name else node for node in lab.nodes)
        save_lab(msgspec.structs.replace(lab, nodes=nodes))
    _save_records(tuple(one for one in _load_records() if one.number != record.number))


def _scene(lab: Lab, record: _Record) -> Scene:
    others = tuple(
        one.fault
        for one in _load_records()
        if one.fault.node == record.fault.node and one.number != record.number and one.boot_id == record.boot_id
    )
    return Scene(lab=lab, node=lab.node(record.fault.node), number=record.number, boot_id=record.boot_id, others=others)


def _load_records() -> tuple[_Record, ...]:
    try:
        return decode_json(_FILE.read_bytes(), tuple[_Record, ...])
    except FileNotFoundError:
        return ()
    except msgspec.DecodeError as error:
        raise MultinodeError(
            f"{_FILE} cannot be read: {error}", hint="multinode lab down also ends its faults"
        ) from error


def _save_records(records: tuple[_Record, ...]) -> None:
    write_json(_FILE, records)
