"""ACS and IOMMU, from trees that stand in for /sys: a switch with a NIC and a GPU below it, as Linux shows them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from multinode.node.facts.nics import list_rdma_ports

ROOT, UP = "0000:80:01.0", "0000:81:00.0"
OF_NIC, OF_GPU = "0000:82:04.0", "0000:82:08.0"
NIC, GPU = "0000:83:00.0", "0000:84:00.0"
# ACSCtl of lspci: SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, and SrcValid+ alone.
ALL, VALID = 0x1D, 0x01


def config(acs: int | None, size: int = 4096) -> bytes:
    """A bridge's configuration space: an error-reporting capability first, then ACS, if any."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | (0x148 << 20 if acs is not None else 0))
    if acs is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x1F, acs)
    return bytes(space[:size])


class Machine:
    """A tree for /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def device(self, *chain: str, config: bytes = b"", vendor: str = "0x8086", kind: str = "0x060400") -> Path:
        folder = self.root / "devices/pci0000:80" / Path(*chain)
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / "bus/pci/devices" / chain[-1]).symlink_to(folder)
        (folder / "config").write_bytes(config)
        for name, text in (("vendor", vendor), ("class", kind)):
            (folder / name).write_text(f"{text}\n")
        return folder

    def switch(self, acs: int | None, size: int = 4096) -> None:
        """The root port, the switch, and its ports."""
        self.device(ROOT, config=config(ALL, size))
        self.device(ROOT, UP, config=config(None, size))
        for port in (OF_NIC, OF_GPU):
            self.device(ROOT, UP, port, config=config(acs, size))

    def nic(self, *chain: str) -> Path:
        folder = self.device(*chain, vendor="0x15b3", kind="0x020700")
        port = self.root / "class/infiniband/mlx5_0"
        (port / "ports/1").mkdir(parents=True)
        (port / "device").symlink_to(folder)
        return folder

    def gpu(self, *chain: str) -> Path:
        return self.device(*chain, vendor="0x10de", kind="0x030200")

    def group(self, folder: Path, number: int, kind: str, unit: str = "dmar1") -> None:
        group = self.root / f"kernel/iommu_groups/{number}"
        group.mkdir(parents=True, exist_ok=True)
        (group / "type").write_text(f"{kind}\n")
        (folder / "iommu_group").symlink_to(group)
        (self.root / "devices/virtual/iommu" / unit).mkdir(parents=True, exist_ok=True)
        (folder / "iommu").symlink_to(self.root / "devices/virtual/iommu" / unit)

    def told(self) -> tuple[list[str], str | None]:
        (port,) = list_rdma_ports(str(self.root / "class"))
        return port.get("acs", []), port.get("iommu")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def below_one_switch(machine: Machine, acs: int | None, size: int = 4096) -> tuple[Path, Path]:
    machine.switch(acs, size)
    return machine.nic(ROOT, UP, OF_NIC, NIC), machine.gpu(ROOT, UP, OF_GPU, GPU)


@pytest.mark.parametrize(("acs", "named"), [(ALL, [OF_NIC, OF_GPU]), (VALID, []), (0, []), (None, [])])
def test_ports_of_the_switch_that_redirect_are_named(machine: Machine, acs: int | None, named: list[str]) -> None:
    below_one_switch(machine, acs)
    assert machine.told() == (named, None)


def test_a_gpu_behind_another_root_port_is_reached_through_the_cpu_anyway(machine: Machine) -> None:
    machine.switch(ALL)
    machine.nic(ROOT, UP, OF_NIC, NIC)
    machine.device("0000:80:03.0", config=config(ALL))
    machine.gpu("0000:80:03.0", "0000:90:00.0")
    # A sound function of a GPU is none.
    machine.device(ROOT, UP, OF_GPU, "0000:84:00.1", vendor="0x10de", kind="0x040300")
    assert machine.told() == ([], None)


@pytest.mark.parametrize(("groups", "named"), [((40, 41), [OF_NIC, OF_GPU]), ((40, 40), [])])
def test_without_root_the_groups_of_an_iommu_tell_it(
    machine: Machine, groups: tuple[int, int], named: list[str]
) -> None:
    """Who may not administer the machine reads 64 bytes of a configuration."""
    for folder, number in zip(below_one_switch(machine, ALL, 64), groups, strict=True):
        machine.group(folder, number, "DMA-FQ")
    assert machine.told() == (named, "dmar1")


def test_where_neither_can_be_read_nothing_is_told(machine: Machine) -> None:
    below_one_switch(machine, ALL, 64)
    assert machine.told() == ([], None)


def test_what_was_switched_off_after_the_start_is_believed_before_the_groups(machine: Machine) -> None:
    for folder, number in zip(below_one_switch(machine, 0), (40, 41), strict=True):
        machine.group(folder, number, "identity")
    assert machine.told() == ([], None)


def test_a_configuration_that_leads_in_a_circle_ends(machine: Machine) -> None:
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)
    machine.device(ROOT, config=b"")
    machine.device(ROOT, UP, config=bytes(space))
    machine.device(ROOT, UP, OF_NIC, config=bytes(space))
    machine.device(ROOT, UP, OF_GPU, config=bytes(space))
    machine.nic(ROOT, UP, OF_NIC, NIC)
    machine.gpu(ROOT, UP, OF_GPU, GPU)
    assert machine.told() == ([], None)
