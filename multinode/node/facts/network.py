"""Network interfaces of this node, the highest speed of each, the routes to the peers, and TCP sockets.

Sends no packets, and changes no settings. The kernel is asked for routes, as `ip route get` does (rtnetlink(7)), since
only the kernel knows which routing table it uses on nodes with several networks or VRFs.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..files import TABLE_CHARACTERS, read_number, read_text, try_read, user_name
from ..processes import command_of, list_pids
from ..programs import Query, QueryFailed, find_program
from .unknown import Unknown

_IP_DEADLINE_S = 5.0
_SBIN = ("/usr/sbin", "/sbin")
_MBIT_PER_GBIT = 1000
_UNKNOWN_MBIT = 1 << 31

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_SIOCGIFNETMASK = 0x891B
_IFREQ_BYTES = 40
_MAX_ADDRESSES = 1024
_IFF_UP = 1
# Fields of /proc/net/if_inet6 (linux/if_addr.h, net/ipv6.h). The flags are temporary, dadfailed, deprecated, tentative.
_SCOPE_GLOBAL = 0
_PASSING_FLAGS = 0x01 | 0x08 | 0x20 | 0x40
_IFF_RUNNING = 0x40
_IFREQ_FLAGS = "16sH22x"

# Requests for a NIC's link modes (linux/ethtool.h).
_SIOCETHTOOL = 0x8946
_GSET = 0x01
_GLINKSETTINGS = 0x4C
# struct ethtool_link_settings, and room for its three masks of at most 127 words each.
_SETTINGS = "II7Bb4B28x"
_SETTINGS_BYTES = struct.calcsize(_SETTINGS)
_WORDS_AT = 9
_MOST_WORDS = 127
_WORD_BYTES = 4
_IFREQ_POINTER = "16sP16x"

# Bits of the link modes by Mbit/s (enum ethtool_link_mode_bit_indices). Modes of 20 and 56 Gbit/s are left out: they
# need backplanes, or NICs and switches of one vendor, so a NIC that runs slower is not held back.
_MODES_MBIT = {
    10: (0, 1, 92),
    100: (2, 3, 67, 90, 91),
    1_000: (4, 5, 17, 41, 68),
    2_500: (15, 47),
    5_000: (48,),
    10_000: (12, 18, 19, 20, *range(42, 47)),
    25_000: (31, 32, 33),
    40_000: tuple(range(23, 27)),
    50_000: (34, 35, 40, *range(52, 57)),
    100_000: (*range(36, 40), *range(57, 62), *range(75, 80)),
    200_000: (*range(62, 67), *range(80, 85)),
    400_000: (*range(69, 74), *range(85, 90)),
}

# ARPHRD numbers in /sys/class/net/X/type (linux/if_arp.h).
_HARDWARE_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}
# Names in `ip -details` and DEVTYPE of devices that end in software. veth, bond, vlan and macvlan forward Ethernet to
# another device, and count as Ethernet.
_BRIDGES = {"bridge", "openvswitch"}
_NIC_TYPES = {"", "wlan", "wwan"}
_TUNNELS = {"tun", "tap", "wireguard", "dummy", "vxlan", "geneve", "gre", "gretap", "ipip", "sit", "ifb", "vrf"}


def list_interfaces() -> list[Record]:
    """All interfaces in the kernel's order; the fields are those of the fact `interfaces`."""
    program = find_program("ip", os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN)))
    if program is not None:
        # BusyBox's ip lacks -json, and an old ip prints broken JSON: then ask the kernel.
        with contextlib.suppress(QueryFailed, ValueError, KeyError):
            return parse_ip_addr(
                Query([program, "-details", "-json", "address", "show"], deadline_s=_IP_DEADLINE_S).answer()
            )
    return read_interfaces_by_ioctl()


def parse_ip_addr(text: str) -> list[Record]:
    """Interfaces in the output of `ip -details -json address show`."""
    return [
        _describe(
            link["ifname"],
            [f"{item['local']}/{item['prefixlen']}" for item in link["addr_info"] if _is_usable(item)],
            link.get("linkinfo", {}).get("info_kind"),
        )
        # Some versions print an empty object for an interface that they filter out.
        for link in json.loads(text)
        if link
    ]


def _is_usable(item: Record) -> bool:
    """Whether an address is IPv4, or a global IPv6 address that is not temporary (RFC 8981), deprecated, tentative."""
    if item["family"] == "inet":
        return True
    passing = any(item.get(flag) for flag in ("temporary", "deprecated", "tentative", "dadfailed"))
    return item["family"] == "inet6" and item.get("scope") == "global" and not passing


def read_interfaces_by_ioctl() -> list[Record]:
    """All interfaces, as the kernel lists them (netdevice(7), proc(5)), for nodes without iproute2."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for label, address in _list_addresses(query):
            mask = fcntl.ioctl(query, _SIOCGIFNETMASK, struct.pack("40s", os.fsencode(label)))
            # A second address may have its own label, as eth0:1.
            addresses.setdefault(label.split(":")[0], []).append(f"{address}/{prefix_length(mask[20:24])}")
    for name, address in parse_if_inet6(try_read("/proc/net/if_inet6") or ""):
        addresses.setdefault(name, []).append(address)
    return [_describe(name, address, None) for name, address in addresses.items()]


def parse_if_inet6(text: str) -> list[tuple[str, str]]:
    """Interface, and address with prefix length, of each usable address in /proc/net/if_inet6."""
    rows = [line.split() for line in text.splitlines()]
    return [
        (row[5], f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))}/{int(row[2], 16)}")
        for row in rows
        if len(row) > 5 and int(row[3], 16) == _SCOPE_GLOBAL and not int(row[4], 16) & _PASSING_FLAGS  # noqa: PLR2004
    ]


def parse_speed(text: Optional[str]) -> Optional[float]:
    """Gbit/s from the Mbit/s of /sys/class/net/X/speed; None without a link, which is -1, or 4294967295 if old."""
    speed_mbit = int(text or "-1")
    return speed_mbit / _MBIT_PER_GBIT if 0 < speed_mbit < _UNKNOWN_MBIT else None


def read_nic_speed(ifname: str) -> Optional[float]:
    """Gbit/s of the NIC's fastest mode; None if its driver reports none, as in virtual machines."""
    try:
        return fastest_mode(_read_modes(ifname))
    except OSError:
        return None


def fastest_mode(supported: bytes) -> Optional[float]:
    """Gbit/s of the fastest mode in a little-endian mask of link modes; None if it has no known mode."""
    mask = int.from_bytes(supported, "little")
    speeds = [speed for speed, bits in _MODES_MBIT.items() if any(mask >> bit & 1 for bit in bits)]
    return max(speeds) / _MBIT_PER_GBIT if speeds else None


def prefix_length(mask: bytes) -> int:
    """24 for the four bytes of 255.255.255.0."""
    return bin(int.from_bytes(mask, "big")).count("1")


def read_port_range() -> tuple[int, int]:
    """First and last ephemeral port."""
    first, last = read_text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return int(first), int(last)


def _read_modes(ifname: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            words = -_words(_ask(query, ifname, _settings(0)))
            answer = _ask(query, ifname, _settings(words))
            return _little(answer[_SETTINGS_BYTES : _SETTINGS_BYTES + words * _WORD_BYTES])
        except OSError:
            # Kernels before 4.6 only have the older request, whose answer has 32 bits in its second word.
            answer = _ask(query, ifname, struct.pack("I40x", _GSET))
            return _little(answer[_WORD_BYTES : 2 * _WORD_BYTES])


def _settings(words: int) -> bytes:
    # Asked for 0 words, the kernel answers with the negative number of words; asked for that number, with the masks.
    fields = [0] * 14
    fields[0], fields[_WORDS_AT] = _GLINKSETTINGS, words
    return struct.pack(_SETTINGS, *fields) + bytes(3 * _MOST_WORDS * _WORD_BYTES)


def _words(answer: bytes) -> int:
    words: int = struct.unpack(_SETTINGS, answer[:_SETTINGS_BYTES])[_WORDS_AT]
    return words


def _ask(query: socket.socket, ifname: str, question: bytes) -> bytes:
    buffer = array.array("B", question)
    fcntl.ioctl(query, _SIOCETHTOOL, struct.pack(_IFREQ_POINTER, os.fsencode(ifname), buffer.buffer_info()[0]))
    return buffer.tobytes()


def _little(words: bytes) -> bytes:
    return struct.pack(f"<{len(words) // _WORD_BYTES}I", *struct.unpack(f"={len(words) // _WORD_BYTES}I", words))


def _list_addresses(query: socket.socket) -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    address, size = buffer.buffer_info()
    answer = fcntl.ioctl(query, _SIOCGIFCONF, struct.pack("iL", size, address))
    used = struct.unpack("iL", answer)[0]
    data = buffer.tobytes()
    return [
        (os.fsdecode(data[at : at + 16].split(b"\0", 1)[0]), socket.inet_ntoa(data[at + 20 : at + 24]))
        for at in range(0, used, _IFREQ_BYTES)
    ]


def _describe(name: str, addresses: list[str], info_kind: Optional[str]) -> Record:
    folder = f"/sys/class/net/{name}"
    flags = _read_flags(name)
    driver = _find_driver(folder, info_kind)
    duplex = try_read(f"{folder}/duplex")
    return {
        "name": name,
        "addresses": addresses,
        "up": bool((flags or 0) & _IFF_UP) and try_read(f"{folder}/operstate") in ("up", "unknown"),
        "mtu": read_number(f"{folder}/mtu"),
        "speed_gbit_per_s": parse_speed(try_read(f"{folder}/speed")),
        "kind": _find_kind(folder, driver),
        "driver": driver,
        "running": None if flags is None else bool(flags & _IFF_RUNNING),
        "duplex": duplex if duplex in ("full", "half") else None,
        "nic_gbit_per_s": read_nic_speed(name) if os.path.exists(f"{folder}/device") else None,
        "errors": _count(folder, "errors"),
        "packets": _count(folder, "packets"),
    }


def _read_flags(name: str) -> Optional[int]:
    # The file `flags` below /sys lacks flags that the kernel computes on request, such as RUNNING.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            answer = fcntl.ioctl(query, _SIOCGIFFLAGS, struct.pack(_IFREQ_FLAGS, os.fsencode(name), 0))
    except OSError:
        return None
    flags: int = struct.unpack(_IFREQ_FLAGS, answer)[1]
    return flags


def _find_driver(folder: str, info_kind: Optional[str]) -> Optional[str]:
    if info_kind:
        return info_kind
    for mark, driver in (("tun_flags", "tun"), ("bonding", "bond"), ("bridge", "bridge")):
        if os.path.exists(f"{folder}/{mark}"):
            return driver
    device = dict(line.split("=", 1) for line in (try_read(f"{folder}/uevent") or "").splitlines() if "=" in line)
    kind = device.get("DEVTYPE", "")
    return None if kind in _NIC_TYPES else kind


def _find_kind(folder: str, driver: Optional[str]) -> str:
    if driver in _BRIDGES:
        return "bridge"
    if driver in _TUNNELS:
        return "virtual"
    if any(os.path.exists(f"{folder}/{mark}") for mark in ("wireless", "phy80211")):
        return "wireless"
    return _HARDWARE_KINDS.get(read_number(f"{folder}/type") or 0, "virtual")


def _count(folder: str, counter: str) -> Optional[int]:
    both = [read_number(f"{folder}/statistics/{way}_{counter}") for way in ("rx", "tx")]
    return None if None in both else sum(filter(None, both))


_DISCARD_PORT = 9
_ANSWER_S = 2.0
_ANSWER_BYTES = 1 << 16
# linux/netlink.h, linux/rtnetlink.h.
_RTM_GETROUTE, _RTM_NEWROUTE = 26, 24
_NLM_F_REQUEST = 1
_RTA_DST, _RTA_OIF = 1, 4
_MESSAGE, _ROUTE, _ATTRIBUTE, _NUMBER = (struct.Struct(form) for form in ("=IHHII", "=8BI", "=HH", "=I"))
_ALIGNED = 4


def address_family(address: str) -> socket.AddressFamily:
    """The family of an IP address in text form."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def find_routes(peers: list[str], interfaces: list[Record]) -> list[Record]:
    """The kernel's source address and outgoing interface for each peer."""
    owners = {address.split("/")[0]: link["name"] for link in interfaces for address in link["addresses"]}
    return [_find_route(peer, owners) for peer in peers]


def _find_route(peer: str, owners: dict[str, str]) -> Record:
    family = address_family(peer)
    try:
        # The controller resolves names: a resolver may take longer than the whole probe.
        packed = socket.inet_pton(family, peer)
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((peer, _DISCARD_PORT))
            source = datagrams.getsockname()[0]
    except OSError as error:
        return {"peer": peer, "source": Unknown(error.strerror or "not an IP address")}
    # A route may set a source that is not an address of its outgoing NIC. A node needs no route to itself.
    sender = None if source == peer else sending_interface(family, packed)
    return {"peer": peer, "source": source, "ifname": owners.get(source) if sender is None else sender}


def sending_interface(family: int, packed: bytes) -> Optional[str]:
    """The interface over which the kernel would send to an address; None if unknown."""
    destination = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _RTA_DST) + packed
    route = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0) + destination
    request = _MESSAGE.pack(_MESSAGE.size + len(route), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + route
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_ANSWER_S)
            kernel.sendto(request, (0, 0))
            return _interface_of(kernel.recv(_ANSWER_BYTES))
    except (OSError, struct.error):
        # A sandbox may forbid netlink sockets.
        return None


def _interface_of(answer: bytes) -> Optional[str]:
    length, kind, _, _, _ = _MESSAGE.unpack_from(answer)
    if kind != _RTM_NEWROUTE:
        return None
    at = _MESSAGE.size + _ROUTE.size
    while at + _ATTRIBUTE.size <= length:
        size, name = _ATTRIBUTE.unpack_from(answer, at)
        if name == _RTA_OIF:
            return socket.if_indextoname(_NUMBER.unpack_from(answer, at + _ATTRIBUTE.size)[0])
        at += max(_ATTRIBUTE.size, (size + _ALIGNED - 1) // _ALIGNED * _ALIGNED)
    return None


# States by their numbers in the kernel's table.
CONNECTED = {"01": "established", "02": "connecting", "03": "connecting"}
LISTENING = {"0A": "listening"}

_MOST_LISTED = 32
_MOST_FILES = 4096
_SOCKET = "socket:["


class Row(NamedTuple):
    """One socket of the kernel's table."""

    state: str
    port: int
    peer: str  # `10.0.0.2:29500`
    send_queue_bytes: int  # not sent, or not acknowledged
    receive_queue_bytes: int  # received, and not read by the process
    uid: int
    inode: int  # identifies the socket among the descriptors of processes


def is_port_taken(port: int) -> bool:
    """Whether a rendezvous could not bind the port now on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Torch's store sets this option, too: closed connections in TIME_WAIT do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound for a moment, and never listened on
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def listens(port: int, pids: Collection[int]) -> bool:
    """Whether one of these processes listens on the port."""
    tables = [parse_table(try_read(f"/proc/net/{name}", TABLE_CHARACTERS) or "", LISTENING) for name in ("tcp6", "tcp")]
    wanted = {row.inode for rows in tables for row in rows if row.port == port}
    return bool(wanted) and any(wanted & _socket_inodes(pid) for pid in pids)


def find_port_users(ports: Collection[int]) -> dict[int, str]:
    """Who listens on each port: `python3 (pid 123, user alice)`; for another user's process, only the user."""
    # Both tables may have a row of a port; the listener on IPv4 wins.
    tables = [parse_table(try_read(f"/proc/net/{name}", TABLE_CHARACTERS) or "", LISTENING) for name in ("tcp6", "tcp")]
    listeners = {row.port: row for rows in tables for row in rows if row.port in ports}
    wanted = {row.inode for row in listeners.values()}
    pids: dict[int, int] = {}
    for pid in sorted(list_pids()) if wanted else ():
        for inode in wanted & _socket_inodes(pid):
            pids.setdefault(inode, pid)
    return {port: _describe_user(listeners.get(port), pids) for port in ports}


def describe_connections(pid: int) -> Record:
    """Counts of a process's connections, and those with the longest queues."""
    # This raises for another user's process, which would otherwise seem to have no connections.
    os.listdir(f"/proc/{pid}/fd")
    inodes = _socket_inodes(pid)
    # A kernel without IPv6 has only one table.
    tables = [try_read(f"/proc/{pid}/net/{name}", TABLE_CHARACTERS) or "" for name in ("tcp", "tcp6")]
    rows = [row for table in tables for row in parse_table(table, CONNECTED) if row.inode in inodes]
    rows.sort(key=lambda row: (row.state == "established", -row.send_queue_bytes - row.receive_queue_bytes))
    listed = ("state", "peer", "send_queue_bytes", "receive_queue_bytes")
    return {
        "established": sum(row.state == "established" for row in rows),
        "connecting": sum(row.state == "connecting" for row in rows),
        "listed": [{name: getattr(row, name) for name in listed} for row in rows[:_MOST_LISTED]],
    }


def parse_table(text: str, states: dict[str, str]) -> Iterator[Row]:
    """Rows of /proc/net/tcp or tcp6 in one of these states; an incomplete last line is skipped."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 10 and fields[3] in states:  # noqa: PLR2004 - up to the inode
            sent, _, received = fields[4].partition(":")
            port = int(fields[1].rpartition(":")[2], 16)
            queues = int(sent, 16), int(received, 16)
            yield Row(states[fields[3]], port, _address(fields[2]), *queues, int(fields[7]), int(fields[9]))


def _socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds; empty if the process is gone or another user's."""
    inodes = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder)[:_MOST_FILES]:
            # A descriptor may be closed meanwhile.
            with contextlib.suppress(OSError):
                link = os.readlink(os.path.join(folder, name))
                if link.startswith(_SOCKET):
                    inodes.add(int(link[len(_SOCKET) : -1]))
    return inodes


def _address(text: str) -> str:
    """`10.0.0.2:29000` of `0200000A:7148`: each 32-bit word of the address is in the machine's byte order."""
    words, _, port = text.partition(":")
    order = "<" if sys.byteorder == "little" else ">"
    packed = b"".join(struct.pack(f"{order}I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    if len(packed) == 4 or mapped:  # noqa: PLR2004 - the bytes of an IPv4 address
        return f"{socket.inet_ntop(socket.AF_INET, packed[-4:])}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"


def _describe_user(listener: Optional[Row], pids: dict[int, int]) -> str:
    if listener is None:
        return "a process that cannot be seen"
    user = user_name(listener.uid)
    pid = pids.get(listener.inode)
    if pid is None:
        return f"a process of user {user}"
    return f"{command_of(pid) or 'a process'} (pid {pid}, user {user})"
