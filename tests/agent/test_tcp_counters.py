from __future__ import annotations

import pytest

from multinode.agent.sample.tcp_counters import parse_snmp, read_tcp

# The part of /proc/net/snmp that matters and what stands around it, of Linux 6.1.
SNMP = """\
Icmp: InMsgs InErrors
Icmp: 40 0
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs \
RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 812 410 9 31 12 880214 1201337 421 0 77 0
Udp: InDatagrams NoPorts
Udp: 12 0
"""


def test_sent_and_resent_segments_are_found_by_their_names() -> None:
    assert parse_snmp(SNMP) == {"kind": "tcp", "sent_segments": 1201337, "retransmitted_segments": 421}


def test_a_kernel_that_says_nothing_of_tcp_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        parse_snmp("Udp: InDatagrams\nUdp: 12\n")


def test_this_machine_tells() -> None:
    assert read_tcp()["sent_segments"] >= 0
