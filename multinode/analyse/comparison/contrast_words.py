"""How a contrast's sentences name sides and write figures. Words alone: which sentence is true is not judged here."""

from __future__ import annotations

from multinode.analyse.comparison.contrast_figures import Side

__all__ = ["capitalised", "figure", "milliseconds", "name_nodes", "name_role"]

_THREE_DIGITS = 100


def figure(value: float) -> str:
    """Three digits that count, above the point all of them: `1342`, `24.1`, `0.512`."""
    return f"{value:.0f}" if abs(value) >= _THREE_DIGITS else f"{value:.3g}"


def milliseconds(time_ms: float) -> str:
    """`1342 ms`, `4.2 ms`."""
    return f"{figure(time_ms)} ms"


def name_nodes(side: Side) -> str:
    """`one node`, `2 nodes`; of one node alone its name."""
    if side.role == "each-node":
        return side.node_names[0] if side.node_names else "one node"
    return "one node" if side.nodes == 1 else f"{side.nodes} nodes"


def name_role(side: Side) -> str:
    """`the baseline`, `the candidate`; further sides by their nodes: `4 nodes`, `n2 alone`."""
    if side.role in {"baseline", "candidate"}:
        return f"the {side.role}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest as it is, names of nodes too."""
    return sentence[:1].upper() + sentence[1:]
