"""Which functions make and undo which kind of fault. Undoing what was never made, or is undone, does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from multinode.lab.faults import clock, files, groups, kinds, links, power, sshd
from multinode.lab.faults.kinds import Fault
from multinode.lab.faults.scene import Scene
from multinode.lab.spec import Lab, LabNode

__all__ = ["Effect", "effect_of"]


def _nothing_to_check(lab: Lab, fault: Fault) -> None:
    del lab, fault


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of fault does. The functions take the fault as the kind that stands beside them in the table.

    Attributes:
        make: takes it away.
        undo: gives it back; returns the node where that renewed its processes.
        check: raises UsageError where it cannot be; called before anything is on record.
    """

    make: Callable[[Scene, Any], None]
    undo: Callable[[Scene, Any], LabNode | None]
    check: Callable[[Lab, Any], None] = _nothing_to_check


_CONFIGURED = Effect(make=sshd.configure, undo=sshd.deconfigure)
_LIMIT = Effect(make=groups.limit, undo=groups.unlimit, check=groups.check)

_EFFECTS: dict[type, Effect] = {
    kinds.LinkDown: Effect(make=links.pull, undo=links.plug),
    kinds.LinkSlow: Effect(make=links.slow, undo=links.unslow),
    kinds.Mtu: Effect(make=links.enlarge, undo=links.unenlarge),
    kinds.Ports: Effect(make=links.close_ports, undo=links.open_ports),
    kinds.Interface: Effect(make=links.add_interface, undo=links.remove_interface, check=links.check_interface),
    kinds.Address: Effect(make=links.add_card, undo=links.remove_interface, check=links.check_interface),
    kinds.Route: Effect(make=links.divert, undo=links.undivert, check=links.check_route),
    kinds.SshdState: Effect(make=sshd.disturb, undo=sshd.mend),
    kinds.Variable: _CONFIGURED,
    kinds.Clock: Effect(make=sshd.configure, undo=sshd.deconfigure, check=clock.check_clock),
    kinds.NodeState: Effect(make=power.take, undo=power.give),
    kinds.Cpu: _LIMIT,
    kinds.Memory: _LIMIT,
    kinds.DiskFull: Effect(make=files.fill_disk, undo=files.free_disk),
    kinds.Package: Effect(make=files.set_version, undo=files.restore_version, check=files.check_package),
    kinds.FileMissing: Effect(make=files.hide, undo=files.restore),
    kinds.FileText: Effect(make=files.write, undo=files.restore),
}


def effect_of(fault: Fault) -> Effect:
    """What this fault does."""
    return _EFFECTS[type(fault)]
