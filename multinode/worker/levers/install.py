"""The hooks of the levers that this worker's environment variables select."""

from __future__ import annotations

import os
from typing import Any, Optional

from ..guard import Guard, Hooks
from ..nics import NicMeter
from ..steps import Steps
from . import averaging, balance, compress, sync, sync_trainer


def guarded_hooks(steps: Steps, guard: Guard, traffic: Any) -> Hooks:
    """Hooks that leave the training unchanged if they fail.

    Args:
        steps: steps of the training.
        guard: reports and swallows their failures.
        traffic: its `add` is called with the traffic of compressed gradients.
    """
    kind = os.environ.get(compress.VARIABLE)
    return compress.hooks(steps, guard, traffic, kind) if kind else []


def unguarded_hooks(steps: Steps, nic_meter: Optional[NicMeter]) -> Hooks:
    """Hooks that end the worker if they fail, since without the lever it would be another training.

    Args:
        steps: steps of the training.
        nic_meter: meter to read at the end of a round of averaging, if any.
    """
    return [*_averaging_hooks(steps, nic_meter), *balance.hooks(steps)]


def deals_samples() -> bool:
    """Whether `balance` deals out samples, so that each batch's samples must be counted."""
    return balance.VARIABLE in os.environ


def _averaging_hooks(steps: Steps, nic_meter: Optional[NicMeter]) -> Hooks:
    text = os.environ.get(averaging.VARIABLE)
    if not text:
        return []
    rounds = sync.ParameterAveraging(averaging.read_settings(text), steps)
    if nic_meter is not None:
        # NIC counters at the ends of rounds tell the traffic of a round.
        rounds.listeners.append(nic_meter.read_soon)
    return [*sync.hooks(steps, rounds), *sync_trainer.hooks(rounds)]
