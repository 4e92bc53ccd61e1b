"""What nodes make of their parameters at the end of a round: local SGD and DiLoCo. Knows no process group.

DiLoCo (arXiv:2311.08105) is SGD with Nesterov momentum, whose gradient is the negated mean change of a round. With
learning rate 1 and momentum 0 it is local SGD, which needs no parameters of the last round where nothing is rounded.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, NamedTuple, Optional, Tuple

VARIABLE = "MULTINODE_SYNC"
"""Environment variable with the fields of AveragingSettings in JSON."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# A power of two below fp16's largest number, 65504: scaled sums stay below it.
_FP16_ROOM = 32768.0
_LEAST = 1e-30


class AveragingSettings(NamedTuple):
    """When and how parameters are averaged."""

    every: int  # optimizer steps of a round
    workers: Tuple[int, ...]  # number of workers of each node; ranks of a node are consecutive
    # `fp16` or `bf16`, in which changes are sent between nodes; None sends the parameters unchanged
    dtype: Optional[str] = None
    outer_lr: Optional[float] = None  # of the outer optimizer, SGD with Nesterov momentum; None only averages
    momentum: float = 0.0  # of the outer optimizer
    option: str = "--average"  # as the user typed it

    @property
    def firsts(self) -> Tuple[int, ...]:
        """The global rank of each node's first worker."""
        return tuple(sum(self.workers[:node]) for node in range(len(self.workers)))

    @property
    def shares(self) -> Tuple[float, ...]:
        """The weight of each node in the average: its fraction of all workers."""
        return tuple(count / sum(self.workers) for count in self.workers)


def read_settings(text: str) -> AveragingSettings:
    """Parse the value of VARIABLE."""
    fields = json.loads(text)
    return AveragingSettings(**{**fields, "workers": tuple(fields["workers"])})


class OuterOptimizer:
    """Steps one node's flat parameters once a round.

    Args:
        settings: of the averaging.
        flat: the parameters, equal on all nodes; a tensor of its own of one dimension.
    """

    def __init__(self, settings: AveragingSettings, flat: Any) -> None:
        self._dtype, self._momentum = settings.dtype, settings.momentum
        self._lr = 1.0 if settings.outer_lr is None else settings.outer_lr
        # The parameters after the last round. Without them nodes average the parameters themselves.
        self.anchor = _wide(flat) if settings.outer_lr is not None or settings.dtype is not None else None
        self.momentum: Any = None  # None before the first step, and if there is none

    def change(self, flat: Any) -> Any:
        """What this node has to be averaged: the change of its parameters in this round, or the parameters."""
        return flat if self.anchor is None else flat.to(self.anchor.dtype) - self.anchor

    @property
    def needs_scale(self) -> bool:
        """Whether nodes agree on a scale before they send: fp16 has its full precision in a part of its range only."""
        return self._dtype == "fp16"

    def pack(self, change: Any, share: float, scale: Any = None) -> Any:
        """What this node sends, for a sum over all nodes.

        Args:
            change: of this node.
            share: its weight in the average.
            scale: of all nodes, from `fp16_scale`; None if none is needed.
        """
        sent = change * share
        if scale is not None:
            sent *= scale
        return sent if self._dtype is None else sent.to(getattr(sys.modules["torch"], _DTYPES[self._dtype]))

    def unpack(self, total: Any, like: Any, scale: Any = None) -> Any:
        """The mean of all nodes' changes in the dtype of `like`, from the sum of what they sent."""
        mean = total.to(like.dtype)
        if scale is not None:
            mean /= scale
        return mean

    def step(self, mean: Any) -> Any:
        """The parameters after the round, given the mean of all nodes' changes."""
        if self.anchor is None:
            return mean
        if self._momentum:
            # As torch.optim.SGD: the first step fills the buffer.
            self.momentum = mean if self.momentum is None else self.momentum * self._momentum + mean
            mean = mean + self._momentum * self.momentum
        return self.anchor.add_(mean, alpha=self._lr)

    def state(self) -> Dict[str, Any]:
        """Its tensors, for a checkpoint."""
        return {"anchor": self.anchor, "momentum": self.momentum}

    def load_state(self, state: Dict[str, Any], device: Any) -> None:
        """Restore the tensors of `state`."""
        if state["momentum"] is not None:
            self.momentum = state["momentum"].to(device)
        # If the checkpoint has no anchor, the parameters themselves were sent: the loaded ones are the anchor.
        if self.anchor is not None and state["anchor"] is not None:
            self.anchor = state["anchor"].to(device)


def fp16_scale(largest: Any) -> Any:
    """A power of two that scales changes to where fp16 has its full precision.

    Args:
        largest: the largest absolute change of all nodes, a tensor of no dimension.
    """
    torch = sys.modules["torch"]
    return torch.exp2(torch.floor(torch.log2(_FP16_ROOM / largest.clamp(min=_LEAST))))


def _wide(flat: Any) -> Any:
    """The tensor in at least fp32: changes of a round may be smaller than the last bit of a narrower type."""
    return flat.float() if flat.element_size() < 4 else flat  # noqa: PLR2004 - bytes of fp32
