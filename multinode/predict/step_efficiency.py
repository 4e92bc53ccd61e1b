"""What a step of nodes that average between them is worth beside a step of one node, as measured. Pure.

The time of a step, and of an exchange, is the cost model's subject.
"""

from __future__ import annotations

from multinode.levers.averaging import Averaging
from multinode.stats.estimate import Bounds

# Steps of one node that a step of two replaces, to the same held-out loss, by the steps of a round of local SGD: the
# fewest and the most of all seeds and lengths in benchmarks/averaging.json and averaging-long.json. A round of one step
# is DDP.
REPLACED = {1: (1.75, 2.09), 16: (1.35, 1.59), 64: (1.24, 1.42)}
# DiLoCo over 15 rounds; over 6, in which its outer momentum has not built up, it was 0.81. More may replace more.
REPLACED_BY_DILOCO = 1.31
_NODES = 2


def step_efficiency(averaging: Averaging | None) -> Bounds:
    """Steps of one node over those of nodes that average, to the same loss and per node: the fewest and the most.

    At most 1: a batch saves no more steps than it is larger (arXiv:1812.06162). Rounds that were not measured replace
    no fewer than the next longer ones that were, beyond all as many as the longest, and no more than the next shorter.

    Args:
        averaging: of two nodes; None averages the gradients of every step, as DDP does.
    """
    every, is_outer = (averaging.every, averaging.outer_lr is not None) if averaging is not None else (1, False)
    longer = [fewest for steps, (fewest, _) in REPLACED.items() if steps >= every]
    fewest = REPLACED_BY_DILOCO if is_outer else max(longer, default=REPLACED[max(REPLACED)][0])
    most = REPLACED[1][1] if is_outer else min(most for steps, (_, most) in REPLACED.items() if steps <= every)
    return fewest / _NODES, min(1.0, most / _NODES)


def samples_ratio(today: Averaging | None, changed: Averaging | None) -> Bounds:
    """Samples of a changed training over those of today's, to the same loss: the fewest and the most; at least 1."""
    before, after = step_efficiency(today), step_efficiency(changed)
    if before == after:
        return 1.0, 1.0
    return max(1.0, before[0] / after[1]), max(1.0, before[1] / after[0])
