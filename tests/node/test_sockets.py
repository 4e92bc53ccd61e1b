from __future__ import annotations

import socket

import pytest

from multinode.node.facts.network import CONNECTED, LISTENING, Row, find_port_users, is_port_taken, parse_table

# In the form of Linux 6.18 on a little-endian machine: a listener, a connection with bytes in both queues, one that is
# being made, one of somebody else, and a line that was cut off. The rest of each line is left out.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7148 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 000000006092b582
   1: 0101D50A:A1B2 0201D50A:7148 01 00000010:00000400 01:00000014 00000000     0        0 12 2 000000003ba18657
   2: 0101D50A:A1B4 0201D50A:C350 02 00000001:00000000 01:00000014 00000003     0        0 13 2 000000003ba18658
   3: 0101D50A:A1B6 0201D50A:C351 01 00000000:00000000 00:00000000 00000000     0        0 99 1 000000003ba18659
   4: 0101D50A:A1B8 0201D5
"""
_LOCAL = "0000000000000000FFFF00000100007F:E396"
_REST = "01 00000000:00000000 00:00000000 00000000     0        0"
TCP6 = f"""\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: {_LOCAL} 0000000000000000FFFF00000201D50A:7148 {_REST} 12 1 00000000e483622e
   1: {_LOCAL} 000080FE00000000FF005450AE1D4EFF:0050 {_REST} 13 1 000000002e239955
"""


def test_sockets_are_read_from_the_kernels_table() -> None:
    assert list(parse_table(TCP, LISTENING)) == [Row("listening", 29000, "0.0.0.0:0", 0, 0, 1000, 11)]
    assert list(parse_table(TCP, CONNECTED)) == [
        Row("established", 41394, "10.213.1.2:29000", 16, 1024, 0, 12),
        Row("connecting", 41396, "10.213.1.2:50000", 1, 0, 0, 13),
        Row("established", 41398, "10.213.1.2:50001", 0, 0, 0, 99),
    ]


@pytest.mark.parametrize(("table", "peers"), [(TCP6, ["10.213.1.2:29000", "[fe80::5054:ff:ff4e:1dae]:80"]), ("", [])])
def test_ipv4_addresses_inside_ipv6_are_written_as_such(table: str, peers: list[str]) -> None:
    assert [row.peer for row in parse_table(table, CONNECTED)] == peers


def test_a_port_is_taken_while_somebody_listens_and_free_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_port_taken(port)
    assert not is_port_taken(port)


def test_nobody_is_accused_of_a_port_without_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert find_port_users([port]) == {port: "a process that cannot be seen"}
