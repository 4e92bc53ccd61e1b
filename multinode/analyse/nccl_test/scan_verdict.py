"""judge_scan: evidence -> Verdict: whether a sweep is what the network gives, and who or what to look at if not.

Owns the words of the first sentence; the figures are `sweep_evidence`'s and the explanations `sweep_causes`'.
"""

from __future__ import annotations

import msgspec

from multinode.analyse.nccl_test.scan_causes import Cause, find_causes
from multinode.analyse.nccl_test.scan_evidence import Reading, ScanEvidence, SizeShare, read_evidence
from multinode.units import format_rate, format_size

__all__ = ["Verdict", "judge_scan"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a sweep.

    Attributes:
        text: one or two plain sentences.
        nodes: names to look at, the likeliest first.
        causes: likewise; empty where there is nothing to mend.
        shares: how much of the network every large message used.
    """

    text: str
    nodes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    shares: tuple[SizeShare, ...] = ()


def judge_scan(evidence: ScanEvidence) -> Verdict:
    """Hold the largest size of each collective against raw TCP and the link; wrong values come before any speed."""
    reading = read_evidence(evidence)
    causes = find_causes(reading)
    return Verdict(
        text=_text(reading, causes),
        nodes=tuple(dict.fromkeys(name for cause in causes for name in cause.nodes)),
        causes=causes,
        shares=reading.shares,
    )


def _text(reading: Reading, causes: tuple[Cause, ...]) -> str:
    if any(row.num_wrong for row in reading.evidence.rows):
        return f"{causes[0].text}."
    if reading.evidence.path_ok is False:
        return f"This says nothing of the network that was meant. Look first: {causes[0].text}."
    if reading.worst is None:
        return "No size was measured by all workers."
    measured = _measured(reading, reading.worst)
    if causes:
        # Where the sweep is well, something beside it may not be.
        look = "Look at this all the same" if reading.is_well else "Look first"
        return f"{measured}. {look}: {causes[0].text}."
    return f"{measured}. Nothing to mend." if reading.is_well else f"{measured}."


def _measured(reading: Reading, worst: SizeShare) -> str:
    what = f"{worst.collective} of {format_size(worst.size_bytes)}"
    if len({share.collective for share in reading.shares}) > 1:
        what += ", which fills it least,"
    speed = f"{worst.card_gb_per_s:.3g} GB/s"
    if reading.evidence.nodes == 1:
        return (
            f"{what} reaches {worst.busbw_gb_per_s:.3g} GB/s of busbw between workers of one node: no network was used"
        )
    if reading.collective_is_slow is None:
        return f"{what} moves {speed} through a card; neither a link's rate nor raw TCP is known to hold it against"
    shares = []
    if worst.share_of_ceiling is not None:
        best = "its line rate" if reading.evidence.over_rdma else "what TCP can carry"
        shares.append(f"{worst.share_of_ceiling:.0%} of {best}")
    if worst.share_of_tcp is not None:
        shares.append(f"{worst.share_of_tcp:.0%} of what raw TCP reached")
    link = reading.evidence.link_gbit_per_s
    network = f"a {format_rate(link)} link" if link else "this network"
    if worst.usual_share < 1:
        network += f" to {reading.evidence.backend}, which sends and receives large messages in turns on a connection"
    if reading.is_well:
        return f"This is what {network} gives: {' and '.join(shares)} ({what} moves {speed} through a card)"
    return f"{what} moves {speed} through a card of {network}: {' and '.join(shares)}"
