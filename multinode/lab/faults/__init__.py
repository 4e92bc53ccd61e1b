"""Take one thing of the lab away at a time, and give it back: link, port, sshd, disk, file, clock and others."""

from multinode.lab.faults.kinds import (
    Address,
    Clock,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    NodeState,
    Package,
    Ports,
    Route,
    SshdState,
    Variable,
)
from multinode.lab.faults.making import clear_faults, list_faults, make_fault

__all__ = [
    "Address",
    "Clock",
    "DiskFull",
    "Fault",
    "FileMissing",
    "FileText",
    "Interface",
    "LinkDown",
    "LinkSlow",
    "Mtu",
    "NodeState",
    "Package",
    "Ports",
    "Route",
    "SshdState",
    "Variable",
    "clear_faults",
    "list_faults",
    "make_fault",
]
