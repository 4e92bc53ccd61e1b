"""Names of the sides, figures and modes of a contrast."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.contrast.figures import Side
from multinode.units import BITS_PER_BYTE, format_count, format_list, format_range, format_rate, goodput_gb_per_s

_THREE_DIGITS = 100


def figure(value: float) -> str:
    """Three significant digits, and all before the point: `1342`, `24.1`, `0.512`."""
    return f"{value:.0f}" if abs(value) >= _THREE_DIGITS else f"{value:.3g}"


def milliseconds(time_ms: float) -> str:
    """`1342 ms`, `4.2 ms`."""
    return f"{figure(time_ms)} ms"


def name_nodes(side: Side) -> str:
    """`1 node`, `2 nodes`; for one node alone its name."""
    if side.role == "each-node" and side.node_names:
        return side.node_names[0]
    return format_count(side.nodes, "node")


def name_side(side: Side, mode: str) -> str:
    """A side within a sentence: `2 nodes`, `n2 alone`; for two stored runs `run 20260104-ab`.

    Args:
        side: of a contrast.
        mode: of the contrast.
    """
    if mode == "compare":
        return f"run {side.run_ids[-1]}"
    return f"{name_nodes(side)} alone" if side.role == "each-node" else name_nodes(side)


def capitalised(sentence: str) -> str:
    """With a capital first letter; the rest is unchanged, including names of nodes."""
    return sentence[:1].upper() + sentence[1:]


_BYTES_PER_MB, _BYTES_PER_GB = 1e6, 1e9
_MS_PER_S = 1e3
_MOST_BYTES = 1e18
# Plausible link rates.
_SLOWEST_LINK, _FASTEST_LINK = 1e-6, 1e6
PARTS = {
    "compute_ms": "compute",
    "exposed_ms": "exposed communication",
    "wait_ms": "waiting for slower workers",
    "data_ms": "waiting for data",
    "optimizer_ms": "optimizer",
    "host_ms": "other host time",
}
"""Parts of a step, by WorkerSplit's fields."""


def network_words(side: Side) -> str:
    """Bytes per step through the busiest NIC, and the share of its link; empty if unknown."""
    seen = side.bytes_per_step
    counted = next((size for size in (seen.card, seen.expected) if size is not None), None)
    if counted is None or side.nodes == 1 or not 0 < counted <= _MOST_BYTES:
        return ""
    gbit_per_s = counted * BITS_PER_BYTE / _BYTES_PER_GB / (side.step_time_ms.value / _MS_PER_S)
    by_rule = "" if seen.card is not None else " (expected from the strategy, not counted)"
    said = f"{figure(counted / _BYTES_PER_MB)} MB per step each way{by_rule}"
    link = side.link_gbit_per_s
    if link is None or not _SLOWEST_LINK <= link <= _FASTEST_LINK:
        return f"{said}, on average {format_rate(gbit_per_s)}"
    most = goodput_gb_per_s(link) * BITS_PER_BYTE
    rates = format_range(format_rate(most), "of", format_rate(link))
    return f"{said}, {gbit_per_s / most:.0%} of TCP line rate ({rates})"


ASKED = "set with --mode"


def compared_words(candidate: str, baseline: str) -> str:
    """The reason for comparing two stored runs."""
    return f"run {candidate} against run {baseline}"


def named_words(gpus: int) -> str:
    """The number of GPUs named for the baseline."""
    return f"--baseline-gpus names {gpus} GPUs of node 0"


def enough_words(first: Sequence[int], most: int) -> str:
    """The first nodes have enough slots for the workers of all."""
    where = "node 0 has" if len(first) == 1 else f"the first {len(first)} nodes have"
    return f"{where} {sum(first)} slots, enough for the workers of all {most} nodes"


def too_few_words(first: Sequence[int], workers: int, most: int) -> str:
    """The first nodes have too few slots."""
    one = len(first) == 1
    where = f"node 0 has slots={first[0]}" if one else f"the first {len(first)} nodes have {sum(first)} slots"
    return f"{where}, too few for {format_count(workers, 'worker')} of each of the {most} nodes"


def uneven_words(counts: Sequence[int]) -> str:
    """No number of workers is divisible by these numbers of nodes."""
    numbers = format_list([str(count) for count in counts])
    return f"no number of workers on these nodes is divisible by {numbers} nodes"
