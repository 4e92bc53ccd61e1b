"""MTU: the same for all NICs. Packet loss on the path is found by the check of ports."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, disagreements

MTU_DIFFERS = Rule(
    "link",
    "warning",
    catches="different MTUs on the data plane: large packets are lost, or every node is slower than necessary",
    message=(
        "{ifname} has MTU {mtu}, and {peer} has {expected}: small packets pass, but large ones may be lost without an "
        "error"
    ),
    hint="the switches must support it too; on {node}:\nsudo ip link set dev {ifname} mtu {expected}",
)


@Check
def check_mtus(inspection: Inspection) -> Iterator[Case]:
    """All NICs for data have the same MTU."""
    cards = inspection.cards
    mtus = {name: link.mtu for name, link in cards.items() if link.mtu is not None}
    for name, mtu, peer, expected in disagreements(mtus, majority=True):
        yield MTU_DIFFERS.found(name, ifname=cards[name].name, mtu=mtu, peer=peer, expected=expected)
