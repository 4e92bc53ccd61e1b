"""NICs and ports of RDMA NICs, InfiniBand and RoCE: their state and their counters.

It also finds what slows transfers between an RDMA NIC and GPUs on its PCIe switch: access control (ACS), and an IOMMU.
Without root, the kernel shows only the beginning of a bridge's configuration, without ACS. If an IOMMU is on, its
groups still show whether ACS separated two devices when the machine started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
from collections.abc import Iterator
from typing import Optional

from ..channel import Record
from ..files import counter_paths, list_names, rdma_ports, read_number, try_read

_CLASSES = "/sys/class"
_MAX_PORTS = 64
_RATE = re.compile(r"(?P<gbit>[\d.]+) Gb/sec")
_MAX_GIDS = 256
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_PCIE_SPEED = re.compile(r"([\d.]+) GT/s")
_OLD_PCIE = 5.0
_FAULT_FIELDS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
# Documentation/ABI/stable/sysfs-class-infiniband. A port counts how often its link went down or was recovered.
_RDMA_FAULT_FIELDS = {
    "rx_errors": "port_rcv_errors",
    "tx_dropped": "port_xmit_discards",
    "symbol_errors": "symbol_error",
    "carrier_changes": "link_downed",
    "link_recoveries": "link_error_recovery",
}

Counters = dict[str, dict[str, Optional[int]]]


def list_rdma_ports(classes: str = _CLASSES) -> list[Record]:
    """One record per RDMA port; a node without RDMA NICs has none.

    Args:
        classes: directory where the kernel lists devices by class.
    """
    return [_describe(name, folder, classes) for name, folder in list(rdma_ports(classes))[:_MAX_PORTS]]


def read_nics(classes: str = _CLASSES) -> Counters:
    """Bytes and packets by interface name, or `device/port` of an RDMA port; unreadable ones are left out."""
    names = (*list_names(f"{classes}/net"), *(name for name, _ in rdma_ports(classes)))
    nics = {name: _read(name, classes) for name in names}
    return {name: counters for name, counters in nics.items() if None not in counters.values()}


def read_nic(name: str, classes: str = _CLASSES) -> dict[str, Optional[int]]:
    """Counters of one NIC with errors, drops and link changes; None if the NIC does not count something.

    Raises:
        OSError: its traffic counters cannot be read.
    """
    counters = _read(name, classes)
    if None in counters.values():
        raise OSError(f"{name} has no traffic counters")
    device, _, port = name.rpartition("/")
    if device:
        place = f"{classes}/infiniband/{device}/ports/{port}/counters"
        return {**counters, **{field: read_number(f"{place}/{file}") for field, file in _RDMA_FAULT_FIELDS.items()}}
    place = f"{classes}/net/{name}"
    faults = {field: read_number(f"{place}/statistics/{field}") for field in _FAULT_FIELDS}
    return {"carrier_changes": read_number(f"{place}/carrier_changes"), **counters, **faults}


def grown(before: Counters, after: Counters) -> Counters:
    """Increase of each NIC's counters, for NICs in both."""
    return {
        name: {field: (now or 0) - (before[name].get(field) or 0) for field, now in counters.items()}
        for name, counters in after.items()
        if name in before
    }


def added(counters: Counters, more: Counters) -> Counters:
    """Sums of the counters; a NIC that is missing in either is left out, unless `counters` is empty."""
    if not counters:
        return more
    return {
        name: {field: (count or 0) + (more[name].get(field) or 0) for field, count in fields.items()}
        for name, fields in counters.items()
        if name in more
    }


def _read(name: str, classes: str) -> dict[str, Optional[int]]:
    paths, unit = counter_paths(name, classes)
    counts = {field: read_number(path) for field, path in paths.items()}
    return {field: None if count is None else count * unit for field, count in counts.items()}


def _describe(name: str, folder: str, classes: str) -> Record:
    device, _, port = name.rpartition("/")
    state = try_read(f"{folder}/state")
    rate = _RATE.match(try_read(f"{folder}/rate") or "")
    nic = f"{classes}/infiniband/{device}"
    more = {
        "board": try_read(f"{nic}/board_id") or None,
        "firmware": try_read(f"{nic}/fw_ver") or None,
        **_find_gid(folder),
        **_read_pcie(f"{nic}/device"),
        **read_pcie_path(f"{nic}/device", f"{os.path.dirname(classes)}/bus/pci/devices"),
    }
    return {
        "device": device,
        "port": int(port),
        # `4: ACTIVE`: the number is InfiniBand's code of the word.
        "state": None if state is None else state.rpartition(":")[2].strip(),
        "link_layer": try_read(f"{folder}/link_layer"),
        "rate_gbit_per_s": float(rate["gbit"]) if rate else None,
        # Facts that not every NIC has.
        **{name: value for name, value in more.items() if value not in (None, [])},
    }


def _find_gid(folder: str) -> Record:
    """The GID for RoCE v2 and its interface: the first GID of an IPv4 address, else the first GID.

    An unused GID is all zeros, and its type cannot be read (Documentation/ABI/testing/sysfs-class-infiniband).
    """
    index_found = None
    for index in range(_MAX_GIDS):
        gid = try_read(f"{folder}/gids/{index}")
        if gid is None:
            break
        if gid.strip("0:") and try_read(f"{folder}/gid_attrs/types/{index}") == "RoCE v2":
            is_ipv4 = gid.startswith(_IPV4_MAPPED)
            index_found = index if index_found is None or is_ipv4 else index_found
            if is_ipv4:
                break
    ifname = None if index_found is None else try_read(f"{folder}/gid_attrs/ndevs/{index_found}")
    # Even if no GID is used, the first entry names the interface.
    return {"gid_index": index_found, "ifname": ifname or try_read(f"{folder}/gid_attrs/ndevs/0") or None}


def _read_pcie(folder: str) -> Record:
    """PCI address of the NIC, and the speed of its PCIe link per direction, current and maximal."""
    speeds = {name: _read_lanes(folder, name) for name in ("current", "max")}
    address = os.path.basename(os.path.realpath(folder)).lower()
    return {
        "pci": address if _PCI_ADDRESS.fullmatch(address) else None,
        "pcie_gbit_per_s": speeds["current"],
        "pcie_max_gbit_per_s": speeds["max"],
    }


def _read_lanes(folder: str, name: str) -> Optional[float]:
    # `16.0 GT/s PCIe`; older kernels omit the last word. The encoding is 8b/10b up to 5 GT/s, and 128b/130b above.
    speed = _PCIE_SPEED.match(try_read(f"{folder}/{name}_link_speed") or "")
    width = read_number(f"{folder}/{name}_link_width")
    if speed is None or not width:
        return None
    transfers = float(speed[1])
    return round(transfers * width * (0.8 if transfers <= _OLD_PCIE else 128 / 130), 1)


_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_VENDORS = ("0x10de", "0x1002")
# Displays, 3D controllers and other accelerators, by the first byte of the class (linux/pci_ids.h).
_GPU_CLASSES = ("0x03", "0x12")
# linux/pci_regs.h: offset of the extended capabilities; ACS's number, and the offset of its control word.
_CAPABILITIES_AT, _CONFIG_BYTES = 0x100, 0x1000
_ACS, _ACS_CONTROL = 0x0D, 6
_REQUESTS_REDIRECTED, _COMPLETIONS_REDIRECTED = 0x04, 0x08
_MOST_CAPABILITIES = 64
_MOST_BRIDGES = 16


def read_pcie_path(device: str, pci: str) -> Record:
    """`acs`, the bridges that redirect traffic between the device and a GPU below one switch to the CPU; and `iommu`.

    Args:
        device: the NIC's folder below /sys/devices, or a link to it.
        pci: directory where the kernel lists PCI devices.
    """
    nic = _chain(device)
    bridges: dict[str, None] = {}
    for gpu in _gpus(pci):
        other = _chain(gpu)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(nic, other)))
        between = [*nic[shared:-1], *other[shared:-1]] if shared else []
        controls = {bridge: _redirects(f"{pci}/{bridge}") for bridge in between}
        bridges.update(dict.fromkeys(bridge for bridge, redirects in controls.items() if redirects))
        groups = {_group(device), _group(gpu)}
        if None in controls.values() and None not in groups and len(groups) > 1:
            bridges.update(dict.fromkeys(between))
    return {"acs": list(bridges)[:_MOST_BRIDGES], "iommu": _translator(device)}


def _chain(folder: str) -> list[str]:
    """Addresses of the devices from the root port down to this one."""
    _, _, below = os.path.realpath(folder).partition("/pci")
    return below.split("/")[1:]


def _gpus(pci: str) -> Iterator[str]:
    for name in list_names(pci):
        vendor, kind = (try_read(f"{pci}/{name}/{file}") or "" for file in ("vendor", "class"))
        if vendor in _GPU_VENDORS and kind.startswith(_GPU_CLASSES):
            yield f"{pci}/{name}"


def _redirects(bridge: str) -> Optional[bool]:
    """Whether the bridge's ACS redirects peer-to-peer traffic; None if that cannot be read."""
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
    """The IOMMU that translates the device's DMA addresses, as `dmar1`; None if there is none, or it passes through."""
    kind = try_read(f"{device}/iommu_group/type") or ""
    if not kind.startswith("DMA"):
        return None
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"{device}/iommu"))
    return None
