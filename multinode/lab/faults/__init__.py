"""Take one thing of the lab away at a time, and give it back: link, port, sshd, processor, memory, disk and others."""

from multinode.lab.faults.files import DiskFull, FileMissing, FileText, Package
from multinode.lab.faults.links import Address, Interface, LinkDown, LinkSlow, Mtu, Ports, Route
from multinode.lab.faults.making import Fault, clear_faults, list_faults, make_fault
from multinode.lab.faults.node import Cpu, Memory, NodeState
from multinode.lab.faults.sshd import Clock, SshdState, Variable

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
    "clear_faults",
    "list_faults",
    "make_fault",
]
