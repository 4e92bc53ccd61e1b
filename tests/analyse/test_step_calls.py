from __future__ import annotations

import pytest

from multinode.analyse.collectives.traffic import Strategy
from multinode.analyse.job.step_calls import hideable_share


@pytest.mark.parametrize(
    ("strategy", "lora", "recompute", "share"),
    [
        (Strategy.DDP, False, False, 2 / 3),
        (Strategy.DDP, False, True, 3 / 4),
        (Strategy.DDP, True, False, 1 / 2),
        (Strategy.DDP, True, True, 2 / 3),
        (Strategy.ZERO2, False, True, 3 / 4),
        (Strategy.ZERO3, False, False, 1),
        (Strategy.SHARD_GRAD_OP, True, True, 1),
    ],
)
def test_reductions_hide_beside_the_backward_pass_and_gathers_beside_both(
    strategy: Strategy, *, lora: bool, recompute: bool, share: float
) -> None:
    assert hideable_share(strategy, lora=lora, recompute=recompute) == pytest.approx(share)
