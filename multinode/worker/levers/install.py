"""Which hooks the levers put into this worker, as its variables ask for."""

from __future__ import annotations

import os
from typing import Any, Optional

from ..guard import Guard, Hooks
from ..nics import NicMeter
from ..steps import Steps
from . import balance, compress, sync, sync_trainer


def guarded_hooks(steps: Steps, guard: Guard, traffic: Any) -> Hooks:
    """Those that leave the training as it is if they fail.

    Args:
        steps: of the training.
        guard: around them.
        traffic: told what compressed gradients send, by its `add`.
    """
    kind = os.environ.get(compress.VARIABLE)
    return compress.hooks(steps, guard, traffic, kind) if kind else []


def unguarded_hooks(steps: Steps, nic_meter: Optional[NicMeter]) -> Hooks:
    """Those that end the worker if they fail: a training that is not changed where it should be is another one.

    Args:
        steps: of the training.
        nic_meter: read at the end of a round of averaging; None where there is none.
    """
    return [*_averaging_hooks(steps, nic_meter), *balance.hooks(steps)]


def deals_samples() -> bool:
    """Whether samples are dealt out, so that they have to be counted in each batch."""
    return balance.VARIABLE in os.environ


def _averaging_hooks(steps: Steps, nic_meter: Optional[NicMeter]) -> Hooks:
    text = os.environ.get(sync.VARIABLE)
    if not text:
        return []
    averaging = sync.ParameterAveraging(sync.read_settings(text), steps)
    if nic_meter is not None:
        # Between two averages the counters tell what a round sends.
        averaging.listeners.append(nic_meter.read_soon)
    return [*sync.hooks(steps, averaging), *sync_trainer.hooks(averaging)]
