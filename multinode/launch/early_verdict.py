"""EarlyVerdict: whether one node alone would be faster, after the first steps of a run on several nodes.

Data only; `predict.early_verdict` judges.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from multinode.units import format_count

LEAST_STEPS = 15
"""Recorded steps needed for a verdict, including warm-up."""
CERTAIN_STEPS = 120
"""Measured steps needed for a verdict that may end a run: with fewer, intervals cover less than they claim.

For steps with an autocorrelation of 0.6, the 95% interval of 10 steps covers in 87 of 100 runs, of 120 in 95 (ADR
0035).
"""
VERDICT_FILE = "early-verdict.json"
"""Its file in the run directory."""
Interval = tuple[float, float]


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train the rest."""

    speedup: float  # its samples/s over those of the unchanged run
    speedup_interval: Interval  # low, high
    left_s: float | None = None  # time for the remaining steps; None if their number is unknown
    left_interval_s: Interval | None = None  # low, high; None likewise


class BestChange(Projection, frozen=True, kw_only=True):
    """The setting that would make these nodes fastest."""

    name: str  # in a few words: `gradients as fp16`
    options: str = ""  # of `multinode launch`; empty if it needs manual changes
    samples_ratio: float = 1.0  # samples per step relative to now: a larger global batch changes the optimization


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run is, and where it runs."""

    run_id: str
    node: str  # the first one, which would train alone with its `workers_per_node`
    nodes: int
    workers_per_node: int
    step: int  # the last one that all workers have ended; `total_steps` of the training, None is unknown
    total_steps: int | None = None
    recorded: int  # steps that were recorded by all workers; `measured` of them those that count
    measured: int


class EarlyVerdict(RunSteps, frozen=True, kw_only=True):
    """Whether one node alone would be faster than the run; `early-verdict.json` of a run."""

    schema: str = "multinode.early-verdict/1"
    now: Projection | None = None  # the run as it is; its speed-up is 1 by definition
    # the first node alone with its workers of this run, predicted; None with a reason in `reason`
    one_node: Projection | None = None
    best: BestChange | None = None  # None where no setting pays, or none could be predicted
    # whether the training fits one node's memory: `fits`, `too_small` or `unknown`
    memory: Literal["fits", "too_small", "unknown"] = "unknown"
    needed_gib: float | None = None  # allocation per worker on one node, if `too_small`
    gpu_gib: float | None = None  # memory of its GPU, if `too_small`
    core_wait_ms: float | None = None  # time per step that the first node's workers waited for CPU cores, if relevant
    reason: str = ""  # why there is no prediction; may be empty
    sentence: str = ""  # the verdict in one line

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval favors one node, its memory suffices, and there are enough steps."""
        return self.favours_one_node and self.measured >= CERTAIN_STEPS

    @property
    def favours_one_node(self) -> bool:
        """Whether the whole interval favors one node, and its memory suffices."""
        return self.one_node is not None and self.one_node.speedup_interval[0] > 1 and self.memory == "fits"


def unknown_verdict(steps: RunSteps, reason: str) -> EarlyVerdict:
    """No verdict, with this reason."""
    said = f"unknown whether 1 node would be faster than {steps.nodes}: {reason}"
    sentence = f"Early verdict ({format_count(steps.recorded, 'step')}): {said}"
    return EarlyVerdict(**msgspec.structs.asdict(steps), reason=reason, sentence=sentence)
