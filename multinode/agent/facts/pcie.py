"""What stands between an RDMA card and the GPUs on its PCIe switch: access control (ACS), and an IOMMU.

Read as far as the kernel lets: of a bridge's configuration who may not administer the machine sees the beginning alone,
without ACS. Where an IOMMU is on, its groups tell that ACS kept two devices apart when the machine started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterator
from typing import Optional

from ..channel import Record
from ..kernel_files import list_names, try_read

_GPU_VENDORS = ("0x10de", "0x1002")
# Displays, 3D controllers and other accelerators, by the first byte of the class (linux/pci_ids.h).
_GPU_CLASSES = ("0x03", "0x12")
# linux/pci_regs.h: extended capabilities begin there, and one of this kind has its control word there.
_CAPABILITIES_AT, _CONFIG_BYTES = 0x100, 0x1000
_ACS, _ACS_CONTROL = 0x0D, 6
_REQUESTS_REDIRECTED, _COMPLETIONS_REDIRECTED = 0x04, 0x08
_MOST_CAPABILITIES = 64
_MOST_BRIDGES = 16


def read_pcie_path(device: str, pci: str) -> Record:
    """`acs`, the bridges that send up to the CPU what the device and a GPU below one switch exchange; and `iommu`.

    Args:
        device: the card's folder below /sys/devices, or a link to it.
        pci: where the kernel lists the PCI devices.
    """
    card = _chain(device)
    bridges: dict[str, None] = {}
    for gpu in _gpus(pci):
        other = _chain(gpu)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(card, other)))
        between = [*card[shared:-1], *other[shared:-1]] if shared else []
        controls = {bridge: _redirects(f"{pci}/{bridge}") for bridge in between}
        bridges.update(dict.fromkeys(bridge for bridge, redirects in controls.items() if redirects))
        groups = {_group(device), _group(gpu)}
        if None in controls.values() and None not in groups and len(groups) > 1:
            bridges.update(dict.fromkeys(between))
    return {"acs": list(bridges)[:_MOST_BRIDGES], "iommu": _translator(device)}


def _chain(folder: str) -> list[str]:
    """The devices from the root port down to this one: `pci0000:80/0000:80:01.0/...` without its beginning."""
    _, _, below = os.path.realpath(folder).partition("/pci")
    return below.split("/")[1:]


def _gpus(pci: str) -> Iterator[str]:
    for name in list_names(pci):
        vendor, kind = (try_read(f"{pci}/{name}/{file}") or "" for file in ("vendor", "class"))
        if vendor in _GPU_VENDORS and kind.startswith(_GPU_CLASSES):
            yield f"{pci}/{name}"


def _redirects(bridge: str) -> Optional[bool]:
    """Whether its ACS redirects; None where that cannot be read."""
    try:
        with open(f"{bridge}/config", "rb") as file:
            config = file.read(_CONFIG_BYTES)
    except OSError:
        return None
    if len(config) < _CONFIG_BYTES:
        return None
    at = _CAPABILITIES_AT
    for _ in range(_MOST_CAPABILITIES):
        if not _CAPABILITIES_AT <= at <= _CONFIG_BYTES - 8:
            break
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + _ACS_CONTROL)
            return bool(control & (_REQUESTS_REDIRECTED | _COMPLETIONS_REDIRECTED))
        at = head >> 20
    return False


def _group(device: str) -> Optional[str]:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"{device}/iommu_group"))
    return None


def _translator(device: str) -> Optional[str]:
    """The IOMMU that translates the addresses of what the device sends, `dmar1`; None of none, or one that does not."""
    kind = try_read(f"{device}/iommu_group/type") or ""
    if not kind.startswith("DMA"):
        return None
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"{device}/iommu"))
    return None
