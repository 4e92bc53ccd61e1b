"""MTU: one for all cards of the data plane. What is lost on the path between them is found by the check of ports."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, disagreements

MTU_DIFFERS = Rule(
    "link",
    "warning",
    catches="different MTUs on the data plane: large packets get lost, or every node is slower than it could be",
    message="{ifname} has an MTU of {mtu}, that of {peer} {expected}: small packets pass, and large ones may be lost "
    "without an error",
    hint="switches on the way must pass it too; on {node}:\nsudo ip link set dev {ifname} mtu {expected}",
)


@Check
def check_mtus(inspection: Inspection) -> Iterator[Case]:
    """All cards of the data plane have one MTU."""
    cards = inspection.cards
    mtus = {name: link.mtu for name, link in cards.items() if link.mtu is not None}
    for name, mtu, peer, expected in disagreements(mtus, majority=True):
        yield MTU_DIFFERS.found(name, ifname=cards[name].name, mtu=mtu, peer=peer, expected=expected)
