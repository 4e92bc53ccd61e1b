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
    """One way to train the rest.

    Attributes:
        speedup: its samples/s over those of the unchanged run.
        speedup_interval: low, high.
        left_s: time for the remaining steps; None if their number is unknown.
        left_interval_s: low, high; None likewise.
    """

    speedup: float
    speedup_interval: Interval
    left_s: float | None = None
    left_interval_s: Interval | None = None


class BestChange(Projection, frozen=True, kw_only=True):
    """The setting that would make these nodes fastest.

    Attributes:
        name: in a few words: `gradients as fp16`.
        options: of `multinode launch`; empty if it needs manual changes.
        samples_ratio: samples per step relative to now: a larger global batch changes the optimization.
    """

    name: str
    options: str = ""
    samples_ratio: float = 1.0


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run is, and where it runs.

    Attributes:
        node: the first one, which would train alone with its `workers_per_node`.
        step: the last one that all workers have ended; `total_steps` of the training, None is unknown.
        recorded: steps that were recorded by all workers; `measured` of them those that count.
    """

    run_id: str
    node: str
    nodes: int
    workers_per_node: int
    step: int
    total_steps: int | None = None
    recorded: int
    measured: int


class EarlyVerdict(RunSteps, frozen=True, kw_only=True):
    """Whether one node alone would be faster than the run; `early-verdict.json` of a run.

    Attributes:
        now: the run as it is; its speed-up is 1 by definition.
        one_node: the first node alone with its workers of this run, predicted; None with a reason in `reason`.
        best: None where no setting pays, or none could be predicted.
        memory: whether the training fits one node's memory: `fits`, `too_small` or `unknown`.
        needed_gib: allocation per worker on one node, if `too_small`.
        gpu_gib: memory of its GPU, if `too_small`.
        core_wait_ms: time per step that the first node's workers waited for CPU cores, if relevant.
        reason: why there is no prediction; may be empty.
        sentence: the verdict in one line.
    """

    schema: str = "multinode.early-verdict/1"
    now: Projection | None = None
    one_node: Projection | None = None
    best: BestChange | None = None
    memory: Literal["fits", "too_small", "unknown"] = "unknown"
    needed_gib: float | None = None
    gpu_gib: float | None = None
    core_wait_ms: float | None = None
    reason: str = ""
    sentence: str = ""

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
