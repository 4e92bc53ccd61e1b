"""summarise_bench: what the nodes recorded in all phases -> figures, who is slow and why. Pure.

The words are `bench.words`'.
"""

from __future__ import annotations

from collections.abc import Sequence

from multinode.bench.figures import BenchReport
from multinode.bench.nodes import BenchPart, bench_nodes
from multinode.bench.slow_devices import find_below_sheet, find_drops, find_slow, with_peers
from multinode.records.benchmark import PHASES


def summarise_bench(run_id: str, parts: Sequence[BenchPart]) -> BenchReport:
    """The report of a bench.

    Args:
        run_id: its run.
        parts: a node in a phase each.
    """
    nodes = with_peers(bench_nodes(parts))
    made = {part.phase for part in parts}
    return BenchReport(
        run_id=run_id,
        phases=tuple(phase for phase in PHASES if phase in made),
        nodes=nodes,
        slow=find_slow(nodes),
        drops=find_drops(nodes),
        below_sheet=find_below_sheet(nodes),
    )
