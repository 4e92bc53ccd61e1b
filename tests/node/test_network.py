from __future__ import annotations

from pathlib import Path

import pytest

from multinode.node.facts.network import (
    fastest_mode,
    list_interfaces,
    parse_if_inet6,
    parse_ip_addr,
    parse_speed,
    prefix_length,
    read_interfaces_by_ioctl,
    read_nic_speed,
    read_port_range,
)

# iproute2 6.1.0, Debian 12: `ip -details -json address show`, of each link the fields that matter here.
IP_ADDR = """[{"ifindex":1,"ifname":"lo","link_type":"loopback","inet6_addr_gen_mode":"eui64",
"addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8,"scope":"host","label":"lo"},
{"family":"inet6","local":"::1","prefixlen":128,"scope":"host"}]},
{},
{"ifindex":4,"ifname":"mn-nosuch0","link_type":"ether","linkinfo":{"info_kind":"bridge","info_data":{}},
"addr_info":[{"family":"inet","local":"172.17.0.1","prefixlen":16,"broadcast":"172.17.255.255","scope":"global"}]},
{"ifindex":5,"ifname":"mn-nosuch1","link_type":"none","linkinfo":{"info_kind":"wireguard"},
"addr_info":[{"family":"inet","local":"10.9.0.1","prefixlen":24,"scope":"global"},
{"family":"inet","local":"10.9.1.1","prefixlen":24,"scope":"global","secondary":true},
{"family":"inet6","local":"fd00::1","prefixlen":64,"scope":"global"},
{"family":"inet6","local":"fd00::2","prefixlen":64,"scope":"global","temporary":true},
{"family":"inet6","local":"fd00::3","prefixlen":64,"scope":"global","tentative":true},
{"family":"inet6","local":"fe80::1","prefixlen":64,"scope":"link"}]}]"""


def test_the_output_of_ip_is_read() -> None:
    loopback, bridge, tunnel = parse_ip_addr(IP_ADDR)
    assert (loopback["name"], loopback["addresses"], loopback["kind"]) == ("lo", ["127.0.0.1/8"], "loopback")
    assert (bridge["addresses"], bridge["kind"]) == (["172.17.0.1/16"], "bridge")
    assert (tunnel["addresses"], tunnel["kind"]) == (["10.9.0.1/24", "10.9.1.1/24", "fd00::1/64"], "virtual")
    assert [link["driver"] for link in (loopback, bridge, tunnel)] == [None, "bridge", "wireguard"]


def test_what_the_system_does_not_tell_is_none_and_not_minus_one() -> None:
    absent = parse_ip_addr(IP_ADDR)[1]
    assert (absent["mtu"], absent["speed_gbit_per_s"], absent["up"]) == (None, None, False)
    unknown = ("running", "duplex", "nic_gbit_per_s", "errors", "packets")
    assert [absent[name] for name in unknown] == [None] * 5


def test_the_kernel_says_that_loopback_runs_and_counts_its_frames() -> None:
    before = next(link for link in list_interfaces() if link["name"] == "lo")
    assert (before["running"], before["kind"], before["driver"]) == (True, "loopback", None)
    assert before["errors"] == 0
    statistics = Path("/sys/class/net/lo/statistics")
    counted = sum(int((statistics / f"{way}_packets").read_text()) for way in ("rx", "tx"))
    assert before["packets"] <= counted
    assert before["nic_gbit_per_s"] is None


def test_ephemeral_ports_are_those_of_the_kernel() -> None:
    first, last = read_port_range()
    assert Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split() == [str(first), str(last)]


def test_the_kernel_and_iproute2_agree() -> None:
    by_ip = {link["name"]: sorted(link["addresses"]) for link in list_interfaces()}
    assert {link["name"]: sorted(link["addresses"]) for link in read_interfaces_by_ioctl()} == by_ip


@pytest.mark.parametrize(("mask", "length"), [(b"\xff\xff\xff\x00", 24), (b"\xff\xff\xfc\x00", 22), (b"\0\0\0\0", 0)])
def test_the_length_of_a_mask(mask: bytes, length: int) -> None:
    assert prefix_length(mask) == length


@pytest.mark.parametrize(
    ("text", "speed"), [("2500", 2.5), ("100000", 100.0), ("-1", None), ("4294967295", None), ("", None), (None, None)]
)
def test_a_speed_that_the_nic_does_not_know_is_none(text: str | None, speed: float | None) -> None:
    assert parse_speed(text) == speed


# Address, index, prefix length, scope, flags and interface (proc(5)); the flags: permanent, temporary, tentative.
IF_INET6 = """\
fd6d6e00000000000000000000000001 06 40 00 80     eth0
fd6d6e00000000000000000000000002 06 40 00 01     eth0
fd6d6e00000000000000000000000003 06 40 00 c0     eth0
fe800000000000000000000000000001 06 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_the_ipv6_addresses_of_the_kernel_are_those_that_last() -> None:
    assert parse_if_inet6(IF_INET6) == [("eth0", "fd6d:6e00::1/64")]
    assert parse_if_inet6("") == []


def modes(*bits: int) -> bytes:
    return sum(1 << bit for bit in bits).to_bytes(16, "little")


# Bits as linux/ethtool.h numbers them. What a NIC is said to support has bits beside its speeds: ports, pause, FEC.
@pytest.mark.parametrize(
    ("mask", "gbit_per_s"),
    [
        (modes(0, 1, 2, 3, 4, 5, 6, 7, 13), 1.0),
        (modes(5, 6, 7, 13, 47), 2.5),
        (modes(5, 6, 7, 12, 47, 48), 10.0),
        (modes(12, 31, 32, 33, 10, 49, 50, 51), 25.0),
        (modes(23, 24, 25, 26, 29, 30), 40.0),
        (modes(12, 24, 32, 36, 37, 38, 39), 100.0),
        (modes(36, 62, 66), 200.0),
        (modes(62, 69, 89), 400.0),
        # A driver that names no speed.
        (b"", None),
        (bytes(16), None),
        (modes(6, 7, 13, 49), None),
        (modes(110), None),
    ],
)
def test_the_fastest_of_the_modes_is_taken(mask: bytes, gbit_per_s: float | None) -> None:
    assert fastest_mode(mask) == gbit_per_s


@pytest.mark.parametrize("ifname", ["lo", "mn-nosuch0"])
def test_what_is_no_nic_has_no_speed(ifname: str) -> None:
    assert read_nic_speed(ifname) is None
