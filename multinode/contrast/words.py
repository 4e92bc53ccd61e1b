"""How the sides of a contrast, their figures, their network and the reason of its mode are called."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.contrast.figures import Side
from multinode.units import format_count, format_list, format_rate, goodput_gb_per_s

_THREE_DIGITS = 100


def figure(value: float) -> str:
    """Three digits that count, above the point all of them: `1342`, `24.1`, `0.512`."""
    return f"{value:.0f}" if abs(value) >= _THREE_DIGITS else f"{value:.3g}"


def milliseconds(time_ms: float) -> str:
    """`1342 ms`, `4.2 ms`."""
    return f"{figure(time_ms)} ms"


def name_nodes(side: Side) -> str:
    """`1 node`, `2 nodes`; of one node alone its name."""
    if side.role == "each-node" and side.node_names:
        return side.node_names[0]
    return format_count(side.nodes, "node")


def name_side(side: Side, mode: str) -> str:
    """A side within a sentence: `2 nodes`, `n2 alone`; of two stored runs `run 20260104-ab`.

    Args:
        side: of a contrast.
        mode: of the contrast.
    """
    if mode == "compare":
        return f"run {side.run_ids[-1]}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest as it is, names of nodes too."""
    return sentence[:1].upper() + sentence[1:]


_BITS_PER_BYTE = 8
_BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e9
_MS_PER_S = 1e3
_MOST_BYTES = 1e18
# What a NIC can say of its speed and be believed.
_SLOWEST_LINK, _FASTEST_LINK = 1e-6, 1e6
PARTS = {
    "compute_ms": "compute",
    "exposed_ms": "exposed communication",
    "wait_ms": "waiting for slower workers",
    "data_ms": "waiting for data",
    "optimizer_ms": "optimizer",
    "host_ms": "other host time",
}
"""Of a step, by the names of WorkerSplit's fields."""


def network_words(side: Side) -> str:
    """Bytes per step through the busiest node's NIC, and the rate that makes, of its link; empty where not known."""
    seen = side.bytes_per_step
    counted = next((size for size in (seen.card, seen.expected) if size is not None), None)
    if counted is None or side.nodes == 1 or not 0 < counted <= _MOST_BYTES:
        return ""
    gbit_per_s = counted * _BITS_PER_BYTE / _BYTES_PER_GB / (side.step_time_ms.value / _MS_PER_S)
    by_rule = "" if seen.card is not None else " (expected from the strategy, not counted)"
    said = f"{figure(counted / _BYTES_PER_MB)} MB per step and direction{by_rule}"
    link = side.link_gbit_per_s
    if link is None or not _SLOWEST_LINK <= link <= _FASTEST_LINK:
        return f"{said}, on average {format_rate(gbit_per_s)}"
    most = goodput_gb_per_s(link) * _BITS_PER_BYTE
    carried = f"{format_rate(most)} on a link of {format_rate(link)}"
    return f"{said}: on average {gbit_per_s / most:.0%} of TCP line rate ({carried})"


ASKED = "asked for with --mode"


def compared_words(candidate: str, baseline: str) -> str:
    """Of two stored runs, by their ids."""
    return f"run {candidate} against run {baseline}"


def named_words(gpus: int) -> str:
    """So many GPUs are named for the baseline."""
    return f"--baseline-gpus names {gpus} GPUs of node 0"


def enough_words(first: Sequence[int], most: int) -> str:
    """The slots of the first nodes suffice for the workers of all."""
    where = "node 0 has" if len(first) == 1 else f"the first {len(first)} nodes have"
    return f"{where} {sum(first)} slots, enough for the workers of all {most} nodes"


def too_few_words(first: Sequence[int], workers: int, most: int) -> str:
    """They do not."""
    one = len(first) == 1
    where = f"node 0 has slots={first[0]}" if one else f"the first {len(first)} nodes have {sum(first)} slots"
    return f"{where}, too few for {format_count(workers, 'worker')} of each of the {most} nodes"


def uneven_words(counts: Sequence[int]) -> str:
    """No number of workers divides among these numbers of nodes."""
    numbers = format_list([str(count) for count in counts])
    return f"no number of workers that these nodes can have divides among {numbers} nodes"
