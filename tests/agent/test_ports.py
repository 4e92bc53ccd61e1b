from __future__ import annotations

import socket

from multinode.agent.facts.ports import Listener, find_port_users, find_taken_ports, parse_tcp_table

# /proc/net/tcp of Linux 6.1: a listener on 127.0.0.1:29500, one on 0.0.0.0:22, and a connection from port 29500.
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31337 1 0000000000000000 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0000000000000000 100 0 0 10 0
   2: 0100007F:733C 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 31338 1 0000000000000000 20 4 30 10 -1
"""  # noqa: E501 - captured as it was


def test_listeners_are_read_from_the_kernels_table() -> None:
    assert parse_tcp_table(TABLE) == [Listener(29500, 1000, 31337), Listener(22, 0, 4242)]


def test_a_port_is_taken_while_somebody_listens_and_free_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find_taken_ports([port]) == [port]
    assert find_taken_ports([port]) == []


def test_nobody_is_accused_of_a_port_without_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert find_port_users([port]) == {port: "a process that cannot be seen"}
