"""TCP segments that this node has sent and sent again, of the network namespace that we are in (/proc/net/snmp)."""

from __future__ import annotations

from ..channel import Record

__all__ = ["parse_snmp", "read_tcp"]

_PATH = "/proc/net/snmp"


def read_tcp() -> Record:
    """A `tcp` record.

    Raises:
        OSError, KeyError, ValueError: the kernel does not tell.
    """
    with open(_PATH, encoding="ascii") as file:
        return parse_snmp(file.read())


def parse_snmp(text: str) -> Record:
    """The same from the text of that file: a line of names, then a line of values, for each protocol.

    Raises:
        KeyError, ValueError: it is something else.
    """
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    counters = dict(zip(names, values))
    return {
        "kind": "tcp",
        "sent_segments": int(counters["OutSegs"]),
        "retransmitted_segments": int(counters["RetransSegs"]),
    }
