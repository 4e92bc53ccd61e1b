from __future__ import annotations

import os
from pathlib import Path

from multinode.agent.facts.kernel_log import KernelLog

XID = "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(message: str) -> bytes:
    """As /dev/kmsg has it: priority, number, time and flags; the message; then pairs."""
    return f"4,1234,5678901,-;{message}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:65:00\n".encode()


def test_lines_about_hardware_are_kept_and_others_are_not(tmp_path: Path) -> None:
    # A pipe of packets gives one record a read, as the device does.
    reading, writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    log = KernelLog(f"/proc/self/fd/{reading}")
    # A pipe cannot be moved to its end, which the device can.
    log._fd = os.dup(reading)  # noqa: SLF001 - likewise
    for message in ("usb 1-1: new high-speed device", XID, "EXT4-fs (sda1): Remounting filesystem read-only"):
        os.write(writing, record(message))
    assert [one["message"] for one in log.read()] == [XID, "EXT4-fs (sda1): Remounting filesystem read-only"]
    assert log.read() == []
    for _ in range(110):
        os.write(writing, record(XID + "x" * 1000))
        found = log.read()
        assert all(len(one["message"]) <= 300 for one in found)
    assert found == [], "a log without end is cut off"
    log.close()
    os.close(reading)
    os.close(writing)
    assert KernelLog(str(tmp_path / "none")).read() == []
